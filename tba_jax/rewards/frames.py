# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""JSON messages over pipes, with deadlines: four bytes of length, then text."""

import json
import os
import select
import struct
import time
from typing import Any, BinaryIO

_HEADER = struct.Struct(">I")
_MAX_BYTES = 64 << 20


class Broken(Exception):
  """The other side is gone, or says what is no message."""


class Late(Exception):
  """The deadline passed."""


def write(stream: BinaryIO, message: Any) -> None:
  """Writes a message; waits as long as the other side does not read."""
  data = json.dumps(message).encode()
  stream.write(_HEADER.pack(len(data)) + data)
  stream.flush()


def read(stream: BinaryIO) -> Any:
  """Waits for a message and returns it; None where the other side closed."""
  header = stream.read(_HEADER.size)
  if len(header) < _HEADER.size:
    return None
  return json.loads(stream.read(*_HEADER.unpack(header)))


def send(fd: int, message: Any, deadline: float) -> None:
  """Writes a message to a pipe that does not block.

  Args:
    fd: of the pipe, set to not block.
    message: plain enough for JSON.
    deadline: by `time.monotonic()`.

  Raises:
    Late: the other side did not read in time.
    Broken: it is gone.
  """
  data = json.dumps(message).encode()
  left = memoryview(_HEADER.pack(len(data)) + data)
  while left:
    _wait(fd, select.POLLOUT, deadline)
    try:
      left = left[os.write(fd, left) :]
    except BlockingIOError:
      continue
    except OSError as error:
      raise Broken(str(error)) from error


def receive(fd: int, deadline: float) -> Any:
  """Returns the next message of a pipe; args and errors as of `send`."""
  (length,) = _HEADER.unpack(_read_exactly(fd, _HEADER.size, deadline))
  if length > _MAX_BYTES:
    raise Broken(f"a message of {length} bytes")
  try:
    return json.loads(_read_exactly(fd, length, deadline))
  except ValueError as error:
    raise Broken(str(error)) from error


def _read_exactly(fd: int, size: int, deadline: float) -> bytes:
  data = b""
  while len(data) < size:
    _wait(fd, select.POLLIN, deadline)
    try:
      chunk = os.read(fd, size - len(data))
    except BlockingIOError:
      continue
    if not chunk:
      raise Broken("it ended")
    data += chunk
  return data


def _wait(fd: int, what: int, deadline: float) -> None:
  left_s = deadline - time.monotonic()
  poll = select.poll()
  poll.register(fd, what)
  if left_s <= 0 or not poll.poll(left_s * 1000):
    raise Late()
