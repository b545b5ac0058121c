# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Which token sees which: causal masks, real tokens, sliding windows.

Axes: B prompts, L tokens, Q queries, S keys, R decode rows, C cache columns.
"""

import jax
import jax.numpy as jnp

from tba_jax import types


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


def cache_window(
    layer: types.PyTree,
    mask_RxC: jax.Array,
    positions_R: jax.Array,
    write_index: jax.Array,
    size: int,
) -> tuple[types.PyTree, jax.Array]:
  """Returns a layer's cache and mask [R, C] for one step with a window.

  The columns of a cache have no order, so it holds the position of each under
  `position` [R, 1, C, 1]; the written column gets its own here.
  """
  if not size:
    return layer, mask_RxC
  (R,) = positions_R.shape
  at = jnp.arange(R), 0, jnp.broadcast_to(write_index, (R,)), 0
  column_positions = layer["position"].at[at].set(positions_R)
  mask_Rx1xC = window(
      mask_RxC[:, None],
      positions_R[:, None],
      column_positions[:, 0, :, 0],
      size,
  )
  return {**layer, "position": column_positions}, mask_Rx1xC[:, 0]
