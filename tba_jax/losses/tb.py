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


# Sub-trajectory balance: every part of a completion must balance.
#
# The flow through the state before token t is π_ref(y_<t|x) exp(u_t), so that
# with u_t learned and u at the end r/β a part from i to j balances where
#
# δ_ij = u_i - u_j + Σ_{i≤t<j} (log π - log π_ref)(y_t) = 0.
#
# The whole completion alone is trajectory balance with log Z = u_0. β u_t is
# the
# soft value of the state, which the value model gives.


def subtb_loss(
    logprobs_BxKxT: jax.Array,
    ref_logprobs_BxKxT: jax.Array,
    mask_BxKxT: jax.Array,
    rewards_BxK: jax.Array,
    values_BxKxT: jax.Array,
    *,
    beta: jax.Array | float,
    scale: str,
    lam: float,
) -> tuple[jax.Array, dict[str, jax.Array]]:
  """Returns the sub-trajectory balance loss.

      loss = 1/(BK) Σ_b Σₖ  Σ_{i<j} λ^{j-i} δ_ij² / Σ_{i<j} λ^{j-i}

  Source: Madan et al. 2022 (arXiv:2209.12782), eq. 10 and 11, SubTB(λ). Scales
  are those of `tb.py`. A completion without counted tokens adds 0. One pass
  over the tokens, not one over all pairs: with D_n = Σ_{i<j} λ^{j-i} δ_ijⁿ of
  one j, the next token's are D_n with all δ moved by its own.

  Args:
    logprobs_BxKxT: [B, K, T] float32, log π of each token, nats.
    ref_logprobs_BxKxT: [B, K, T] float32, log π_ref, nats, no gradient.
    mask_BxKxT: [B, K, T] float32, 1 on the tokens that count, which come first.
    rewards_BxK: [B, K] float32, task units.
    values_BxKxT: [B, K, T] float32, β u_t, in units of reward; the gradient
      flows through it.
    beta: KL coefficient in reward per nat, above 0; may be traced.
    scale: "unit" or "paper".
    lam: λ, above 0 up to 1: the smaller, the more short parts count.

  Returns:
    Loss, [] float32; `log_z_Bx1` (u_0) and `residual_BxK` (δ of the whole
    completion) in nats, without gradient.

  Raises:
    ValueError: `scale` is not known.
  """
  chex.assert_rank([logprobs_BxKxT, rewards_BxK], [3, 2])
  chex.assert_equal_shape(
      [logprobs_BxKxT, ref_logprobs_BxKxT, mask_BxKxT, values_BxKxT]
  )
  if scale not in SCALES:
    raise ValueError(f"loss.scale={scale!r}: allowed {SCALES}")
  shown = lambda x: jnp.where(mask_BxKxT > 0, x, 0.0)
  flow_BxKxT = shown(values_BxKxT) / beta
  last_pad = ((0, 0), (0, 0), (0, 1))
  next_mask_BxKxT = jnp.pad(mask_BxKxT[..., 1:], last_pad)
  next_flow_BxKxT = jnp.where(
      next_mask_BxKxT > 0,
      jnp.pad(flow_BxKxT[..., 1:], last_pad),
      rewards_BxK[:, :, None] / beta,
  )
  rho_BxKxT = logprobs_BxKxT - jax.lax.stop_gradient(ref_logprobs_BxKxT)
  delta_BxKxT = shown(flow_BxKxT - next_flow_BxKxT + rho_BxKxT)

  def step(carry, inputs):
    d0, d1, d2, total, weight = carry
    delta, mask = inputs
    d2 = lam * (d2 + 2 * delta * d1 + delta**2 * (d0 + 1))
    d1 = lam * (d1 + delta * (d0 + 1))
    d0 = lam * (d0 + 1)
    return (d0, d1, d2, total + mask * d2, weight + mask * d0), None

  zeros_BxK = jnp.zeros_like(delta_BxKxT[..., 0])
  (*_, total_BxK, weight_BxK), _ = jax.lax.scan(
      step,
      (zeros_BxK,) * 5,
      tuple(jnp.moveaxis(x, -1, 0) for x in (delta_BxKxT, mask_BxKxT)),
  )
  square = jnp.mean(total_BxK / jnp.where(weight_BxK > 0, weight_BxK, 1.0))
  # As in `tb.py`: β/2 of the paper's scale.
  return (beta / 2 * square if scale == "unit" else square), (
      jax.lax.stop_gradient(
          {
              "log_z_Bx1": flow_BxKxT[:, :1, 0],
              "residual_BxK": delta_BxKxT.sum(axis=2),
          }
      )
  )


# Trajectory balance under its other names: CoPG and GVPO.
#
# With R_θ = r - β (log π - log π_ref), the reward that is left once its KL is
# paid, both are a variance of R_θ within a group, as VarGrad trajectory balance
# is: its residual is -(R_θ - R̄_θ)/β. They differ in a factor alone. In "unit"
# scale both have K/(K-1) times the unit gradient of `tb.py`, that of RLOO.


_Loss = tuple[jax.Array, dict[str, jax.Array]]


def copg_loss(
    seq_logprobs_BxK: jax.Array,
    ref_seq_logprobs_BxK: jax.Array,
    rewards_BxK: jax.Array,
    *,
    beta: jax.Array | float,
    scale: str,
) -> _Loss:
  """Returns the contrastive policy gradient loss over all pairs of a group.

      loss = 1/B Σ_b 1/(K-1) Σ_{i>j} (R_θ(y_i) - R_θ(y_j))²

  Source: Flet-Berliac et al. 2024 (arXiv:2406.19185). With
  Σ_{i>j} (a_i - a_j)² = K Σ_i (a_i - ā)², its gradient is
  β² K²/(K-1) times that of the paper's trajectory balance, which is a mean over
  K. The "unit" scale, ours, is 1/(2βK) times that.

  Args:
    seq_logprobs_BxK: [B, K] float32, log π(y|x) of each completion, nats.
    ref_seq_logprobs_BxK: [B, K] float32, log π_ref(y|x), nats, no gradient.
    rewards_BxK: [B, K] float32, task units; a shift per prompt changes nothing.
    beta: KL coefficient in reward per nat, above 0; may be traced.
    scale: "unit" or "paper".

  Returns:
    Loss, [] float32 (reward² in the paper's scale).

  Raises:
    ValueError: `scale` is not known, or K is 1.
  """
  left_BxK = _left_reward(
      seq_logprobs_BxK, ref_seq_logprobs_BxK, rewards_BxK, beta, scale
  )
  K = left_BxK.shape[1]
  pairs_BxKxK = left_BxK[:, :, None] - left_BxK[:, None, :]
  # Each pair stands twice in the sum.
  loss = jnp.mean(jnp.square(pairs_BxKxK).sum(axis=(1, 2))) / (2 * (K - 1))
  return (loss / (2 * beta * K) if scale == "unit" else loss), {}


def gvpo_loss(
    seq_logprobs_BxK: jax.Array,
    ref_seq_logprobs_BxK: jax.Array,
    rewards_BxK: jax.Array,
    *,
    beta: jax.Array | float,
    scale: str,
) -> _Loss:
  """Returns the group variance policy optimization loss.

      loss = 1/B Σ_b 1/(2(K-1)) Σ_i (R_θ(y_i) - R̄_θ)²

  Source: Zhang et al. 2025 (arXiv:2504.19599), with the run's reference as the
  policy that the KL is to. Its gradient is β² K/(2(K-1)) times that of the
  paper's trajectory balance. The "unit" scale, ours, is 1/β times that.

  Args, returns and raises: as `copg_loss`.
  """
  left_BxK = _left_reward(
      seq_logprobs_BxK, ref_seq_logprobs_BxK, rewards_BxK, beta, scale
  )
  K = left_BxK.shape[1]
  centered_BxK = left_BxK - left_BxK.mean(axis=1, keepdims=True)
  loss = jnp.mean(jnp.square(centered_BxK).sum(axis=1)) / (2 * (K - 1))
  return (loss / beta if scale == "unit" else loss), {}


def _left_reward(
    seq_logprobs_BxK: jax.Array,
    ref_seq_logprobs_BxK: jax.Array,
    rewards_BxK: jax.Array,
    beta: jax.Array | float,
    scale: str,
) -> jax.Array:
  groups = [seq_logprobs_BxK, ref_seq_logprobs_BxK, rewards_BxK]
  chex.assert_rank(groups, 2)
  chex.assert_equal_shape(groups)
  if scale not in SCALES:
    raise ValueError(f"loss.scale={scale!r}: allowed {SCALES}")
  if rewards_BxK.shape[1] < 2:
    raise ValueError("train.completions_per_prompt=1: 2 or more for a variance")
  rho_BxK = seq_logprobs_BxK - jax.lax.stop_gradient(ref_seq_logprobs_BxK)
  return rewards_BxK - beta * rho_BxK
