# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Runs one study; see `benchmarks/runner.py`, and `README.md` for commands.

python -m studies [--config=FILE] [--config.key=value …] NAME [OPERAND …]
"""

import sys

from benchmarks import runner
from tba_jax.system import processes

STUDIES = (
    "certificate",
    "distill",
    "diversity",
    "enumerable",
    "fleet",
    "free_search",
    "logged",
    "planted",
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
  # Roles of a run and other libraries inherit this environment.
  processes.restart_as_role()
  sys.exit(runner.run("studies", MODULES, sys.argv[1:]))
