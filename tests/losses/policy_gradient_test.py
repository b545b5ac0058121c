# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Policy gradients: known numbers, invariances, and their gradients."""

import functools

from absl.testing import parameterized
import chex
import jax
import jax.numpy as jnp
import numpy as np

from tba_jax.losses import policy_gradient
from tests.support import loss_case

SEQ = jnp.array([[-1.0, -2.0, -4.0]])
REWARDS = jnp.array([[3.0, 0.0, 0.0]])
# Two tokens, then one, then two.
LOGPROBS = jnp.array([[[-0.5, -0.5], [-2.0, -9.0], [-1.0, -3.0]]])
MASK = jnp.array([[[1.0, 1.0], [1.0, 0.0], [1.0, 1.0]]])


WEIGHTS = MASK / MASK.sum(axis=2, keepdims=True)


def run(name, seq, rewards, *, kl=0.0, beta=0.0):
  """Runs a loss on completions of one token; kl is the behavior policy's."""
  return loss_case.run_sequences(
      getattr(policy_gradient, name),
      seq,
      seq,
      rewards,
      beta=beta,
      behavior_logprobs_BxKxT=(seq + kl)[..., None],
  )


def run_tokens(name, logprobs, ref, weights, rewards, beta):
  groups = loss_case.of_tokens(logprobs, ref, MASK, rewards, weights=weights)
  loss_fn = getattr(policy_gradient, name)
  return loss_fn(groups, loss_case.make_settings(), beta)


class KnownNumbersTest(chex.TestCase):

  @chex.variants(with_jit=True, without_jit=True)
  def test_reinforce_matches_known_numbers(self):
    loss_fn = self.variant(functools.partial(run, "reinforce_loss"))
    loss, aux = loss_fn(SEQ, REWARDS)
    np.testing.assert_allclose(aux["advantages_BxK"], [[2.0, -1.0, -1.0]])
    # -(2·-1 - 1·-2 - 1·-4) / 3
    np.testing.assert_allclose(loss, -4 / 3, rtol=1e-6)

  @chex.variants(with_jit=True, without_jit=True)
  def test_rloo_matches_known_numbers(self):
    loss, aux = self.variant(functools.partial(run, "rloo_loss"))(SEQ, REWARDS)
    np.testing.assert_allclose(aux["advantages_BxK"], [[3.0, -1.5, -1.5]])
    np.testing.assert_allclose(loss, -2.0, rtol=1e-6)

  @parameterized.parameters(("reinforce_loss", 1.0), ("rloo_loss", 1.5))
  def test_the_kl_of_the_sampler_is_in_the_reward(self, name, factor):
    kl = jnp.array([[2.0, -1.0, 0.0]])
    _, aux = run(name, SEQ, REWARDS, kl=kl, beta=0.5)
    returns = np.array([2.0, 0.5, 0.0])
    np.testing.assert_allclose(
        aux["advantages_BxK"][0],
        factor * (returns - returns.mean()),
        rtol=1e-6,
    )

  @chex.variants(with_jit=True, without_jit=True)
  @parameterized.parameters(
      ("grpo_loss", np.sqrt(2.0) + 1e-4), ("dr_grpo_loss", 1.0)
  )
  def test_grpo_matches_known_numbers(self, name, std):
    ref = LOGPROBS.at[0, 1, 0].add(np.log(2.0))  # δ = log 2: k3 = 1 - log 2
    loss, aux = self.variant(functools.partial(run_tokens, name))(
        LOGPROBS, ref, WEIGHTS, REWARDS, 0.3
    )
    advantages = np.array([2.0, -1.0, -1.0]) / std
    np.testing.assert_allclose(aux["advantages_BxK"][0], advantages, rtol=1e-5)
    means = np.array([-0.5, -2.0, -2.0])
    expected = (-(advantages * means).sum() + 0.3 * (1 - np.log(2.0))) / 3
    np.testing.assert_allclose(loss, expected, rtol=1e-5)

  @chex.variants(with_jit=True, without_jit=True)
  def test_tba_prime_matches_known_numbers(self):
    # Log-ratios: 50 (clipped to 10) and 1; 3, one masked; 0 and 0.
    ratio = jnp.array([[[50.0, 1.0], [3.0, 70.0], [0.0, 0.0]]])
    loss, aux = self.variant(functools.partial(run_tokens, "tba_prime_loss"))(
        LOGPROBS, LOGPROBS - ratio, MASK, REWARDS, 0.1
    )
    returns = np.array([3.0 - 1.1, -0.3, 0.0])
    advantages = returns - returns.mean()
    np.testing.assert_allclose(aux["advantages_BxK"][0], advantages, rtol=1e-5)
    expected = -(advantages * [-1.0, -2.0, -4.0]).mean()
    np.testing.assert_allclose(loss, expected, rtol=1e-5)


class GradientTest(parameterized.TestCase):

  @parameterized.parameters("reinforce_loss", "rloo_loss")
  def test_is_minus_the_advantage_over_the_number(self, name):
    grad, aux = jax.grad(functools.partial(run, name), has_aux=True)(
        SEQ, REWARDS
    )
    np.testing.assert_allclose(grad, -aux["advantages_BxK"] / 3, rtol=1e-6)

  @parameterized.parameters("reinforce_loss", "rloo_loss")
  def test_a_shift_of_the_rewards_changes_nothing(self, name):
    chex.assert_trees_all_close(
        run(name, SEQ, REWARDS), run(name, SEQ, REWARDS + 7.0), rtol=1e-5
    )

  @parameterized.parameters("grpo_loss", "dr_grpo_loss")
  def test_equal_rewards_leave_only_the_kl(self, name):
    rewards = jnp.full((1, 3), 0.1)
    loss = lambda x, beta: run_tokens(
        name, x, LOGPROBS - 0.5, MASK, rewards, beta
    )[0]
    np.testing.assert_allclose(jax.grad(loss)(LOGPROBS, 0.0), 0.0, atol=1e-4)
    # d k3 / d log π = 1 - exp(δ), δ = -0.5, over the three completions.
    np.testing.assert_allclose(
        jax.grad(loss)(LOGPROBS, 1.0),
        MASK * (1 - np.exp(-0.5)) / 3,
        atol=1e-4,
    )

  def test_grpo_stays_finite_far_from_the_reference(self):
    ref = LOGPROBS + jnp.array([[[900.0, -900.0], [0.0, jnp.nan], [0.0, 0.0]]])
    loss = lambda x: run_tokens("grpo_loss", x, ref, MASK, REWARDS, 0.1)[0]
    chex.assert_tree_all_finite(jax.value_and_grad(loss)(LOGPROBS))
