# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""A child process that answers over pipes within a deadline."""

from collections.abc import Mapping, Sequence
import contextlib
import os
import select
import signal
import subprocess
import time
from typing import IO

_EXIT_S = 2.0


class BrokenPipe(Exception):
  """The child is gone, or sent an invalid message."""


class LateReply(Exception):
  """The deadline passed."""


class Child:
  """A process in its own group, to be killed with all that it started.

  uid: user id to which the child changed, None if it is this process's.
  """

  def __init__(
      self,
      command: Sequence[str],
      environment: Mapping[str, str],
      stderr: IO[bytes] | None = None,
  ):
    """Starts the command; OSError if it cannot be started."""
    self.uid: int | None = None
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
    return self._process.poll() is not None

  def status(self) -> int | None:
    """Returns the exit status; None if the child does not exit soon."""
    try:
      return self._process.wait(_EXIT_S)
    except subprocess.TimeoutExpired:
      return None

  def kill(self) -> None:
    """Kills the child with all that it started."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
      os.killpg(self._process.pid, signal.SIGKILL)
    if self.uid is not None:
      # Processes that left the group too: all of their user.
      with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        subprocess.run(
            ["kill", "-9", "-1"],
            user=self.uid,
            group=self.uid,
            extra_groups=[],
            stderr=subprocess.DEVNULL,
            check=False,
            timeout=_EXIT_S,
        )
    self.status()
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
