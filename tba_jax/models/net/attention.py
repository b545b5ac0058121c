# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Plain attention for training and prefill.

`kernels.py` has that of accelerators, `cache.py` that of decode steps.

Axes: B prompts, K completions, P prompt tokens, Q queries, S keys, G key-value
heads, M query heads of one key-value head, Dh head width, L tokens.
"""

from collections.abc import Callable
import math

import jax
import jax.numpy as jnp

# Finite, so that a row with all keys masked has no NaN gradient; so low that a
# masked key has a weight of exactly 0.
MASKED_SCORE = -1e30
# Queries of a sequence whose scores a device holds at a time.
BLOCK = 1024


def masked_scores(
    spec: str, q: jax.Array, k: jax.Array, mask: jax.Array
) -> jax.Array:
  """Returns the scaled scores in float32, with MASKED_SCORE where mask is 0."""
  scores = jnp.einsum(spec, q, k, preferred_element_type=jnp.float32)
  mask = jnp.broadcast_to(mask, scores.shape)
  return jnp.where(mask, scores / math.sqrt(q.shape[-1]), MASKED_SCORE)


def attend_self(
    q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array
) -> jax.Array:
  """Returns attention of one sequence over itself.

  Args:
    q: [B, Q, G, M, Dh].
    k: [B, S, G, Dh].
    v: [B, S, G, Dh].
    mask: [B, Q, S] bool, True where query sees key.

  Returns:
    [B, Q, G, M, Dh].
  """
  scores = masked_scores("bqgmd,bsgd->bgmqs", q, k, mask[:, None, None])
  weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
  return jnp.einsum("bgmqs,bsgd->bqgmd", weights, v)


def attend_shared(
    q: jax.Array,
    prompt: tuple[jax.Array, jax.Array, jax.Array],
    own: tuple[jax.Array, jax.Array, jax.Array],
) -> jax.Array:
  """Returns attention over a prompt shared by K rows and each row's own keys.

  One softmax covers both; the prompt's keys and values are never repeated.

  Args:
    q: [B, K, Q, G, M, Dh].
    prompt: keys [B, P, G, Dh], values [B, P, G, Dh], mask [B, Q, P] bool, or
      [B, 1, P] if all queries see the same.
    own: keys [B, K, S, G, Dh], values [B, K, S, G, Dh], mask [1, 1, Q, S]
      bool.

  Returns:
    [B, K, Q, G, M, Dh].
  """
  k_prompt, v_prompt, mask_prompt = prompt
  k_own, v_own, mask_own = own
  # Heads come before queries, so that every product below is a batched matmul
  # and each operand is transposed once.
  q_BxGxKxQxMxDh = jnp.transpose(q, (0, 3, 1, 2, 4, 5))
  k_own, v_own = (jnp.moveaxis(x, 3, 1) for x in (k_own, v_own))
  k_prompt, v_prompt = (jnp.moveaxis(x, 2, 1) for x in (k_prompt, v_prompt))
  s_prompt = masked_scores(
      "bgkqmd,bgpd->bgkqmp",
      q_BxGxKxQxMxDh,
      k_prompt,
      mask_prompt[:, None, None, :, None],
  )
  s_own = masked_scores(
      "bgkqmd,bgksd->bgkqms",
      q_BxGxKxQxMxDh,
      k_own,
      mask_own[:, None, :, :, None],
  )
  largest = lambda x: jnp.max(x, axis=-1, keepdims=True, initial=MASKED_SCORE)
  # Softmax is shift-invariant, so no gradient passes through the maximum.
  shift = jax.lax.stop_gradient(jnp.maximum(largest(s_prompt), largest(s_own)))
  e_prompt, e_own = jnp.exp(s_prompt - shift), jnp.exp(s_own - shift)
  total = e_prompt.sum(-1, keepdims=True) + e_own.sum(-1, keepdims=True)
  out = jnp.einsum("bgkqmp,bgpd->bgkqmd", e_prompt.astype(q.dtype), v_prompt)
  out += jnp.einsum("bgkqms,bgksd->bgkqmd", e_own.astype(q.dtype), v_own)
  # A CPU's reductions are slow with more than five axes: that of the quotient's
  # gradient took a tenth of a training step.
  flat = lambda x: x.reshape(*x.shape[:3], -1, x.shape[-1])
  out = (flat(out) / flat(total.astype(out.dtype))).reshape(out.shape)
  return jnp.transpose(out, (0, 2, 3, 1, 4, 5))


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

  A query sees itself and the size - 1 positions before it; size 0 is no window.
  """
  if not size:
    return mask
  behind = query_positions[..., :, None] - key_positions[..., None, :]
  return mask & (behind < size)


def sees(queries_Q: jax.Array, keys_S: jax.Array, window: int) -> jax.Array:
  """Returns [Q, S] bool, True where a query sees a key, by their indices.

  A query sees itself and the window - 1 tokens before it; window 0 is all.
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
) -> jax.Array:
  """Returns causal attention of sequences over their real tokens.

  Args:
    q: [B, L, G, M, Dh].
    k: [B, L, G, Dh].
    v: [B, L, G, Dh].
    mask_BxL: bool, True on real tokens, which are contiguous.
    window: sliding window, see `sees`.
    num_parts: devices that L is split over.

  Returns:
    [B, L, G, M, Dh].
  """

  def block(q: jax.Array, indices_Q: jax.Array, k: jax.Array, v: jax.Array):
    seen = sees(indices_Q, jnp.arange(k.shape[1]), window)
    return attend_self(q, k, v, seen[None] & mask_BxL[:, None])

  return _by_blocks(block, q, (k, v), 1, num_parts)


def attend_completions(
    q: jax.Array,
    prompt: tuple[jax.Array, jax.Array, jax.Array],
    own: tuple[jax.Array, jax.Array],
    window: int,
    num_parts: int,
) -> jax.Array:
  """Returns attention of completions over their prompt and themselves.

  Args:
    q: [B, K, S, G, M, Dh].
    prompt: keys [B, P, G, Dh], values [B, P, G, Dh], mask [B, P] bool. If S is
      split over devices, a completion begins with its prompt's last token, so
      that the mask lacks it (`sequence.completion_inputs`).
    own: keys [B, K, S, G, Dh], values [B, K, S, G, Dh].
    window: sliding window, see `sees`.
    num_parts: devices that S is split over.

  Returns:
    [B, K, S, G, M, Dh].
  """
  *prompt, prompt_mask = prompt
  P = prompt_mask.shape[1]
  first = P - (num_parts > 1)  # Index of a completion's first token.

  def block(q: jax.Array, indices_Q: jax.Array, *keys_values: jax.Array):
    k_prompt, v_prompt, k_own, v_own = keys_values
    seen = prompt_mask[:, None]
    if window:
      seen = seen & sees(first + indices_Q, jnp.arange(P), window)[None]
    seen_own = sees(indices_Q, jnp.arange(k_own.shape[2]), window)[None, None]
    return attend_shared(
        q, (k_prompt, v_prompt, seen), (k_own, v_own, seen_own)
    )

  return _by_blocks(block, q, (*prompt, *own), 2, num_parts)


def _by_blocks(
    block: Callable[..., jax.Array],
    q: jax.Array,
    keys_values: tuple[jax.Array, ...],
    axis: int,
    num_parts: int,
) -> jax.Array:
  """Returns `block` of up to `BLOCK` queries of each device at a time.

  The scores of a block are recomputed in the backward pass, so that those of
  one block are all that is held.

  Args:
    block: (queries, their indices, *keys_values) -> array as its queries.
    q: queries along `axis`.
    keys_values: seen by all blocks.
    axis: 1 or 2.
    num_parts: devices that `axis` is split over.
  """
  Q = q.shape[axis]
  own = Q // num_parts
  if own <= BLOCK:
    return block(q, jnp.arange(Q), *keys_values)
  count = -(-own // BLOCK)
  length = -(-own // count)

  def cut(x: jax.Array, axis: int) -> jax.Array:
    lead, rest = x.shape[:axis], x.shape[axis + 1 :]
    x = x.reshape(*lead, num_parts, own, *rest)
    padding = [(0, 0)] * x.ndim
    padding[axis + 1] = (0, count * length - own)
    x = jnp.pad(x, padding).reshape(*lead, num_parts, count, length, *rest)
    x = jnp.moveaxis(x, axis + 1, 0)
    return x.reshape(count, *lead, num_parts * length, *rest)

  def join(x: jax.Array) -> jax.Array:
    lead, rest = x.shape[1 : axis + 1], x.shape[axis + 2 :]
    x = x.reshape(count, *lead, num_parts, length, *rest)
    x = jnp.moveaxis(x, 0, axis + 1)
    x = x.reshape(*lead, num_parts, count * length, *rest)
    x = jax.lax.slice_in_dim(x, 0, own, axis=axis + 1)
    return x.reshape(*lead, Q, *rest)

  # Gradients of keys and values are summed over blocks in float32.
  wide = [x.astype(jnp.float32) for x in keys_values]

  @jax.checkpoint
  def one(pair: tuple[jax.Array, jax.Array]) -> jax.Array:
    narrow = (x.astype(y.dtype) for x, y in zip(wide, keys_values))
    return block(*pair, *narrow)

  return join(jax.lax.map(one, (cut(q, axis), cut(jnp.arange(Q), 0))))
