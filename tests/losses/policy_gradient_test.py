# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Policy gradients: known numbers, invariances, and their gradients."""

import functools

from absl.testing import absltest
from absl.testing import parameterized
import chex
import jax
import jax.numpy as jnp
import numpy as np

from tba_jax.losses import policy_gradient

SEQ = jnp.array([[-1.0, -2.0, -4.0]])
REWARDS = jnp.array([[3.0, 0.0, 0.0]])
# Two tokens, then one, then two.
LOGPROBS = jnp.array([[[-0.5, -0.5], [-2.0, -9.0], [-1.0, -3.0]]])
MASK = jnp.array([[[1.0, 1.0], [1.0, 0.0], [1.0, 1.0]]])


class KnownNumbersTest(chex.TestCase):

  @chex.variants(with_jit=True, without_jit=True)
  def test_reinforce(self):
    loss, aux = self.variant(policy_gradient.reinforce_loss)(SEQ, REWARDS)
    np.testing.assert_allclose(aux["advantages_BxK"], [[2.0, -1.0, -1.0]])
    # -(2·-1 - 1·-2 - 1·-4) / 3
    np.testing.assert_allclose(loss, -4 / 3, rtol=1e-6)

  @chex.variants(with_jit=True, without_jit=True)
  def test_rloo(self):
    loss, aux = self.variant(policy_gradient.rloo_loss)(SEQ, REWARDS)
    np.testing.assert_allclose(aux["advantages_BxK"], [[3.0, -1.5, -1.5]])
    np.testing.assert_allclose(loss, -2.0, rtol=1e-6)

  @chex.variants(with_jit=True, without_jit=True)
  def test_kl_in_reward(self):
    returns = self.variant(policy_gradient.kl_in_reward)(
        REWARDS, jnp.array([[2.0, -1.0, 0.0]]), beta=0.5
    )
    np.testing.assert_allclose(returns, [[2.0, 0.5, 0.0]])

  @chex.variants(with_jit=True, without_jit=True)
  @parameterized.parameters((True, np.sqrt(2.0)), (False, 1.0))
  def test_grpo(self, divide_by_std, std):
    run = self.variant(
        functools.partial(
            policy_gradient.grpo_loss, divide_by_std=divide_by_std
        )
    )
    weights = MASK / MASK.sum(axis=2, keepdims=True)
    ref = LOGPROBS.at[0, 1, 0].add(np.log(2.0))  # δ = log 2: k3 = 1 - log 2
    loss, aux = run(LOGPROBS, ref, weights, REWARDS, beta=0.3)
    epsilon = 1e-4 if divide_by_std else 0.0
    advantages = np.array([2.0, -1.0, -1.0]) / (std + epsilon)
    np.testing.assert_allclose(aux["advantages_BxK"][0], advantages, rtol=1e-5)
    means = np.array([-0.5, -2.0, -2.0])
    expected = (-(advantages * means).sum() + 0.3 * (1 - np.log(2.0))) / 3
    np.testing.assert_allclose(loss, expected, rtol=1e-5)

  @chex.variants(with_jit=True, without_jit=True)
  def test_tba_prime(self):
    # Log-ratios: 50 (clipped to 10) and 1; 3, one masked; 0 and 0.
    ratio = jnp.array([[[50.0, 1.0], [3.0, 70.0], [0.0, 0.0]]])
    loss, aux = self.variant(policy_gradient.tba_prime_loss)(
        LOGPROBS, LOGPROBS - ratio, MASK, MASK, REWARDS, beta=0.1
    )
    returns = np.array([3.0 - 1.1, -0.3, 0.0])
    advantages = returns - returns.mean()
    np.testing.assert_allclose(aux["advantages_BxK"][0], advantages, rtol=1e-5)
    expected = -(advantages * [-1.0, -2.0, -4.0]).mean()
    np.testing.assert_allclose(loss, expected, rtol=1e-5)


class GradientTest(parameterized.TestCase):

  @parameterized.parameters(
      policy_gradient.reinforce_loss, policy_gradient.rloo_loss
  )
  def test_is_minus_the_advantage_over_the_number(self, loss_fn):
    grad, aux = jax.grad(loss_fn, has_aux=True)(SEQ, REWARDS)
    np.testing.assert_allclose(grad, -aux["advantages_BxK"] / 3, rtol=1e-6)

  @parameterized.parameters(
      policy_gradient.reinforce_loss, policy_gradient.rloo_loss
  )
  def test_a_shift_of_the_returns_changes_nothing(self, loss_fn):
    chex.assert_trees_all_close(
        loss_fn(SEQ, REWARDS), loss_fn(SEQ, REWARDS + 7.0), rtol=1e-5
    )

  @parameterized.parameters(True, False)
  def test_equal_rewards_leave_only_the_kl(self, divide_by_std):
    run = lambda x, beta: policy_gradient.grpo_loss(
        x,
        LOGPROBS - 0.5,
        MASK,
        jnp.full((1, 3), 0.1),
        beta=beta,
        divide_by_std=divide_by_std,
    )[0]
    np.testing.assert_allclose(jax.grad(run)(LOGPROBS, 0.0), 0.0, atol=1e-4)
    # d k3 / d log π = 1 - exp(δ), δ = -0.5, over the three completions.
    np.testing.assert_allclose(
        jax.grad(run)(LOGPROBS, 1.0),
        MASK * (1 - np.exp(-0.5)) / 3,
        atol=1e-4,
    )

  def test_grpo_stays_finite_far_from_the_reference(self):
    ref = LOGPROBS + jnp.array([[[900.0, -900.0], [0.0, jnp.nan], [0.0, 0.0]]])
    run = lambda x: policy_gradient.grpo_loss(
        x, ref, MASK, REWARDS, beta=0.1, divide_by_std=True
    )[0]
    chex.assert_tree_all_finite(jax.value_and_grad(run)(LOGPROBS))

  def test_masked_tokens_play_no_part(self):
    hidden = jnp.where(MASK > 0, LOGPROBS, jnp.nan)
    run = lambda x: jax.value_and_grad(
        lambda x: policy_gradient.tba_prime_loss(
            x, jnp.zeros_like(x), MASK, MASK, REWARDS, beta=0.1
        )[0]
    )(x)
    chex.assert_trees_all_equal(run(hidden), run(LOGPROBS))

  def test_one_completion_leaves_nobody_for_rloo(self):
    with self.assertRaisesRegex(ValueError, "completions_per_prompt=1"):
      policy_gradient.rloo_loss(jnp.zeros((2, 1)), jnp.zeros((2, 1)))


if __name__ == "__main__":
  absltest.main()
