# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Policy gradients: known numbers, invariances, and their gradients."""

import functools
import itertools

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


def run_tokens(name, logprobs, ref, weights, rewards, beta, **settings):
  groups = loss_case.of_tokens(logprobs, ref, MASK, rewards, weights=weights)
  loss_fn = getattr(policy_gradient, name)
  return loss_fn(groups, loss_case.make_settings(**settings), beta)


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


class AdvantagesTest(chex.TestCase):

  def advantages(self, rewards, **settings):
    def run(rewards):
      _, aux = run_tokens(
          "dr_grpo_loss", LOGPROBS, LOGPROBS, MASK, rewards, 0.0, **settings
      )
      return aux["advantages_BxK"]

    return self.variant(run)(jnp.array([rewards]))[0]

  @chex.variants(with_jit=True, without_jit=True)
  def test_each_matches_known_numbers(self):
    for name, expected in (
        ("mean", [2.0, -1.0, -1.0]),
        ("std", [2**0.5, -(0.5**0.5), -(0.5**0.5)]),
        ("maxrl", [2.0, -1.0, -1.0]),
        # The best of the three pairs are 0, 3 and 3, with mean 2 and the root
        # of 2 as deviation. Each 0 is in a pair of either kind.
        ("pass_at_k", [1 / 2**0.5, -0.5 / 2**0.5, -0.5 / 2**0.5]),
    ):
      with self.subTest(name):
        np.testing.assert_allclose(
            self.advantages([3.0, 0.0, 0.0], advantage=name),
            expected,
            rtol=2e-4,
        )

  @chex.variants(without_jit=True)
  def test_maxrl_divides_by_the_mean(self):
    run = functools.partial(self.advantages, advantage="maxrl")
    np.testing.assert_allclose(run([1.0, 0.5, 0.0]), [1.0, 0.0, -1.0])
    np.testing.assert_array_equal(run([0.0, 0.0, 0.0]), [0.0, 0.0, 0.0])
    # A mean below 0 would turn the order around.
    np.testing.assert_array_equal(run([0.0, -1.0, 0.0]), [0.0, 0.0, 0.0])

  def test_maxrl_is_unbiased_for_the_series(self):
    """d/dp [-(1 - p) - (1 - p)²/2] is 1 + .7 at p = .3, for K = 3."""
    total = 0.0
    for rewards in itertools.product((0.0, 1.0), repeat=3):
      rewards = np.array(rewards)
      advantages = policy_gradient.maxrl_advantages(
          jnp.array([rewards], jnp.float32), None
      )[0]
      scores = np.where(rewards > 0, 1 / 0.3, -1 / 0.7)
      share = np.where(rewards > 0, 0.3, 0.7).prod()
      total += share * np.mean(advantages * scores)
    np.testing.assert_allclose(total, 1.7, rtol=1e-5)

  def test_pass_at_k_equals_its_source_and_all_subsets(self):
    """Chen et al. 2025, §2.4, for 2 of 5 right, and the mean over subsets."""
    c = lambda k: loss_case.make_settings(pass_k=k)
    for k, right, wrong, std in (
        (1, 0.6, -0.4, 0.24**0.5),
        # R̄ = 1 - 3/10 = .7; .3 - C(2, 1)/C(4, 1) = -.2.
        (2, 0.3, -0.2, 0.21**0.5),
        # R̄ = 1 - 1/10 = .9; .1 - C(2, 2)/C(4, 2) = -.0667.
        (3, 0.1, 0.1 - 1 / 6, 0.09**0.5),
    ):
      found = policy_gradient.pass_at_k_advantages(
          jnp.array([[0.0, 1.0, 0.0, 0.0, 1.0]]), c(k)
      )
      expected = np.array([wrong, right, wrong, wrong, right]) / (std + 1e-4)
      np.testing.assert_allclose(found[0], expected, rtol=1e-4)
    rewards = np.array([0.3, -1.0, 2.0, 0.3, 0.7])
    for k in (1, 2, 3, 4):
      subsets = list(itertools.combinations(range(5), k))
      best = np.array([rewards[list(s)].max() for s in subsets])
      expected = [
          best[[i in s for s in subsets]].mean() - best.mean() for i in range(5)
      ]
      found = policy_gradient.pass_at_k_advantages(
          jnp.array([rewards], jnp.float32), c(k)
      )
      np.testing.assert_allclose(
          found[0], np.array(expected) / (best.std() + 1e-4), rtol=1e-4
      )

  def test_grpo_s_is_std_and_dr_grpo_s_mean(self):
    for name, own in (("grpo_loss", "std"), ("dr_grpo_loss", "mean")):
      chex.assert_trees_all_equal(*(
          run_tokens(
              name, LOGPROBS, LOGPROBS, MASK, REWARDS, 0.0, advantage=value
          )
          for value in ("", own)
      ))  # fmt: skip


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
