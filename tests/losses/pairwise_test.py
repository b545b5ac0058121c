# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Losses of best against worst: known numbers, ties, gradients."""

import functools

from absl.testing import parameterized
import chex
import jax
import jax.numpy as jnp
import numpy as np

from tba_jax.losses import pairwise
from tests.support import loss_case

BETA = 0.5
# Best is the third (first of two equals), worst the first: h = 3 - 1 = 2.
SEQ = jnp.array([[-1.0, -5.0, -2.0, -4.0]])
REF_SEQ = jnp.array([[-2.0, -5.0, -5.0, -9.0]])
REWARDS = jnp.array([[0.0, 0.5, 1.0, 1.0]])
PAIR_LOSSES = (
    pairwise.online_dpo_loss,
    pairwise.ipo_loss,
    pairwise.slic_loss,
)


best_of_n = functools.partial(
    loss_case.run_sequences, pairwise.best_of_n_loss, beta=BETA
)


class PairTest(chex.TestCase):

  @chex.variants(with_jit=True, without_jit=True)
  @parameterized.parameters(
      ("online_dpo_loss", np.log1p(np.exp(-1.0))),
      ("ipo_loss", 1.0),
      ("slic_loss", 0.0),
  )
  def test_matches_known_numbers(self, name, expected):
    run = self.variant(
        functools.partial(
            loss_case.run_sequences, getattr(pairwise, name), beta=BETA
        )
    )
    loss, aux = run(SEQ, REF_SEQ, REWARDS)
    np.testing.assert_allclose(loss, expected, rtol=1e-6)
    np.testing.assert_allclose(aux["margin_Bx1"], [[2.0]])
    np.testing.assert_allclose(aux["pair_Bx1"], [[1.0]])

  @chex.variants(with_jit=True, without_jit=True)
  def test_slic_penalizes_a_margin_too_small(self):
    run = self.variant(
        functools.partial(
            loss_case.run_sequences, pairwise.slic_loss, beta=0.25
        )
    )
    np.testing.assert_allclose(run(SEQ, REF_SEQ, REWARDS)[0], 0.5, rtol=1e-6)

  @parameterized.parameters(
      # Derivatives by h: -β sigmoid(-βh), 2 (h - 1/2β), -β while β h < 1.
      (pairwise.online_dpo_loss, 0.25, -0.25 / (1 + np.exp(0.5))),
      (pairwise.ipo_loss, 0.5, 2.0),
      (pairwise.slic_loss, 0.25, -0.25),
      (pairwise.slic_loss, 0.75, 0.0),
  )
  def test_gradient_is_of_the_pair_alone(self, loss_fn, beta, slope):
    grad = jax.grad(
        lambda s: loss_case.run_sequences(
            loss_fn, s, REF_SEQ, REWARDS, beta=beta
        )[0]
    )(SEQ)
    np.testing.assert_allclose(
        grad, [[-slope, 0.0, slope, 0.0]], rtol=1e-5, atol=1e-7
    )

  @parameterized.parameters(*PAIR_LOSSES)
  def test_equal_rewards_make_no_pair(self, loss_fn):
    two = lambda x: jnp.concatenate([x, x])
    rewards = jnp.concatenate([REWARDS, jnp.full((1, 4), 0.1)])
    run = lambda s: loss_case.run_sequences(
        loss_fn, s, two(REF_SEQ), rewards, beta=BETA
    )
    (loss, aux), grad = jax.value_and_grad(run, has_aux=True)(two(SEQ))
    one = loss_case.run_sequences(loss_fn, SEQ, REF_SEQ, REWARDS, beta=BETA)[0]
    np.testing.assert_allclose(loss, one / 2, rtol=1e-6)
    np.testing.assert_allclose(aux["pair_Bx1"], [[1.0], [0.0]])
    chex.assert_trees_all_equal(grad[1], jnp.zeros(4))

  @parameterized.parameters((2,), (4,))
  def test_a_tie_may_prefer_the_first_to_the_last(self, num):
    """As published: of two equals sample 0 is chosen, 1 rejected."""
    rewards = jnp.full((1, num), 0.1)
    run = functools.partial(
        loss_case.run_sequences,
        pairwise.online_dpo_loss,
        ref_seq=REF_SEQ[:, :num],
        rewards=rewards,
        beta=BETA,
        ties="first",
    )
    (_, aux), grad = jax.value_and_grad(lambda s: run(seq=s), has_aux=True)(
        SEQ[:, :num]
    )
    rho = (SEQ - REF_SEQ)[0]
    h = rho[0] - rho[num - 1]
    np.testing.assert_allclose(aux["margin_Bx1"], [[h]])
    slope = -BETA / (1 + np.exp(BETA * h))
    expected = np.zeros(num)
    expected[0], expected[-1] = slope, -slope
    np.testing.assert_allclose(grad[0], expected, rtol=1e-5)
    # Rewards that differ are paired as ever.
    both = [
        loss_case.run_sequences(
            pairwise.online_dpo_loss,
            SEQ,
            REF_SEQ,
            REWARDS,
            beta=BETA,
            ties=ties,
        )
        for ties in ("first", "skip")
    ]
    chex.assert_trees_all_equal(*both)

  @parameterized.parameters(*PAIR_LOSSES)
  def test_only_the_order_of_rewards_plays_a_part(self, loss_fn):
    chex.assert_trees_all_equal(
        loss_case.run_sequences(loss_fn, SEQ, REF_SEQ, REWARDS, beta=BETA),
        loss_case.run_sequences(
            loss_fn, SEQ, REF_SEQ, 9 * REWARDS - 4, beta=BETA
        ),
    )


class BestOfNTest(chex.TestCase):

  @chex.variants(with_jit=True, without_jit=True)
  def test_matches_known_numbers(self):
    seq = jnp.concatenate([SEQ, SEQ - 1])
    rewards = jnp.concatenate([REWARDS, jnp.zeros((1, 4))])
    run = self.variant(best_of_n)
    # The third of the first prompt, the first of the second.
    np.testing.assert_allclose(
        run(seq, seq, rewards)[0], (2 + 2) / 2, rtol=1e-6
    )

  def test_gradient_is_of_the_best_alone(self):
    grad = jax.grad(lambda s: best_of_n(s, s, REWARDS)[0])(SEQ)
    np.testing.assert_allclose(grad, [[0.0, 0.0, -1.0, 0.0]])


class BradleyTerryTest(chex.TestCase):

  @chex.variants(with_jit=True, without_jit=True)
  def test_matches_known_numbers(self):
    run = self.variant(pairwise.bradley_terry_loss)
    # Margins 2 and -1.
    rewards_Bx2 = jnp.array([[1.0, -1.0], [0.0, 1.0]])
    expected = (np.log1p(np.exp(-2.0)) + np.log1p(np.exp(1.0))) / 2
    np.testing.assert_allclose(run(rewards_Bx2), expected, rtol=1e-6)
    np.testing.assert_allclose(run(rewards_Bx2 + 7), expected, rtol=1e-5)

  def test_the_gradient_moves_what_is_wrong_most(self):
    rewards_Bx2 = jnp.array([[1.0, -1.0], [0.0, 1.0]])
    grad = jax.grad(pairwise.bradley_terry_loss)(rewards_Bx2)
    push_B = np.array([1 / (1 + np.exp(2.0)), 1 / (1 + np.exp(-1.0))]) / 2
    np.testing.assert_allclose(
        grad, np.stack([-push_B, push_B], axis=1), rtol=1e-5
    )

  def test_other_shapes_are_refused(self):
    with self.assertRaises(AssertionError):
      pairwise.bradley_terry_loss(jnp.zeros((2, 3)))
