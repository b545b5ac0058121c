# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Becomes a command that ends when the process that started it does.

    python -m tba_jax.rewards.leash COMMAND WORD…

Its parent has threads of JAX, in which nothing may run between fork and exec.
"""

import os
import sys

from tba_jax.system import processes

if __name__ == "__main__":
  processes.die_with_parent()
  try:
    os.execvp(sys.argv[1], sys.argv[1:])
  except OSError as error:
    sys.exit(f"{sys.argv[1]}: {error}")
