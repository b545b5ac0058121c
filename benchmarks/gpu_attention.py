# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Compiled cost of one layer's attention and gradient on a GPU.

    python -m benchmarks gpu_attention [DEVICE]

compiles each row of `ROWS` for DEVICE (default "h100:1") with each method, and
prints it as Markdown to standard error. No GPU is needed. Methods:

- ours: `kernels.cudnn`, cuDNN's causal kernel on rotated sequences, with zero
  queries for the tokens before the last Q;
- mask: cuDNN with a mask [queries, keys];
- tokamax: `tokamax.dot_product_attention` (Mosaic), if installed, with padding
  as a mask of keys and causality as a window.

The heads are Llama 3 8B's. The compiler reports the kernels' inputs and outputs
in bytes, however often they are read. FLOP count the blocks that kernels visit
according to their sources (`flops`). Times are unknown.
"""

from collections.abc import Callable, Sequence
import importlib.util
from typing import Any

import jax
import jax.numpy as jnp
import ml_collections

from benchmarks import slices
from tba_jax.models.kernels import kernels
from tba_jax.models.net import attention
from tba_jax.system import hlo
from tba_jax.tools import targets

_G, _M, _DH = 8, 4, 128
# Sequences, prompt tokens before the queries, and queries.
ROWS = ((16, 0, 512), (16, 512, 52), (16, 512, 511), (4, 512, 8191))
_COLUMNS = (
    "sequences", "before", "queries", "way", "temporaries, MB",
    "memory moved, MB", "GFLOP", "ms at peak bandwidth", "ms at peak FLOP",
)  # fmt: skip


def run(
    config: ml_collections.ConfigDict, operands: Sequence[str]
) -> dict[str, Any]:
  """Returns the figures of each row, and prints them as Markdown."""
  del config
  name = "".join(operands) or "h100:1"
  device = targets.devices(name)[0]
  if device.platform != "gpu":
    raise ValueError(f"operand {name}: must be a GPU, such as h100:1, a100:1")
  chip = targets.CHIPS[device.device_kind]
  ways = {"ours": kernels.cudnn, "mask": mask}
  if importlib.util.find_spec("tokamax"):
    ways["tokamax"] = tokamax
  out = []
  slices.print_row(_COLUMNS)
  slices.print_row(["---"] * len(_COLUMNS))
  for N, before, Q in ROWS:
    for way, kernel in ways.items():
      row = {"sequences": N, "before": before, "queries": Q, "way": way}
      try:
        text, temporary_bytes = _compile(kernel, N, before, Q, device)
      except NotImplementedError as error:
        out.append({**row, "error": str(error)})
        slices.print_row([*map(str, row.values()), str(error)])
        continue
      moved = hlo.costs(text).memory_bytes
      total = flops(way, N, before, Q)
      out.append(
          {
              **row,
              "temporary_bytes": temporary_bytes,
              "memory_bytes": moved,
              "flops": total,
              "kernels": hlo.kernels(text),
          }
      )
      slices.print_row(
          [
              *map(str, row.values()),
              *(f"{x / 1e6:,.0f}" for x in (temporary_bytes, moved)),
              f"{total / 1e9:,.0f}",
              f"{1e3 * moved / chip.memory_bytes_per_s:.2f}",
              f"{1e3 * total / chip.flops_per_s:.2f}",
          ]
      )
  return {"device": name, "jax": jax.__version__, "rows": out}


def flops(way: str, N: int, before: int, Q: int) -> float:
  """Returns the FLOP of a method, forward and backward.

  cuDNN computes 2 products forward and 5 backward, for the causal pairs of
  queries and keys, or for all pairs if causality is only given by a mask.
  tokamax 0.0.17 computes 2 and 7; backward, it skips blocks only for the plain
  causal mask, without tokens before the queries.
  """
  S = before + Q
  causal, every = before * Q + Q * Q / 2, Q * S
  pairs = {
      "ours": 7 * S * S / 2,
      "mask": 7 * (every if before else causal),
      "tokamax": 2 * causal + 7 * (every if before else causal),
  }[way]
  return 2 * pairs * N * _G * _M * _DH


def mask(
    q: jax.Array, k: jax.Array, v: jax.Array, real: jax.Array, window: int
) -> jax.Array:
  """Returns the result of `kernels.cudnn`, using a [queries, keys] mask."""
  N, Q, G, M, Dh = q.shape
  before = k.shape[1] - Q
  # The gradient needs even lengths.
  even = lambda x: jnp.pad(
      x, ((0, 0), (0, x.shape[1] % 2)) + ((0, 0),) * (x.ndim - 2)
  )
  q, k, v, real = even(q), even(k), even(v), even(real)
  seen = attention.sees(
      before + jnp.arange(q.shape[1]), jnp.arange(k.shape[1]), window
  )
  out = jax.nn.dot_product_attention(
      q.reshape(*q.shape[:2], G * M, Dh),
      k,
      v,
      mask=(seen[None] & real[:, None])[:, None],
      is_causal=not before,
      implementation="cudnn",
  )
  return out[:, :Q].reshape(N, Q, G, M, Dh)


def tokamax(
    q: jax.Array, k: jax.Array, v: jax.Array, real: jax.Array, window: int
) -> jax.Array:
  """Returns the result of `kernels.cudnn`, using tokamax."""
  import tokamax as library

  N, Q, G, M, Dh = q.shape
  S = k.shape[1]
  out = library.dot_product_attention(
      q.reshape(N, Q, G * M, Dh),
      k,
      v,
      mask=real[:, None, None],
      local_window_size=((window or S) - 1 - (S - Q), S - Q),
      implementation="mosaic",
  )
  return out.reshape(q.shape)


def _compile(
    kernel: Callable[..., jax.Array],
    N: int,
    before: int,
    Q: int,
    device: jax.Device,
) -> tuple[str, int]:
  """Returns the module of a layer's attention, and its temporary bytes."""

  def step(q, k, v, real, gradient):
    attend = lambda q, k, v: kernel(q, k, v, real, 0)
    out, vjp = jax.vjp(attend, q, k, v)
    return out, vjp(gradient)

  place = jax.sharding.SingleDeviceSharding(device)
  array = lambda *shape, dtype=jnp.bfloat16: jax.ShapeDtypeStruct(
      shape, dtype, sharding=place
  )
  queries = array(N, Q, _G, _M, _DH)
  keys = array(N, before + Q, _G, _DH)
  real = array(N, before + Q, dtype=jnp.bool_)
  # tokamax asks the default device for its kind.
  with jax.default_device(device):
    lowered = jax.jit(step).lower(queries, keys, keys, real, queries)
    compiled = lowered.compile(targets.compiler_options(device))
  return compiled.as_text(), compiled.memory_analysis().temp_size_in_bytes
