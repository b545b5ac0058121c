# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""A child process that answers over pipes within a deadline."""

from collections.abc import Mapping, Sequence
import contextlib
import os
import select
import signal
import subprocess
import threading
import time
from typing import IO

from tba_jax.system import processes

_EXIT_S = 2.0


class BrokenPipe(Exception):
  """The child is gone, or sent an invalid message."""


class LateReply(Exception):
  """The deadline passed."""


class Child:
  """A process in its own group, to be killed with all that it started."""

  def __init__(
      self,
      command: Sequence[str],
      environment: Mapping[str, str],
      stderr: IO[bytes] | None = None,
  ):
    """Starts the command; OSError if it cannot be started."""
    self._kill_lock = threading.Lock()
    self._process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=stderr,
        start_new_session=True,
        env=environment,
    )
    for pipe in (self._process.stdin, self._process.stdout):
      os.set_blocking(pipe.fileno(), False)

  @property
  def pid(self) -> int:
    return self._process.pid

  def write(self, data: bytes, deadline: float) -> None:
    """Writes to the child's input; `deadline` is on the monotonic clock.

    Raises:
      BrokenPipe: the child has closed it.
      LateReply: the deadline passed.
    """
    left = memoryview(data)
    while left:
      self._wait(self._process.stdin, select.POLLOUT, deadline)
      try:
        left = left[os.write(self._process.stdin.fileno(), left) :]
      except BlockingIOError:
        continue
      except OSError as error:
        raise BrokenPipe(str(error)) from error

  def read(self, max_bytes: int, deadline: float) -> bytes:
    """Waits for output, and returns what there is; raises as `write`."""
    while True:
      self._wait(self._process.stdout, select.POLLIN, deadline)
      with contextlib.suppress(BlockingIOError):
        data = os.read(self._process.stdout.fileno(), max_bytes)
        if not data:
          raise BrokenPipe("it ended")
        return data

  def has_output(self, wait_s: float = 0.0) -> bool:
    """Waits for output or its end; returns whether there is output."""
    flags = _ready(self._process.stdout, select.POLLIN, wait_s)
    return bool(flags & select.POLLIN)

  def has_ended(self) -> bool:
    if self._process.returncode is not None or not hasattr(os, "waitid"):
      return self._process.poll() is not None
    # Not waited for until `kill`: its number, which is also that of its group,
    # might be another process's afterwards.
    flags = os.WEXITED | os.WNOHANG | os.WNOWAIT
    return os.waitid(os.P_PID, self.pid, flags) is not None

  def kill(self) -> None:
    """Kills the child with its descendants, and its group."""
    with self._kill_lock:
      if self._process.returncode is not None:
        return
      if not self.has_ended():
        self._process.send_signal(signal.SIGSTOP)
        processes.kill_descendants(self.pid)
      with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(self.pid, signal.SIGKILL)
      with contextlib.suppress(subprocess.TimeoutExpired):
        self._process.wait(_EXIT_S)
    for pipe in (self._process.stdin, self._process.stdout):
      pipe.close()

  def _wait(self, pipe: IO[bytes], events: int, deadline: float) -> None:
    left_s = deadline - time.monotonic()
    if left_s <= 0 or not _ready(pipe, events, left_s):
      raise LateReply()


def _ready(pipe: IO[bytes], events: int, wait_s: float) -> int:
  """Returns the poll events of a pipe; 0 on timeout."""
  poll = select.poll()
  poll.register(pipe, events)
  return sum(flags for _, flags in poll.poll(wait_s * 1000))
