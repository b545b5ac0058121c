# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Runs one benchmark and prints its result as one JSON line.

    python -m benchmarks [--config=FILE] [--config.key=value …] NAME [OPERAND …]

Where no config is given, it is that of `configs/countdown.py`.
Each module has `run(config, operands) -> dict`; its docstring says what is
measured, and `README.md` here has results and commands.
"""

from collections.abc import Sequence
import importlib
import json
import pathlib
import sys

from benchmarks import results
from tba_jax.config import load
from tba_jax.system import processes

BENCHMARKS = (
    "chaos",
    "cost_ratios",
    "decode",
    "decode_lengths",
    "distill",
    "diversity",
    "end_to_end",
    "enumerable",
    "environments",
    "faults",
    "free_search",
    "fuzz",
    "gpu",
    "gpu_attention",
    "listeners",
    "logged",
    "long_completions",
    "objectives",
    "probe",
    "publish",
    "ragged_decode",
    "real",
    "real_speed",
    "red_team_diversity",
    "reference_cost",
    "replay",
    "rounds",
    "run_ahead",
    "scale",
    "search",
    "served",
    "slices",
    "soak",
    "spread",
    "staleness",
    "store",
    "strangers",
    "structure",
    "throughput",
    "time_to_reward",
    "train_step",
    "turns",
    "watch",
)


_CONFIG = pathlib.Path(__file__).parent.parent / "configs" / "countdown.py"


def main(argv: Sequence[str]) -> int:
  """Runs the benchmark that `argv` names; prints its JSON line."""
  argv, overrides = load.split_argv(argv)
  path = str(_CONFIG)
  if argv and argv[0].startswith("--config="):
    path = argv[0].removeprefix("--config=")
    argv = argv[1:]
  if not argv or argv[0] not in BENCHMARKS:
    return processes.refuse(
        f"python -m benchmarks {' '.join(argv)}: the first operand must be one"
        f" of {', '.join(BENCHMARKS)}"
    )
  try:
    with processes.importing():
      module = importlib.import_module(f"benchmarks.{argv[0]}")
  except ModuleNotFoundError as error:
    if error.name != "matplotlib":
      raise
    return processes.refuse(
        f"python -m benchmarks {argv[0]} draws with matplotlib, which is not"
        " installed: pip install 'tba_jax[plots]'"
    )
  result = module.run(load.load_config(path, overrides), list(argv[1:]))
  line = {"benchmark": argv[0], **result, "machine": results.machine()}
  print(json.dumps(line), flush=True)
  return processes.EXIT_OK


if __name__ == "__main__":
  # A run's roles, and peers, have this environment.
  processes.restart_as_role()
  sys.exit(main(sys.argv[1:]))
