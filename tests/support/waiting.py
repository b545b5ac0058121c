# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""The one wait of tests, with a deadline; and whether a process runs."""

from collections.abc import Callable
import pathlib
import time
from typing import Any


def wait_until(
    condition: Callable[[], Any],
    what: str | Callable[[], str] = "the condition",
    wait_s: float = 60.0,
    *,
    is_lost: Callable[[], Any] = lambda: False,
) -> Any:
  """Returns the value of a condition once it holds.

  Args:
    condition: looked at every few milliseconds.
    what: awaited event, or a function that describes the state at a failure.
    wait_s: seconds until AssertionError.
    is_lost: whether there is nothing left to wait for: AssertionError at once.
  """
  deadline = time.monotonic() + wait_s
  while not (value := condition()):
    lost = is_lost()
    if lost or time.monotonic() > deadline:
      text = what if isinstance(what, str) else what()
      why = f"no longer to come ({lost})" if lost else f"not within {wait_s} s"
      raise AssertionError(f"{why}: {text}")
    time.sleep(0.005)
  return value


def is_running(pid: int) -> bool:
  """Returns whether a process has not ended; a zombie has."""
  try:
    status = pathlib.Path(f"/proc/{pid}/stat").read_text()
  except (FileNotFoundError, ProcessLookupError):
    return False
  return status.rpartition(")")[2].split()[0] != "Z"
