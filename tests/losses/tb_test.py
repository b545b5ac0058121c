# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Trajectory balance: known numbers, invariances, and its gradients."""

import functools

from absl.testing import absltest
import chex
import jax
import jax.numpy as jnp
import numpy as np

from tba_jax.losses import tb

B, K = 3, 5
BETA = 0.3


def make_groups(seed=0, dtype=np.float32):
  """Returns log-probs [B, K], reference log-probs [B, K], rewards [B, K]."""
  rng = np.random.default_rng(seed)
  seq = rng.normal(-10, 3, (B, K)).astype(dtype)
  ref_seq = rng.normal(-10, 3, (B, K)).astype(dtype)
  return seq, ref_seq, rng.normal(size=(B, K)).astype(dtype)


class VargradTest(chex.TestCase):

  @chex.variants(with_jit=True, without_jit=True)
  def test_known_numbers(self):
    seq = jnp.array([[-1.0, -2.0], [-3.0, -3.0]])
    ref_seq = jnp.array([[-2.0, -2.0], [-4.0, -5.0]])
    rewards = jnp.array([[1.0, 0.0], [0.5, 0.5]])
    run = self.variant(functools.partial(tb.vargrad_tb_loss, scale="paper"))
    loss, aux = run(seq, ref_seq, rewards, beta=0.5)
    # r/β - ρ: [2 - 1, 0 - 0] and [1 - 1, 1 - 2].
    np.testing.assert_allclose(aux["log_z_Bx1"], [[0.5], [-0.5]], atol=1e-6)
    np.testing.assert_allclose(
        aux["residual_BxK"], [[-0.5, 0.5], [-0.5, 0.5]], atol=1e-6
    )
    np.testing.assert_allclose(loss, 0.25, rtol=1e-6)
    unit = self.variant(functools.partial(tb.vargrad_tb_loss, scale="unit"))
    np.testing.assert_allclose(
        unit(seq, ref_seq, rewards, beta=0.5)[0], 0.25 * 0.25, rtol=1e-6
    )

  def test_is_the_mean_group_variance(self):
    seq, ref_seq, rewards = make_groups()
    loss, _ = tb.vargrad_tb_loss(
        seq, ref_seq, rewards, beta=BETA, scale="paper"
    )
    variances_B = np.var(seq - ref_seq - rewards / BETA, axis=1)
    np.testing.assert_allclose(loss, variances_B.mean(), rtol=1e-5)

  def test_scales_differ_by_half_beta_in_value_and_gradient(self):
    seq, ref_seq, rewards = make_groups()
    run = lambda scale: jax.value_and_grad(
        lambda s: tb.vargrad_tb_loss(
            s, ref_seq, rewards, beta=BETA, scale=scale
        )[0]
    )(seq)
    chex.assert_trees_all_close(
        run("unit"),
        jax.tree.map(lambda x: x * BETA / 2, run("paper")),
        rtol=1e-5,
    )

  def test_stopped_log_z_leaves_the_gradient_of_a_full_group(self):
    seq, ref_seq, rewards = make_groups()
    stopped = lambda s: tb.vargrad_tb_loss(
        s, ref_seq, rewards, beta=BETA, scale="unit"
    )[0]

    def not_stopped(s):
      log_z = tb.vargrad_log_z(s, ref_seq, rewards, beta=BETA)
      return tb.learned_z_tb_loss(
          s, ref_seq, rewards, log_z, beta=BETA, scale="unit"
      )[0]

    chex.assert_trees_all_close(
        jax.grad(stopped)(seq), jax.grad(not_stopped)(seq), atol=1e-6
    )

  def test_metrics_carry_no_gradient(self):
    seq, ref_seq, rewards = make_groups()

    def sum_of_metrics(s):
      _, aux = tb.vargrad_tb_loss(s, ref_seq, rewards, beta=1.0, scale="unit")
      return aux["log_z_Bx1"].sum() + aux["residual_BxK"][0, 0]

    chex.assert_trees_all_equal(
        jax.grad(sum_of_metrics)(seq), jnp.zeros_like(seq)
    )

  def test_reward_shift_of_a_prompt_changes_nothing(self):
    seq, ref_seq, rewards = make_groups()
    shift = np.array([[0.0], [5.0], [-2.0]], np.float32)
    run = jax.value_and_grad(
        lambda s, r: tb.vargrad_tb_loss(s, ref_seq, r, beta=BETA, scale="unit")[
            0
        ]
    )
    chex.assert_trees_all_close(
        run(seq, rewards), run(seq, rewards + shift), rtol=1e-4, atol=1e-6
    )

  def test_order_of_prompts_and_completions_changes_nothing(self):
    seq, ref_seq, rewards = make_groups()
    order = np.random.default_rng(1)
    rows, columns = order.permutation(B), order.permutation(K)
    shuffle = lambda x: x[rows][:, columns]
    run = jax.value_and_grad(
        lambda s, f, r: tb.vargrad_tb_loss(s, f, r, beta=BETA, scale="unit")[0]
    )
    loss, grad = run(seq, ref_seq, rewards)
    loss_shuffled, grad_shuffled = run(*map(shuffle, (seq, ref_seq, rewards)))
    np.testing.assert_allclose(loss_shuffled, loss, rtol=1e-6)
    np.testing.assert_allclose(grad_shuffled, shuffle(grad), atol=1e-7)

  def test_at_the_reference_the_residual_is_the_centered_reward(self):
    _, ref_seq, rewards = make_groups()
    _, aux = tb.vargrad_tb_loss(
        ref_seq, ref_seq, rewards, beta=BETA, scale="unit"
    )
    centered = rewards - rewards.mean(axis=1, keepdims=True)
    np.testing.assert_allclose(-BETA * aux["residual_BxK"], centered, atol=1e-5)

  def test_gradient_is_the_advantage_by_finite_differences(self):
    with jax.enable_x64(True):
      seq, ref_seq, rewards = make_groups(dtype=np.float64)
      # Logits -> log-probs: the chain that the advantage form speaks of.
      weights = np.random.default_rng(2).normal(size=(B, K, 6))
      logprobs = lambda theta: seq + jnp.einsum("bkd,d->bk", weights, theta)
      loss = lambda theta: tb.vargrad_tb_loss(
          logprobs(theta),
          jnp.asarray(ref_seq),
          jnp.asarray(rewards),
          beta=BETA,
          scale="paper",
      )[0]
      theta = np.random.default_rng(3).normal(size=6)
      step = 1e-6
      differences = np.array(
          [
              (loss(theta + step * e) - loss(theta - step * e)) / (2 * step)
              for e in np.eye(6)
          ]
      )
      rho = np.asarray(logprobs(theta)) - ref_seq
      center = lambda x: x - x.mean(axis=1, keepdims=True)
      advantages = center(rewards) - BETA * center(rho)
      closed_form = (
          -2 / BETA * np.einsum("bk,bkd->d", advantages, weights) / (B * K)
      )
      np.testing.assert_allclose(differences, closed_form, rtol=1e-6)
      np.testing.assert_allclose(jax.grad(loss)(theta), closed_form, rtol=1e-9)

  def test_unit_scale_is_a_policy_gradient_whatever_beta_is(self):
    seq, ref_seq, rewards = make_groups()
    center = lambda x: x - x.mean(axis=1, keepdims=True)
    for beta in (0.01, 0.3, 2.0):
      grad = jax.grad(
          lambda s, beta=beta: tb.vargrad_tb_loss(
              s, ref_seq, rewards, beta=beta, scale="unit"
          )[0]
      )(seq)
      advantages = center(rewards) - beta * center(seq - ref_seq)
      np.testing.assert_allclose(grad, -advantages / (B * K), atol=1e-5)

  def test_reference_gets_no_gradient(self):
    seq, ref_seq, rewards = make_groups()
    grad = jax.grad(
        lambda f: tb.vargrad_tb_loss(seq, f, rewards, beta=BETA, scale="unit")[
            0
        ]
    )(ref_seq)
    chex.assert_trees_all_equal(grad, jnp.zeros_like(grad))

  def test_vmap_over_betas(self):
    seq, ref_seq, rewards = make_groups()
    run = lambda beta: tb.vargrad_tb_loss(
        seq, ref_seq, rewards, beta=beta, scale="paper"
    )[0]
    betas = jnp.array([0.1, 1.0])
    np.testing.assert_allclose(
        jax.vmap(run)(betas), [run(0.1), run(1.0)], rtol=1e-5
    )

  def test_refuses_wrong_settings_and_flat_batches(self):
    seq, ref_seq, rewards = make_groups()
    with self.assertRaisesRegex(ValueError, "loss.scale='big'"):
      tb.vargrad_tb_loss(seq, ref_seq, rewards, beta=1.0, scale="big")
    with self.assertRaisesRegex(ValueError, "loss.beta=0.0"):
      tb.vargrad_tb_loss(seq, ref_seq, rewards, beta=0.0, scale="unit")
    with self.assertRaises(AssertionError):
      flat = map(np.ravel, (seq, ref_seq, rewards))
      tb.vargrad_tb_loss(*flat, beta=1.0, scale="unit")


class LearnedZTest(chex.TestCase):

  @chex.variants(with_jit=True, without_jit=True)
  def test_known_numbers(self):
    run = self.variant(functools.partial(tb.learned_z_tb_loss, scale="paper"))
    loss, aux = run(
        jnp.array([[-1.0, -2.0]]),
        jnp.array([[-2.0, -2.0]]),
        jnp.array([[1.0, 0.0]]),
        jnp.array([[2.0]]),
        beta=0.5,
    )
    np.testing.assert_allclose(aux["residual_BxK"], [[1.0, 2.0]], rtol=1e-6)
    np.testing.assert_allclose(loss, 2.5, rtol=1e-6)

  def test_gradient_of_log_z_is_twice_the_mean_residual(self):
    seq, ref_seq, rewards = make_groups()
    log_z = np.array([[1.0], [-2.0], [0.5]], np.float32)
    run = lambda z: tb.learned_z_tb_loss(
        seq, ref_seq, rewards, z, beta=BETA, scale="paper"
    )
    grad, aux = jax.grad(run, has_aux=True)(log_z)
    np.testing.assert_allclose(
        grad, 2 * aux["residual_BxK"].mean(axis=1, keepdims=True) / B, rtol=1e-5
    )

  def test_is_zero_at_the_optimum(self):
    # Four outcomes, policy π_ref exp(r/β) / Z.
    rewards = np.array([[0.0, 1.0, 0.3, 0.7]], np.float32)
    ref = np.log(np.array([[0.1, 0.2, 0.3, 0.4]], np.float32))
    log_z = jax.nn.logsumexp(ref + rewards / BETA, axis=1, keepdims=True)
    loss, _ = tb.learned_z_tb_loss(
        ref + rewards / BETA - log_z,
        ref,
        rewards,
        log_z,
        beta=BETA,
        scale="paper",
    )
    np.testing.assert_allclose(loss, 0.0, atol=1e-10)


if __name__ == "__main__":
  absltest.main()
