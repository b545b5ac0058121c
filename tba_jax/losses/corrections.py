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
    mask_token         w_t, or 0 where it is below the floor or above the cap
    mask_sequence      the same for w
    gspo               s = w^(1/|y|), or 0 where PPO's clip leaves none
    dppo_tv            w_t, or 0 where the token's probability is further than
                       the cap from the behavior policy's, and A pushes it on
    dppo_kl            the same with the KL of {the token, all others}
    sapo               4 p (1 - p) w_t, p = sigmoid(τ (w_t - 1)), τ = 1 where
                       A > 0, else 1.05
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
several steps. PPO's clip is max(-A w, -A clip(w, 1 - c, 1 + d)): its gradient
is zero where the ratio has passed the bound that the advantage A pushes it
towards. A is minus the objective's derivative with respect to log π(y_t).

Sources: clip_token, Schulman et al. 2017 (arXiv:1707.06347), eq. 7, with an
asymmetric clip as in DAPO, Yu et al. 2025 (arXiv:2503.14476); clip_sequence,
Noukhovitch et al. 2024 (arXiv:2410.18252); truncation, Espeholt et al. 2018
(arXiv:1802.01561); mask_token, TBA' (Bartoldson et al. 2025, arXiv:2503.18929)
without a floor; with a floor, IcePop (eq. 1 of INTELLECT-3, arXiv:2512.16144);
mask_sequence, the masked importance sampling of verl and TRL; gspo, Zheng et
al. 2025 (arXiv:2507.18071), eq. 5 to 7; dppo, Qi et al. 2026
(arXiv:2602.04879), its binary divergences; sapo, Gao et al. 2025
(arXiv:2511.20347), the gradient of 4/τ sigmoid(τ (w_t - 1)), with its τ;
cispo, MiniMax 2025 (arXiv:2506.13585), with both bounds; decoupled, Hilton et
al. 2021 (arXiv:2110.00641) and Fu et al. 2025 (AReaL, arXiv:2505.24298); topr,
Le Roux et al. 2025 (arXiv:2503.14286), its canonical form; vespo, the kernel of
Shen et al. 2026 (arXiv:2602.10693) with the constants of its code; m2_mask,
Zheng et al. 2025 (M2PO, arXiv:2510.01161), which takes the mean over a batch;
here the mean is over a prompt, so that micro-batches do not change the mask.

All factors are nonnegative and have no gradient. With a squared residual
(`residual.py`), they change the path to the minimum but not the minimum itself,
if it is attainable; with a policy gradient, they also change the minimum. The
bounded factors, which are ours, are positive on all data, so completions that
the policy has moved away from still pull on it. Without this pull, nothing
brings back a policy that is far from its data (docs/results/staleness.md).
"""

import chex
import jax
import jax.numpy as jnp

from tba_jax.losses import objective_table

# Corrections with one factor per completion.
_OF_SEQUENCES = (
    "clip_sequence",
    "truncate_sequence",
    "mask_sequence",
    "topr",
    "bounded_sequence",
    "vespo",
)
# k and λ of VESPO's kernel, for A ≥ 0 and for A < 0.
_VESPO_GAIN, _VESPO_LOSS = (2.0, 3.0), (3.0, 2.0)

# τ of SAPO's gate, for A > 0 and for others.
_SAPO_GAIN, _SAPO_LOSS = 1.0, 1.05
# Largest probability of a token in a binary KL, which is finite below 1.
_MAX_PROB = 1 - 1e-6

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
    ratio_floor: float = 0.0,
    moment_cap: float = 0.0,
    divergence_cap: float = 0.0,
    mask_BxKxT: jax.Array | None = None,
    behavior_logprobs_BxKxT: jax.Array | None = None,
    proximal: tuple[jax.Array, jax.Array] | None = None,
) -> tuple[jax.Array, jax.Array]:
  """Returns each token's gradient factor, and where it differs from the ratio.

  Args:
    ratio_BxKxT: [B, K, T] float32, w_t of `ratios`.
    ratio_BxK: [B, K] float32, w of `ratios`.
    advantages_BxKxT: [B, K, T] float32, minus the objective's derivative with
      respect to log π of each token; only the sign matters.
    correction: name in `objective_table.CORRECTIONS`.
    ratio_clip: c, bound of the clips, gspo, cispo and decoupled.
    clip_high: d; 0 = the same as ratio_clip.
    ratio_floor: lowest ratio that the masks keep.
    moment_cap: cap of "m2_mask", nats².
    divergence_cap: largest divergence that "dppo_tv" (a probability) and
      "dppo_kl" (nats) keep.
    mask_BxKxT: [B, K, T] float32, 1 on counted tokens, for "m2_mask" and
      "gspo"; None counts all.
    behavior_logprobs_BxKxT: [B, K, T] float32, log π_behavior, for "dppo_tv"
      and "dppo_kl"; None stands for 0.
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
  if mask_BxKxT is None:
    mask_BxKxT = jnp.ones_like(w_BxKxT)
  if correction == "gspo":
    # Not from w, which has a bound.
    logs_BxK = (jnp.log(ratio_BxKxT) * mask_BxKxT).sum(axis=2)
    lengths_BxK = jnp.maximum(mask_BxKxT.sum(axis=2), 1.0)
    s_BxKx1 = jnp.exp(logs_BxK / lengths_BxK)[:, :, None]
    w_BxKxT = jnp.broadcast_to(s_BxKx1, ratio_BxKxT.shape)
  cut_outside = lambda above, below: jnp.where(
      advantages_BxKxT > 0, above, (advantages_BxKxT < 0) & below
  )
  cut_by_clip = lambda w: cut_outside(w > high, w < low)
  if correction == "none":
    return jnp.ones_like(w_BxKxT), jnp.zeros_like(w_BxKxT)
  if correction in ("clip_token", "clip_sequence", "gspo"):
    factor_BxKxT = jnp.where(cut_by_clip(w_BxKxT), 0.0, w_BxKxT)
  elif correction in ("truncate_token", "truncate_sequence"):
    factor_BxKxT = jnp.minimum(w_BxKxT, ratio_cap)
  elif correction in ("mask_token", "mask_sequence"):
    if ratio_floor >= ratio_cap:
      raise ValueError(
          f"config.loss.ratio_floor = {ratio_floor}: must be below"
          f" config.loss.ratio_cap = {ratio_cap}"
      )
    is_outside = (w_BxKxT < ratio_floor) | (w_BxKxT > ratio_cap)
    factor_BxKxT = jnp.where(is_outside, 0.0, w_BxKxT)
  elif correction in ("dppo_tv", "dppo_kl"):
    if behavior_logprobs_BxKxT is None:
      behavior_logprobs_BxKxT = jnp.zeros_like(w_BxKxT)
    divergence = _total_variation if correction == "dppo_tv" else _binary_kl
    is_far = divergence(behavior_logprobs_BxKxT, w_BxKxT) > divergence_cap
    cut_BxKxT = cut_outside(is_far & (w_BxKxT > 1), is_far & (w_BxKxT < 1))
    factor_BxKxT = jnp.where(cut_BxKxT, 0.0, w_BxKxT)
  elif correction == "sapo":
    tau_BxKxT = jnp.where(advantages_BxKxT > 0, _SAPO_GAIN, _SAPO_LOSS)
    gate_BxKxT = jax.nn.sigmoid(tau_BxKxT * (w_BxKxT - 1))
    factor_BxKxT = 4 * gate_BxKxT * (1 - gate_BxKxT) * w_BxKxT
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


def _total_variation(
    behavior_logprobs_BxKxT: jax.Array, ratio_BxKxT: jax.Array
) -> jax.Array:
  """Returns |π - π_behavior| of each token's probability."""
  return jnp.exp(behavior_logprobs_BxKxT) * jnp.abs(ratio_BxKxT - 1)


def _binary_kl(
    behavior_logprobs_BxKxT: jax.Array, ratio_BxKxT: jax.Array
) -> jax.Array:
  """Returns KL(π_behavior || π) of {the token, all others}, nats."""
  behavior_BxKxT = jnp.exp(behavior_logprobs_BxKxT)
  rest = lambda prob: jnp.log1p(-jnp.minimum(prob, _MAX_PROB))
  others_BxKxT = rest(behavior_BxKxT) - rest(behavior_BxKxT * ratio_BxKxT)
  same_BxKxT = -behavior_BxKxT * jnp.log(ratio_BxKxT)
  return same_BxKxT + (1 - behavior_BxKxT) * others_BxKxT


def _within_moment(
    log_ratio_BxKxT: jax.Array, mask_BxKxT: jax.Array, cap: float
) -> jax.Array:
  """Returns [B, K, T] bool, the tokens to keep so that their mean square ≤ cap.

  Keeps as many of a prompt's counted tokens as possible, smallest squares
  first. Tokens with equal squares are kept or dropped together.
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
