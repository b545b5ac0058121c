# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""The cache of keys and values that decoding reads and writes.

A cache is a list of blocks of columns. The first block holds the prompts, the
others the columns that decode steps write. A decode step may be given the
first few blocks only: it then costs what those hold, and every row's bits are
those of a step over all blocks, because a block whose columns are all masked
adds exact zeros at the end of each sum.

    block = {
        "layers": N times {"k": [R, G, Dh, C], "v": [R, G, C, Dh]},
        "position": [R, C] int32, only with a sliding window,
    }

Keys lie with their columns last and values with their columns first: the two
products of attention then read rows of memory, which XLA's CPU backend does a
third faster than with both the same way.

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
  """Returns blocks of zeros with `lengths` columns, the first for prompts."""
  R, G, Dh = num_rows, config.num_kv_heads, config.head_dim
  zeros = lambda *shape: jnp.zeros(shape, jnp.dtype(config.compute_dtype))

  def block(C: int) -> PyTree:
    layer = lambda: {"k": zeros(R, G, Dh, C), "v": zeros(R, G, C, Dh)}
    made = {"layers": [layer() for _ in range(config.num_layers)]}
    if config.sliding_window:
      made["position"] = jnp.zeros((R, C), jnp.int32)
    return made

  return [block(C) for C in lengths]


def layer_of_prompts(k: jax.Array, v: jax.Array) -> PyTree:
  """Returns one layer of prompts from keys and values [B, P, G, Dh]."""
  return {"k": jnp.transpose(k, (0, 2, 3, 1)), "v": jnp.swapaxes(v, 1, 2)}


def fill(
    cache: list[PyTree], prompt_cache: PyTree, slots: jax.Array
) -> list[PyTree]:
  """Copies prompts to the first blocks of rows.

  Args:
    cache: of R rows; its first block has P columns.
    prompt_cache: {"layers": leaves [N, B, ...] as `layer_of_prompts` makes
      them, and "position" [B, P] where the cache has it}; with P columns, or
      with as many as some more blocks hold together.
    slots: [R] int32, the prompt of each row; below 0: the row stays as it is.
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
class Target:
  """What one decode step does to a block, the same in every layer.

  column: [R] int32, the column that each row writes; C: none of this block.
  seen: [R, C] bool, the columns that each row's query sees.
  """

  column: jax.Array
  seen: jax.Array


def aim(
    cache: Sequence[PyTree],
    mask: jax.Array,
    positions: jax.Array,
    write_index: jax.Array,
    window: int,
) -> tuple[list[Target], list[PyTree]]:
  """Returns a step's target in each block, and the cache with its positions.

  Args:
    cache: blocks of R rows.
    mask: [R, columns of all blocks] bool, what each row sees, the written
      column included.
    positions: [R] int32, of the tokens.
    write_index: [R] or [] int32, the column written, not of the first block;
      behind the last block, nothing is written.
    window: how many positions a token sees, itself included; 0: all.
  """
  (R,) = positions.shape
  index_R = jnp.broadcast_to(write_index, (R,))
  targets, written = [], []
  start = 0
  for block in cache:
    C = block["layers"][0]["k"].shape[-1]
    # An index below 0 would count from the block's end.
    column_R = jnp.where(index_R < start, C, index_R - start)
    seen_RxC = mask[:, start : start + C]
    if window:
      at = jnp.arange(R), column_R
      position_RxC = block["position"].at[at].set(positions, mode="drop")
      block = {**block, "position": position_RxC}
      seen_RxC = attention.window_mask(
          seen_RxC[:, None], positions[:, None], position_RxC, window
      )[:, 0]
    targets.append(Target(column_R, seen_RxC))
    written.append(block)
    start += C
  return targets, written


def attend(
    layer: Sequence[PyTree],
    targets: Sequence[Target],
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
) -> tuple[jax.Array, list[PyTree]]:
  """Writes one key and value per row, then attends over all blocks.

  Args:
    layer: per block, "k" [R, G, Dh, C] and "v" [R, G, C, Dh].
    targets: per block.
    q: [R, G, M, Dh].
    k: [R, G, Dh].
    v: [R, G, Dh].

  Returns:
    [R, G, M, Dh], and the layer as written.
  """
  row = jnp.arange(len(k))
  # The first block holds prompts, which stay as they are.
  written = [layer[0]]
  for old, target in zip(layer[1:], targets[1:], strict=True):
    write = lambda leaf, at, new: leaf.at[at].set(
        new, unique_indices=True, mode="drop"
    )
    every = slice(None)
    written.append(
        {
            "k": write(old["k"], (row, every, every, target.column), k),
            "v": write(old["v"], (row, every, target.column), v),
        }
    )
  return _attend(q, written, [target.seen for target in targets]), written


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
