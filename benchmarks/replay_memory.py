# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Memory of the trainer's host for each completion that its buffer stores.

Completions of 64 tokens, 50 a prompt, all different. What is measured is the
memory that the process owns before and after they are inserted.
"""

from collections.abc import Sequence
import gc
import os
import pathlib
from typing import Any

import ml_collections

from benchmarks import replay

_SIZE = 1_000_000
_PLANNED = 10_000_000


def run(
    config: ml_collections.ConfigDict, operands: Sequence[str]
) -> dict[str, Any]:
  """Returns bytes a stored completion, and the gigabytes of ten million.

  Args:
    config: `seed` and `replay` are read, but for the capacities.
    operands: none, or how many completions to store.

  Raises:
    ValueError: the operand is not a number of 8 or more.
  """
  size = int(operands[0]) if operands else _SIZE
  if len(operands) > 1 or size < 8:
    raise ValueError(f"operands {list(operands)}: allowed is a number from 8")
  groups = replay.make_groups(config, size)
  groups.next()
  gc.collect()
  before = _resident_bytes()
  buffer = replay.make_buffer(config, size)
  replay.fill(buffer, groups, size)
  gc.collect()
  grown = _resident_bytes() - before
  each = grown / len(buffer)
  return {
      "stored_completions": len(buffer),
      "mb": grown / 1e6,
      "bytes_per_completion": each,
      "gb_of_ten_million": each * _PLANNED / 1e9,
  }


def _resident_bytes() -> int:
  pages = int(pathlib.Path("/proc/self/statm").read_text().split()[1])
  return pages * os.sysconf("SC_PAGE_SIZE")
