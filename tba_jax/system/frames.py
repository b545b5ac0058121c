# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Messages over pipes: four bytes of length, then JSON.

An answer repeats the nonce that came behind its request, before its message, so
that no other writer's bytes are taken for it.
"""

from collections.abc import Callable
import json
import secrets
import struct
from typing import Any

HEADER = struct.Struct(">I")
NONCE_BYTES = 16
MAX_BYTES = 64 << 20

# Reads that many bytes.
ReadFn = Callable[[int], bytes]


class FrameError(Exception):
  """Bytes that are no message, or not the answer to the request."""


def nonce() -> bytes:
  return secrets.token_bytes(NONCE_BYTES)


def pack(message: Any) -> bytes:
  data = json.dumps(message).encode()
  return HEADER.pack(len(data)) + data


def unpack(read: ReadFn) -> bytes:
  """Returns the next message, as its JSON; raises what `read` does.

  Raises:
    FrameError: the message is too long.
  """
  (length,) = HEADER.unpack(read(HEADER.size))
  if length > MAX_BYTES:
    raise FrameError(f"a message of {length} bytes")
  return read(length)


def parse(data: bytes) -> dict[str, Any]:
  """Returns an answer; FrameError without a JSON object."""
  try:
    answer = json.loads(data)
  except (ValueError, RecursionError) as error:
    raise FrameError(str(error)) from error
  if not isinstance(answer, dict):
    raise FrameError("an answer that is not an object")
  return answer
