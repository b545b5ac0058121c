# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Sub-trajectory balance: every part of a completion must balance.

The flow through the state before token t is π_ref(y_<t|x) exp(u_t), so that
with u_t learned and u at the end r/β a part from i to j balances where

    δ_ij = u_i - u_j + Σ_{i≤t<j} (log π - log π_ref)(y_t) = 0.

The whole completion alone is trajectory balance with log Z = u_0. β u_t is the
soft value of the state, which the value model gives.
"""

import chex
import jax
import jax.numpy as jnp

from tba_jax.losses import tb


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
  if scale not in tb.SCALES:
    raise ValueError(f"loss.scale={scale!r}: allowed {tb.SCALES}")
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
