# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Runs a module as a role of a run, as its supervisor starts it.

    python -m tba_jax.system.role NAME MODULE WORD…

The process ends with its supervisor and reports its heartbeat from the start:
MODULE may take seconds to import.
"""

import runpy
import sys

from tba_jax.system import heartbeat
from tba_jax.system import processes

if __name__ == "__main__":
  processes.die_with_supervisor()
  heartbeat.start(sys.argv.pop(1))
  # The name of the module is replaced by its path.
  sys.argv.pop(0)
  runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
