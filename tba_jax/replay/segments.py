# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""The bytes of a journal's segment: a header, then records.

    header = magic | format u32 | start u64 | digest of what is before
    record = magic | length u64 | start u64 | digest | payload

Numbers are little-endian. `start` is the position of the first byte, so that
bytes of another place (a copy inside a payload, a reused block of the disk) are
no record. The digest, BLAKE2b of 16 bytes, covers header fields and payload.
"""

from collections.abc import Iterator
import dataclasses
import hashlib
import pathlib
import struct

FORMAT = 1
_SEGMENT_MAGIC = b"tbajrnl\n"
_RECORD_MAGIC = b"tbarec\x00\n"
_SEGMENT = struct.Struct("<8sIQ")
_RECORD = struct.Struct("<8sQQ")
_DIGEST_BYTES = 16
HEADER_BYTES = _SEGMENT.size + _DIGEST_BYTES
RECORD_BYTES = _RECORD.size + _DIGEST_BYTES


@dataclasses.dataclass(frozen=True)
class Span:
  """A part of a segment: a record, or bytes that are none.

  start, end: offsets in the file.
  payload: of the record, None where the bytes are none.
  """

  start: int
  end: int
  payload: bytes | None


def header(start: int) -> bytes:
  """Returns the header of a segment whose first byte is at a position."""
  fields = _SEGMENT.pack(_SEGMENT_MAGIC, FORMAT, start)
  return fields + _digest(fields)


def record(start: int, payload: bytes) -> bytes:
  """Returns the record of a payload whose first byte is at a position."""
  fields = _RECORD.pack(_RECORD_MAGIC, len(payload), start)
  return fields + _digest(fields, payload) + payload


def check_format(path: pathlib.Path, data: bytes) -> bool:
  """Returns whether a segment's header is whole.

  Args:
    path: of the file, for the message.
    data: its bytes.

  Raises:
    ValueError: the header is whole and of a newer format.
  """
  fields, digest = data[: _SEGMENT.size], data[_SEGMENT.size : HEADER_BYTES]
  if len(data) < HEADER_BYTES or digest != _digest(fields):
    return False
  magic, version, _ = _SEGMENT.unpack(fields)
  if magic == _SEGMENT_MAGIC and version > FORMAT:
    raise ValueError(
        f"{path} has journal format {version}; this version of tba_jax reads up"
        f" to {FORMAT}"
    )
  return magic == _SEGMENT_MAGIC


def spans(data: bytes, start: int, *, whole_header: bool) -> Iterator[Span]:
  """Yields a segment's records and, between them, the bytes that are none.

  After bytes that are no record the next record is searched for.

  Args:
    data: of the file.
    start: position of its first byte.
    whole_header: as `check_format` says; the header's bytes are skipped then.
  """
  offset = HEADER_BYTES if whole_header else 0
  damaged_from = offset
  while offset < len(data):
    payload = _payload_at(data, offset, start)
    if payload is None:
      found = data.find(_RECORD_MAGIC, offset + 1)
      offset = len(data) if found < 0 else found
      continue
    if damaged_from < offset:
      yield Span(damaged_from, offset, None)
    end = offset + RECORD_BYTES + len(payload)
    yield Span(offset, end, payload)
    offset = damaged_from = end
  if damaged_from < len(data):
    yield Span(damaged_from, len(data), None)


def _payload_at(data: bytes, offset: int, start: int) -> bytes | None:
  if len(data) - offset < RECORD_BYTES:
    return None
  magic, length, position = _RECORD.unpack_from(data, offset)
  if magic != _RECORD_MAGIC or position != start + offset:
    return None
  begin = offset + RECORD_BYTES
  payload = data[begin : begin + length]
  digest = data[begin - _DIGEST_BYTES : begin]
  fields = data[offset : offset + _RECORD.size]
  if len(payload) != length or digest != _digest(fields, payload):
    return None
  return payload


def _digest(*parts: bytes) -> bytes:
  state = hashlib.blake2b(digest_size=_DIGEST_BYTES)
  for part in parts:
    state.update(part)
  return state.digest()
