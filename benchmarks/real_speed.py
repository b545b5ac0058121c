# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Tokens per second of a real model, versus PyTorch, vLLM and the machine.

    python -m benchmarks --config=configs/instructions.py real_speed [REPEATS]

The model of `config.init` samples 2 prompts x 16 completions of 64 + 64 tokens
(`decode`), and computes the config's loss and its gradient on 2 prompts x 8
(`gradient`). Hugging Face's `generate` and PyTorch do the same on all cores, in
float32 and bfloat16. vLLM is timed if TBA_JAX_VLLM names an interpreter with
it. Each repeat times all programs in turn; a figure is the median over repeats
of the fastest run. Only completion tokens count.

A limit is the time of the matrix products alone, in the fastest layout on this
machine, with weights larger than the caches. For `decode` it excludes prefill
and attention. For `gradient` it has three products per matrix, and computes
each prompt once for all its completions, as ours does.

Writes real_speed.json and the tables real_speed.md and real_speed_goals.md to
this folder.
"""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import functools
import json
import math
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

import jax
import jax.numpy as jnp
import ml_collections

from benchmarks import decode
from benchmarks import peer_model
from benchmarks import peer_speed
from benchmarks import results
from tba_jax import types
from tba_jax.learning import published
from tba_jax.losses import objective
from tba_jax.models import config as config_lib
from tba_jax.models.hf import hf
from tba_jax.models.net import transformer
from tba_jax.system import jsonl

VLLM_VARIABLE = "TBA_JAX_VLLM"
DTYPES = ("float32", "bfloat16")
# Goals for the faster dtype of each side: work, program, and minimum factor.
GOALS = (
    ("decode", "transformers", 3.0),
    ("decode", "vllm", 1.8),
    ("decode", "limit", 0.65),
    ("gradient", "torch", 1.6),
)
_REPEATS = 3
RESULTS = pathlib.Path(__file__).parent
_PEER_DEADLINE_S = 1800.0
# Minimum total bytes and maximum number of weights that a limit cycles over.
_COLD_BYTES, MOST_WEIGHTS = 64 << 20, 64

# (work, program, dtype).
Side = tuple[str, str, str]


@dataclasses.dataclass(frozen=True)
class Work:
  """Work that is timed; reported figures use the defaults.

  decode: B, K, P and T of what is sampled.
  gradient: B, K, P and T of a gradient.
  runs: repetitions in a turn, the fastest of which counts.
  """

  decode: tuple[int, int, int, int] = (2, 16, 64, 64)
  gradient: tuple[int, int, int, int] = (2, 8, 64, 64)
  runs: int = 3

  def num_tokens(self, name: str) -> int:
    B, K, _, T = getattr(self, name)
    return B * K * T


def run(
    config: ml_collections.ConfigDict,
    operands: Sequence[str],
    work: Work = Work(),
) -> dict[str, Any]:
  """Times all sides in turn; writes real_speed.json and its tables.

  Args:
    config: only `init`, `loss`, `train.remat` and `sampling.temperature` are
      read.
    operands: repeats (default 3).
    work: sizes of what is timed.

  Returns:
    `tokens_per_s`: work, program, dtype and the figure of each repeat; `goals`:
    work, program, required factor, and measured factor (None without the
    program); `folder`, and sizes.

  Raises:
    ValueError: `config.init` names no model, or the operand is invalid.
    RuntimeError: another program failed; the message has the end of its output.
  """
  if len(operands) > 1 or not all(o.isdecimal() and int(o) for o in operands):
    raise ValueError(f"operands {' '.join(operands)!r}: must be repeats from 1")
  repeats = int(operands[0]) if operands else _REPEATS
  if config.init in ("scratch", "sft"):
    raise ValueError(
        f"config.init = {config.init!r}: must be a model, as in"
        " --config=configs/instructions.py"
    )
  shape, params = hf.load(config.init)
  with tempfile.TemporaryDirectory(prefix="tba_jax_bench_") as folder:
    hf.save(folder, shape, params)
    sides = _ours(config, shape, params, work) | _peers(folder, work)
    speeds: dict[Side, list[float]] = {side: [] for side in sides}
    for repeat in range(repeats):
      for side, seconds in sides.items():
        speeds[side].append(work.num_tokens(side[0]) / seconds())
        line = f"{' '.join(side)}: {speeds[side][-1]:.0f} tokens/s"
        print(f"{repeat + 1}/{repeats} {line}", file=sys.stderr)
  result = {
      "tokens_per_s": [[*side, values] for side, values in speeds.items()],
      "goals": [[*goal, _factor(speeds, goal)] for goal in GOALS],
      "model": config.init,
      "num_params": sum(x.size for x in jax.tree.leaves(params)),
      **dataclasses.asdict(work),
      "machine": results.machine(),
  }
  RESULTS.mkdir(parents=True, exist_ok=True)
  jsonl.atomic_write_json(RESULTS / "real_speed.json", result)
  results.print_table(make_table(speeds), RESULTS / "real_speed.md")
  results.print_table(make_goals(speeds), RESULTS / "real_speed_goals.md")
  return {**result, "folder": str(RESULTS)}


def _factor(
    speeds: Mapping[Side, Sequence[float]], goal: tuple[str, str, float]
) -> float | None:
  """Returns our speed over a program's, each in its faster dtype.

  For the limit, returns the largest share over dtypes; None without figures.
  """
  work, program, _ = goal
  medians = lambda name: {
      side[2]: statistics.median(values)
      for side, values in speeds.items()
      if side[:2] == (work, name)
  }
  ours, peers = medians("ours"), medians(program)
  if not peers:
    return None
  if program == "limit":
    return max(ours[dtype] / peers[dtype] for dtype in peers)
  return max(ours.values()) / max(peers.values())


def make_table(speeds: Mapping[Side, Sequence[float]]) -> list[list[str]]:
  """Returns a row per side: its speed, relative to the limit and to ours."""
  rows = [
      ["work", "program", "dtype", "tokens/s", "of the limit", "ours over it"]
  ]
  for (work, program, dtype), values in speeds.items():
    median = statistics.median(values)
    ours, limit = (
        statistics.median(speeds[work, name, dtype])
        for name in ("ours", "limit")
    )
    cell = f"{median:.0f}"
    if len(values) > 1:
      cell += f" ({min(values):.0f} to {max(values):.0f})"
    over = "" if program == "ours" else f"{ours / median:.2f}"
    share = f"{median / limit:.2f}"
    rows.append([work, program, dtype, cell, share, over])
  return rows


def make_goals(speeds: Mapping[Side, Sequence[float]]) -> list[list[str]]:
  """Returns a row per goal with the measured value."""
  rows = [["ours over", "in", "asked", "measured"]]
  for work, program, goal in GOALS:
    factor = _factor(speeds, (work, program, goal))
    cell = "not measured" if factor is None else f"{factor:.2f}"
    rows.append([program, work, f"{goal:g}", cell])
  return rows


def _ours(
    config: ml_collections.ConfigDict,
    shape: config_lib.ModelConfig,
    params: types.PyTree,
    work: Work,
) -> dict[Side, Callable[[], float]]:
  """Returns functions that return the seconds of a turn, limits included."""
  sides = {}
  B, K, P, T = work.decode
  sizes = decode.Work(B, K, P, T)
  config = config.copy_and_resolve_references()
  for dtype in DTYPES:
    shape_of_dtype = dataclasses.replace(shape, compute_dtype=dtype)
    config.model.compute_dtype = dtype
    copy = published.snapshot(params, dtypes=published.published_dtypes(config))
    sample = decode.make_ours(
        transformer.make_model(shape_of_dtype), copy, sizes
    )
    best = functools.partial(_best, work.runs)
    sides["decode", "ours", dtype] = functools.partial(
        best, functools.partial(sample, T)
    )
    sides["decode", "limit", dtype] = functools.partial(
        lambda dtype: T * _decode_limit_s(shape, dtype, B * K), dtype
    )
    model = transformer.make_model(shape_of_dtype, remat=config.train.remat)
    sides["gradient", "ours", dtype] = functools.partial(
        best, _make_gradient(config, model, params, work.gradient)
    )
    sides["gradient", "limit", dtype] = functools.partial(
        lambda dtype: _gradient_limit_s(shape, dtype, work.gradient), dtype
    )
  return sides


def _best(runs: int, once: Callable[[], float]) -> float:
  return min(once() for _ in range(runs))


def _make_gradient(
    config: ml_collections.ConfigDict,
    model: transformer.Model,
    params: types.PyTree,
    shape: Sequence[int],
) -> Callable[[], float]:
  """Returns a function that returns the seconds of a loss and its gradient."""
  loss_fn = objective.make_loss_fn(config, model)
  batch = peer_model.make_batch(shape, model.config.vocab_size)
  gradient = jax.jit(
      jax.value_and_grad(
          lambda params, batch, beta: loss_fn(params, {}, batch, beta)[0]
      )
  )

  def once() -> float:
    start = time.perf_counter()
    jax.block_until_ready(
        gradient(params, batch, jnp.float32(config.loss.beta))
    )
    return time.perf_counter() - start

  once()
  return once


def _matrices(c: config_lib.ModelConfig) -> list[tuple[int, int, int]]:
  """Returns (inputs, outputs, number) of the layers' matrices.

  Matrices with the same input are merged: a wider product is not slower.
  """
  heads = c.num_heads + 2 * c.num_kv_heads
  return [
      (c.width, heads * c.head_dim, c.num_layers),
      (c.num_heads * c.head_dim, c.width, c.num_layers),
      (c.width, 2 * c.mlp_width, c.num_layers),
      (c.mlp_width, c.width, c.num_layers),
  ]


def _decode_limit_s(
    c: config_lib.ModelConfig, dtype: str, num_rows: int
) -> float:
  """Returns the seconds of the products of a decode step."""
  matrices = [*_matrices(c), (c.width, c.vocab_size, 1)]
  return sum(
      number * _product_s(dtype, num_rows, inputs, outputs)
      for inputs, outputs, number in matrices
  )


def _gradient_limit_s(
    c: config_lib.ModelConfig, dtype: str, shape: Sequence[int]
) -> float:
  """Returns the seconds of a gradient's products.

  Layers process each prompt once and all completions; the head only computes
  logits of completions.
  """
  B, K, P, T = shape
  total = 0.0
  for matrices, M in (
      (_matrices(c), B * (P + K * T)),
      ([(c.width, c.vocab_size, 1)], B * K * T),
  ):
    for inputs, outputs, number in matrices:
      total += number * (
          _product_s(dtype, M, inputs, outputs)
          + _product_s(dtype, M, outputs, inputs)
          + _product_s(dtype, inputs, M, outputs)
      )
  return total


def _product_s(dtype: str, M: int, K: int, N: int) -> float:
  """Returns the seconds of a product [M, K] x [K, N] in the fastest layout."""
  matrix_bytes = K * N * jnp.dtype(dtype).itemsize
  count = min(max(1, _COLD_BYTES // matrix_bytes), MOST_WEIGHTS)
  return min(
      _layout_s(dtype, left, right, {"m": M, "k": K, "n": N}, count)
      for left, right in (("mk", "kn"), ("mk", "nk"), ("km", "kn"))
  )


def _layout_s(
    dtype: str, left: str, right: str, sizes: Mapping[str, int], count: int
) -> float:
  ones = lambda axes: jnp.ones([sizes[axis] for axis in axes], dtype)
  rows, weights = ones(left), [ones(right) * i for i in range(count)]
  subscripts = f"{left},{right}->mn"
  jax.block_until_ready(_products(subscripts, rows, weights))
  least = math.inf
  for _ in range(3):
    start = time.perf_counter()
    jax.block_until_ready(_products(subscripts, rows, weights))
    least = min(least, time.perf_counter() - start)
  return least / count


@functools.partial(jax.jit, static_argnums=0)
def _products(
    subscripts: str, rows: jax.Array, weights: Sequence[jax.Array]
) -> list[jax.Array]:
  product = functools.partial(
      jnp.einsum, subscripts, rows, preferred_element_type=jnp.float32
  )
  return [product(weight) for weight in weights]


def _peers(folder: str, work: Work) -> dict[Side, Callable[[], float]]:
  """Returns functions that return the seconds of another program's turn."""
  programs = [
      ("decode", "transformers", "generate", sys.executable),
      ("gradient", "torch", "gradient", sys.executable),
  ]
  if python := os.environ.get(VLLM_VARIABLE):
    programs.insert(1, ("decode", "vllm", "vllm", python))
  return {
      (name, program, dtype): functools.partial(
          run_peer,
          python,
          operand,
          folder,
          dtype,
          getattr(work, name),
          work.runs,
      )
      for name, program, operand, python in programs
      for dtype in DTYPES
  }


def run_peer(
    python: str,
    program: str,
    folder: str,
    dtype: str,
    shape: Sequence[int],
    runs: int,
) -> float:
  """Returns the minimum seconds of a program in `peer_speed.PROGRAMS`."""
  words = [program, folder, dtype, *shape, runs]
  try:
    process = subprocess.run(
        [python, peer_speed.__file__, *map(str, words)],
        capture_output=True,
        text=True,
        timeout=_PEER_DEADLINE_S,
        check=False,
    )
  except subprocess.TimeoutExpired as error:
    raise RuntimeError(
        f"{program}: nothing after {_PEER_DEADLINE_S:.0f} s"
    ) from error
  if process.returncode:
    raise RuntimeError(
        f"{program} ended with status {process.returncode}:"
        f" {process.stderr[-2000:]}"
    )
  # vLLM also logs to stdout, even after the result.
  _, _, rest = f"\n{process.stdout}".rpartition(f"\n{peer_speed.RESULT}")
  return min(json.loads(rest.partition("\n")[0]))
