# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Trajectory balance: VarGrad, learned log Z, pairs, sub-trajectories; GVPO.

All pull the policy towards π_ref(y|x) exp(r(x, y)/β) / Z(x). `tb`,
`tb_learned_z` and `gvpo` are members of the family in `residual.py`. With
`loss.scale` "paper", losses are scaled as in the papers; "unit" gives a policy
gradient, whose size does not grow as β is annealed:

    ∇loss = -1/(BK) Σ_b Σₖ A ∇log π(yₖ|x_b),   A = (r - r̄) - β (ρ - ρ̄)

with ρ = log π - log π_ref; this loss is β/2 times the paper's squared residual.
Both scales have the same minimizer.
"""

from typing import Any

import jax
import jax.numpy as jnp

from tba_jax.losses import groups as groups_lib
from tba_jax.losses import residual

_Loss = groups_lib.Loss


def tb_loss(groups: groups_lib.Groups, c: Any, beta: jax.Array) -> _Loss:
  """Returns the trajectory balance loss with the VarGrad estimate of log Z.

      log Ẑ(x) = 1/K Σₖ [r(x, yₖ)/β + log π_ref(yₖ|x) - log π(yₖ|x)]
      loss = c/(BK) Σ_b Σₖ (sg[log Ẑ(x_b)] + log π - log π_ref - r/β)²

  with c = β/2 by default, and 1 with `loss.scale` "paper". sg stops the
  gradient.

  Source: Bartoldson et al. 2025 (arXiv:2503.18929), eq. 4 and 5; estimator of
  Richter et al. 2020 (arXiv:2010.10436).

  Returns:
    Loss, [] float32 (reward times nats in unit scale, nats² in the paper's),
    and `log_z_Bx1` and `residual_BxK` in nats.
  """
  return residual.member(
      groups,
      c,
      beta,
      anchor="reference",
      baseline="group",
      paper=2 / beta,
  )


def tb_learned_z_loss(
    groups: groups_lib.Groups, c: Any, beta: jax.Array
) -> _Loss:
  """Returns the trajectory balance loss with a learned log Z.

      loss = 1/(BK) Σ_b Σₖ (log Z(x_b) + log π - log π_ref - r/β)²

  Source: Malkin et al. 2022 (arXiv:2201.13259), trajectory balance; with the
  reference policy in the reward, Lee et al. 2024 (arXiv:2405.18540). Returns as
  `tb_loss`.
  """
  return residual.member(
      groups,
      c,
      beta,
      anchor="reference",
      baseline="learned",
      paper=2 / beta,
  )


def subtb_loss(groups: groups_lib.Groups, c: Any, beta: jax.Array) -> _Loss:
  """Returns the sub-trajectory balance loss.

      δ_ij = u_i - u_j + Σ_{i≤t<j} (log π - log π_ref)(y_t)
      loss = 1/(BK) Σ_b Σₖ  Σ_{i<j} λ^{j-i} δ_ij² / Σ_{i<j} λ^{j-i}

  over the counted tokens, where β u_t, from the value model, is the soft value
  of the state before token t, and u = r/β after the last token; λ is
  `subtb_lambda`, above 0 and at most 1. The term of the whole completion is
  trajectory balance with log Z = u_0. A completion without counted tokens adds
  0.

  Source: Madan et al. 2022 (arXiv:2209.12782), eq. 10 and 11, SubTB(λ).
  Computed in one pass over the tokens: D_n(j) = Σ_{i<j} λ^{j-i} δ_ijⁿ gives
  D_n(j + 1), because the next token adds the same amount to every δ_ij.

  Returns:
    Loss, [] float32, and `log_z_Bx1` (u_0) and `residual_BxK` (δ of the whole
    completion) in nats.
  """
  front, _ = groups_lib.counted_first(groups.mask_BxKxT)
  mask_BxKxT, lam = front(groups.mask_BxKxT), c.subtb_lambda
  shown = lambda x: jnp.where(mask_BxKxT > 0, x, 0.0)
  flow_BxKxT = shown(front(groups.values_BxKxT)) / beta
  last_pad = ((0, 0), (0, 0), (0, 1))
  next_mask_BxKxT = jnp.pad(mask_BxKxT[..., 1:], last_pad)
  next_flow_BxKxT = jnp.where(
      next_mask_BxKxT > 0,
      jnp.pad(flow_BxKxT[..., 1:], last_pad),
      groups.rewards_BxK[:, :, None] / beta,
  )
  rho_BxKxT = front(
      groups.logprobs_BxKxT - jax.lax.stop_gradient(groups.ref_logprobs_BxKxT)
  )
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
  loss = beta / 2 * square if c.scale == "unit" else square
  return loss, jax.lax.stop_gradient(
      {
          "log_z_Bx1": flow_BxKxT[:, :1, 0],
          "residual_BxK": delta_BxKxT.sum(axis=2),
      }
  )


def gvpo_loss(groups: groups_lib.Groups, c: Any, beta: jax.Array) -> _Loss:
  """Returns the group variance policy optimization loss.

      loss = 1/B Σ_b 1/(2(K-1)) Σ_i (R(y_i) - R̄)²,   R = r - β (log π - log a)

  Source: Zhang et al. 2025 (arXiv:2504.19599), whose anchor is "behavior";
  `loss.anchor` defaults to the reference. The residual of VarGrad trajectory
  balance is -(R - R̄)/β, so the gradient is β² K/(2(K-1)) times the gradient of
  the paper's trajectory balance. The unit scale divides it by β, which gives
  K/(K-1) times the gradient of `tb_loss`, as in RLOO.
  """
  K = groups.rewards_BxK.shape[1]
  if c.anchor == "ema":  # β_i differ, so R̄ must have no gradient.
    loss, _ = residual.member(
        groups, c, beta, anchor="ema", baseline="group", paper=beta
    )
    return K / (K - 1) * loss, {}
  log_ratio_BxK, _ = residual.log_ratio(
      groups, c.anchor or "reference", c.ema_decay
  )
  left_BxK = groups.rewards_BxK - beta * log_ratio_BxK
  counted_BxK = groups.counted_BxK
  num_Bx1 = jnp.maximum(counted_BxK.sum(axis=1, keepdims=True), 1.0)
  left_BxK = counted_BxK * left_BxK
  mean_Bx1 = left_BxK.sum(axis=1, keepdims=True) / num_Bx1
  centered_BxK = counted_BxK * (left_BxK - mean_Bx1)
  loss = jnp.mean(jnp.square(centered_BxK).sum(axis=1)) / (2 * (K - 1))
  return (loss / beta if c.scale == "unit" else loss), {}


def ctb_loss(groups: groups_lib.Groups, c: Any, beta: jax.Array) -> _Loss:
  """Returns contrastive trajectory balance: pairs of a group instead of log Z.

      loss = c/(2BK²) Σ_b Σ_ij 1[|r_i - r_j|/β >= σ] (δ_i - δ_j)²
      δ = log π - log π_ref - r/β

  with c as in `tb_loss`, which it equals at σ = `loss.pair_contrast` = 0.
  Pruning pairs of similar rewards keeps the minimizer if the others connect all
  completions.

  Source: Kwon et al. 2026 (arXiv:2605.00553), eq. 3, 4 and 7, with σ = 0.5;
  there log R, r/β here, has no π_ref (`tempering.gamma` removes it), and a
  batch is one group. Returns as `tb_loss`.
  """
  reward_BxK, counted_BxK = groups.rewards_BxK / beta, groups.counted_BxK
  delta_BxK = counted_BxK * (groups.rho_BxK - reward_BxK)
  gap = lambda x_BxK: x_BxK[:, :, None] - x_BxK[:, None, :]
  pairs_BxKxK = counted_BxK[:, :, None] * counted_BxK[:, None, :]
  pairs_BxKxK *= jnp.abs(gap(reward_BxK)) >= c.pair_contrast
  num_Bx1 = jnp.maximum(counted_BxK.sum(axis=1, keepdims=True), 1.0)
  square_BxK = (pairs_BxKxK * jnp.square(gap(delta_BxK))).sum(axis=2) / num_Bx1
  loss = jnp.mean(square_BxK) / 2
  log_z_Bx1 = -delta_BxK.sum(axis=1, keepdims=True) / num_Bx1
  residual_BxK = counted_BxK * (delta_BxK + log_z_Bx1)
  return beta / 2 * loss if c.scale == "unit" else loss, jax.lax.stop_gradient(
      {"log_z_Bx1": log_z_Bx1, "residual_BxK": residual_BxK}
  )
