# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Tells what was read of a task's data, and what was left out and why.

Nothing to tell of a task that is not made of rows. No JAX here.
"""

from collections.abc import Callable
import pathlib

from tba_jax import jsonl
from tba_jax.tasks import base

FILE = "data.json"


def write(
    task: base.Task,
    workdir: pathlib.Path,
    on_event: Callable[[str, str], None],
) -> None:
  """Writes WORKDIR/data.json, and an event for each line.

  Args:
    task: as the policy sees it: prompts that are too long are known.
    workdir: of the run.
    on_event: receives ("data", line).
  """
  report = base.report_of(task)
  if report is not None:
    jsonl.atomic_write_json(workdir / FILE, report.to_json())
    for line in report.lines():
      on_event("data", line)


def show(task: base.Task) -> None:
  """Prints the lines of the report."""
  report = base.report_of(task)
  if report is not None:
    for line in report.lines():
      print(f"data: {line}", flush=True)
