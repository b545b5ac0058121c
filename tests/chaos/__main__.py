# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Runs one attack: `benchmarks/runner.py` says how, `README.md` has results.

    python -m tests.chaos [--config=FILE] [--config.key=value …] NAME \\
        [OPERAND …]
"""

import sys

from benchmarks import runner
from tba_jax.system import processes

ATTACKS = (
    "chaos",
    "faults",
    "fuzz",
    "listeners",
    "soak",
    "strangers",
)
MODULES = {name: f"tests.chaos.{name}" for name in ATTACKS}

if __name__ == "__main__":
  # A run's roles, and peers, have this environment.
  processes.restart_as_role()
  sys.exit(runner.run("tests.chaos", MODULES, sys.argv[1:]))
