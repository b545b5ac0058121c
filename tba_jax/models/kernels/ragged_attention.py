# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Kernels for attention in a decode step over rows of mixed lengths.

When rows take new completions as others end, plain attention (`cache.py`) reads
as many columns of every row as the longest row has. A kernel reads only the
pages that a row sees, and none of idle rows:

- on TPU `pages`, a Pallas kernel whose grid is the list of these pages, rebuilt
  in each step from the rows' lengths. JAX's `paged_attention` and
  `ragged_paged_attention` read a row from its first column, but our prompts are
  left-padded and a window may begin anywhere; they also take only one block of
  pages;
- on GPU `splits`, JAX's `decode_attention`: one program per split of a row's
  columns, which returns at once if the row does not see the split.

The cache is shared with plain attention: a page is a range of a row's columns.
The first block holds each row's own prompt; the columns of decode steps form
one block, so that one program serves all lengths.

Axes: R decode rows, G key-value heads, M query heads per key-value head, Dh
head width, C columns of a block, X and E as in `cache.py`, N = R * X, H query
heads of a part.
"""

from collections.abc import Sequence
import functools
import math

from absl import logging
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
import numpy as np

from tba_jax import types
from tba_jax.models import config as config_lib
from tba_jax.models.net import attention
from tba_jax.models.net import cache as cache_lib
from tba_jax.models.net import sequence

# Name by which `system/hlo.py` finds both kernels in a compiled program.
_NAME = "ragged_decode_attention"
# Bounds of the columns per page or split, and how many a block has in between.
# On a TPU, each page is a grid step, which has a fixed cost. A GPU stops
# reading a split at the row's end, and merges the results of splits.
_SHORTEST, _LONGEST = 64, 512
_NUM_PAGES, _NUM_SPLITS = 16, 8
# Maximum bytes of a page's keys; a TPU's fast memory holds eight such arrays.
_PAGE_BYTES = 2**19
# Maximum bytes of the list of pages: half of a TPU's scalar memory, which is 16
# KiB on some.
_LIST_BYTES = 2**19
_SMALL_TPUS = ("TPU v2", "TPU v3")
# Minimum columns and head width of a product, and columns per product on a GPU.
_LEAST_TILE = 16
_GPU_COLUMNS = 64


def choose(
    config: config_lib.ModelConfig,
    device: jax.Device,
    lengths: Sequence[int],
    num_rows: int,
    num_parts: int,
) -> str:
  """Returns "pages", "splits" or "plain" for rows of mixed lengths.

  Args:
    config: shape of the model; only `attention="auto"` uses these kernels.
    device: any device that holds the rows.
    lengths: columns of each block of the cache.
    num_rows: number of rows per device.
    num_parts: X, over all devices that split the heads.
  """
  kernel = {"tpu": "pages", "gpu": "splits"}.get(device.platform, "plain")
  if kernel == "plain" or config.attention != "auto":
    return "plain"
  if config.latent_rank:
    problem = "keys and values, the cache has latents"
  elif kernel == "pages":
    problem = _find_tpu_problem(config, device, lengths, num_rows, num_parts)
  else:
    problem = _find_gpu_problem(config, device, lengths)
  if problem:
    tell_choice(
        f"attention of decode steps is plain: {kernel!r} needs {problem}"
    )
    return "plain"
  return kernel


def _find_tpu_problem(
    config: config_lib.ModelConfig,
    device: jax.Device,
    lengths: Sequence[int],
    num_rows: int,
    num_parts: int,
) -> str:
  """Returns the requirement of the TPU kernel that is not met here, or ""."""
  if device.device_kind in _SMALL_TPUS:
    return f"a TPU v4 or later, this one is a {device.device_kind}"
  layers = map(config.kv_shape, range(config.num_layers))
  width = max(G * Dh // math.gcd(num_parts, G) for G, Dh in layers)
  size = width * jnp.dtype(config.compute_dtype).itemsize
  pages = sum(-(-C // page_size(C, size)) for C in lengths)
  listed = 4 * (1 + len(lengths)) * num_rows * pages
  if listed > _LIST_BYTES:
    return (
        f"fewer rows: of sampling.num_slots, a device has {num_rows}, each of"
        f" {sum(lengths)} tokens, and may have"
        f" {num_rows * _LIST_BYTES // listed}"
    )
  return ""


def _find_gpu_problem(
    config: config_lib.ModelConfig, device: jax.Device, lengths: Sequence[int]
) -> str:
  """Returns the requirement of the GPU kernel that is not met here, or ""."""
  if config.compute_dtype == "float32":
    return "model.compute_dtype='bfloat16', it is 'float32'"
  capability = getattr(device, "compute_capability", "8.0")
  if capability.startswith("gfx"):  # AMD.
    return "an NVIDIA GPU"
  if float(capability) < 8:
    return f"compute capability 8.0, {device.device_kind} has {capability}"
  for _, size in sorted({*map(config.kv_shape, range(config.num_layers))}):
    if size < _LEAST_TILE or size & (size - 1):
      return f"a head_dim that is a power of 2 from {_LEAST_TILE}, it is {size}"
  if any(length % _LEAST_TILE for length in lengths):
    prompt, *own = lengths
    return (
        "sampling.max_prompt_tokens and sampling.max_completion_tokens that"
        f" divide by {_LEAST_TILE}, they are {prompt} and {sum(own)}"
    )
  return ""


@functools.cache
def tell_choice(message: str) -> None:
  logging.warning(message)


def attend(
    kernel: str,
    layer: Sequence[types.PyTree],
    updates: Sequence[cache_lib.BlockUpdate],
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    sinks: jax.Array | None = None,
) -> tuple[jax.Array, list[types.PyTree]]:
  """Returns the results of `cache.attend`; zeros for rows that see nothing.

  The kernel runs on each device's own rows and parts of the heads.

  Args:
    kernel: "pages" or "splits".
    layer: keys and values of each block; no rows share a prompt. For a shared
      layer, they are its source's with these written.
    updates: update of each block; the columns that a row sees are adjacent.
    q: [R, G, M, Dh].
    k: [R, G, Dh]; None for a shared layer, which writes nothing.
    v: [R, G, Dh]; None with `k`.
    sinks: [G, M], logits of the heads' sinks; None if there are none.
  """
  written = layer if k is None else cache_lib.write(layer, updates, k, v)
  pairs = [(block["k"], block["v"]) for block in written]
  parts = sequence.current_split()
  devices = parts.mesh.devices
  fn = functools.partial(
      _attend,
      {"pages": pages, "splits": splits}[kernel],
      devices.flat[0].platform == "cpu",
  )
  if devices.size > 1:
    rows, heads = parts.batch or None, parts.heads
    if pairs[0][0].shape[1] % math.prod(parts.mesh.shape[a] for a in heads):
      heads = None
    spec = PartitionSpec(rows, heads)
    fn = jax.shard_map(
        fn,
        mesh=parts.mesh,
        in_specs=(spec, spec, PartitionSpec(rows), PartitionSpec(heads)),
        out_specs=spec,
        check_vma=False,
    )
  seen = [update.seen for update in updates]
  out = fn(q.astype(pairs[0][0].dtype), pairs, seen, sinks)
  return out.astype(q.dtype), written


def _attend(
    kernel,
    interpret: bool,
    q: jax.Array,
    pairs: Sequence,
    seen: Sequence,
    sinks: jax.Array | None,
) -> jax.Array:
  """Returns attention [R, G, M, Dh] of a device's rows over all blocks."""
  R, X = pairs[0][0].shape[:2]
  padded = cache_lib.pad_queries(q, X)
  merge = lambda x: x.reshape(R * X, *x.shape[2:])
  # Each part of the heads becomes a separate row.
  spans = [tuple(jnp.repeat(edge, X) for edge in span(block)) for block in seen]
  out, logsumexp = kernel(
      merge(padded),
      [tuple(map(merge, pair)) for pair in pairs],
      spans,
      scale=1 / math.sqrt(q.shape[-1]),
      interpret=interpret,
  )
  if sinks is not None:
    sinks = jnp.tile(sinks.reshape(X, -1), (R, 1))
  out, _ = attention.join_sinks(out, logsumexp, sinks)
  is_live = functools.reduce(jnp.logical_or, [b > a for a, b in spans])
  out = jnp.where(is_live[:, None, None], out, jnp.zeros((), out.dtype))
  return cache_lib.own_heads(out.reshape(padded.shape), q.shape)


def span(seen: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Returns the start and end [R] of the adjacent columns that each row sees.

  Args:
    seen: [R, C] bool.
  """
  start = jnp.argmax(seen, axis=1).astype(jnp.int32)
  return start, start + jnp.sum(seen, axis=1, dtype=jnp.int32)


def page_size(num_columns: int, column_bytes: int) -> int:
  """Returns the columns per TPU page, for a block of `num_columns`.

  Args:
    num_columns: C.
    column_bytes: bytes of a column's keys, or of its values.
  """
  size = _size_for(num_columns, _NUM_PAGES)
  while size > _LEAST_TILE and size * column_bytes > _PAGE_BYTES:
    size //= 2
  return min(size, num_columns)


def split_size(num_columns: int) -> int:
  """Returns the columns per GPU split, a divisor of the block's columns."""
  return math.gcd(_size_for(num_columns, _NUM_SPLITS), num_columns)


def _size_for(num_columns: int, count: int) -> int:
  size = _SHORTEST
  while size < _LONGEST and size * count < num_columns:
    size *= 2
  return size


def pages(
    q: jax.Array,
    pairs: Sequence[tuple[jax.Array, jax.Array]],
    spans: Sequence[tuple[jax.Array, jax.Array]],
    *,
    scale: float,
    interpret: bool,
) -> tuple[jax.Array, jax.Array]:
  """Returns attention [N, H, E] of rows over their spans, and its logsumexp.

  The logsumexp is [N, H] float32. Results of rows that see no columns are
  undefined.

  Args:
    q: [N, H, E].
    pairs: keys and values [N, C, E] of each block.
    spans: start and end of the columns that a row sees in each block, [N]
      int32.
    scale: factor of the scores.
    interpret: whether to run on a CPU.
  """
  # Half a second of imports that other platforms do not need.
  from jax.experimental import pallas as pl
  from jax.experimental.pallas import tpu as pltpu

  (N, H, E), B = q.shape, len(pairs)
  lengths = [k.shape[1] for k, _ in pairs]
  sizes = [page_size(C, E * q.dtype.itemsize) for C in lengths]
  counts = [-(-C // size) for C, size in zip(lengths, sizes)]
  segments, places, total = list_pages(spans, sizes, counts)
  # When traced, Python's division would ask JAX for a TPU.
  row_of = lambda segment: jax.lax.div(segment, B)

  def kernel(segment_ref, *refs):
    place_refs, refs = refs[:B], refs[B:]
    start_ref, end_ref, q_ref, *refs = refs
    *pair_refs, out_ref, log_ref, top_ref, sum_ref, acc_ref = refs
    i = pl.program_id(0)
    row, block = row_of(segment_ref[i]), jax.lax.rem(segment_ref[i], B)

    @pl.when((i == 0) | (row_of(segment_ref[jnp.maximum(i, 1) - 1]) != row))
    def begin():
      top_ref[...] = jnp.full_like(top_ref, attention.MASKED_SCORE)
      sum_ref[...] = jnp.zeros_like(sum_ref)
      acc_ref[...] = jnp.zeros_like(acc_ref)

    def add(b: int) -> None:
      k, v = (ref[0] for ref in pair_refs[2 * b : 2 * b + 2])
      first = (place_refs[b][i] - row * counts[b]) * sizes[b]
      start, end = start_ref[row * B + b], end_ref[row * B + b]
      is_seen = lambda shape, axis: (
          (column := first + jax.lax.broadcasted_iota(jnp.int32, shape, axis))
          >= start
      ) & (column < end)
      score = jax.lax.dot_general(
          q_ref[0],
          k,
          (((1,), (1,)), ((), ())),
          preferred_element_type=jnp.float32,
      )
      score = jnp.where(
          is_seen(score.shape, 1), score * scale, attention.MASKED_SCORE
      )
      top = jnp.maximum(top_ref[...], score.max(1, keepdims=True))
      weights, shrunk = jnp.exp(score - top), jnp.exp(top_ref[...] - top)
      if lengths[b] % sizes[b]:
        # A page's entries past the last column may be NaN.
        v = jnp.where(is_seen(v.shape, 0), v, jnp.zeros((), v.dtype))
      top_ref[...] = top
      sum_ref[...] = shrunk * sum_ref[...] + weights.sum(1, keepdims=True)
      acc_ref[...] = shrunk * acc_ref[...] + jnp.dot(
          weights.astype(v.dtype), v, preferred_element_type=jnp.float32
      )

    for b in range(B):
      pl.when(block == b)(functools.partial(add, b))

    @pl.when(row_of(segment_ref[i + 1]) != row)
    def end():
      out_ref[0] = (acc_ref[...] / sum_ref[...]).astype(out_ref.dtype)
      log_ref[0] = top_ref[...] + jnp.log(sum_ref[...])

  of_row = lambda i, segment_ref, *_: (row_of(segment_ref[i]), 0, 0)

  def of_page(b: int):
    # A page is not read again if the previous step read it.
    return lambda i, _, *refs: (
        jax.lax.div(refs[b][i], counts[b]),
        jax.lax.rem(refs[b][i], counts[b]),
        0,
    )

  out, logsumexp = pl.pallas_call(
      kernel,
      grid_spec=pltpu.PrefetchScalarGridSpec(
          num_scalar_prefetch=3 + B,
          grid=(total,),
          in_specs=[
              pl.BlockSpec((1, H, E), of_row),
              *(
                  pl.BlockSpec((1, sizes[b], E), of_page(b))
                  for b in range(B)
                  for _ in range(2)
              ),
          ],
          out_specs=[
              pl.BlockSpec((1, H, E), of_row),
              pl.BlockSpec((1, H, 1), of_row),
          ],
          scratch_shapes=[
              pltpu.VMEM((H, 1), jnp.float32),
              pltpu.VMEM((H, 1), jnp.float32),
              pltpu.VMEM((H, E), jnp.float32),
          ],
      ),
      out_shape=[
          jax.ShapeDtypeStruct((N, H, E), q.dtype),
          jax.ShapeDtypeStruct((N, H, 1), jnp.float32),
      ],
      compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",)),
      interpret=interpret,
      name=_NAME,
  )(
      segments,
      *places,
      *(jnp.stack(edges, axis=1).reshape(-1) for edges in zip(*spans)),
      q,
      *(x for pair in pairs for x in pair),
  )
  return out, logsumexp[..., 0]


def list_pages(
    spans: Sequence[tuple[jax.Array, jax.Array]],
    sizes: Sequence[int],
    counts: Sequence[int],
) -> tuple[jax.Array, list[jax.Array], jax.Array]:
  """Returns the list of pages to read, by row and then block, and its length.

  The length is at least 1. S is the maximum number of pages plus an end marker.

  Args:
    spans: start and end of the columns that a row sees in each block, [N].
    sizes: columns per page of each block.
    counts: pages per row of each block.

  Returns:
    row * blocks + block for each page, [S] int32; for each block, the index
    over all rows of the page read now or last, [S] int32; and the length, []
    int32.
  """
  N, B = len(spans[0][0]), len(spans)
  first = jnp.stack([a // size for (a, _), size in zip(spans, sizes)], axis=1)
  end = jnp.stack([-(-b // size) for (_, b), size in zip(spans, sizes)], axis=1)
  is_live = jnp.stack([b > a for a, b in spans], axis=1)
  num = jnp.where(is_live, end - first, 0).reshape(-1)
  ends = jnp.cumsum(num)
  total = jnp.maximum(ends[-1], 1)
  most = N * sum(counts) + 1
  segment = jnp.repeat(jnp.arange(N * B), num, total_repeat_length=most)
  segment = segment.astype(jnp.int32)
  index = jnp.arange(most, dtype=jnp.int32)
  page = (first.reshape(-1) - (ends - num))[segment] + index
  places = []
  for b, count in enumerate(counts):
    place = segment // B * count + jnp.clip(page, 0, count - 1)
    place = jnp.where((segment % B == b) & (index < total), place, 0)
    places.append(jax.lax.cummax(place))
  return jnp.where(index < total, segment, N * B), places, total


def splits(
    q: jax.Array,
    pairs: Sequence[tuple[jax.Array, jax.Array]],
    spans: Sequence[tuple[jax.Array, jax.Array]],
    *,
    scale: float,
    interpret: bool,
) -> tuple[jax.Array, jax.Array]:
  """Returns the same as `pages`, from one call per block, merged afterwards."""
  from jax.experimental.pallas.ops.gpu import decode_attention

  outs, sizes = [], []
  for (k, v), (start, end) in zip(pairs, spans):
    C = k.shape[1]
    size = split_size(C)
    with jax.named_scope(_NAME):
      out, (total, top) = decode_attention.mqa(
          q,
          k,
          v,
          start,
          end,
          sm_scale=scale,
          block_k=min(size, _GPU_COLUMNS),
          k_splits=C // size,
          return_residuals=True,
          interpret=interpret,
      )
    outs.append(out.astype(jnp.float32))
    is_live = (end > start)[:, None]
    log_total = top + jnp.log(jnp.where(is_live, total, 1.0))
    sizes.append(jnp.where(is_live, log_total, attention.MASKED_SCORE))
  sizes = jnp.stack(sizes)
  weights = jax.nn.softmax(sizes, axis=0)[..., None]
  out = jnp.sum(weights * jnp.stack(outs), axis=0).astype(q.dtype)
  return out, jax.nn.logsumexp(sizes, axis=0)


def num_read(
    kernel: str,
    lengths: Sequence[int],
    spans: Sequence[tuple[np.ndarray, np.ndarray]],
    column_bytes: int,
) -> int:
  """Returns the number of columns that a kernel reads in all rows and blocks.

  It follows from the grid: pages that a span touches, or a split's columns from
  its first to the tile that holds the span's end.

  Args:
    kernel: "pages" or "splits".
    lengths: C of each block.
    spans: start and end of the columns that a row sees in each block, [R].
    column_bytes: argument of `page_size`.
  """
  read = 0
  for C, (start, end) in zip(lengths, spans, strict=True):
    is_live = end > start
    if kernel == "pages":
      size = tile = page_size(C, column_bytes)
    else:
      size = split_size(C)
      tile = min(size, _GPU_COLUMNS)
    first, last = start // size * size, -(-end // tile) * tile
    read += int(np.where(is_live, np.minimum(last, C) - first, 0).sum())
  return read
