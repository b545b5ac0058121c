# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""The `report` program: the entry that `main` calls."""

from collections.abc import Sequence
import sys

import ml_collections

from tba_jax.report import build


def run(
    config: ml_collections.ConfigDict | None,
    workdir: str | None,
    operands: Sequence[str] = (),
) -> int:
  """Writes the report of one run and prints its path.

  Args:
    config: not used; a run directory holds its own.
    workdir: the run directory, where there is no operand.
    operands: the run directory.

  Returns:
    0, or 2 where there is not one run directory to report on.
  """
  del config
  try:
    path = build.run(list(operands) or ([workdir] if workdir else []))
  except ValueError as error:
    print(f"error: {error}", file=sys.stderr)
    return 2
  print(path)
  return 0
