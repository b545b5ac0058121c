# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Trajectory balance: VarGrad, learned log Z, sub-trajectories; GVPO.

All pull the policy towards π_ref(y|x) exp(r(x, y)/β) / Z(x). `tb`,
`tb_learned_z` and `gvpo` are members of the family in `residual.py`. `c` is
`config.loss`. Its `scale` "paper" follows each paper; "unit" gives a policy
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
      loss = 1/(BK) Σ_b Σₖ (sg[log Ẑ(x_b)] + log π - log π_ref - r/β)²

  Source: Bartoldson et al. 2025 (arXiv:2503.18929), eq. 4 and 5; estimator of
  Richter et al. 2020 (arXiv:2010.10436). sg stops the gradient.

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
  reference policy in the reward, Lee et al. 2024 (arXiv:2405.18540). For the
  results, see `tb_loss`.
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
  Computed in one pass over the tokens: D_n = Σ_{i<j} λ^{j-i} δ_ijⁿ of j + 1
  follow from D_n of j, as the next token shifts every δ by its own.

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

  Source: Zhang et al. 2025 (arXiv:2504.19599), with the KL to the run's
  reference; the paper's is `loss.anchor` "behavior".
  The residual of VarGrad trajectory balance is -(R - R̄)/β, so the gradient is
  β² K/(2(K-1)) times the gradient of the paper's trajectory balance. Our unit
  scale divides it by β: K/(K-1) times the gradient of `tb_loss`, as in RLOO.
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
  centered_BxK = left_BxK - left_BxK.mean(axis=1, keepdims=True)
  loss = jnp.mean(jnp.square(centered_BxK).sum(axis=1)) / (2 * (K - 1))
  return (loss / beta if c.scale == "unit" else loss), {}
