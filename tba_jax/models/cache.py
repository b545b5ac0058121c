# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""The KV cache of decode steps.

A cache is a list of blocks of columns. The first block holds the prompts, the
others the columns that decode steps write. A decode step may be given the first
few blocks only, which is cheaper and changes no bits: a block with all columns
masked adds exact zeros at the end of each sum.

    block = {
        "layers": N times {"k": [R, G, Dh, C], "v": [R, G, C, Dh]},
        "position": [R, C] int32, only with a sliding window,
    }

Keys have their columns last, values before their width: both products of
attention then read memory row by row, a third faster on XLA's CPU backend.

Axes: R decode rows, N layers, G key-value heads, M query heads of one, Dh head
width, C columns of a block, P of the first, B prompts.
"""

from collections.abc import Sequence
import dataclasses
import functools

import jax
import jax.numpy as jnp

from tba_jax import types
from tba_jax.models import attention
from tba_jax.models import config as config_lib

ModelConfig = config_lib.ModelConfig
PyTree = types.PyTree


def empty(
    config: ModelConfig, num_rows: int, lengths: Sequence[int]
) -> list[PyTree]:
  """Returns blocks of zeros with `lengths` columns each."""
  R, G, Dh = num_rows, config.num_kv_heads, config.head_dim
  zeros = lambda *shape: jnp.zeros(shape, jnp.dtype(config.compute_dtype))

  def block(C: int) -> PyTree:
    layer = lambda: {"k": zeros(R, G, Dh, C), "v": zeros(R, G, C, Dh)}
    made = {"layers": [layer() for _ in range(config.num_layers)]}
    if config.sliding_window:
      made["position"] = jnp.zeros((R, C), jnp.int32)
    return made

  return [block(C) for C in lengths]


def prompt_layer(k: jax.Array, v: jax.Array) -> PyTree:
  """Returns keys and values [B, P, G, Dh] in the cache's layout."""
  return {"k": jnp.transpose(k, (0, 2, 3, 1)), "v": jnp.swapaxes(v, 1, 2)}


def fill(
    cache: list[PyTree], prompt_cache: PyTree, slots: jax.Array
) -> list[PyTree]:
  """Copies prompts to the first blocks of rows.

  Args:
    cache: of R rows.
    prompt_cache: {"layers": leaves [N, B, ...] of `prompt_layer`, and
      "position" [B, P] if the cache has it}; as wide as the first block, or as
      the first few together.
    slots: [R] int32, the prompt of each row; below 0 keeps the row.
  """

  def select(old, prompts):
    taken = (slots >= 0).reshape(-1, *[1] * (old.ndim - 1))
    return jnp.where(taken, prompts[jnp.maximum(slots, 0)], old)

  stacked = prompt_cache["layers"]
  num_columns = stacked["v"].shape[-2]
  filled, start = [], 0
  for block in cache:
    end = start + block["layers"][0]["v"].shape[-2]
    if end <= num_columns:
      layer = lambda n, at=slice(start, end): {
          "k": stacked["k"][n][..., at],
          "v": stacked["v"][n][..., at, :],
      }
      part = {"layers": [layer(n) for n in range(len(block["layers"]))]}
      if "position" in block:
        part["position"] = prompt_cache["position"][:, start:end]
      block = jax.tree.map(select, block, part)
    filled.append(block)
    start = end
  return filled


@dataclasses.dataclass(frozen=True)
class BlockUpdate:
  """What a decode step writes to and reads of a block, in every layer.

  column: [R] int32, the column that each row writes; C writes none.
  seen: [R, C] bool, the columns that each row's query sees.
  """

  column: jax.Array
  seen: jax.Array


def plan_updates(
    cache: Sequence[PyTree],
    mask: jax.Array,
    positions: jax.Array,
    write_index: jax.Array,
    window: int,
) -> tuple[list[BlockUpdate], list[PyTree]]:
  """Returns each block's update, and the cache with the positions written.

  Args:
    cache: blocks of R rows.
    mask: [R, columns of all blocks] bool, what each row sees, the written
      column included.
    positions: [R] int32, of the tokens.
    write_index: [R] or [] int32, the column to write, not of the first block;
      past the last block nothing is written.
    window: sliding window; 0 is none.
  """
  (R,) = positions.shape
  index_R = jnp.broadcast_to(write_index, (R,))
  updates, written = [], []
  start = 0
  for block in cache:
    C = block["layers"][0]["k"].shape[-1]
    # A negative index would count from the block's end.
    column_R = jnp.where(index_R < start, C, index_R - start)
    seen_RxC = mask[:, start : start + C]
    if window:
      at = jnp.arange(R), column_R
      position_RxC = block["position"].at[at].set(positions, mode="drop")
      block = {**block, "position": position_RxC}
      seen_RxC = attention.window_mask(
          seen_RxC[:, None], positions[:, None], position_RxC, window
      )[:, 0]
    updates.append(BlockUpdate(column_R, seen_RxC))
    written.append(block)
    start += C
  return updates, written


def attend(
    layer: Sequence[PyTree],
    updates: Sequence[BlockUpdate],
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
) -> tuple[jax.Array, list[PyTree]]:
  """Writes one key and value per row, then attends over all blocks.

  Args:
    layer: per block, "k" [R, G, Dh, C] and "v" [R, G, C, Dh].
    updates: per block.
    q: [R, G, M, Dh].
    k: [R, G, Dh].
    v: [R, G, Dh].

  Returns:
    [R, G, M, Dh], and the updated layer.
  """
  row = jnp.arange(len(k))
  # The first block holds prompts, which do not change.
  written = [layer[0]]
  for old, update in zip(layer[1:], updates[1:], strict=True):
    write = lambda leaf, at, new: leaf.at[at].set(
        new, unique_indices=True, mode="drop"
    )
    every = slice(None)
    written.append(
        {
            "k": write(old["k"], (row, every, every, update.column), k),
            "v": write(old["v"], (row, every, update.column), v),
        }
    )
  return _attend(q, written, [update.seen for update in updates]), written


def _attend(
    q: jax.Array, pairs: Sequence[PyTree], seen: Sequence[jax.Array]
) -> jax.Array:
  """Returns attention [R, G, M, Dh] over blocks, with one softmax over all.

  Args:
    q: [R, G, M, Dh].
    pairs: per block, "k" [R, G, Dh, C] and "v" [R, G, C, Dh].
    seen: per block, [R, C] bool.
  """
  scores = [
      attention.masked_scores(
          "rgmd,rgdc->rgmc", q, pair["k"], mask_RxC[:, None, None]
      )
      for pair, mask_RxC in zip(pairs, seen, strict=True)
  ]
  largest = [score.max(-1) for score in scores]
  shift = functools.reduce(jnp.maximum, largest)
  out, total = 0.0, 0.0
  for score, pair in zip(scores, pairs):
    weights = jnp.exp(score - shift[..., None])
    total += weights.sum(-1)
    out += jnp.einsum("rgmc,rgcd->rgmd", weights.astype(q.dtype), pair["v"])
  return out / total[..., None].astype(q.dtype)
