# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Attention kernels: splash on TPU, cuDNN's and ours on GPU, else plain.

Kernels store no scores, and skip fully masked blocks. They serve the passes
whose mesh is known (`sequence.split_tokens`): the train step and the log-probs
of the reference, on packed rows; frozen judges and a searcher's prefill, on
whole sequences.

Where tokens are split over devices, a kernel gets all tokens of some heads: two
all-to-alls, one for queries, keys and values before it and one for its results,
trade the split over tokens for a split over heads (DeepSpeed Ulysses,
arXiv:2309.14509, §3). Devices then have equal shares of the causal mask,
whereas in a split over queries later blocks would see more keys. Plain
attention gathers keys and values.

Axes: B prompts, K completions, N sequences, Q queries, S keys, G key-value
heads, M query heads per key-value head, Dh head width.
"""

from collections.abc import Callable, Sequence
import functools
import math

from absl import logging
import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec

from tba_jax.models import config as config_lib
from tba_jax.models import head_layout
from tba_jax.models.kernels import gpu_rows
from tba_jax.models.kernels import splash_rows
from tba_jax.models.net import attention
from tba_jax.models.net import layers
from tba_jax.models.net import packed
from tba_jax.models.net import row_attention
from tba_jax.models.net import sequence
from tba_jax.models.net import spread

# Maximum size of a block of queries or keys, and the divisor of all sizes.
BLOCK = 512
_LANES = 128
# Maximum queries per splash kernel call, unless one sequence has more.
_MAX_QUERIES = 16384


def choose(
    config: config_lib.ModelConfig,
    parts: sequence.Split,
    head_dim: int = 0,
) -> str:
  """Returns the name of the kernel for a pass over a mesh.

  Args:
    head_dim: width of a layer's heads; 0 checks all layers.

  Raises:
    ValueError: `config.attention` names a kernel that cannot serve the pass.
  """
  if parts.mesh is None or config.attention == "plain":
    return "plain"
  device = parts.mesh.devices.flat[0]
  kernel = config.attention
  if kernel == "auto":
    kernel = {"tpu": "splash", "gpu": "cudnn"}.get(device.platform)
    if kernel is None:
      return "plain"
  config = spread.model_over(config, parts)
  widths = {width for _, width in config.attended_shapes}
  for width in [head_dim] if head_dim else sorted(widths):
    problem = _find_problem(kernel, config, parts, device, width)
    if not problem:
      continue
    if config.attention != "auto":
      raise ValueError(
          f"config.model.attention={kernel!r} needs {problem}; 'plain' and"
          " 'auto' work everywhere"
      )
    tell_choice(f"attention is plain: {kernel!r} needs {problem}")
    return "plain"
  return kernel


def _find_problem(
    kernel: str,
    config: config_lib.ModelConfig,
    parts: sequence.Split,
    device: jax.Device,
    head_dim: int,
) -> str:
  """Returns the requirement of a kernel that is not met here, or ""."""
  platform = {"splash": "tpu", "cudnn": "gpu"}[kernel]
  if device.platform != platform:
    return f"a mesh of {platform}, this one is of {device.platform}"
  # Splash needs split heads only if tokens are split.
  must_split = kernel == "cudnn" or parts.count > 1
  heads = parts.head_count * parts.count
  for G, width in sorted({*config.attended_shapes}) if must_split else ():
    M = config.num_heads // G
    found = head_layout.choose(G, M, heads)
    words = f"{heads} devices, of mesh.tensor and mesh.sequence, for {G * M}"
    words += f" heads with {G} of keys and values"
    if found.cost > head_layout.MOST_OF_KERNELS:
      return f"fewer than {words}"
    if found.cost > head_layout.MOST and width == head_dim:
      tell_choice(
          f"attention computes {found.cost:.3g} times the needed heads on"
          f" {words}; a mesh whose product divides them computes no others"
      )
  if kernel == "splash":
    return ""
  if config.compute_dtype == "float32":
    return "model.compute_dtype='bfloat16', it is 'float32'"
  if device.compute_capability.startswith("gfx"):  # AMD.
    return "an NVIDIA GPU"
  capability = float(device.compute_capability)
  if capability < 8:
    return f"compute capability 8.0, {device.device_kind} has {capability}"
  widest = 256 if capability >= 9 else 128
  if head_dim % 8 or head_dim > widest:
    return f"a head_dim that divides by 8, up to {widest}, it is {head_dim}"
  return ""


@functools.cache
def tell_choice(message: str) -> None:
  logging.warning(message)


def attend_causal(
    config: config_lib.ModelConfig,
    parts: sequence.Split,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    mask: jax.Array,
    window: int,
    sinks: jax.Array | None = None,
) -> jax.Array:
  """Returns causal attention of sequences over their real tokens.

  Args:
    config: shape of the model; `attention` selects the kernel.
    parts: split over the mesh.
    q: [N, S, G, M, Dh].
    k: [N, S, G, Dh].
    v: [N, S, G, Dh].
    mask: [N, S] bool, True on real tokens, which are contiguous. Results at
      other places are finite but meaningless.
    window: sliding window; 0 is none.
    sinks: [G, M], logits of the heads' sinks; None if there are none.

  Returns:
    [N, S, G, M, Dh].
  """
  kernel = choose(config, parts, q.shape[-1])
  if kernel == "cudnn" and sinks is not None:
    tell_choice("attention of prompts is plain: 'cudnn' has no attention sinks")
    kernel = "plain"
  if kernel == "plain":
    if parts.count > 1:
      k, v = (parts.place(x, "batch", None) for x in (k, v))
    return attention.attend_causal(q, k, v, mask, window, parts.count, sinks)
  return attend_last(kernel, parts, q, k, v, mask, window, sinks)


def attend_rows(
    config: config_lib.ModelConfig,
    parts: sequence.Split,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    places: packed.Places,
    window: int,
    sinks: jax.Array | None = None,
) -> jax.Array:
  """Returns attention of packed rows, see `row_attention.attend_rows`.

  Args:
    config, parts: arguments of `attend_causal`.
    q: [R, L, G, M, Dh].
    k: [R, L, G, Dh].
    v: [R, L, G, Dh].
    places: description of each place in the rows.
    window: sliding window of positions; 0 is none.
    sinks: [G, M], logits of the heads' sinks; None if there are none.

  Returns:
    [R, L, G, M, Dh]; finite but meaningless at places without a token.
  """
  kernel = choose(config, parts, q.shape[-1])
  if kernel == "plain":
    fn = lambda q, k, v, sinks, *places: row_attention.attend_rows(
        q, k, v, *places, window, parts.platform, sinks
    )
  else:
    own = _splash_rows if kernel == "splash" else gpu_rows.attend
    fn = lambda q, k, v, sinks, _, places: own(
        q, k, v, places, window=window, sinks=sinks
    )
  if parts.mesh is None or parts.mesh.size == 1:
    return fn(q, k, v, sinks, places, places)
  # Plain attention does not move queries between devices.
  length = parts.length if kernel == "plain" else ()
  heads = (*parts.heads, *(parts.length if kernel != "plain" else ()))
  size = math.prod(parts.mesh.shape[axis] for axis in heads)
  shape = q.shape
  layout = _layout(shape, size)
  if layout:
    q, k, v, sinks = _spread(layout, q, k, v, sinks)
  heads = heads if layout else ()
  batch, length, heads = (a or None for a in (parts.batch, length, heads))
  queries = PartitionSpec(batch, length, heads)
  keys = PartitionSpec(batch, None, heads)
  out = jax.shard_map(
      fn,
      mesh=parts.mesh,
      in_specs=(
          *(queries, keys, keys, PartitionSpec(heads)),
          PartitionSpec(batch, length),
          PartitionSpec(batch, None),
      ),
      out_specs=queries,
      check_vma=False,
  )(q, k, v, sinks, places, places)
  return _gathered(layout, out, shape)


def _layout(shape: Sequence[int], size: int) -> head_layout.Layout | None:
  """Returns the layout of queries [..., G, M, Dh] over `size` devices.

  None if each device had better compute all heads.
  """
  found = head_layout.choose(*shape[2:4], size)
  return found if found.cost <= head_layout.MOST_OF_KERNELS else None


def _spread(
    layout: head_layout.Layout,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    sinks: jax.Array | None,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array | None]:
  """Returns queries, keys, values and sinks with the heads of a layout."""
  k, v = (spread.keys(x, 2, layout) for x in (k, v))
  sinks = None if sinks is None else spread.queries(sinks, 0, layout)
  return spread.queries(q, 2, layout), k, v, sinks


def _gathered(
    layout: head_layout.Layout | None, out: jax.Array, shape: Sequence[int]
) -> jax.Array:
  """Returns results with the heads of the given shape [..., G, M, Dh]."""
  if layout is None:
    return out
  return spread.gathered(out, 2, shape[2:4], layout.copies)


def _splash_rows(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    places: packed.Places,
    window: int,
    sinks: jax.Array | None,
) -> jax.Array:
  """Returns `splash_rows.attend` for rows of any length."""
  L = q.shape[1]
  block, length = block_sizes(L, row_attention.block_size(places, "tpu"))
  grow = lambda value: lambda x: jnp.pad(
      x,
      ((0, 0), (0, length - L)) + ((0, 0),) * (x.ndim - 2),
      constant_values=value,
  )
  out = splash_rows.attend(
      *map(grow(0), (q, k, v)),
      jax.tree.map(grow(-1), places),
      window=window,
      block=block,
      sinks=sinks,
  )
  return out[:, :L]


def _split_heads(parts: sequence.Split, x: jax.Array, axis: int) -> jax.Array:
  """Returns [B, …, G, …] with tokens gathered and heads along `axis` split.

  If heads do not divide evenly, the compiler decides.
  """
  mesh = parts.mesh
  heads = (*parts.heads, *parts.length)
  if mesh.size == 1 or x.shape[axis] % (parts.head_count * parts.count):
    return x
  spec = [PartitionSpec.UNCONSTRAINED] * x.ndim
  spec[0] = parts.batch or None
  spec[1:axis] = [None] * (axis - 1)
  spec[axis] = heads
  return jax.lax.with_sharding_constraint(
      x, NamedSharding(mesh, PartitionSpec(*spec))
  )


def attend_last(
    kernel: str,
    parts: sequence.Split,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    mask: jax.Array,
    window: int,
    sinks: jax.Array | None = None,
) -> jax.Array:
  """Returns causal attention [N, Q, G, M, Dh] of the last Q of S tokens.

  Only splash attention accepts sinks [G, M].
  """
  shape = q.shape
  layout = _layout(shape, parts.head_count * parts.count)
  if layout:
    q, k, v, sinks = _spread(layout, q, k, v, sinks)
  if kernel == "cudnn":
    # cuDNN's kernel has its own partitioning rule.
    if parts.count == 1:
      return _gathered(layout, cudnn(q, k, v, mask, window), shape)
    split = lambda x: _split_heads(parts, x, 2)
    out = cudnn(split(q), split(k), split(v), mask, window)
    return _gathered(layout, split(out), shape)
  fn = functools.partial(splash, window=window)
  out = _over_mesh(fn, parts, layout is not None)(q, k, v, mask, sinks)
  return _gathered(layout, out, shape)


def _over_mesh(
    fn: Callable[..., jax.Array], parts: sequence.Split, splits_heads: bool
) -> Callable[..., jax.Array]:
  """Returns `fn` applied to each device's own sequences and heads.

  The compiler cannot split a kernel. Heads that do not divide evenly are
  replicated on each device.
  """
  mesh = parts.mesh
  if mesh.size == 1:
    return fn
  heads = (*parts.heads, *parts.length) if splits_heads else ()
  batch, heads = (axes or None for axes in (parts.batch, heads))
  queries = PartitionSpec(batch, None, heads, None, None)
  keys = PartitionSpec(batch, None, heads, None)
  return jax.shard_map(
      fn,
      mesh=mesh,
      in_specs=(
          *(queries, keys, keys),
          PartitionSpec(batch, None),
          PartitionSpec(heads),
      ),
      out_specs=queries,
      check_vma=False,
  )


def splash(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    mask: jax.Array,
    sinks: jax.Array | None,
    window: int,
) -> jax.Array:
  """Returns causal attention of the last Q of S tokens by splash attention.

  The mask between tokens is computed from their indices, and blocks that it
  masks fully are skipped. Segments mark the padding, so that every query has a
  key.
  """
  # Half a second of imports that other platforms do not need.
  from jax.experimental.pallas.ops.tpu import splash_attention as splash_lib

  N, Q, G, M, Dh = q.shape
  before = k.shape[1] - Q
  block_q, num_q = block_sizes(Q)
  block_k, num_k = block_sizes(before + num_q)
  grow = lambda x, size: jnp.pad(
      x, ((0, 0), (0, size - x.shape[1])) + ((0, 0),) * (x.ndim - 2)
  )
  q = grow(q * jnp.asarray(1 / math.sqrt(Dh), q.dtype), num_q)
  q = jnp.moveaxis(q.reshape(N, num_q, G * M, Dh), 1, 2)
  k, v = (jnp.moveaxis(grow(x, num_k), 1, 2) for x in (k, v))
  segments = grow(mask.astype(jnp.int32), num_k)
  seen = splash_lib.LocalMask(
      (num_q, num_k), ((window - 1) if window else None, 0), before
  )
  kernel = splash_lib.make_splash_mha(
      splash_lib.MultiHeadMask([seen] * (G * M)),
      block_sizes=splash_lib.BlockSizes(
          block_q=block_q,
          block_kv=block_k,
          block_q_dkv=block_q,
          block_kv_dkv=block_k,
          block_q_dq=block_q,
          block_kv_dq=block_k,
      ),
      head_shards=1,
      q_seq_shards=1,
      residual_checkpoint_name=layers.ATTENTION,
  )
  ids = splash_lib.SegmentIds(segments[:, before : before + num_q], segments)
  # The kernel stores 128 numbers per query in its auxiliary arrays.
  at_once = max(1, _MAX_QUERIES // num_q)
  at_once = max(n for n in range(1, N + 1) if N % n == 0 and n <= at_once)
  if sinks is not None:
    kernel = functools.partial(kernel, sinks=sinks.reshape(-1))
  run = jax.vmap(kernel)
  if at_once == N:
    out = run(q, k, v, ids)
  else:
    cut = lambda x: x.reshape(N // at_once, at_once, *x.shape[1:])
    inputs = jax.tree.map(cut, (q, k, v, ids))
    out = jax.lax.map(lambda part: run(*part), inputs)
    out = out.reshape(q.shape)
  out = jnp.moveaxis(out[:, :, :Q], 2, 1)
  return out.reshape(N, Q, G, M, Dh)


def block_sizes(length: int, most: int = 0) -> tuple[int, int]:
  """Returns the block size, and the length rounded up to whole blocks.

  Blocks have up to `most` tokens, or `BLOCK`.
  """
  count = -(-length // (most or BLOCK))
  size = -(-length // (count * _LANES)) * _LANES
  return size, count * size


def cudnn(
    q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array, window: int
) -> jax.Array:
  """Returns causal attention of the last Q of S tokens by cuDNN.

  cuDNN aligns its causal mask at the first query and key, and expects padding
  on the right: zero queries stand in for the tokens before the last Q, and each
  sequence is rotated to begin with its first real token. An explicit [Q, S]
  mask would cost memory, and would not skip blocks.
  """
  N, Q, G, M, Dh = q.shape
  before = k.shape[1] - Q
  # The gradient needs an even length: add a last token that no other sees.
  odd = k.shape[1] % 2
  S = k.shape[1] + odd
  q = jnp.pad(
      q.reshape(N, Q, G * M, Dh), ((0, 0), (before, odd), (0, 0), (0, 0))
  )
  k, v = (jnp.pad(x, ((0, 0), (0, odd), (0, 0), (0, 0))) for x in (k, v))
  padding_N = jnp.argmax(mask, axis=1)

  # The partitioner splits a gather over N only where that is a batch axis.
  @jax.vmap
  def rotate(x: jax.Array, by: jax.Array) -> jax.Array:
    return x.at[(jnp.arange(S) + by) % S].get(
        mode="promise_in_bounds", unique_indices=True
    )

  out = jax.nn.dot_product_attention(
      *(rotate(x, padding_N) for x in (q, k, v)),
      is_causal=True,
      local_window_size=(window - 1, 0) if window else None,
      implementation="cudnn",
  )
  out = rotate(out, -padding_N)[:, before : before + Q]
  return out.reshape(N, Q, G, M, Dh)
