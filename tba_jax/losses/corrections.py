# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Importance corrections of gradients on stale data.

A correction multiplies an objective's gradient on each token by a function of

    w_t = π(y_t|x, y_<t) / π_behavior(y_t|x, y_<t),    w = Π_t w_t,

and leaves the objective's value unchanged, so that runs with different
corrections can be compared. The factor itself has no gradient.

    none               1
    clip_token         w_t, or 0 where PPO's clip leaves no gradient
    clip_sequence      w, or 0 where proximal RLOO's clip leaves none
    truncate_token     min(w_t, cap)
    truncate_sequence  min(w, cap)
    mask_token         w_t, or 0 where it is above the cap
    cispo              clip(w_t, 1 - c, 1 + d)
    decoupled          min(π_p/π_behavior, cap) π/π_p, or 0 where PPO's clip of
                       π/π_p leaves no gradient
    topr               min(w, 1) where A < 0, else 1
    bounded_token      clip(w_t, 1/2, 2) where A ≥ 0, clip(w_t, 1/4, 2) where
                       A < 0
    bounded_sequence   the same for w
    vespo              wᵏ e^(λ (1 - w)), (k, λ) = (2, 3) where A ≥ 0, (3, 2)
                       where A < 0
    m2_mask            w_t, or 0 for the tokens of a prompt whose w_t is
                       furthest from 1: as few tokens as bring the mean of
                       (log w_t)² down to the cap

π_p is the proximal policy: newer than the behavior policy, and held fixed for
some steps. PPO's clip is max(-A w, -A clip(w, 1 - c, 1 + d)): it has no
gradient where the ratio has passed the bound towards which the advantage A
pushes it. A is minus the objective's derivative with respect to log π(y_t).

Sources: clip_token, Schulman et al. 2017 (arXiv:1707.06347), eq. 7, with an
asymmetric clip as in DAPO, Yu et al. 2025 (arXiv:2503.14476); clip_sequence,
Noukhovitch et al. 2024 (arXiv:2410.18252); truncation, Espeholt et al. 2018
(arXiv:1802.01561); mask_token, TBA' (Bartoldson et al. 2025, arXiv:2503.18929);
cispo, MiniMax 2025 (arXiv:2506.13585), with both bounds; decoupled, Hilton et
al. 2021 (arXiv:2110.00641) and Fu et al. 2025 (AReaL, arXiv:2505.24298); topr,
Le Roux et al. 2025 (arXiv:2503.14286), its canonical form; vespo, the kernel of
Shen et al. 2026 (arXiv:2602.10693) with the constants of its code; m2_mask,
Zheng et al. 2025 (M2PO, arXiv:2510.01161), which takes the mean over a batch;
here the mean is over a prompt, so that micro-batches do not change the mask.

All factors are nonnegative and have no gradient. With a squared residual
(`residual.py`), they change the path to the minimum but not the minimum itself,
if it can be reached; with a policy gradient, they also change the minimum. The
bounded factors, our own, are positive on all data, so completions that the
policy has moved away from still pull on it. Without this pull, nothing brings
back a policy that is far from its data (docs/results/staleness.md).
"""

import chex
import jax
import jax.numpy as jnp

from tba_jax.losses import objective_table

# Corrections with one factor per completion.
_OF_SEQUENCES = (
    "clip_sequence",
    "truncate_sequence",
    "topr",
    "bounded_sequence",
    "vespo",
)
# k and λ of VESPO's kernel, for A ≥ 0 and for A < 0.
_VESPO_GAIN, _VESPO_LOSS = (2.0, 3.0), (3.0, 2.0)

# Bounds of the ratio in the bounded corrections, for A ≥ 0 and for A < 0.
_BOUNDS_GAIN, _BOUNDS_LOSS = (0.5, 2.0), (0.25, 2.0)

# Nats; far outside any clip, with an exp far below overflow.
_MAX_LOG_RATIO = 20.0


def ratios(
    logprobs_BxKxT: jax.Array,
    behavior_logprobs_BxKxT: jax.Array,
    mask_BxKxT: jax.Array,
) -> tuple[jax.Array, jax.Array]:
  """Returns the ratio of each token and of each completion, without gradient.

  Args:
    logprobs_BxKxT: [B, K, T] float32, log π, nats.
    behavior_logprobs_BxKxT: [B, K, T] float32, log π_behavior, nats.
    mask_BxKxT: [B, K, T] float32, 1 on counted tokens.

  Returns:
    w_t, [B, K, T] (1 on other tokens), and w, [B, K]; both at most e^20, so
    that no product with them is infinite.
  """
  chex.assert_rank(logprobs_BxKxT, 3)
  chex.assert_equal_shape([logprobs_BxKxT, behavior_logprobs_BxKxT, mask_BxKxT])
  log_ratio_BxKxT = jax.lax.stop_gradient(
      jnp.where(mask_BxKxT > 0, logprobs_BxKxT - behavior_logprobs_BxKxT, 0.0)
  )
  bounded = lambda x: jnp.exp(jnp.minimum(x, _MAX_LOG_RATIO))
  return bounded(log_ratio_BxKxT), bounded(log_ratio_BxKxT.sum(axis=2))


def factors(
    ratio_BxKxT: jax.Array,
    ratio_BxK: jax.Array,
    advantages_BxKxT: jax.Array,
    *,
    correction: str,
    ratio_clip: float,
    ratio_cap: float,
    clip_high: float = 0.0,
    moment_cap: float = 0.0,
    mask_BxKxT: jax.Array | None = None,
    proximal: tuple[jax.Array, jax.Array] | None = None,
) -> tuple[jax.Array, jax.Array]:
  """Returns each token's gradient factor, and where it is not the ratio.

  Args:
    ratio_BxKxT: [B, K, T] float32, w_t of `ratios`.
    ratio_BxK: [B, K] float32, w of `ratios`.
    advantages_BxKxT: [B, K, T] float32, minus the objective's derivative with
      respect to log π of each token; only the sign matters.
    correction: name in `objective_table.CORRECTIONS`.
    ratio_clip: c, bound of the clips, cispo and decoupled.
    ratio_cap: the cap.
    clip_high: d; 0 = the same as ratio_clip.
    moment_cap: cap of "m2_mask", nats².
    mask_BxKxT: [B, K, T] float32, 1 on counted tokens, for "m2_mask"; None
      counts all.
    proximal: [B, K, T] float32 both, π/π_p and π_p/π_behavior of each token,
      for "decoupled"; None: the policy itself is π_p.

  Returns:
    The factors, [B, K, T] float32, and 1 on each token whose factor is not its
    ratio, [B, K, T] float32 (0 everywhere for "none").
  """
  chex.assert_equal_shape([ratio_BxKxT, advantages_BxKxT])
  chex.assert_equal_shape_prefix([ratio_BxKxT, ratio_BxK], 2)
  low, high = 1 - ratio_clip, 1 + (clip_high or ratio_clip)
  w_BxKxT = ratio_BxKxT
  if correction in _OF_SEQUENCES:
    w_BxKxT = jnp.broadcast_to(ratio_BxK[:, :, None], ratio_BxKxT.shape)
  cut_by_clip = lambda w: jnp.where(
      advantages_BxKxT > 0, w > high, (advantages_BxKxT < 0) & (w < low)
  )
  if correction == "none":
    return jnp.ones_like(w_BxKxT), jnp.zeros_like(w_BxKxT)
  if correction in ("clip_token", "clip_sequence"):
    factor_BxKxT = jnp.where(cut_by_clip(w_BxKxT), 0.0, w_BxKxT)
  elif correction in ("truncate_token", "truncate_sequence"):
    factor_BxKxT = jnp.minimum(w_BxKxT, ratio_cap)
  elif correction == "mask_token":
    factor_BxKxT = jnp.where(w_BxKxT > ratio_cap, 0.0, w_BxKxT)
  elif correction == "cispo":
    factor_BxKxT = jnp.clip(w_BxKxT, low, high)
  elif correction == "topr":
    tapered_BxKxT = jnp.minimum(w_BxKxT, 1.0)
    factor_BxKxT = jnp.where(advantages_BxKxT < 0, tapered_BxKxT, 1.0)
  elif correction in ("bounded_token", "bounded_sequence"):
    gain_BxKxT, loss_BxKxT = (
        jnp.clip(w_BxKxT, *bounds) for bounds in (_BOUNDS_GAIN, _BOUNDS_LOSS)
    )
    factor_BxKxT = jnp.where(advantages_BxKxT < 0, loss_BxKxT, gain_BxKxT)
  elif correction == "vespo":
    (k, lam), (k_loss, lam_loss) = _VESPO_GAIN, _VESPO_LOSS
    gains_BxKxT = advantages_BxKxT >= 0
    exponent_BxKxT = jnp.where(gains_BxKxT, k, k_loss) * jnp.log(w_BxKxT)
    exponent_BxKxT += jnp.where(gains_BxKxT, lam, lam_loss) * (1 - w_BxKxT)
    factor_BxKxT = jnp.exp(exponent_BxKxT)
  elif correction == "m2_mask":
    if mask_BxKxT is None:
      mask_BxKxT = jnp.ones_like(w_BxKxT)
    is_kept = _within_moment(jnp.log(w_BxKxT), mask_BxKxT, moment_cap)
    factor_BxKxT = jnp.where(is_kept, w_BxKxT, 0.0)
  elif correction == "decoupled":
    to_proximal, to_behavior = proximal or (jnp.ones_like(w_BxKxT), w_BxKxT)
    cut_BxKxT = cut_by_clip(to_proximal)
    capped_BxKxT = jnp.minimum(to_behavior, ratio_cap) * to_proximal
    factor_BxKxT = jnp.where(cut_BxKxT, 0.0, capped_BxKxT)
    changed_BxKxT = cut_BxKxT | (to_behavior > ratio_cap)
    return factor_BxKxT, changed_BxKxT.astype(w_BxKxT.dtype)
  else:
    raise ValueError(
        f"loss.correction={correction!r}: must be {objective_table.CORRECTIONS}"
    )
  return factor_BxKxT, (factor_BxKxT != w_BxKxT).astype(w_BxKxT.dtype)


def _within_moment(
    log_ratio_BxKxT: jax.Array, mask_BxKxT: jax.Array, cap: float
) -> jax.Array:
  """Returns [B, K, T] bool, tokens to keep for a mean square up to a cap.

  Keeps as many of a prompt's counted tokens as possible, smallest squares
  first; tokens with equal squares are kept or left out together.
  """
  square_BxKxT = jnp.where(mask_BxKxT > 0, jnp.square(log_ratio_BxKxT), jnp.inf)
  sorted_BxN = jnp.sort(square_BxKxT.reshape(len(square_BxKxT), -1), axis=1)
  # Means of the 1, 2, … smallest values; these never decrease.
  count_N = jnp.arange(1, sorted_BxN.shape[1] + 1)
  means_BxN = jnp.cumsum(sorted_BxN, axis=1) / count_N[None]
  # Smallest excluded value; ties with it are also excluded.
  limit_B = jnp.where(means_BxN <= cap, jnp.inf, sorted_BxN).min(axis=1)
  return square_BxKxT < limit_B[:, None, None]


def scale_gradient(values: jax.Array, factor: jax.Array) -> jax.Array:
  """Returns the values, with the gradient through them scaled by `factor`."""
  fixed = jax.lax.stop_gradient(values)
  return fixed + jax.lax.stop_gradient(factor) * (values - fixed)
