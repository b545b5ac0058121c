# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Append-only journal of payloads in segments, which survives a crash.

    segment = header, then records
    header  = magic | format u32 | start u64 | digest of the fields before
    record  = magic | length u64 | start u64 | digest | payload

Numbers are little-endian. `start` is the position of the first byte, so that a
copy elsewhere (inside a payload, in a reused block of the disk) is no record.
The digest is BLAKE2b of 16 bytes over header fields and payload.

The *position* of a record is the place after it: `replay(position)` goes on
behind it. Positions only grow, also over restarts and repairs. Payloads are on
the disk when `append` returns. Damage is skipped, counted and reported, and
never hides the records after it.
"""

from collections.abc import Callable, Iterator, Sequence
import dataclasses
import errno
import hashlib
import json
import os
import pathlib
import re
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
class RecordSpan:
  """A record of a segment, or damaged bytes.

  start, end: offsets in the file.
  payload: of the record, None for damaged bytes.
  """

  start: int
  end: int
  payload: bytes | None


def segment_header(start: int) -> bytes:
  """Returns the header of a segment whose first byte is at a position."""
  fields = _SEGMENT.pack(_SEGMENT_MAGIC, FORMAT, start)
  return fields + _digest(fields)


def encode_record(start: int, payload: bytes) -> bytes:
  """Returns the record of a payload whose first byte is at a position."""
  fields = _RECORD.pack(_RECORD_MAGIC, len(payload), start)
  return fields + _digest(fields, payload) + payload


def check_segment_format(path: pathlib.Path, data: bytes) -> bool:
  """Returns whether a segment's header is intact.

  Args:
    path: of the file, for the message.
    data: its bytes.

  Raises:
    ValueError: the header is intact and of a newer format.
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


def record_spans(
    data: bytes, start: int, *, whole_header: bool
) -> Iterator[RecordSpan]:
  """Yields a segment's records, and the damaged bytes between them.

  Args:
    data: of the file.
    start: position of its first byte.
    whole_header: as `check_segment_format` says; the header is skipped then.
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
      yield RecordSpan(damaged_from, offset, None)
    end = offset + RECORD_BYTES + len(payload)
    yield RecordSpan(offset, end, payload)
    offset = damaged_from = end
  if damaged_from < len(data):
    yield RecordSpan(damaged_from, len(data), None)


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


_NAME = re.compile(r"segment-(\d{20})\.journal")
# No room: on the disk, in the user's quota, or up to the process's file limit.
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_MAX_ACK_LINES = 10_000


class JournalFullError(OSError):
  """There is no room for the payloads; the journal is as it was before."""


class Journal:
  """A directory of segments, open for appending by one thread of one process.

  Another thread may call `truncate_before` meanwhile.

  torn_bytes: cut off the end of the last segment when it was opened.
  damaged_bytes: skipped, each place counted once.
  """

  def __init__(
      self,
      directory: str | os.PathLike[str],
      *,
      max_segment_bytes: int,
      on_event: Callable[[str, str], None],
      min_position: int = 0,
  ):
    """Opens or makes a journal, and repairs its end.

    Args:
      directory: of its segments, made private to the user (0700).
      max_segment_bytes: a segment that would exceed it is closed; a single
        append may exceed it.
      on_event: called with (kind, message) of what was repaired or skipped;
        kinds are journal_torn, journal_damaged and journal_unclean.
      min_position: new records get positions above it, also where the journal
        was lost.

    Raises:
      ValueError: the last segment has a newer format.
      JournalFullError: no room for the repair.
      OSError: the directory can't be used.
    """
    self._directory = pathlib.Path(directory)
    self._max_segment_bytes = max_segment_bytes
    self._on_event = on_event
    self.torn_bytes = 0
    self.damaged_bytes = 0
    self._reported: set[tuple[str, int]] = set()
    self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    self._directory.chmod(0o700)
    names = (_NAME.fullmatch(p.name) for p in self._directory.iterdir())
    self._starts = sorted(int(name[1]) for name in names if name)
    # The open segment: its descriptor (-1 = none yet) and the bytes it has.
    self._fd = -1
    self._size = 0
    # A failed append may have left bytes behind `_size`.
    self._unclean = False
    self._position = 0
    self.repair()
    if self._position < min_position:
      self.close()
      self._position = min_position

  @property
  def start(self) -> int:
    """Position before the oldest record that is still here."""
    return self._starts[0] if self._starts else self._position

  @property
  def position(self) -> int:
    """Position after the newest record."""
    return self._position

  def append(self, payloads: Sequence[bytes]) -> list[int]:
    """Writes payloads in one go and syncs them to the disk.

    Waits for the disk, without a deadline of its own.

    Returns:
      The position after each payload.

    Raises:
      JournalFullError: no room; none of the payloads is in the journal.
      OSError: the disk refused for another reason; likewise.
    """
    if not payloads:
      return []
    added = sum(RECORD_BYTES + len(p) for p in payloads)
    if self._fd < 0 or (
        self._size + added > self._max_segment_bytes
        and self._size > HEADER_BYTES
    ):
      self._open_segment()
    position, records, positions = self._starts[-1] + self._size, [], []
    for payload in payloads:
      records.append(encode_record(position, payload))
      position += len(records[-1])
      positions.append(position)
    try:
      if self._unclean:
        self._cut()
      _write(self._fd, b"".join(records))
      os.fsync(self._fd)
    except OSError as error:
      self._unclean = True
      self._try_to_cut()
      raise _explained(error, self._directory) from error
    self._size += added
    self._position = positions[-1]
    return positions

  def replay(self, from_position: int) -> Iterator[tuple[int, bytes]]:
    """Yields (position, payload) of the records behind a position, in order.

    Args:
      from_position: 0, `start`, or what `append` or this function gave.

    Raises:
      ValueError: a segment has a newer format.
    """
    starts = list(self._starts)
    for start, end in zip(starts, [*starts[1:], None]):
      if end is not None and end <= from_position:
        continue
      path = self._path(start)
      # What a failed append left behind is not part of the journal.
      size = self._size if end is None and self._fd >= 0 else None
      data = path.read_bytes()[:size]
      whole = check_segment_format(path, data)
      for span in record_spans(data, start, whole_header=whole):
        if span.payload is None:
          self._report_damage(path, span)
        elif start + span.end > from_position:
          yield start + span.end, span.payload

  def repair(self) -> None:
    """Cuts a half-written record off the end of the last segment.

    The next record goes into a new segment, which is made first, so that no
    position is used twice.
    """
    if not self._starts:
      return
    start = self._starts[-1]
    path = self._path(start)
    data = path.read_bytes()
    self._position = start + len(data)
    whole = check_segment_format(path, data)
    found = list(record_spans(data, start, whole_header=whole))
    for span in found[:-1]:
      if span.payload is None:
        self._report_damage(path, span)
    if found and found[-1].payload is None:
      span = found[-1]
      self._open_segment()
      os.truncate(path, span.start)
      self.torn_bytes += span.end - span.start
      self._on_event(
          "journal_torn",
          f"{path}: cut {span.end - span.start} bytes after byte {span.start}",
      )

  def truncate_before(self, position: int) -> int:
    """Deletes the segments whose records all lie before a position.

    The segment that is being written stays.

    Returns:
      How many were deleted.
    """
    count = 0
    while len(self._starts) > 1 and self._starts[1] <= position:
      self._path(self._starts[0]).unlink(missing_ok=True)
      del self._starts[0]
      count += 1
    if count:
      _sync_directory(self._directory)
    return count

  def closed_segments(self) -> list[pathlib.Path]:
    """Returns the files that will not change any more, oldest first."""
    closed = self._starts[:-1] if self._fd >= 0 else self._starts
    return [self._path(start) for start in closed]

  def close(self) -> None:
    """Closes the open segment; replay is still possible."""
    if self._fd >= 0:
      os.close(self._fd)
      self._fd = -1

  def _path(self, start: int) -> pathlib.Path:
    return self._directory / f"segment-{start:020d}.journal"

  def _open_segment(self) -> None:
    """Begins a new segment at the present position."""
    start = self._position
    path = self._path(start)
    fd = -1
    try:
      fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
      _write(fd, segment_header(start))
      os.fsync(fd)
      _sync_directory(self._directory)
    except OSError as error:
      if fd >= 0:
        os.close(fd)
        path.unlink(missing_ok=True)
      raise _explained(error, self._directory) from error
    self.close()
    self._fd, self._size, self._unclean = fd, HEADER_BYTES, False
    if start not in self._starts:
      self._starts.append(start)

  def _cut(self) -> None:
    """Cuts what was written behind the last intact record."""
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
    self.damaged_bytes += span.end - span.start
    self._on_event(
        "journal_damaged",
        f"{path}: skipped {span.end - span.start} bytes from byte {span.start}",
    )


class AckLog:
  """The newest acknowledged block of each searcher, in a file of its own.

  It is synced before an acknowledgement is sent: what the journal lacks of it
  after a restart has been lost. Lines are JSON, [sid, next sequence, prompts,
  completions, tokens]; the last line of a searcher counts.

  marks: sid -> [next sequence, prompts, completions, tokens].
  existed: whether the file was there when it was opened.
  """

  def __init__(self, directory: str | os.PathLike[str]):
    """Opens the file; makes it where there is none."""
    self._path = pathlib.Path(directory) / "acknowledged.jsonl"
    self.marks: dict[str, list[int]] = {}
    self.existed = self._path.exists()
    self._unsynced: dict[str, list[int]] = {}
    self._num_lines = 0
    if self.existed:
      self._read()

  def add(self, sid: str, mark: Sequence[int]) -> None:
    """Notes the newest block of a searcher; `sync` makes it durable."""
    if self.marks.get(sid, []) < list(mark):  # Blocks come in order.
      self.marks[sid] = self._unsynced[sid] = list(mark)

  def sync(self) -> bool:
    """Writes what was added; False where nothing was.

    Raises:
      JournalFullError: no room; a later call tries again.
      OSError: the disk refused for another reason.
    """
    if not self._unsynced and self.existed:
      return False
    try:
      self._write()
    except OSError as error:
      raise _explained(error, self._path) from error
    self._unsynced.clear()
    return True

  def _write(self) -> None:
    compact = not self.existed or (
        self._num_lines > _MAX_ACK_LINES
        and self._num_lines > 2 * len(self.marks)
    )
    marks = self.marks if compact else self._unsynced
    # A line begins with a newline, because the one before may be torn.
    lines = [f"\n{json.dumps([sid, *mark])}" for sid, mark in marks.items()]
    path = self._path.with_suffix(".tmp") if compact else self._path
    mode = os.O_TRUNC if compact else os.O_APPEND
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | mode, 0o600)
    try:
      _write(fd, "".join(lines).encode())
      os.fsync(fd)
    finally:
      os.close(fd)
    if compact:
      os.replace(path, self._path)
      _sync_directory(self._path.parent)
      self._num_lines = 0
    self._num_lines += len(lines)
    self.existed = True

  def _read(self) -> None:
    for line in self._path.read_bytes().split(b"\n"):
      try:
        sid, *mark = json.loads(line)
      except (ValueError, TypeError):
        continue  # Torn by a crash, so its acknowledgement was not sent.
      if len(mark) == 4 and all(type(n) is int for n in mark):
        self.marks[str(sid)] = mark
        self._num_lines += 1


def _explained(error: OSError, path: pathlib.Path) -> OSError:
  kind = JournalFullError if error.errno in _FULL else OSError
  return kind(error.errno, os.strerror(error.errno or 0), str(path))


def _write(fd: int, data: bytes) -> None:
  """Writes all bytes; a short write is continued."""
  view = memoryview(data)
  while view:
    view = view[os.write(fd, view) :]


def _sync_directory(directory: pathlib.Path) -> None:
  fd = os.open(directory, os.O_RDONLY)
  try:
    os.fsync(fd)
  finally:
    os.close(fd)
