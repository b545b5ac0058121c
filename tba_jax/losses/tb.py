# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Trajectory balance: VarGrad and learned log Z.

Both pull the policy to π_ref(y|x) exp(r(x, y)/β) / Z(x). They share a
scale: "paper" is the paper's own, whose gradient is 2/β times a policy
gradient and so grows as β is annealed; "unit" is β/2 times that, whose gradient

    ∇loss = -1/(BK) Σ_b Σₖ A ∇log π(yₖ|x_b),   A = (r - r̄) - β (ρ - ρ̄)

with ρ = log π - log π_ref has no β in front. (Squares in units of reward, β²/2
times the paper's, would leave a β there, and an annealed β would stall Adam.)
Both have the same minimizer.

Only differences of log-probs enter, so a completion's mask must be the same in
the policy's and the reference's sums.
"""

import chex
import jax
import jax.numpy as jnp

SCALES = ("unit", "paper")


def vargrad_tb_loss(
    seq_logprobs_BxK: jax.Array,
    ref_seq_logprobs_BxK: jax.Array,
    rewards_BxK: jax.Array,
    *,
    beta: jax.Array | float,
    scale: str,
) -> tuple[jax.Array, dict[str, jax.Array]]:
  """Returns the trajectory balance loss with the VarGrad estimate of log Z.

      log Ẑ(x) = 1/K Σₖ [r(x, yₖ)/β + log π_ref(yₖ|x) - log π(yₖ|x)]
      loss = 1/(BK) Σ_b Σₖ (sg[log Ẑ(x_b)] + log π - log π_ref - r/β)²

  Source: Bartoldson et al. 2025 (arXiv:2503.18929), VarGrad TB objective, eq.
  4 and 5; estimator of Richter et al. 2020 (arXiv:2010.10436). sg stops the
  gradient. The "unit" scale, ours, is β/2 times that.

  Args:
    seq_logprobs_BxK: [B, K] float32, log π(y|x) of each completion, nats.
    ref_seq_logprobs_BxK: [B, K] float32, log π_ref(y|x), nats, no gradient.
    rewards_BxK: [B, K] float32, task units; a shift per prompt changes nothing.
    beta: KL coefficient in reward per nat, above 0; may be traced.
    scale: "unit" or "paper".

  Returns:
    Loss, [] float32 (reward times nats in unit scale, nats² in the paper's);
    `log_z_Bx1` and `residual_BxK` in nats, without gradient.

  Raises:
    ValueError: `scale` is not known, or `beta` is a number that is not above 0.
  """
  log_z_Bx1 = vargrad_log_z(
      seq_logprobs_BxK, ref_seq_logprobs_BxK, rewards_BxK, beta=beta
  )
  return learned_z_tb_loss(
      seq_logprobs_BxK,
      ref_seq_logprobs_BxK,
      rewards_BxK,
      jax.lax.stop_gradient(log_z_Bx1),
      beta=beta,
      scale=scale,
  )


def learned_z_tb_loss(
    seq_logprobs_BxK: jax.Array,
    ref_seq_logprobs_BxK: jax.Array,
    rewards_BxK: jax.Array,
    log_z_Bx1: jax.Array,
    *,
    beta: jax.Array | float,
    scale: str,
) -> tuple[jax.Array, dict[str, jax.Array]]:
  """Returns the trajectory balance loss with a given, learnable log Z.

      loss = 1/(BK) Σ_b Σₖ (log Z(x_b) + log π - log π_ref - r/β)²

  Source: Malkin et al. 2022 (arXiv:2201.13259), trajectory balance; with the
  reference policy in the reward, Lee et al. 2024 (arXiv:2405.18540). Scales as
  in `vargrad_tb_loss`.

  Args:
    seq_logprobs_BxK: [B, K] float32, log π(y|x) of each completion, nats.
    ref_seq_logprobs_BxK: [B, K] float32, log π_ref(y|x), nats, no gradient.
    rewards_BxK: [B, K] float32, task units.
    log_z_Bx1: [B, 1] float32, log Z(x) in nats; its gradient is returned too.
    beta: KL coefficient in reward per nat, above 0; may be traced.
    scale: "unit" or "paper".

  Returns:
    As `vargrad_tb_loss`.

  Raises:
    ValueError: `scale` is not known, or `beta` is a number that is not above 0.
  """
  _check_groups(seq_logprobs_BxK, ref_seq_logprobs_BxK, rewards_BxK)
  chex.assert_shape(log_z_Bx1, (rewards_BxK.shape[0], 1))
  _check_beta(beta)
  rho_BxK = seq_logprobs_BxK - jax.lax.stop_gradient(ref_seq_logprobs_BxK)
  residual_BxK = log_z_Bx1 + rho_BxK - rewards_BxK / beta
  # Its gradient is β times the residual's: minus the advantage.
  half_square = beta * jnp.mean(jnp.square(residual_BxK)) / 2
  loss = _gradient_scale(beta, scale) * half_square
  return loss, jax.lax.stop_gradient(
      {
          "log_z_Bx1": log_z_Bx1,
          "residual_BxK": residual_BxK,
      }
  )


def vargrad_log_z(
    seq_logprobs_BxK: jax.Array,
    ref_seq_logprobs_BxK: jax.Array,
    rewards_BxK: jax.Array,
    *,
    beta: jax.Array | float,
) -> jax.Array:
  """Returns [B, 1] float32, the group mean of r/β + log π_ref - log π, nats.

  A mean of log quantities, not a log of a mean: it makes the residuals of a
  group sum to zero, so a complete group needs no other baseline.
  """
  _check_groups(seq_logprobs_BxK, ref_seq_logprobs_BxK, rewards_BxK)
  _check_beta(beta)
  return jnp.mean(
      rewards_BxK / beta + ref_seq_logprobs_BxK - seq_logprobs_BxK,
      axis=1,
      keepdims=True,
  )


def _check_groups(
    seq_logprobs_BxK: jax.Array,
    ref_seq_logprobs_BxK: jax.Array,
    rewards_BxK: jax.Array,
) -> None:
  """Groups stay [B, K]: a flat batch would mix prompts in the mean."""
  groups = [seq_logprobs_BxK, ref_seq_logprobs_BxK, rewards_BxK]
  chex.assert_rank(groups, 2)
  chex.assert_equal_shape(groups)
  chex.assert_type(groups, float)


def _check_beta(beta: jax.Array | float) -> None:
  """A traced β cannot be looked at; schedules check theirs when made."""
  if isinstance(beta, (int, float)) and beta <= 0:
    raise ValueError(f"loss.beta={beta}: must be above 0")


def _gradient_scale(beta: jax.Array | float, scale: str) -> jax.Array | float:
  """Returns what a unit-scale gradient is multiplied by."""
  if scale not in SCALES:
    raise ValueError(f"loss.scale={scale!r}: allowed {SCALES}")
  return 1.0 if scale == "unit" else 2 / beta
