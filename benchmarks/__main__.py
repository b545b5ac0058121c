# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Runs one benchmark; see `runner.py` for usage, `README.md` for results.

python -m benchmarks [--config=FILE] [--config.key=value …] NAME [OPERAND …]
"""

import sys

from benchmarks import runner
from tba_jax.system import processes

BENCHMARKS = (
    "cost_ratios",
    "decode",
    "decode_lengths",
    "delta",
    "end_to_end",
    "environments",
    "first_hour",
    "gpu",
    "long_completions",
    "long_tail",
    "long_tail_searcher",
    "objectives",
    "probe",
    "prose",
    "publish",
    "ragged_decode",
    "real_speed",
    "replay",
    "scale",
    "served",
    "slices",
    "store",
    "structure",
    "throughput",
    "time_to_reward",
    "train_step",
)
MODULES = {name: f"benchmarks.{name}" for name in BENCHMARKS}

if __name__ == "__main__":
  # Roles of a run and other libraries inherit this environment.
  processes.restart_as_role()
  sys.exit(runner.run("benchmarks", MODULES, sys.argv[1:]))
