# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Attention for training and prefill; `cache.py` has that of decode steps.

Axes: B prompts, K completions, P prompt tokens, Q queries, S keys, G key-value
heads, M query heads of one key-value head, Dh head width, L tokens.
"""

import math

import jax
import jax.numpy as jnp

# Finite, so that a row with all keys masked has no NaN gradient; so low that a
# masked key has a weight of exactly 0.
MASKED_SCORE = -1e30


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
    own: keys [B, K, S, G, Dh], values [B, K, S, G, Dh], mask [B, K, Q, S]
      bool.

  Returns:
    [B, K, Q, G, M, Dh].
  """
  k_prompt, v_prompt, mask_prompt = prompt
  k_own, v_own, mask_own = own
  # With heads before queries every product below is a batched matmul, and each
  # operand is transposed once.
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
  return jnp.transpose(out / total.astype(out.dtype), (0, 2, 3, 1, 4, 5))


def positions_of(mask: jax.Array) -> jax.Array:
  """Returns [..., L] int32, each token's position; 0 before the first."""
  return jnp.maximum(jnp.cumsum(mask.astype(jnp.int32), axis=-1) - 1, 0)


def causal_mask(length: int) -> jax.Array:
  """Returns [L, L] bool, True where query (row) sees key (column)."""
  return jnp.tril(jnp.ones((length, length), bool))


def causal_real_mask(mask_BxL: jax.Array) -> jax.Array:
  """Returns [B, L, L] bool, the causal mask over real tokens."""
  return causal_mask(mask_BxL.shape[1])[None] & mask_BxL.astype(bool)[:, None]


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
