# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Which token sees which: causal masks, real tokens, sliding windows.

Axes: B prompts, L tokens, Q queries, S keys.
"""

import jax
import jax.numpy as jnp


def positions(mask: jax.Array) -> jax.Array:
  """Returns the position of each token [..., L] int32; 0 before the first."""
  return jnp.maximum(jnp.cumsum(mask.astype(jnp.int32), axis=-1) - 1, 0)


def causal(length: int) -> jax.Array:
  """Returns [L, L] bool, True where query (row) sees key (column)."""
  return jnp.tril(jnp.ones((length, length), bool))


def causal_real(mask_BxL: jax.Array) -> jax.Array:
  """Returns [B, L, L] bool: causal, over real tokens."""
  return causal(mask_BxL.shape[1])[None] & mask_BxL.astype(bool)[:, None]


def window(
    mask: jax.Array,
    query_positions: jax.Array,
    key_positions: jax.Array,
    size: int,
) -> jax.Array:
  """Returns mask [..., Q, S] without the keys that lie behind a window.

  A query sees itself and the size - 1 positions before it; size 0: all.
  """
  if not size:
    return mask
  behind = query_positions[..., :, None] - key_positions[..., None, :]
  return mask & (behind < size)
