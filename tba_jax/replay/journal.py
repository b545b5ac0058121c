# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""An append-only journal of byte records that survives crashes.

A segment file `<first position>.journal` is a header line and then records:
length, CRC-32 of the payload, payload. A record's position is its number since
the journal began. What was appended is on disk when `append` returns; a torn
tail, which a crash leaves, is cut when the journal is opened again.
"""

from collections.abc import Callable, Iterator, Sequence
import errno
import os
import pathlib
import struct
import zlib

_MAGIC = b"TBAJ"
FORMAT = 1
_HEADER = struct.Struct("<4sIQ")  # magic, format, first position
_RECORD = struct.Struct("<II")  # length, CRC-32
_SUFFIX = ".journal"


class JournalFullError(OSError):
  """The disk is full; nothing was appended, and the journal is intact."""


class NewerJournalError(ValueError):
  """A segment was written by a newer program than this one."""


class Journal:
  """Appends records to segments of one directory. One thread appends.

  start: position of the oldest record that is still there.
  end: position that the next record will have.
  """

  def __init__(
      self,
      directory: str | os.PathLike[str],
      *,
      max_segment_bytes: int,
      on_event: Callable[[str, str], None],
  ):
    """Opens the directory, made with mode 0700 where it is not there.

    Args:
      directory: local.
      max_segment_bytes: a segment that is longer is closed.
      on_event: called with ("journal_repaired", message) for damage.

    Raises:
      NewerJournalError: a segment has a newer format; it is named.
      OSError: the directory can't be made or written.
    """
    self._directory = pathlib.Path(directory)
    self._max_segment_bytes = max_segment_bytes
    self._on_event = on_event
    self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    self._file = None
    self.end = 0
    segments = self._segments()
    for path in segments:
      self._read_header(path)
    if segments:
      self.end = self._repair(segments[-1])
    self.start = _first_position(segments[0]) if segments else self.end

  def append(self, payloads: Sequence[bytes]) -> list[int]:
    """Writes records with one sync; returns their positions.

    Blocks until the disk has them.

    Raises:
      JournalFullError: there is no room; the journal is as it was before.
      OSError: the disk failed otherwise; the journal is as it was before.
    """
    if self._file is None or self._file.tell() >= self._max_segment_bytes:
      self._open_segment()
    before = self._file.tell()
    data = b"".join(_RECORD.pack(len(p), zlib.crc32(p)) + p for p in payloads)
    try:
      _write_all(self._file, data)
      os.fdatasync(self._file.fileno())
    except OSError as error:
      self._file.truncate(before)
      self._file.seek(before)
      if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        raise JournalFullError(
            error.errno,
            f"no room for {len(data)} bytes in the journal {self._directory}",
        ) from error
      raise
    positions = list(range(self.end, self.end + len(payloads)))
    self.end += len(payloads)
    return positions

  def replay(self, first: int) -> Iterator[tuple[int, bytes]]:
    """Yields (position, payload) from `first` on, in order.

    A record that is damaged is passed over, told, and keeps its position; what
    cannot be read behind it in its segment is told too.
    """
    segments = self._segments()
    ends = [_first_position(path) for path in segments[1:]] + [self.end]
    for path, end in zip(segments, ends):
      if end <= first:
        continue
      yield from self._read_segment(path, first, end)

  def truncate_before(self, position: int) -> None:
    """Deletes segments whose records are all below `position`."""
    segments = self._segments()
    for path, following in zip(segments, segments[1:]):
      if _first_position(following) <= position:
        path.unlink()
        self.start = _first_position(following)

  def close(self) -> None:
    if self._file is not None:
      self._file.close()
      self._file = None

  def _segments(self) -> list[pathlib.Path]:
    return sorted(self._directory.glob(f"*{_SUFFIX}"), key=_first_position)

  def _open_segment(self) -> None:
    self.close()
    path = self._directory / f"{self.end:020d}{_SUFFIX}"
    # A segment without a record may stand there from a start that wrote none.
    self._file = path.open("wb", buffering=0)
    try:
      _write_all(self._file, _HEADER.pack(_MAGIC, FORMAT, self.end))
    except OSError as error:
      self.close()
      path.unlink(missing_ok=True)
      raise JournalFullError(
          error.errno, f"no room for a journal segment in {self._directory}"
      ) from error
    _sync_directory(self._directory)

  def _read_header(self, path: pathlib.Path) -> bool:
    """Returns whether the header is whole; refuses a newer format."""
    with path.open("rb") as file:
      data = file.read(_HEADER.size)
    if len(data) < _HEADER.size or data[:4] != _MAGIC:
      self._on_event("journal_repaired", f"{path} has no header")
      return False
    _, version, _ = _HEADER.unpack(data)
    if version > FORMAT:
      raise NewerJournalError(
          f"{path} has format {version}, this program reads up to {FORMAT}"
      )
    return True

  def _repair(self, path: pathlib.Path) -> int:
    """Cuts the torn tail of the last segment; returns the next position."""
    end = position = _first_position(path)
    size = path.stat().st_size
    whole = min(size, _HEADER.size)
    with path.open("rb") as file:
      file.seek(_HEADER.size)
      while record := _read_record(file):
        position += 1
        # A damaged record with whole ones behind it is no torn tail.
        if record[1]:
          whole, end = file.tell(), position
    if whole < size:
      self._on_event(
          "journal_repaired",
          f"{path}: cut {size - whole} bytes of a torn tail",
      )
      with path.open("r+b") as file:
        file.truncate(whole)
    return end

  def _read_segment(
      self, path: pathlib.Path, first: int, end: int
  ) -> Iterator[tuple[int, bytes]]:
    position = _first_position(path)
    with path.open("rb") as file:
      file.seek(_HEADER.size)
      while position < end and (record := _read_record(file)):
        payload, right = record
        if not right:
          self._on_event(
              "journal_repaired", f"{path}: record {position} is damaged"
          )
        elif position >= first:
          yield position, payload
        position += 1
    if position < end:
      self._on_event(
          "journal_repaired",
          f"{path}: records {position} to {end - 1} cannot be read",
      )


def _first_position(path: pathlib.Path) -> int:
  return int(path.name.removesuffix(_SUFFIX))


def _read_record(file) -> tuple[bytes, bool] | None:
  """Returns (payload, whether its CRC is right); None at a torn end."""
  head = file.read(_RECORD.size)
  if len(head) < _RECORD.size:
    return None
  length, crc = _RECORD.unpack(head)
  payload = file.read(length)
  if len(payload) < length:
    return None
  return payload, zlib.crc32(payload) == crc


def _write_all(file, data: bytes) -> None:
  view = memoryview(data)
  while view:
    view = view[file.write(view) :]


def _sync_directory(directory: pathlib.Path) -> None:
  fd = os.open(directory, os.O_RDONLY)
  try:
    os.fsync(fd)
  finally:
    os.close(fd)
