# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""The `report` program: writes the page of a run, or compares several."""

from collections.abc import Sequence

import ml_collections

from tba_jax.report import compare
from tba_jax.report import page
from tba_jax.system import bucket
from tba_jax.system import processes


def run(
    config: ml_collections.ConfigDict | None,
    workdir: str | None,
    operands: Sequence[str] = (),
) -> int:
  """Writes the report of one run, or compares several; prints its path.

  Args:
    config: unused; a run directory has its own config.
    workdir: run directory if there are no operands.
    operands: run directories, or folders that contain some; gs:// also works.

  Returns:
    0; 2 if an operand is not a directory.
  """
  del config
  folders = list(operands) or ([workdir] if workdir else [])
  try:
    if not folders:
      raise ValueError("report takes one or several run directories")
    folders = [bucket.stage(run, "report", key="operand") for run in folders]
    paths = compare.find_runs(folders)
    if len(paths) == 1:
      path = page.write_report(paths[0])
      bucket.send(paths[0], "report.html", "trace.json")
    else:
      path = compare.write_comparison(paths)
  except ValueError as error:
    return processes.refuse(error)
  print(path)
  return processes.EXIT_OK
