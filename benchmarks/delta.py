# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Cost of a delta net's recurrence with its gradient, versus attention.

    python -m benchmarks delta [DEVICE]

Rows hold one prompt with its completions (`ROWS`). A delta net with 8 key heads
and 16 value heads is timed alternately with attention of 8 key-value heads and
16 query heads, all of width 128 and in float32, without their projections. With
DEVICE, such as v5e:2x2 or h100:1, the delta net is compiled for it in bfloat16
instead. Needed FLOP follow from `delta.py`'s equations and include the forward
pass repeated for the gradient. Needed bytes count inputs, their gradients and
the output once in each pass that uses them, and the states between chunks,
written and read.
"""

from collections.abc import Callable, Sequence
import dataclasses
import statistics
import time
from typing import Any

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np

from benchmarks import peer_model
from benchmarks import slices
from tba_jax.models.net import delta
from tba_jax.models.net import packed
from tba_jax.models.net import row_attention
from tba_jax.system import hlo
from tba_jax.tools import targets

_G, _M, _DH, _TAPS = 8, 2, 128, 4
# Completions, prompt tokens, and tokens of a completion.
ROWS = ((4, 128, 96), (4, 256, 448), (4, 512, 896), (4, 1024, 1792))
_ROUNDS = 3
_TIMES = ("tokens", "delta, s", "attention, s", "ratio")
_COSTS = (
    "tokens", "GFLOP", "needed", "memory moved, MB", "needed",
    "temporaries, MB",
)  # fmt: skip


def run(
    config: ml_collections.ConfigDict, operands: Sequence[str]
) -> dict[str, Any]:
  """Returns the figures of each row, and prints them as Markdown."""
  del config
  device = targets.devices(operands[0])[0] if operands else None
  columns = _COSTS if device else _TIMES
  slices.print_row(columns)
  slices.print_row(["---"] * len(columns))
  out = []
  for shape in ROWS:
    row, cells = _compiled(*shape, device) if device else _timed(*shape)
    tokens = shape[1] + shape[0] * shape[2]
    out.append({"tokens": tokens, **row})
    slices.print_row([str(tokens), *cells])
  return {"device": operands[0] if operands else "cpu", "rows": out}


def _timed(K: int, P: int, T: int) -> tuple[dict[str, Any], list[str]]:
  """Returns the median seconds of both ways, and the cells of the table."""
  made = {}
  for way in ("delta", "attention"):
    function, inputs = _make(way, K, P, T)
    made[way] = jax.jit(function).lower(*inputs).compile(), inputs
  seconds = {way: [] for way in made}
  for _ in range(1 + _ROUNDS):
    for way, (compiled, inputs) in made.items():
      start = time.perf_counter()
      jax.block_until_ready(compiled(*inputs))
      seconds[way].append(time.perf_counter() - start)
  row = {way: statistics.median(times[1:]) for way, times in seconds.items()}
  ratio = row["delta"] / row["attention"]
  return row, [*(f"{x:.3f}" for x in row.values()), f"{ratio:.2f}"]


def _compiled(
    K: int, P: int, T: int, device: jax.Device
) -> tuple[dict[str, Any], list[str]]:
  """Returns the costs of the delta net, and the cells of the table."""
  function, inputs = _make("delta", K, P, T, device)
  options = targets.compiler_options(device) or None
  compiled = jax.jit(function).lower(*inputs).compile(options)
  costs = hlo.costs(compiled.as_text())
  flops, num_bytes = needed(P + K * T)
  row = {
      "flops": costs.flops,
      "needed_flops": flops,
      "memory_bytes": costs.memory_bytes,
      "needed_bytes": num_bytes,
      "temporary_bytes": compiled.memory_analysis().temp_size_in_bytes,
  }
  units = (1e9, 1e9, 1e6, 1e6, 1e6)
  return row, [f"{x / unit:,.0f}" for x, unit in zip(row.values(), units)]


def needed(num_tokens: int) -> tuple[float, float]:
  """Returns the FLOP and bytes of the module docstring, for all heads."""
  H = _G * _M
  # A token of each head: products with the chunk's keys and two with its
  # values, one read by its key, one by its query, and one write.
  token = delta.CHUNK * _DH * (2 / _M + 2) + 3 * _DH**2
  flops = 4 * 2 * token * num_tokens * H
  # Channels forward, again for the gradient, and their gradient; output and its
  # gradient.
  channels, out = 2 * (2 * _G + H) * _DH, 4 * H * _DH
  states = 4 * H * _DH**2 / delta.CHUNK
  return flops, num_tokens * (3 * channels + 2 * out + 2 * states)


def _make(
    way: str, K: int, P: int, T: int, device: jax.Device | None = None
) -> tuple[Callable[..., Any], list[Any]]:
  """Returns a gradient, and its inputs or their shapes."""
  L, H = P + K * T, _G * _M
  indices_1xL = np.arange(L, dtype=np.int32)[None]
  dtype = jnp.bfloat16 if device else jnp.float32
  if way == "delta":
    config = dataclasses.replace(
        peer_model.SHAPE,
        family="qwen3_5_text",
        num_layers=2,
        delta_layers=(True, False),
        delta_key_heads=_G,
        delta_value_heads=H,
        delta_key_dim=_DH,
        delta_value_dim=_DH,
        delta_taps=_TAPS,
    )
    X = config.delta_channels
    shapes = [(1, L, X), (X, _TAPS), (1, L, H), (1, L, H)]
    dtypes = [dtype, dtype, jnp.float32, jnp.float32]
  else:
    shapes = [(1, L, _G, _M, _DH), (1, L, _G, _DH), (1, L, _G, _DH)]
    dtypes = [dtype] * 3

  def loss(*inputs: jax.Array) -> jax.Array:
    places = packed.places_of(indices_1xL, jnp.ones((1, P)), (1, K, T))
    if way == "delta":
      mixed, conv, log_decay, beta = inputs
      out, _ = delta.over_rows(
          config,
          places,
          True,
          mixed,
          conv,
          -jax.nn.softplus(log_decay),
          jax.nn.sigmoid(beta),
      )
    else:
      out = row_attention.attend_rows(*inputs, places, places, 0, "cpu")
    return jnp.sum(out.astype(jnp.float32) ** 2)

  if device:
    place = jax.sharding.SingleDeviceSharding(device)
    make = lambda shape, dtype: jax.ShapeDtypeStruct(
        shape, dtype, sharding=place
    )
  else:
    rng = np.random.default_rng(0)
    make = lambda shape, dtype: jnp.asarray(rng.normal(size=shape), dtype)
  inputs = [make(*pair) for pair in zip(shapes, dtypes)]
  return jax.grad(loss, tuple(range(len(inputs)))), inputs
