# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Runs one study; see `benchmarks/runner.py`, and `README.md` for commands.

python -m studies [--config=FILE] [--config.key=value …] NAME [OPERAND …]
"""

import sys

from benchmarks import runner
from tba_jax.system import processes

STUDIES = (
    "distill",
    "diversity",
    "enumerable",
    "free_search",
    "logged",
    "real",
    "red_team_diversity",
    "rounds",
    "run_ahead",
    "search",
    "staleness",
    "turns",
)
MODULES = {name: f"studies.{name}.{name}" for name in STUDIES}

if __name__ == "__main__":
  # The roles of a run, and peers, inherit this environment.
  processes.restart_as_role()
  sys.exit(runner.run("studies", MODULES, sys.argv[1:]))
