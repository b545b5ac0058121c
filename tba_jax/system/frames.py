# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Messages over pipes: four bytes of length, then JSON.

An answer begins with the nonce that followed its request, so that no other
writer's bytes are taken for the answer.
"""

from collections.abc import Callable
import json
import math
import os
import secrets
import select
import struct
import time
from typing import Any, IO

HEADER = struct.Struct(">I")
NONCE_BYTES = 16
MAX_BYTES = 64 << 20

# Function that reads the given number of bytes.
ReadFn = Callable[[int], bytes]


class FrameError(Exception):
  """Bytes that are not a message, or not the answer to the request."""


def nonce() -> bytes:
  return secrets.token_bytes(NONCE_BYTES)


def pack(message: Any) -> bytes:
  data = json.dumps(message).encode()
  return HEADER.pack(len(data)) + data


def unpack(read: ReadFn) -> bytes:
  """Returns the JSON bytes of the next message; raises as `read` does.

  Raises:
    FrameError: the message is too long.
  """
  (length,) = HEADER.unpack(read(HEADER.size))
  if length > MAX_BYTES:
    raise FrameError(f"a message of {length} bytes")
  return read(length)


def parse(data: bytes) -> dict[str, Any]:
  """Returns an answer; raises FrameError if it is not a JSON object."""
  try:
    answer = json.loads(data)
  except (ValueError, RecursionError) as error:
    raise FrameError(str(error)) from error
  if not isinstance(answer, dict):
    raise FrameError("an answer that is not an object")
  return answer


class PipeClosed(Exception):
  """The other side has closed, or sent bytes that are not a message."""


class PipeTimeout(Exception):
  """The deadline passed."""


class WatchedPipeClosed(Exception):
  """The watched pipe has closed."""


class Pipes:
  """Two pipes to another process; deadlines are on the monotonic clock."""

  def __init__(
      self,
      source: IO[bytes],
      sink: IO[bytes],
      watched: IO[bytes] | None = None,
  ):
    """Takes the pipes; `WatchedPipeClosed` is raised once `watched` ends."""
    self.source, self._sink = source, sink
    self._watched = watched

  def read_some(self, most: int, deadline: float = math.inf) -> bytes:
    """Waits for bytes, and returns up to `most` of them.

    Raises:
      PipeClosed: the other side has closed.
      PipeTimeout: the deadline passed.
    """
    self._wait(self.source, select.POLLIN, deadline)
    data = os.read(self.source.fileno(), min(most, 1 << 20))
    if not data:
      raise PipeClosed("it ended")
    return data

  def read(self, size: int, deadline: float = math.inf) -> bytes:
    """Returns `size` bytes; raises as `read_some` does."""
    parts = []
    while size:
      parts.append(self.read_some(size, deadline))
      size -= len(parts[-1])
    return b"".join(parts)

  def write(self, data: bytes, deadline: float = math.inf) -> None:
    """Writes all of `data`; raises as `read_some` does."""
    remaining = memoryview(data)
    while remaining:
      self._wait(self._sink, select.POLLOUT, deadline)
      try:
        # No more than a writable pipe accepts at once.
        remaining = remaining[
            os.write(self._sink.fileno(), remaining[: select.PIPE_BUF]) :
        ]
      except OSError as error:
        raise PipeClosed(str(error)) from error

  def has_input(self, wait_s: float = 0.0) -> bool:
    """Waits for bytes or the end; returns whether there are bytes."""
    poll = select.poll()
    poll.register(self.source, select.POLLIN)
    return any(flags & select.POLLIN for _, flags in poll.poll(wait_s * 1000))

  def close(self) -> None:
    self.source.close()
    self._sink.close()

  def _wait(self, pipe: IO[bytes], events: int, deadline: float) -> None:
    poll = select.poll()
    poll.register(pipe, events)
    if self._watched is not None:
      poll.register(self._watched, 0)  # Its end is reported in any case.
    left_s = deadline - time.monotonic()
    ready = dict(poll.poll(min(left_s, 1e6) * 1000)) if left_s > 0 else {}
    if self._watched is not None and self._watched.fileno() in ready:
      raise WatchedPipeClosed
    if not ready:
      raise PipeTimeout
