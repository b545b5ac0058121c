# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""The `benchmark` program: one named benchmark, one JSON line."""

from collections.abc import Sequence
import importlib
import json
import sys

import ml_collections

from tba_jax import processes

# Each module has `run(config, operands) -> dict`; its docstring says what is
# measured, and `benchmarks/README.md` has results and commands.
BENCHMARKS = (
    "decode",
    "decode_lengths",
    "decode_live",
    "end_to_end",
    "objectives",
    "publish",
    "replay",
    "replay_memory",
    "scale",
    "spread",
    "store",
    "train_step",
    "watch",
)


def run_benchmark(
    config: ml_collections.ConfigDict,
    workdir: str | None,
    operands: Sequence[str],
) -> int:
  """As `run`, in the environment that a run's roles have; peers have it too."""
  processes.restart_as_role()
  return run(config, workdir, operands)


def run(
    config: ml_collections.ConfigDict,
    workdir: str | None,
    operands: Sequence[str],
) -> int:
  """Runs `operands[0]` with the other operands; prints its JSON line."""
  del workdir
  if not operands or operands[0] not in BENCHMARKS:
    print(
        f"error: --program=benchmark {' '.join(operands)}: the first operand"
        f" must be one of {', '.join(BENCHMARKS)}",
        file=sys.stderr,
    )
    return processes.EXIT_CONFIG
  module = importlib.import_module(f"tba_jax.benchmarks.{operands[0]}")
  result = module.run(config, list(operands[1:]))
  machine = {"cores": len(processes.available_cores())}
  line = {"benchmark": operands[0], **result, "machine": machine}
  print(json.dumps(line), flush=True)
  return processes.EXIT_OK
