# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Plain causal attention, for prefill and judges.

Accelerators use `kernels.py`, packed rows `row_attention.py`, and decode steps
`cache.py`.

Axes: B sequences, Q queries, S keys, G key-value heads, M query heads per
key-value head, Dh head width, L tokens.
"""

from collections.abc import Callable
import math

import jax
import jax.numpy as jnp

from tba_jax.models.net import products

# Finite, so that a row with all keys masked has no NaN gradient, but so low
# that a masked key has a weight of exactly 0.
MASKED_SCORE = -1e30
# Maximum queries of a sequence whose scores a device holds at a time.
BLOCK = 1024


def masked_scores(
    spec: str, q: jax.Array, k: jax.Array, mask: jax.Array
) -> jax.Array:
  """Returns scaled float32 scores; MASKED_SCORE where the mask is False."""
  scores = jnp.einsum(spec, q, k, preferred_element_type=jnp.float32)
  mask = jnp.broadcast_to(mask, scores.shape)
  return jnp.where(mask, scores / math.sqrt(q.shape[-1]), MASKED_SCORE)


def _exponentials(
    scores: jax.Array, sinks_GxM: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
  """Returns the weights [..., S] of keys, and their sum [...] with the sink's.

  Weights are exp(score - c), where c is the largest score or sink.

  Source of sinks: Xiao et al. 2023 (arXiv:2309.17453); here a sink is a learned
  logit of each head.

  Args:
    scores: [..., G, M, Q, S] float32.
    sinks_GxM: logit of each head's sink; None if there are none.
  """
  highest = scores.max(axis=-1)
  if sinks_GxM is not None:
    sinks = products.expand_to(
        sinks_GxM.astype(scores.dtype)[..., None], highest.ndim
    )
    highest = jnp.maximum(highest, sinks)
  highest = jax.lax.stop_gradient(highest)
  weights = jnp.exp(scores - highest[..., None])
  total = weights.sum(axis=-1)
  if sinks_GxM is not None:
    total += jnp.exp(sinks - highest)
  return weights, total


def join_sinks(
    out: jax.Array, logsumexp: jax.Array, sinks: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
  """Returns a kernel's result and its logsumexp, with sinks added.

      out · exp(lse) / (exp(sink) + exp(lse)) = out · sigmoid(lse - sink)

  Given these two, a kernel's backward pass computes the gradients of attention
  with sinks.

  Args:
    out: [..., Dh], attention over keys alone.
    logsumexp: [...] float32, logarithm of the sum of exp(score).
    sinks: logits that broadcast to `logsumexp`; None if there are none.
  """
  if sinks is None:
    return out, logsumexp
  sinks = sinks.astype(logsumexp.dtype)
  share = jax.nn.sigmoid(logsumexp - sinks)[..., None]
  return (out * share).astype(out.dtype), jnp.logaddexp(logsumexp, sinks)


def sinks_gradient(
    product: jax.Array,
    logsumexp: jax.Array,
    sinks: jax.Array | None,
) -> jax.Array | None:
  """Returns the gradient of sinks, None if there are none.

      -exp(sink - lse) · Σ out · grad

  Args:
    product: [...] float32, Σ out · grad of each query and head, with the `out`
      of `join_sinks`.
    logsumexp: [...] float32, log of exp(sink) + Σ exp(score).
    sinks: logits that broadcast to `logsumexp`, of size 1 on axes to sum over.
  """
  if sinks is None:
    return None
  grad = -jnp.exp(sinks.astype(logsumexp.dtype) - logsumexp) * product
  axes = [axis for axis, size in enumerate(sinks.shape) if size == 1]
  return jnp.sum(grad, axis=axes, keepdims=True).astype(sinks.dtype)


def attend_self(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    mask: jax.Array,
    sinks: jax.Array | None = None,
) -> jax.Array:
  """Returns attention of one sequence over itself.

  Args:
    q: [B, Q, G, M, Dh].
    k: [B, S, G, Dh].
    v: [B, S, G, Dh].
    mask: [B, Q, S] bool, True where the query sees the key.
    sinks: [G, M], logits of the heads' sinks; None if there are none.

  Returns:
    [B, Q, G, M, Dh].
  """
  scores = masked_scores("bqgmd,bsgd->bgmqs", q, k, mask[:, None, None])
  weights, total = _exponentials(scores, sinks)
  # Dividing after the product avoids a sum over keys in the gradient.
  out = jnp.einsum(
      "bgmqs,bsgd->bqgmd",
      weights.astype(v.dtype),
      v,
      preferred_element_type=jnp.float32,
  )
  return (out / jnp.moveaxis(total, 3, 1)[..., None]).astype(v.dtype)


def positions_of(mask: jax.Array) -> jax.Array:
  """Returns [..., L] int32, each token's position; 0 before the first."""
  return jnp.maximum(jnp.cumsum(mask.astype(jnp.int32), axis=-1) - 1, 0)


def window_mask(
    mask: jax.Array,
    query_positions: jax.Array,
    key_positions: jax.Array,
    size: int,
) -> jax.Array:
  """Returns mask [..., Q, S] restricted to a sliding window.

  A query sees itself and the size - 1 positions before it; 0 means no window.
  """
  if not size:
    return mask
  behind = query_positions[..., :, None] - key_positions[..., None, :]
  return mask & (behind < size)


def sees(queries_Q: jax.Array, keys_S: jax.Array, window: int) -> jax.Array:
  """Returns [Q, S] bool, True where a query sees a key, from their indices.

  A query sees itself and the window - 1 tokens before it; 0 means no window.
  """
  behind = queries_Q[:, None] - keys_S[None]
  seen = behind >= 0
  return seen & (behind < window) if window else seen


def attend_causal(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    mask_BxL: jax.Array,
    window: int,
    num_parts: int,
    sinks: jax.Array | None = None,
) -> jax.Array:
  """Returns causal attention of sequences over their real tokens.

  Args:
    q: [B, L, G, M, Dh].
    k: [B, L, G, Dh].
    v: [B, L, G, Dh].
    mask_BxL: bool, True on real tokens, which are contiguous.
    window: sliding window, see `sees`.
    num_parts: number of parts that L is split into over devices.
    sinks: [G, M], logits of the heads' sinks; None if there are none.

  Returns:
    [B, L, G, M, Dh].
  """

  def block(q: jax.Array, indices_Q: jax.Array, k: jax.Array, v: jax.Array):
    seen = sees(indices_Q, jnp.arange(k.shape[1]), window)
    return attend_self(q, k, v, seen[None] & mask_BxL[:, None], sinks)

  return _by_blocks(block, q, k, v, num_parts)


def _by_blocks(
    block: Callable[..., jax.Array],
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    num_parts: int,
) -> jax.Array:
  """Returns `block` applied to up to `BLOCK` queries per device at a time.

  The backward pass recomputes the scores of a block, so that memory holds the
  scores of one block only.

  Args:
    block: (queries, their indices, k, v) -> array shaped like the queries.
    q: [B, Q, ...].
    k: keys for all blocks.
    v: values for all blocks.
    num_parts: number of parts that Q is split into over devices.
  """
  Q = q.shape[1]
  own = Q // num_parts
  if own <= BLOCK:
    return block(q, jnp.arange(Q), k, v)
  count = -(-own // BLOCK)
  length = -(-own // count)

  def cut(x: jax.Array) -> jax.Array:
    B, _, *rest = x.shape
    x = x.reshape(B, num_parts, own, *rest)
    padding = [(0, 0)] * x.ndim
    padding[2] = (0, count * length - own)
    x = jnp.pad(x, padding).reshape(B, num_parts, count, length, *rest)
    return jnp.moveaxis(x, 2, 0).reshape(count, B, num_parts * length, *rest)

  def join(x: jax.Array) -> jax.Array:
    _, B, _, *rest = x.shape
    x = x.reshape(count, B, num_parts, length, *rest)
    x = jnp.moveaxis(x, 0, 2).reshape(B, num_parts, count * length, *rest)
    return x[:, :, :own].reshape(B, Q, *rest)

  # Gradients of keys and values are summed over blocks in float32.
  wide = k.astype(jnp.float32), v.astype(jnp.float32)

  @jax.checkpoint
  def one(pair: tuple[jax.Array, jax.Array]) -> jax.Array:
    return block(*pair, *(x.astype(k.dtype) for x in wide))

  indices = cut(jnp.arange(Q)[None])[:, 0]
  return join(jax.lax.map(one, (cut(q), indices)))
