# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Importance corrections: what stale data may still do to the gradient.

Completions come from an older policy, so a gradient taken on them is of the
wrong distribution. A correction multiplies the gradient that an objective has
on each token by a factor of the ratio

    w_t = π(y_t|x, y_<t) / π_behavior(y_t|x, y_<t),    w = Π_t w_t,

and leaves the objective's value as it is, so that runs with different
corrections can be compared. The factor itself carries no gradient.

    none               1
    clip_token         w_t, or 0 where the trust region of PPO cuts it
    clip_sequence      w, or 0 where that of proximal RLOO cuts it
    truncate_token     min(w_t, cap)
    truncate_sequence  min(w, cap)
    mask_token         w_t, or 0 where it is above the cap
    cispo              clip(w_t, 1 - c, 1 + c)
    decoupled          min(π_p/π_behavior, cap) π/π_p, or 0 where the trust
                       region of PPO, around π_p, cuts it

π_p(y_t|…) is of a proximal policy: newer than the one that sampled, and held
while the policy moves away from it.

A trust region cuts a token once its ratio has moved by c to the side to which
the objective pushes it: max(-A w, -A clip(w, 1 - c, 1 + c)) has no gradient
there, with A minus the objective's derivative by log π(y_t).

Sources: clip_token, Schulman et al. 2017 (arXiv:1707.06347), eq. 7;
clip_sequence, Noukhovitch et al. 2024 (arXiv:2410.18252); truncation, Espeholt
et al. 2018 (arXiv:1802.01561); mask_token, the truncated ratio of TBA'
(Bartoldson et al. 2025, arXiv:2503.18929), whose gradient ends at the cap;
cispo, MiniMax 2025 (arXiv:2506.13585), with both bounds; decoupled, Hilton et
al. 2021 (arXiv:2110.00641) and Fu et al. 2025 (AReaL, arXiv:2505.24298).
"""

import chex
import jax
import jax.numpy as jnp

# Those that read `ratio_clip`, and those that read `ratio_cap`.
CLIPPED = ("clip_token", "clip_sequence", "cispo", "decoupled")
CAPPED = ("truncate_token", "truncate_sequence", "mask_token", "decoupled")
CORRECTIONS = tuple(dict.fromkeys(("none", *CLIPPED, *CAPPED)))

# Nats; far outside any trust region, and its exp is far from overflow.
_MAX_LOG_RATIO = 20.0


def ratios(
    logprobs_BxKxT: jax.Array,
    behavior_logprobs_BxKxT: jax.Array,
    mask_BxKxT: jax.Array,
) -> tuple[jax.Array, jax.Array]:
  """Returns the ratio of each token and of each completion, without gradient.

  Args:
    logprobs_BxKxT: [B, K, T] float32, log π, nats.
    behavior_logprobs_BxKxT: [B, K, T] float32, of the policy that sampled.
    mask_BxKxT: [B, K, T] float32, 1 on the tokens that count.

  Returns:
    w_t, [B, K, T] (1 behind the mask), and w, [B, K]; both at most e^20, so
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
    push_BxKxT: jax.Array,
    *,
    correction: str,
    ratio_clip: float,
    ratio_cap: float,
    proximal: tuple[jax.Array, jax.Array] | None = None,
) -> tuple[jax.Array, jax.Array]:
  """Returns what each token's gradient is multiplied by, and what was cut.

  Args:
    ratio_BxKxT: [B, K, T] float32, w_t of `ratios`.
    ratio_BxK: [B, K] float32, w of `ratios`.
    push_BxKxT: [B, K, T] float32, minus the objective's derivative by log π of
      each token; of it only the sign is read, by the trust regions.
    correction: one of `CORRECTIONS`.
    ratio_clip: c, above 0 for those of `CLIPPED`.
    ratio_cap: the cap, above 0 for those of `CAPPED`.
    proximal: [B, K, T] float32 both, π/π_p and π_p/π_behavior of each token,
      read by "decoupled"; None: the policy itself is π_p.

  Returns:
    The factors, [B, K, T] float32, and 1 on each token whose factor is not its
    ratio, [B, K, T] float32 (0 everywhere for "none").

  Raises:
    ValueError: the correction is not known, or its bound is not above 0.
  """
  _check(correction, ratio_clip, ratio_cap)
  chex.assert_equal_shape([ratio_BxKxT, push_BxKxT])
  chex.assert_equal_shape_prefix([ratio_BxKxT, ratio_BxK], 2)
  if correction == "none":
    return jnp.ones_like(ratio_BxKxT), jnp.zeros_like(ratio_BxKxT)
  if correction == "decoupled":
    return _decoupled(
        *(proximal or (jnp.ones_like(ratio_BxKxT), ratio_BxKxT)),
        push_BxKxT,
        ratio_clip,
        ratio_cap,
    )
  w_BxKxT = ratio_BxKxT
  if correction.endswith("_sequence"):
    w_BxKxT = jnp.broadcast_to(ratio_BxK[:, :, None], ratio_BxKxT.shape)
  if correction == "cispo":
    factor_BxKxT = jnp.clip(w_BxKxT, 1 - ratio_clip, 1 + ratio_clip)
  elif correction.startswith("truncate"):
    factor_BxKxT = jnp.minimum(w_BxKxT, ratio_cap)
  else:
    if correction == "mask_token":
      cut_BxKxT = w_BxKxT > ratio_cap
    else:
      cut_BxKxT = _is_cut(w_BxKxT, push_BxKxT, ratio_clip)
    factor_BxKxT = jnp.where(cut_BxKxT, 0.0, w_BxKxT)
  changed_BxKxT = (factor_BxKxT != w_BxKxT).astype(ratio_BxKxT.dtype)
  return factor_BxKxT, changed_BxKxT


def _is_cut(
    w_BxKxT: jax.Array, push_BxKxT: jax.Array, ratio_clip: float
) -> jax.Array:
  """Tells where a trust region leaves no gradient."""
  return jnp.where(
      push_BxKxT > 0,
      w_BxKxT > 1 + ratio_clip,
      (push_BxKxT < 0) & (w_BxKxT < 1 - ratio_clip),
  )


def _decoupled(
    w_BxKxT: jax.Array,
    behind_BxKxT: jax.Array,
    push_BxKxT: jax.Array,
    ratio_clip: float,
    ratio_cap: float,
) -> tuple[jax.Array, jax.Array]:
  cut_BxKxT = _is_cut(w_BxKxT, push_BxKxT, ratio_clip)
  factor_BxKxT = jnp.minimum(behind_BxKxT, ratio_cap) * w_BxKxT
  changed_BxKxT = cut_BxKxT | (behind_BxKxT > ratio_cap)
  return (
      jnp.where(cut_BxKxT, 0.0, factor_BxKxT),
      changed_BxKxT.astype(w_BxKxT.dtype),
  )


def scale_gradient(values: jax.Array, factor: jax.Array) -> jax.Array:
  """Returns the values; a gradient through them is multiplied by `factor`."""
  fixed = jax.lax.stop_gradient(values)
  return fixed + jax.lax.stop_gradient(factor) * (values - fixed)


def _check(correction: str, ratio_clip: float, ratio_cap: float) -> None:
  if correction not in CORRECTIONS:
    raise ValueError(f"loss.correction={correction!r}: allowed {CORRECTIONS}")
  for key, bound, users in (
      ("ratio_clip", ratio_clip, CLIPPED),
      ("ratio_cap", ratio_cap, CAPPED),
  ):
    if correction in users and bound <= 0:
      raise ValueError(
          f"loss.{key}={bound}: above 0 with loss.correction={correction!r}"
      )
