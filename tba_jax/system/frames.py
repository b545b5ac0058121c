# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Messages over pipes: four bytes of length, then JSON."""

import json
import struct
from typing import Any, BinaryIO

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
