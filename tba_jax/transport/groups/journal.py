# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Crash-safe append-only journal of payloads, in segment files.

    segment = header, then records
    header  = magic | format u32 | start u64 | digest of the fields before
    record  = magic | length u64 | start u64 | digest | payload

Numbers are little-endian. `start` is the offset of the first byte, so that a
copy elsewhere (inside a payload, in a reused disk block) is not mistaken for a
record. The digest is a 16-byte BLAKE2b of header fields and payload.

An *offset* counts bytes over all segments. The offset of a record is its end,
so `replay(offset)` continues after it. Offsets only increase, even across
restarts and repairs. Payloads are on disk when `append` returns. Damage is
skipped and reported, and never hides later records.
"""

from collections.abc import Callable, Iterator, Sequence
import errno
import hashlib
import json
import os
import pathlib
import re
import struct
from typing import NamedTuple
import zlib

from tba_jax.system import jsonl

FORMAT = 1
_SEGMENT_MAGIC = b"tbajrnl\n"
_RECORD_MAGIC = b"tbarec\x00\n"
_SEGMENT = struct.Struct("<8sIQ")
_RECORD = struct.Struct("<8sQQ")
_DIGEST_BYTES = 16
# Limit of bytes hashed for invalid records, per byte of a segment. Damaged
# records cost 1, because records do not overlap; a forged header may claim the
# whole rest of the segment.
_MAX_WASTED = 16
HEADER_BYTES = _SEGMENT.size + _DIGEST_BYTES
RECORD_BYTES = _RECORD.size + _DIGEST_BYTES


class RecordSpan(NamedTuple):
  """A record of a segment, or damaged bytes between records.

  start, end: offsets in the file.
  payload: content of the record, None for damaged bytes.
  """

  start: int
  end: int
  payload: bytes | None


def read_segment(
    path: pathlib.Path, start: int, size: int | None = None
) -> tuple[list[RecordSpan], int]:
  """Returns a segment's records with the damage between them, and its size.

  Args:
    start: offset of its first byte.
    size: number of bytes to read, None for all.

  Raises:
    ValueError: the segment has a newer format.
  """
  data = path.read_bytes()[:size]
  return split_segment(path, data, start), len(data)


def split_segment(
    path: pathlib.Path, data: bytes, start: int
) -> list[RecordSpan]:
  """Returns the spans of `read_segment` for the bytes of the file at `path`."""
  at = damaged_from = _header_bytes(path, data)
  spans, wasted_bytes = [], 0
  while at < len(data) and wasted_bytes <= _MAX_WASTED * len(data):
    payload, hashed_bytes = _payload_at(data, at, start)
    if payload is None:
      wasted_bytes += hashed_bytes
      next_record = data.find(_RECORD_MAGIC, at + 1)
      at = len(data) if next_record < 0 else next_record
      continue
    if damaged_from < at:
      spans.append(RecordSpan(damaged_from, at, None))
    end = at + RECORD_BYTES + len(payload)
    spans.append(RecordSpan(at, end, payload))
    at = damaged_from = end
  if damaged_from < len(data):
    spans.append(RecordSpan(damaged_from, len(data), None))
  return spans


def _header_bytes(path: pathlib.Path, data: bytes) -> int:
  """Returns the size of a segment's header, 0 if it is damaged."""
  fields, digest = data[: _SEGMENT.size], data[_SEGMENT.size : HEADER_BYTES]
  if len(data) < HEADER_BYTES or digest != _digest(fields):
    return 0
  magic, version, _ = _SEGMENT.unpack(fields)
  if magic == _SEGMENT_MAGIC and version > FORMAT:
    raise ValueError(
        f"{path} has journal format {version}; this version of tba_jax reads up"
        f" to {FORMAT}"
    )
  return HEADER_BYTES if magic == _SEGMENT_MAGIC else 0


def header_error(data: bytes, start: int) -> str:
  """Returns the error in the header of a segment at an offset, or ""."""
  fields, digest = data[: _SEGMENT.size], data[_SEGMENT.size : HEADER_BYTES]
  if len(data) < HEADER_BYTES:
    return "is cut off"
  if digest != _digest(fields):
    return "is damaged"
  offset = _SEGMENT.unpack(fields)[2]
  return f"has offset {offset}" if offset != start else ""


def _payload_at(data: bytes, at: int, start: int) -> tuple[bytes | None, int]:
  """Returns the payload of an intact record, or None, and the bytes hashed."""
  if len(data) - at < RECORD_BYTES:
    return None, 0
  magic, length, offset = _RECORD.unpack_from(data, at)
  begin = at + RECORD_BYTES
  end = begin + length
  if magic != _RECORD_MAGIC or offset != start + at or end > len(data):
    return None, 0
  payload = data[begin:end]
  digest = data[begin - _DIGEST_BYTES : begin]
  fields = data[at : at + _RECORD.size]
  intact = digest == _digest(fields, payload)
  return payload if intact else None, length


def _encode_header(start: int) -> bytes:
  """Returns the header of a segment at offset `start`."""
  fields = _SEGMENT.pack(_SEGMENT_MAGIC, FORMAT, start)
  return fields + _digest(fields)


def encode_record(start: int, payload: bytes) -> bytes:
  """Returns the record of a payload at offset `start`."""
  fields = _RECORD.pack(_RECORD_MAGIC, len(payload), start)
  return fields + _digest(fields, payload) + payload


def _digest(*parts: bytes) -> bytes:
  state = hashlib.blake2b(digest_size=_DIGEST_BYTES)
  for part in parts:
    state.update(part)
  return state.digest()


_NAME = re.compile(r"segment-(\d{20})\.journal")
# Full disk, user quota, or file size limit of the process.
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_MAX_ACK_LINES = 10_000
# The beginning of a line [sid, next sequence, three totals, sum].
_TORN_LINE = re.compile(rb'\[("[^"\\]*("(, ?(\d+)?){0,5})?)?')


def find_segments(directory: pathlib.Path) -> dict[int, pathlib.Path]:
  """Returns the segments of a journal by offset, in order."""
  matches = (_NAME.fullmatch(path.name) for path in directory.iterdir())
  segments = [match for match in matches if match]
  paths = {int(match[1]): directory / match[0] for match in segments}
  return dict(sorted(paths.items()))


def read_records(
    directory: pathlib.Path, from_offset: int
) -> Iterator[tuple[int, bytes]]:
  """Yields what `Journal.replay` does, for a closed journal.

  Raises:
    ValueError: a segment has a newer format.
  """
  segments = find_segments(directory)
  ends = [*list(segments)[1:], None]
  # A journal without segments has one end more.
  for (start, path), end in zip(segments.items(), ends, strict=False):
    if end is not None and end <= from_offset:
      continue
    for span in read_segment(path, start)[0]:
      if span.payload is not None and start + span.end > from_offset:
        yield start + span.end, span.payload


class JournalFullError(OSError):
  """No room for the payloads; the journal is unchanged."""


class Journal:
  """A directory of segments, open for appending by one thread.

  Another thread may call `truncate_before` meanwhile.
  """

  def __init__(
      self,
      directory: str | os.PathLike[str],
      *,
      max_segment_bytes: int,
      on_event: Callable[[str, str], None],
      min_offset: int = 0,
  ):
    """Opens or creates a journal, and repairs its end.

    Args:
      directory: holds the segments; created or changed to mode 0700.
      max_segment_bytes: size at which a new segment begins; one append may
        exceed it.
      on_event: function called with (kind, message); kinds are journal_torn,
        journal_damaged and journal_unclean.
      min_offset: lower bound of new offsets, in case the journal was lost.

    Raises:
      ValueError: the last segment has a newer format.
      JournalFullError: no room for the repair.
      OSError: the directory cannot be used.
    """
    self._directory = pathlib.Path(directory)
    self._max_segment_bytes = max_segment_bytes
    self._on_event = on_event
    self._reported: set[tuple[str, int]] = set()
    self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    self._directory.chmod(0o700)
    self._starts = list(find_segments(self._directory))
    # The open segment: its descriptor (-1 for none yet) and its size.
    self._fd = -1
    self._size = 0
    # True if a failed append may have left bytes after `_size`.
    self._unclean = False
    self._offset = 0
    self._repair()
    if self._offset < min_offset:
      self.close()
      self._offset = min_offset

  @property
  def start(self) -> int:
    """Position of the oldest segment."""
    return self._starts[0] if self._starts else self._offset

  @property
  def offset(self) -> int:
    """Position after the newest record."""
    return self._offset

  def append(self, payloads: Sequence[bytes]) -> list[int]:
    """Writes payloads in one go and syncs them; returns their offsets.

    Raises:
      JournalFullError: no room; none of the payloads is in the journal.
      OSError: another failure of the disk; likewise.
    """
    if not payloads:
      return []
    added = sum(RECORD_BYTES + len(p) for p in payloads)
    try:
      if self._unclean:
        self._cut()
    except OSError as error:
      raise _explained(error, self._directory) from error
    if self._fd < 0 or (
        self._size + added > self._max_segment_bytes
        and self._size > HEADER_BYTES
    ):
      self._open_segment()
    offset, records, offsets = self._starts[-1] + self._size, [], []
    for payload in payloads:
      records.append(encode_record(offset, payload))
      offset += len(records[-1])
      offsets.append(offset)
    try:
      _write(self._fd, b"".join(records))
      os.fsync(self._fd)
    except OSError as error:
      self._unclean = True
      self._try_to_cut()
      raise _explained(error, self._directory) from error
    self._size += added
    self._offset = offsets[-1]
    return offsets

  def replay(self, from_offset: int) -> Iterator[tuple[int, bytes]]:
    """Yields (offset, payload) of the records after an offset, in order.

    Args:
      from_offset: 0, `start`, or an offset from `append` or `replay`.

    Raises:
      ValueError: a segment has a newer format.
    """
    starts = list(self._starts)
    for start, end in zip(starts, [*starts[1:], None]):
      if end is not None and end <= from_offset:
        continue
      path = self._path(start)
      # Bytes of a failed append are not part of the journal.
      size = self._size if end is None and self._fd >= 0 else None
      for span in read_segment(path, start, size)[0]:
        if span.payload is None:
          self._report_damage(path, span)
        elif start + span.end > from_offset:
          yield start + span.end, span.payload

  def _repair(self) -> None:
    """Cuts a torn record off the end of the last segment.

    A new segment is created first, so that no offset is used twice.
    """
    if not self._starts:
      return
    start = self._starts[-1]
    path = self._path(start)
    spans, size = read_segment(path, start)
    self._offset = start + size
    for span in spans[:-1]:
      if span.payload is None:
        self._report_damage(path, span)
    if spans and spans[-1].payload is None:
      cut = size - spans[-1].start
      self._open_segment()
      os.truncate(path, spans[-1].start)
      message = f"{path}: cut {cut} bytes after byte {spans[-1].start}"
      self._on_event("journal_torn", message)

  def truncate_before(self, offset: int) -> int:
    """Deletes closed segments that end before an offset; returns how many."""
    count = 0
    while len(self._starts) > 1 and self._starts[1] <= offset:
      self._path(self._starts[0]).unlink(missing_ok=True)
      del self._starts[0]
      count += 1
    if count:
      jsonl.sync_directory(self._directory)
    return count

  def close(self) -> None:
    """Closes the open segment; replay is still possible."""
    if self._fd >= 0:
      os.close(self._fd)
      self._fd = -1

  def _path(self, start: int) -> pathlib.Path:
    return self._directory / f"segment-{start:020d}.journal"

  def _open_segment(self) -> None:
    """Begins a new segment at the current offset."""
    start = self._offset
    path = self._path(start)
    fd = -1
    try:
      fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
      _write(fd, _encode_header(start))
      os.fsync(fd)
      jsonl.sync_directory(self._directory)
    except OSError as error:
      if fd >= 0:
        os.close(fd)
        path.unlink(missing_ok=True)
      raise _explained(error, self._directory) from error
    self.close()
    self._fd, self._size = fd, HEADER_BYTES
    if start not in self._starts:
      self._starts.append(start)

  def _cut(self) -> None:
    """Cuts off everything after the last intact record."""
    os.ftruncate(self._fd, self._size)
    os.lseek(self._fd, self._size, os.SEEK_SET)
    os.fsync(self._fd)
    self._unclean = False

  def _try_to_cut(self) -> None:
    try:
      self._cut()
    except OSError as error:
      # The next append tries again before it writes.
      self._on_event("journal_unclean", f"{self._directory}: {error}")

  def _report_damage(self, path: pathlib.Path, span: RecordSpan) -> None:
    if (path.name, span.start) in self._reported:
      return
    self._reported.add((path.name, span.start))
    self._on_event(
        "journal_damaged",
        f"{path}: skipped {span.end - span.start} bytes from byte {span.start}",
    )


class AckLog:
  """File with the newest acknowledged block of each searcher.

  It is synced before an acknowledgement is sent, so after a restart it shows
  which acknowledged blocks the journal has lost. Lines are JSON, [sid, next
  sequence, prompts, completions, tokens, CRC-32 of these]; a searcher's last
  line counts.

  path: `acknowledged.jsonl`.
  marks: sid -> [next sequence, prompts, completions, tokens].
  existed: whether the file exists.
  damage: problem with the file, "" for none.
  """

  def __init__(self, directory: str | os.PathLike[str]):
    self.path = pathlib.Path(directory) / "acknowledged.jsonl"
    self.damage = ""
    self.marks: dict[str, list[int]] = {}
    self.existed = self.path.exists()
    self._unsynced: dict[str, list[int]] = {}
    self._num_lines = 0
    if self.existed:
      self._read()

  def add(self, sid: str, mark: Sequence[int]) -> None:
    """Records the newest block of a searcher; `sync` makes it durable."""
    if self.marks.get(sid, []) < list(mark):  # Blocks come in order.
      self.marks[sid] = self._unsynced[sid] = list(mark)

  def sync(self) -> bool:
    """Writes the added marks; returns False if there was nothing to write.

    Raises:
      JournalFullError: no room; a later call tries again.
      OSError: another failure of the disk.
    """
    if not self._unsynced and self.existed:
      return False
    try:
      self.write_marks()
    except OSError as error:
      raise _explained(error, self.path) from error
    self._unsynced.clear()
    return True

  def rewrite(self) -> None:
    """Replaces a damaged file; raises as `sync` does."""
    self.existed = False
    self.sync()

  def write_marks(self) -> None:
    compact = not self.existed or (
        self._num_lines > _MAX_ACK_LINES
        and self._num_lines > 2 * len(self.marks)
    )
    marks = self.marks if compact else self._unsynced
    # A line begins with a newline, since the previous one may be torn.
    lines = [f"\n{_ack_line(sid, mark)}" for sid, mark in marks.items()]
    path = self.path.with_suffix(".tmp") if compact else self.path
    mode = os.O_TRUNC if compact else os.O_APPEND
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | mode, 0o600)
    try:
      _write(fd, "".join(lines).encode())
      os.fsync(fd)
    finally:
      os.close(fd)
    if compact:
      os.replace(path, self.path)
      jsonl.sync_directory(self.path.parent)
      self._num_lines = 0
    self._num_lines += len(lines)
    self.existed = True

  def _read(self) -> None:
    num_damaged = 0
    for line in filter(None, self.path.read_bytes().split(b"\n")):
      ack = parse_ack(line)
      if ack is None:
        # Torn by a crash: the acknowledgement was not sent.
        num_damaged += _TORN_LINE.fullmatch(line) is None
        continue
      sid, mark = ack
      self.marks[sid] = mark
      self._num_lines += 1
    if num_damaged:
      self.damage = f"{self.path}: {num_damaged} lines are damaged"


def _ack_line(sid: str, mark: Sequence[int]) -> str:
  fields = [sid, *mark]
  return json.dumps([*fields, zlib.crc32(json.dumps(fields).encode())])


def parse_ack(line: bytes) -> tuple[str, list[int]] | None:
  """Returns searcher and mark of a line of the log, None if it is damaged."""
  try:
    sid, *mark, _ = json.loads(line)
    if len(mark) == 4 and _ack_line(sid, mark).encode() == line:
      return str(sid), mark
  except (ValueError, TypeError, RecursionError):
    pass
  return None


def _explained(error: OSError, path: pathlib.Path) -> OSError:
  kind = JournalFullError if error.errno in _FULL else OSError
  return kind(error.errno, os.strerror(error.errno or 0), str(path))


def _write(fd: int, data: bytes) -> None:
  """Writes all bytes; continues after a short write."""
  view = memoryview(data)
  while view:
    view = view[os.write(fd, view) :]
