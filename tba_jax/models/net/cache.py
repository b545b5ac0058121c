# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""The KV cache of decode steps.

A cache is a list of blocks of columns. The first block holds the prompts, each
stored once for S adjacent rows; the others hold the columns that decode steps
write. A decode step may be given only the first few blocks, which is cheaper
and gives identical bits: a fully masked block adds exact zeros at the end of a
sum.

    block = {
        "layers": N times {"k" or "k_last", "v", "routes" if requested}, {"v",
          "routes" if requested} with latents, or for a layer with a state
          {"state", "conv", "routes" if requested} in the second block and
          {"routes" if requested} in the others; layers without experts have no
          routes, shared layers (`ModelConfig.kv_sources`) nothing else,
        "position": [R, C] int32, only if layers have a sliding window,
    }
    "k", "v": [R, X, C, E];  "k_last": [R, X, E, C]
    "routes": [R, C, A] uint8 or uint16, the experts that each token used

The first block has R / S in place of R. Latents (`latent.py`) are one head of
width E in all layouts, whose values are also the keys. A layer with a state
(`delta.py`) has one state per row, after the row's last fed token, and no
columns. The state is overwritten in place: a row whose tokens are cut off
cannot continue.

The G heads form X parts; the heads of a part are adjacent, E = G / X * Dh. All
four may differ between layers (`ModelConfig.kv_shape`).

- On CPUs and GPUs each head is a part. On a CPU, keys have their columns last:
  both products of attention then read memory row by row, which is a third
  faster. The CPU cache and its attention are float32 whatever the model's
  compute dtype: a CPU has no batched bfloat16 product, and would convert the
  whole cache in every step.
- On TPUs a part is the heads of one device: all heads without tensor
  parallelism. Its rows fill the lanes, whereas heads of 64 would be padded to
  twice their size, and a step writes one contiguous row. A query is padded with
  zeros at the other heads of its part. These add nothing, and reading the cache
  still takes far longer than the products (H multiply-adds per number).

Axes: R decode rows, S rows per prompt, N layers, G key-value heads, M query
heads per key-value head, H = G * M, Dh head width, C columns of a block, B
prompts, L columns of a prompt, A experts per token, X and E as above.
"""

from collections.abc import Callable, Sequence
import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

from tba_jax import types
from tba_jax.models import config as config_lib
from tba_jax.models.net import attention

ModelConfig = config_lib.ModelConfig
PyTree = types.PyTree

# Name of a leaf in a layer -> name of its source in the prompt cache.
_SOURCES = {"k": "k", "k_last": "k", "v": "v", "routes": "routes"}
# Name of a leaf -> axis of the columns within one of its rows.
_COLUMN_AXES = {"k": 1, "k_last": 2, "v": 1, "routes": 0}


def empty(
    config: ModelConfig,
    num_rows: int,
    lengths: Sequence[int],
    num_parts: int | None = None,
    rows_per_prompt: int = 1,
    has_routes: bool = False,
) -> list[PyTree]:
  """Returns blocks of zeros, one for each of `lengths`.

  Args:
    num_rows: R.
    lengths: C of each block.
    num_parts: X, or a multiple in layers with fewer heads; None selects the CPU
      layout.
    rows_per_prompt: S, a divisor of R.
    has_routes: whether blocks also store the experts of each token.
  """
  dtype = "float32" if num_parts is None else config.compute_dtype
  zeros = lambda *shape: jnp.zeros(shape, dtype)

  kinds = config.kinds

  def layer(R: int, C: int, n: int, is_first_own: bool) -> PyTree:
    heads, width = config.kv_shape(n)
    X = math.gcd(num_parts or heads, heads)
    E = heads // X * width
    if "delta" in kinds[n]:
      made = _empty_states(config, R, dtype) if is_first_own else {}
    elif n >= config.num_own_layers:
      made = {}
    elif config.latent_rank:
      made = {"v": zeros(R, X, C, E)}
    elif num_parts is None:
      made = {"k_last": zeros(R, X, E, C), "v": zeros(R, X, C, E)}
    else:
      made = {"k": zeros(R, X, C, E), "v": zeros(R, X, C, E)}
    if has_routes and "mlp" in kinds[n]:
      shape = (R, C, config.experts_per_token)
      made["routes"] = jnp.zeros(shape, config.route_dtype)
    return made

  def block(R: int, C: int, is_first_own: bool = False) -> PyTree:
    layers = [layer(R, C, n, is_first_own) for n in range(config.num_layers)]
    made = {"layers": layers}
    if config.sliding_window:
      made["position"] = jnp.zeros((R, C), jnp.int32)
    return made

  prompts, *own = lengths
  return [
      block(num_rows // rows_per_prompt, prompts),
      *(block(num_rows, length, i == 0) for i, length in enumerate(own)),
  ]


def _empty_states(config: ModelConfig, num_rows: int, dtype: Any) -> PyTree:
  """Returns a delta net's states of rows, before their first token.

  state: [R, heads, key width, value width] float32.
  conv: [R, taps - 1, channels], convolution inputs of the last tokens.
  """
  c = config
  heads = c.delta_value_heads, c.delta_key_dim, c.delta_value_dim
  recent = num_rows, c.delta_taps - 1, c.delta_channels
  return {
      "state": jnp.zeros((num_rows, *heads), jnp.float32),
      "conv": jnp.zeros(recent, dtype),
  }


def num_columns(block: PyTree) -> int:
  """Returns C of a block."""
  return next(x["v"].shape[2] for x in block["layers"] if "v" in x)


def fill(
    cache: list[PyTree], prompt_cache: PyTree, slots: jax.Array
) -> list[PyTree]:
  """Copies prompts into the first blocks of rows; keeps other rows as they are.

  Args:
    cache: KV cache of R rows.
    prompt_cache: {"layers": N times {"k", "v"} [B, L, G, Dh], or {"state",
      "conv"} [B, ...], and "routes" [B, L, A] if the model has experts, and
      "position" [B, L] if the cache has it}; the L columns fill the first
      block, or the first few together.
    slots: [R] int32, index of each row's prompt; below 0 keeps the row. The
      first of a prompt's S rows fills the first block.
  """
  length = next(x["v"].shape[1] for x in prompt_cache["layers"] if "v" in x)
  lengths = list(map(num_columns, cache))
  num_blocks = next(
      n for n in range(1, len(lengths) + 1) if sum(lengths[:n]) >= length
  )
  slots = jnp.asarray(slots)
  cache = _fill_states(cache, prompt_cache, slots)
  if num_blocks == 1:
    shared = len(slots) // len(jax.tree.leaves(cache[0])[0])
    slots = jnp.where(jnp.arange(len(slots)) % shared > 0, -1, slots)
  # Rows that get a prompt come first.
  rows_R = jnp.argsort(slots < 0, stable=True)

  def put(leaf: jax.Array, new: jax.Array, row: jax.Array) -> jax.Array:
    at = row // (len(slots) // len(leaf))
    new = new.astype(leaf.dtype)
    return jax.lax.dynamic_update_index_in_dim(leaf, new, at, 0)

  def fill_row(i: jax.Array, blocks: list[PyTree]) -> list[PyTree]:
    row = rows_R[i]
    layers = jax.tree.map(lambda x: x[slots[row]], prompt_cache["layers"])
    filled, start = [], 0
    for block, length in zip(blocks, lengths):
      columns = slice(start, start + length)
      made = {"layers": []}
      for n, layer in enumerate(block["layers"]):
        filled_layer = dict(layer)
        for name in _SOURCES.keys() & layer:
          new = layers[n][_SOURCES[name]][columns]
          X = layer["v"].shape[1] if name != "routes" else 0
          new = _to_layout(name, new, X)
          filled_layer[name] = put(layer[name], new, row)
        made["layers"].append(filled_layer)
      if "position" in block:
        position_C = prompt_cache["position"][slots[row], columns]
        made["position"] = put(block["position"], position_C, row)
      filled.append(made)
      start += length
    return filled

  filled = jax.lax.fori_loop(
      0, jnp.sum(slots >= 0), fill_row, cache[:num_blocks]
  )
  return [*filled, *cache[num_blocks:]]


def _fill_states(
    cache: list[PyTree], prompt_cache: PyTree, slots_R: jax.Array
) -> list[PyTree]:
  """Returns the cache with the states of rows that get a prompt.

  For arguments, see `fill`.
  """
  sources = [_states(layer) for layer in prompt_cache["layers"]]
  if not any(sources):
    return cache
  prompts, block, *others = cache
  rows_R = jnp.argsort(slots_R < 0, stable=True)

  def fill_row(i: jax.Array, layers: list[PyTree]) -> list[PyTree]:
    row = rows_R[i]
    put = lambda leaf, source: jax.lax.dynamic_update_index_in_dim(
        leaf, source[slots_R[row]].astype(leaf.dtype), row, 0
    )
    return jax.tree.map(put, layers, sources)

  states = list(map(_states, block["layers"]))
  states = jax.lax.fori_loop(0, jnp.sum(slots_R >= 0), fill_row, states)
  layers = [{**x, **state} for x, state in zip(block["layers"], states)]
  return [prompts, {**block, "layers": layers}, *others]


def _states(layer: PyTree) -> PyTree:
  """Returns the leaves of a layer that are not made of columns."""
  return {name: x for name, x in layer.items() if name in ("state", "conv")}


def _to_layout(name: str, x: jax.Array, num_parts: int) -> jax.Array:
  """Returns a row's keys or values [C, G, Dh] in the layout of a leaf.

  Routes are [C, A] in either layout.
  """
  if name == "routes":
    return x
  x = x.reshape(x.shape[0], num_parts, -1)
  return jnp.transpose(x, (1, 2, 0) if name == "k_last" else (1, 0, 2))


@dataclasses.dataclass(frozen=True)
class BlockUpdate:
  """Columns of a block that a decode step writes and reads, in every layer.

  With Q tokens per row, both fields have an axis Q after R.

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
    windows: Sequence[int],
) -> tuple[list[PyTree], dict[int, list[BlockUpdate]]]:
  """Returns the cache with positions written, and each block's update.

  The updates are keyed by a layer's window. With Q tokens per row, all
  arguments but the cache have an axis Q after R.

  Args:
    cache: blocks of R rows.
    mask: [R, columns of all blocks] bool, columns that each row sees, including
      the written one.
    positions: [R] int32, positions of the tokens.
    write_index: [R] or [] int32, column to write, never in the first block;
      nothing is written past the last block.
    windows: sliding window of each layer; 0 is none.
  """
  R = len(positions)
  index = jnp.broadcast_to(write_index, positions.shape)
  updates, written = {window: [] for window in windows}, []
  start = 0
  for block in cache:
    C = num_columns(block)
    # A negative index would count from the block's end.
    column = jnp.where(index < start, C, index - start)
    block_seen = mask[..., start : start + C]
    if "position" in block and start:
      position = _write(block["position"], positions, column, 0)
      block = {**block, "position": position}
    for window, of_window in updates.items():
      seen = block_seen
      if window:
        position = block["position"]
        position_RxC = jnp.repeat(position, R // len(position), axis=0)
        one = (slice(None), None) if seen.ndim == 2 else ...
        seen = attention.window_mask(
            seen[one], positions[one], position_RxC, window
        ).reshape(seen.shape)
      of_window.append(BlockUpdate(column, seen))
    written.append(block)
    start += C
  return written, updates


def writes(updates: Sequence[BlockUpdate]) -> jax.Array:
  """Returns [R] or [R, Q] bool, whether a token is written to any block."""
  of_blocks = [x.column < x.seen.shape[-1] for x in updates[1:]]
  return functools.reduce(jnp.logical_or, of_blocks)


def recur(
    config: ModelConfig,
    layer: Sequence[PyTree],
    is_fed: jax.Array,
    recur_fn: Callable[..., tuple[jax.Array, PyTree]],
    *inputs: jax.Array,
) -> tuple[jax.Array, list[PyTree]]:
  """Runs a layer with a state; returns its output and the updated leaves.

  Args:
    is_fed: [R] or [R, Q] bool, whether the token is fed to the row.
    recur_fn: `delta.step`, or `delta.steps` for Q tokens per row.
    *inputs: arguments of `delta.RecurFn`.
  """
  prompts, own, *others = layer
  out, states = recur_fn(config, _states(own), is_fed, *inputs)
  return out, [prompts, {**own, **states}, *others]


def put_routes(
    layer: Sequence[PyTree],
    updates: Sequence[BlockUpdate],
    routes: jax.Array | None,
) -> list[PyTree]:
  """Returns a layer with the experts of tokens written, if it stores them.

  Args:
    routes: [R, A], or [R, Q, A] with Q tokens per row.
  """
  if "routes" not in layer[0]:
    return list(layer)
  return _put(layer, updates, {"routes": routes})


def _put(
    layer: Sequence[PyTree],
    updates: Sequence[BlockUpdate],
    new: PyTree,
) -> list[PyTree]:
  """Returns a layer with columns written to the leaves that are in `new`."""
  # The first block holds prompts, which do not change.
  written = [layer[0]]
  for old, update in zip(layer[1:], updates[1:], strict=True):
    written.append(
        {
            name: _write(leaf, new[name], update.column, _COLUMN_AXES[name])
            if name in new
            else leaf
            for name, leaf in old.items()
        }
    )
  return written


def _write(
    leaf: jax.Array, new: jax.Array, column_R: jax.Array, axis: int
) -> jax.Array:
  """Writes one or Q columns per row, along the row's axis `axis`."""

  def write_row(row: jax.Array, new: jax.Array, column: jax.Array) -> jax.Array:
    at = (*[slice(None)] * axis, column)
    return row.at[at].set(new, mode="drop")

  return jax.vmap(write_row)(leaf, new, column_R)


def attend(
    layer: Sequence[PyTree],
    updates: Sequence[BlockUpdate],
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    sinks: jax.Array | None = None,
) -> tuple[jax.Array, list[PyTree]]:
  """Writes one key and value per row, then attends over all blocks.

  Args:
    layer: keys and values of each block; without keys, the values are the keys.
      For a shared layer, they are a source's, as `attend` returned them.
    q: [R, G, M, Dh].
    k: [R, G, Dh]; None for a shared layer, which writes nothing.
    v: [R, G, Dh]; None with `k`.
    sinks: [G, M], logits of the heads' sinks; None if there are none.

  Returns:
    [R, G, M, Dh], and the layer: on CPUs with keys and values written,
    elsewhere with an extra block of only these, for `write_columns`.
  """
  dtype = layer[0]["v"].dtype
  if "k_last" in layer[0]:
    layer = layer if k is None else write(layer, updates, k, v)
    seen = [update.seen for update in updates]
    out = _attend(q.astype(dtype), layer, seen, sinks)
    return out.astype(q.dtype), layer
  seen, is_seen = [], jnp.zeros((len(q), 1), bool)
  for update in updates:
    column_C = jnp.arange(update.seen.shape[1])
    at = update.column[:, None] == column_C[None]
    seen.append(update.seen & ~at)
    is_seen |= jnp.any(update.seen & at, axis=1, keepdims=True)
  if k is not None:
    own = {
        name: _columns(layer, x)[:, :, None]
        for name, x in (("k", k), ("v", v))
        if name in layer[0]
    }
    layer = [*layer, own]
  out = _attend(q.astype(dtype), layer, [*seen, is_seen], sinks)
  return out.astype(q.dtype), layer


def write_columns(
    x: jax.Array,
    layers: Sequence[Sequence[PyTree]],
    updates: Sequence[Sequence[BlockUpdate]],
) -> tuple[jax.Array, list[Sequence[PyTree]]]:
  """Writes the columns that `attend` returned, after all layers.

  If a layer wrote to its blocks before reading them, XLA would move entire
  blocks to a TPU's fast memory and back.

  Args:
    x: output of the last layer; nothing is written before it is computed.
    layers: blocks of each layer, as `attend` returned them.
    updates: results of `attend` for each layer.
  """
  columns = [
      layer[len(update) :]
      for layer, update in zip(layers, updates, strict=True)
  ]
  if not any(columns):
    return x, list(layers)
  x, columns = jax.lax.optimization_barrier((x, columns))
  written = []
  for layer, update, new_columns in zip(layers, updates, columns):
    layer = layer[: len(update)]
    for own in new_columns:
      new = {name: leaf[:, :, 0] for name, leaf in own.items()}
      layer = _put(layer, update, new)
    written.append(layer)
  return x, written


def write(
    layer: Sequence[PyTree],
    updates: Sequence[BlockUpdate],
    k: jax.Array,
    v: jax.Array,
) -> list[PyTree]:
  """Returns a layer with one key and value per row, [R, G, Dh], written."""
  k, v = _columns(layer, k), _columns(layer, v)
  return _put(layer, updates, {"k": k, "k_last": k, "v": v})


def _columns(layer: Sequence[PyTree], x: jax.Array) -> jax.Array:
  """Returns keys or values [R, G, Dh] as columns of a layer, [R, X, E]."""
  values = layer[0]["v"]
  return x.astype(values.dtype).reshape(len(x), values.shape[1], -1)


def attend_many(
    layer: Sequence[PyTree],
    updates: Sequence[BlockUpdate],
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    sinks: jax.Array | None = None,
) -> tuple[jax.Array, list[PyTree]]:
  """Writes Q keys and values per row, then attends over all blocks.

  Args:
    layer: keys and values of each block; no rows share a prompt. For a shared
      layer, they are its source's with these written.
    q: [R, Q, G, M, Dh].
    k: [R, Q, G, Dh]; None for a shared layer, which writes nothing.
    v: [R, Q, G, Dh]; None with `k`.
    sinks: [G, M], logits of the heads' sinks; None if there are none.

  Returns:
    [R, Q, G, M, Dh], and the updated layer.
  """
  R, Q, G, M, Dh = q.shape
  X, dtype = layer[0]["v"].shape[1], q.dtype
  q, written = q.astype(layer[0]["v"].dtype), layer
  if k is not None:
    by_part = lambda x: jnp.swapaxes(
        x.astype(q.dtype).reshape(R, Q, X, -1), 1, 2
    )
    new = {"k": by_part(k), "v": by_part(v)}
    new["k_last"] = jnp.swapaxes(new["k"], 2, 3)
    written = _put(layer, updates, new)
  # Q queries with M heads are equivalent to one query with Q M heads.
  joined = jnp.swapaxes(q, 1, 2).reshape(R, G, Q * M, Dh)
  seen = [
      jnp.tile(jnp.repeat(update.seen, M, axis=1), (1, G // X, 1))
      for update in updates
  ]
  if sinks is not None:
    sinks = jnp.tile(sinks, (1, Q))
  out = _attend(joined, written, seen, sinks).reshape(R, G, Q, M, Dh)
  return jnp.swapaxes(out, 1, 2).astype(dtype), written


def _attend(
    q: jax.Array,
    pairs: Sequence[PyTree],
    seen: Sequence[jax.Array],
    sinks: jax.Array | None,
) -> jax.Array:
  """Returns attention [R, G, M, Dh] over blocks, with one softmax over all.

  The queries of rows that share a prompt form one product with its keys.

  Args:
    q: [R, G, M, Dh].
    pairs: keys and values of each block.
    seen: [R, C] bool for each block, True on columns that a row sees; or
      [R, H / X, C], True on columns that each query of a part sees.
    sinks: [G, M], logits of the heads' sinks; None if there are none.
  """
  R, X = len(q), pairs[0]["v"].shape[1]
  padded = pad_queries(q, X)
  scale = math.sqrt(q.shape[-1])
  scores = []
  for pair, mask in zip(pairs, seen, strict=True):
    spec = "rxhe,rxec->rxhc" if "k_last" in pair else "rxhe,rxce->rxhc"
    score = jnp.einsum(
        spec,
        _join_rows(padded, len(pair["v"])),
        pair.get("k_last", pair.get("k", pair["v"])),
        preferred_element_type=jnp.float32,
    )
    score = _part_rows(score, R)
    mask = mask[:, None, None] if mask.ndim == 2 else mask[:, None]
    mask = jnp.broadcast_to(mask, score.shape)
    scores.append(jnp.where(mask, score / scale, attention.MASKED_SCORE))
  largest = [score.max(-1) for score in scores]
  if sinks is not None:
    sinks = sinks.reshape(1, X, -1)
    largest.append(sinks)
  shift = functools.reduce(jnp.maximum, largest)
  out, total = 0.0, 0.0 if sinks is None else jnp.exp(sinks - shift)
  for score, pair in zip(scores, pairs):
    weights = jnp.exp(score - shift[..., None])
    total += weights.sum(-1)
    joined = _join_rows(weights.astype(q.dtype), len(pair["v"]))
    summed = jnp.einsum("rxhc,rxce->rxhe", joined, pair["v"])
    out += _part_rows(summed, R)
  return own_heads(out / total[..., None].astype(q.dtype), q.shape)


def _join_rows(x: jax.Array, num_prompts: int) -> jax.Array:
  """Returns [R, X, heads, n] as [R / S, X, S * heads, n]."""
  R, X, heads, n = x.shape
  x = x.reshape(num_prompts, R // num_prompts, X, heads, n)
  return x.swapaxes(1, 2).reshape(num_prompts, X, -1, n)


def _part_rows(x: jax.Array, num_rows: int) -> jax.Array:
  """Returns the inverse of `_join_rows`."""
  num_prompts, X, _, n = x.shape
  x = x.reshape(num_prompts, X, num_rows // num_prompts, -1, n)
  return x.swapaxes(1, 2).reshape(num_rows, X, -1, n)


def _is_own(num_heads: int) -> jax.Array:
  """Returns [1, 1, heads, 1, heads, 1] bool, True where both heads match."""
  return jnp.eye(num_heads, dtype=bool)[None, None, :, None, :, None]


def pad_queries(q: jax.Array, num_parts: int) -> jax.Array:
  """Returns queries [R, G, M, Dh] as [R, X, H / X, E]; 0 at other heads."""
  R, G, M, Dh = q.shape
  X, heads = num_parts, G // num_parts
  q = q.reshape(R, X, heads, M, 1, Dh)
  if heads > 1:
    q = jnp.where(_is_own(heads), q, jnp.zeros((), q.dtype))
  return q.reshape(R, X, heads * M, heads * Dh)


def own_heads(out: jax.Array, shape: Sequence[int]) -> jax.Array:
  """Returns the own-head entries [R, G, M, Dh] of [R, X, H / X, E]."""
  R, G, M, Dh = shape
  X = out.shape[1]
  heads = G // X
  out = out.reshape(R, X, heads, M, heads, Dh)
  if heads > 1:
    out = jnp.where(_is_own(heads), out, jnp.zeros((), out.dtype))
  return out.sum(4).reshape(shape) if heads > 1 else out.reshape(shape)
