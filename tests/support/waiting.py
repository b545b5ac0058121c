# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Waits with deadlines for tests; state of processes."""

from collections.abc import Callable
import os
import pathlib
import signal
import time
from typing import Any


def wait_until(
    condition: Callable[[], Any],
    what: str | Callable[[], str] = "the condition",
    wait_s: float = 60.0,
    *,
    is_lost: Callable[[], Any] = lambda: False,
    every_s: float = 0.005,
) -> Any:
  """Returns the value of a condition once it holds.

  Args:
    condition: awaited condition.
    what: description of the event, or a function that returns it on failure.
    wait_s: seconds until AssertionError.
    is_lost: function of whether the wait is hopeless, for an AssertionError.
    every_s: seconds between two polls of the condition.
  """
  deadline = time.monotonic() + wait_s
  while not (value := condition()):
    lost = is_lost()
    if lost or time.monotonic() > deadline:
      text = what if isinstance(what, str) else what()
      why = f"no longer to come ({lost})" if lost else f"not within {wait_s} s"
      raise AssertionError(f"{why}: {text}")
    time.sleep(every_s)
  return value


def is_running(pid: int) -> bool:
  """Returns whether a process is running; a zombie is not."""
  try:
    status = pathlib.Path(f"/proc/{pid}/stat").read_text()
  except (FileNotFoundError, ProcessLookupError):
    return False
  return _state(status) != "Z"


def stop(pid: int) -> None:
  """Sends SIGSTOP and waits until every thread of the process has stopped.

  On a busy machine, threads may still respond for a while after the signal.
  """
  os.kill(pid, signal.SIGSTOP)
  wait_until(lambda: _is_stopped(pid), f"process {pid} to stop")


def _is_stopped(pid: int) -> bool:
  try:
    stats = [
        (task / "stat").read_text()
        for task in pathlib.Path(f"/proc/{pid}/task").iterdir()
    ]
  except FileNotFoundError:  # The thread has ended.
    return False
  return all(_state(stat) == "T" for stat in stats)


def _state(stat: str) -> str:
  return stat.rpartition(")")[2].split()[0]


def after(seconds: float) -> Callable[[], bool]:
  """Returns a function that returns true after some seconds."""
  until = time.monotonic() + seconds
  return lambda: time.monotonic() > until
