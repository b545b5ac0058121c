# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Messages over pipes: four bytes of length, then JSON.

`serve` answers a pool from within a process that runs user code in a sandbox.
"""

from collections.abc import Callable
import json
import os
import struct
from typing import Any, BinaryIO

from tba_jax.system import processes
from tba_jax.system import sandbox

HEADER = struct.Struct(">I")


def pack(message: Any) -> bytes:
  data = json.dumps(message).encode()
  return HEADER.pack(len(data)) + data


def write(stream: BinaryIO, message: Any) -> None:
  """Writes a message; blocks while the other side does not read."""
  stream.write(pack(message))
  stream.flush()


def read(stream: BinaryIO) -> Any:
  """Waits for a message; returns None once the other side has closed."""
  header = stream.read(HEADER.size)
  if len(header) < HEADER.size:
    return None
  return json.loads(stream.read(*HEADER.unpack(header)))


def serve(
    begin: Callable[[dict[str, Any]], Callable[[Any], Any]],
    *,
    shows_prints: bool,
) -> int:
  """Answers requests from within a sandbox, until the pipe is closed.

  Args:
    begin: function called with the first message, before the sandbox closes;
      returns the function that answers a request.
    shows_prints: whether what user code prints goes to stderr, or nowhere.

  Returns:
    Exit status.
  """
  processes.die_with_parent()
  requests, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
  # Keep user code off the pipes.
  with open(os.devnull, "r+b") as nothing:
    os.dup2(nothing.fileno(), 0)
    os.dup2(2 if shows_prints else nothing.fileno(), 1)
  hello = read(requests)
  if hello is None:
    return 0
  sandbox.limit_memory(hello["memory_mb"])
  try:
    answer = begin(hello)
    entered = sandbox.enter(**hello["sandbox"])
  except Exception as error:  # Reported by the pool.
    write(replies, {"error": repr(error)})
    return 1
  write(replies, entered)
  while (request := read(requests)) is not None:
    write(replies, answer(request))
  return 0
