# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""PPO by hand: rewards of tokens, GAE, whitening, both losses, gradients."""

import dataclasses
import functools

from absl.testing import parameterized
import chex
import jax
import jax.numpy as jnp
import numpy as np

from tba_jax.losses import groups as groups_lib
from tba_jax.losses import ppo
from tests.support import loss_case

# One prompt, completions of 3 and 1 tokens.
MASK = jnp.array([[[1.0, 1.0, 1.0], [1.0, 0.0, 0.0]]])
VALUES = jnp.array([[[0.5, 0.25, 1.0], [0.75, jnp.nan, jnp.inf]]])
REWARDS = jnp.array([[2.0, 1.0]])
LOSS = loss_case.make_settings(value_clip=0.2, value_weight=0.5)


def value_loss(values, old, returns, weights, clip):
  groups = loss_case.of_tokens(
      values,
      values,
      weights,
      weights[..., 0],
      values_BxKxT=values,
      targets=groups_lib.Targets(old, 0 * old, returns),
  )
  return ppo.value_loss(groups, clip)


class TargetsTest(chex.TestCase):

  @chex.variants(with_jit=True, without_jit=True)
  def test_rewards_of_tokens_match_known_numbers(self):
    log_ratio = jnp.array([[[1.0, -1.0, 2.0], [3.0, jnp.nan, 0.0]]])
    run = self.variant(functools.partial(ppo.token_rewards, beta=0.1))
    np.testing.assert_allclose(
        run(REWARDS, log_ratio, MASK)[0],
        [[-0.1, 0.1, 2.0 - 0.2], [1.0 - 0.3, 0.0, 0.0]],
        rtol=1e-6,
    )

  def test_the_reward_of_a_full_completion_is_on_its_last_token(self):
    rewards = ppo.token_rewards(
        REWARDS, 0 * MASK, jnp.ones((1, 2, 3)), beta=0.1
    )
    np.testing.assert_array_equal(rewards[0], [[0, 0, 2], [0, 0, 1]])

  @chex.variants(with_jit=True, without_jit=True)
  def test_gae_matches_known_numbers(self):
    token_rewards = jnp.array([[[0.0, 1.0, 2.0], [3.0, 9.0, 9.0]]])
    run = self.variant(functools.partial(ppo.gae, gamma=0.5, lam=0.5))
    advantages, returns = run(token_rewards, VALUES, MASK)
    # δ = (0 + .125 - .5, 1 + .5 - .25, 2 - 1), and A_t = δ_t + A_{t+1} / 4.
    np.testing.assert_allclose(
        advantages[0], [[-0.375 + 1.5 / 4, 1.25 + 0.25, 1.0], [2.25, 0, 0]]
    )
    np.testing.assert_allclose(returns[0], [[0.5, 1.75, 2.0], [3.0, 0.0, 0.0]])

  def test_tokens_of_an_environment_do_not_matter(self):
    """Reward, value and discount pass over them."""
    rng = np.random.default_rng(0)
    log_ratio, values = rng.normal(size=(2, 1, 2, 3))
    c = loss_case.make_settings(gae_gamma=0.7, gae_lambda=0.6)
    make = lambda *arrays: ppo.make_targets(*arrays, REWARDS, c, 0.1)
    expected = make(values, log_ratio, MASK)
    columns = np.array([-1, 0, -1, 1, -1, -1, 2, -1])
    insert = lambda x, junk: jnp.where(columns >= 0, x[..., columns], junk)
    wide = make(
        insert(values, 9.0), insert(log_ratio, jnp.nan), insert(MASK, 0.0)
    )
    for name in ("advantages_BxKxT", "returns_BxKxT"):
      values = getattr(wide, name)
      np.testing.assert_allclose(
          values[..., columns >= 0], getattr(expected, name), rtol=1e-5
      )
      self.assertFalse(np.any(values[..., columns < 0]))

  def test_turn_rewards_move_to_counted_tokens(self):
    mask = jnp.array([[[0.0, 1, 1, 0, 0, 1, 0, 0], [0.0] * 8]])
    rewards = jnp.array([[[4.0, 0, 1, 2, 0, 0, 0.5, 0.25], [0.0] * 8]])
    # 4 goes to the first token that counts, the others to the last before.
    np.testing.assert_allclose(
        ppo.turn_rewards(rewards, mask)[0, 0], [4, 3, 0.75, 0, 0, 0, 0, 0]
    )
    whole = ppo.turn_rewards(rewards, jnp.ones_like(mask))
    np.testing.assert_array_equal(whole, rewards)
    c = loss_case.make_settings(
        gae_gamma=1.0, gae_lambda=1.0, whiten_advantages=False
    )
    make = functools.partial(
        ppo.make_targets, 0 * mask, 0 * mask, mask, rewards.sum(axis=2), c, 0.1
    )
    by_turn, at_end = make(rewards), make(None)
    # What follows a token, and the same with all of it at the end.
    np.testing.assert_allclose(
        by_turn.returns_BxKxT[0, 0], [0, 7.75, 3.75, 0, 0, 0.75, 0, 0]
    )
    np.testing.assert_allclose(
        at_end.returns_BxKxT[0, 0], [0, 7.75, 7.75, 0, 0, 7.75, 0, 0]
    )

  def test_return_with_lambda_one_is_the_sum_of_what_follows(self):
    rng = np.random.default_rng(0)
    token_rewards, values = rng.normal(size=(2, 1, 2, 3))
    _, returns = ppo.gae(token_rewards, values, MASK, gamma=1.0, lam=1.0)
    follows = np.cumsum((token_rewards * MASK)[..., ::-1], axis=-1)[..., ::-1]
    np.testing.assert_allclose(returns, follows * MASK, rtol=1e-5)

  def test_advantage_with_lambda_zero_is_one_step(self):
    token_rewards = jnp.ones((1, 2, 3))
    advantages, _ = ppo.gae(token_rewards, VALUES, MASK, gamma=1.0, lam=0.0)
    np.testing.assert_allclose(
        advantages[0], [[0.75, 1.75, 0.0], [0.25, 0.0, 0.0]]
    )

  def test_whitening_ignores_masked_tokens(self):
    values = jnp.array([[[1.0, 2.0, 3.0], [6.0, jnp.nan, -jnp.inf]]])
    white = ppo.whiten(values, MASK)
    # Mean 3, unbiased variance (4 + 1 + 0 + 9) / 3.
    np.testing.assert_allclose(
        white[0],
        np.array([[-2, -1, 0], [3, 0, 0]]) / np.sqrt(14 / 3),
        rtol=1e-6,
    )
    np.testing.assert_array_equal(ppo.whiten(0 * MASK + 4, MASK), 0 * MASK)
    np.testing.assert_array_equal(ppo.whiten(values, 0 * MASK), 0 * MASK)

  def test_no_gradient_flows_through_targets(self):
    def total(values):
      targets = ppo.make_targets(
          values,
          0 * MASK,
          MASK,
          REWARDS,
          loss_case.make_settings(),
          0.1,
      )
      return sum(x.sum() for x in jax.tree.leaves(targets))

    grad = jax.grad(total)(0.5 * MASK)
    np.testing.assert_array_equal(grad, 0 * MASK)


class LossTest(parameterized.TestCase):

  def test_value_loss_matches_known_numbers(self):
    values = jnp.array([[[1.0, 3.0, 0.0], [2.0, 7.0, 7.0]]])
    old = jnp.array([[[1.0, 2.0, 1.0], [0.0, 7.0, 7.0]]])
    returns = jnp.array([[[2.0, 5.0, 3.0], [1.0, 0.0, 0.0]]])
    loss, held = value_loss(values, old, returns, MASK / 2, clip=0.5)
    # Held at 2.5 the second is further off, at .5 the third is nearer, at .5
    # the fourth is as near at a half: 1, 2.5², 3², 1.
    np.testing.assert_allclose(loss, (1 + 6.25 + 9 + 1) / 2 / 2 / 2)
    np.testing.assert_array_equal(held[0], [[0, 1, 0], [0, 0, 0]])
    loss, held = value_loss(values, old, returns, MASK / 2, clip=0.0)
    np.testing.assert_allclose(loss, (1 + 4 + 9 + 1) / 2 / 2 / 2)
    self.assertEqual(held.sum(), 0)

  def test_clipped_value_has_no_gradient(self):
    old, returns = jnp.zeros((1, 1, 2)), jnp.full((1, 1, 2), 5.0)
    grad = jax.grad(
        lambda v: value_loss(v, old, returns, old + 1, clip=0.5)[0]
    )(jnp.array([[[0.2, 0.7]]]))
    np.testing.assert_allclose(grad[0, 0], [0.2 - 5, 0.0])

  def make_groups(self):
    rng = np.random.default_rng(1)
    draw = lambda: jnp.asarray(rng.normal(size=(1, 2, 3)))
    return loss_case.of_tokens(
        draw(),
        draw(),
        MASK,
        REWARDS,
        weights=groups_lib.length_weights(MASK, "mean_tokens"),
        values_BxKxT=draw(),
        targets=groups_lib.Targets(draw(), draw() * MASK, draw()),
    )

  def test_is_a_mean_over_tokens_of_both(self):
    groups = self.make_groups()
    loss, aux = ppo.ppo_loss(groups, LOSS, 0.1)
    old, returns = groups.targets.old_values_BxKxT, groups.targets.returns_BxKxT
    near = old + np.clip(groups.values_BxKxT - old, -0.2, 0.2)
    error = np.maximum(
        (groups.values_BxKxT - returns) ** 2, (near - returns) ** 2
    )
    score = groups.targets.advantages_BxKxT * groups.logprobs_BxKxT
    np.testing.assert_allclose(
        loss, ((0.5 * error / 2 - score) * MASK).sum() / 4, rtol=1e-6
    )
    self.assertEqual(aux["value_clipped_BxKxT"].shape, MASK.shape)

  def test_gradient_equals_finite_differences(self):
    with jax.enable_x64(True):
      groups = self.make_groups()
      rng = np.random.default_rng(2)
      steps = rng.normal(size=(2, 1, 2, 3))

      def along(x):
        some = dataclasses.replace(
            groups,
            logprobs_BxKxT=groups.logprobs_BxKxT + x * steps[0],
            values_BxKxT=groups.values_BxKxT + x * steps[1],
        )
        return ppo.ppo_loss(some, LOSS, 0.1)[0]

      slope = (along(1e-6) - along(-1e-6)) / 2e-6
      np.testing.assert_allclose(jax.grad(along)(0.0), slope, rtol=1e-6)
