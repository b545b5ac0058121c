# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Journals blocks, then delivers them: the shared part of journaled receivers.

A block is journaled before it is acknowledged, and delivered in the order of
the journal. After a restart, records that the checkpoint lacks are delivered
first.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
import threading
from typing import Any, NamedTuple

import ml_collections
import numpy as np

from tba_jax import types
from tba_jax.transport import wire
from tba_jax.transport.groups import inbox as inbox_lib
from tba_jax.transport.groups import journal as journal_lib
from tba_jax.transport.groups import leases as leases_lib
from tba_jax.transport.groups import messages


class Entry(NamedTuple):
  """A record to be journaled.

  header: fields of the record.
  data: wire message of header and arrays; None to encode them.
  groups: unpacked groups of a block, None if not unpacked yet.
  """

  header: dict[str, Any]
  arrays: Mapping[str, np.ndarray] = {}
  data: bytes | None = None
  groups: list[types.Group] | None = None


def missing_record(
    sid: str, sequence: int, totals: Mapping[str, int], cause: str
) -> dict[str, Any]:
  """Returns the journal's record of lost blocks.

  Args:
    sid: searcher that made the blocks.
    sequence: number after the last lost block.
    totals: searcher's totals after the last lost block.
    cause: "journal" for acknowledged blocks, "searcher" for blocks that a
      departed searcher had not delivered.
  """
  header = {"kind": "missing", "sid": sid, "next": sequence}
  return header | {"totals": dict(totals), "cause": cause}


class Intake:
  """The journal and the marks of acknowledgement.

  Blocks are journaled by one thread at a time. `lock` guards the marks and is
  never held during a write to the disk.

  journal: records, each written before it is acknowledged.
  ack_log: marks of acknowledged blocks.
  watermarks: sid -> number of the next block; those below are journaled.
  written_off: sid -> totals with which a searcher was written off.
  obstacle: reason why data cannot be journaled, for messages; None without one.
  """

  def __init__(
      self,
      config: ml_collections.ConfigDict,
      run: wire.RunIdentity,
      *,
      deliver: Callable[[inbox_lib.Record], None],
      on_event: Callable[[str, str], None],
      lock: threading.RLock,
      saved: Mapping[str, Any],
  ):
    """Opens the journal; `replay` reads it.

    Args:
      config: reads `replay.max_segment_mb`.
      run: must have a directory.
      deliver: function called with each record that is in the journal.
      on_event: function called with (kind, message).
      lock: the receiver's lock.
      saved: `ReplayService.get_state` of a checkpoint, or {}.
    """
    self.obstacle: str | None = None
    self.watermarks: dict[str, int] = dict(saved.get("watermarks", {}))
    self._run = run
    self._deliver = deliver
    self._on_event = on_event
    self._lock = lock
    self._saved = saved
    self.journal = journal_lib.Journal(
        run.workdir / "replay",
        max_segment_bytes=int(config.replay.max_segment_mb * 1e6),
        min_offset=saved.get("applied", 0),
        on_event=on_event,
    )
    self.ack_log = journal_lib.AckLog(run.workdir / "replay")
    self.written_off: dict[str, dict[str, int]] = {}
    if "ledger" in saved:
      announced = saved["ledger"]["announced"]
      for sid in saved["ledger"]["gone"]:
        totals = zip(messages.UNITS, announced[sid], strict=True)
        self.written_off[sid] = dict(totals)

  def acknowledged(self) -> dict[str, list[int]]:
    """Returns sid -> [next sequence, *totals] of acknowledged blocks."""
    with self._lock:
      return {sid: list(mark) for sid, mark in self.ack_log.marks.items()}

  def write(self, entries: Sequence[Entry]) -> None:
    """Journals records, and delivers them.

    Raises:
      JournalFullError: no room; none of the records is in the journal.
      OSError: another failure of the disk; likewise.
    """
    offsets = self.journal.append([self._data_of(entry) for entry in entries])
    for offset, entry in zip(offsets, entries, strict=True):
      self._report_missing(entry.header)
      self._note(offset, entry)

  def try_to_write(self, entries: Sequence[Entry]) -> bool:
    """Journals records; returns False without room for them."""
    try:
      self.write(entries)
    except journal_lib.JournalFullError as error:
      self.set_obstacle(error)
      return False
    return True

  def write_off(self, sid: str, totals: Mapping[str, int], cause: str) -> bool:
    """Journals the loss of a searcher; returns False without room."""
    header = {"kind": "gone", "sid": sid, "cause": cause, "totals": totals}
    if not self.try_to_write([Entry(header)]):
      return False
    self.set_obstacle(None)
    self._on_event("searcher_gone", f"{sid} ({cause})")
    return True

  def set_obstacle(self, error: journal_lib.JournalFullError | None) -> None:
    """Notes a full journal, or with None that it has room again."""
    if error is not None and self.obstacle is None:
      self._on_event("journal_full", f"no data is accepted: {error}")
    elif error is None and self.obstacle is not None:
      self._on_event("journal_room", "the journal has room again")
    self.obstacle = error and f"the journal has no room: {error}"

  def replay(self, leases: Mapping[str, Mapping[str, Any]]) -> None:
    """Delivers the journal's records after the checkpoint.

    Args:
      leases: content of the lease files, by searcher.
    """
    if self.written_off:
      # The checkpoint includes everything that these searchers announced.
      ended = [
          sid
          for sid, lease in leases.items()
          if self.written_off.get(sid) == lease["totals"]
      ]
      leases_lib.remove_files(self._run, ended)
    saved = self._saved
    start = saved.get("applied", self.journal.start)
    for offset, payload in self.journal.replay(start):
      try:
        header, arrays = wire.decode(payload, self._run.secret)
      except wire.WireError as error:
        self._on_event("journal_refused", f"record at {offset}: {error}")
        continue
      self._note(offset, Entry(header, arrays))
    searchers = {*saved.get("acknowledged", {}), *self.watermarks}
    unknown = self._unknown_loss(
        bool(saved), searchers - {*self.written_off}, leases
    )
    marks = dict(saved.get("acknowledged", {}))
    announced = {
        sid: [
            lease["first"],
            *(lease["acked"][unit] for unit in messages.UNITS),
        ]
        for sid, lease in leases.items()
    }
    for source in (self.ack_log.marks, announced):
      for sid, mark in source.items():
        marks[sid] = max(marks.get(sid, mark), mark)
    for sid, (sequence, *totals) in marks.items():
      if self.watermarks.get(sid, 0) < sequence:
        self.watermarks[sid] = sequence
        totals = dict(zip(messages.UNITS, totals, strict=True))
        header = missing_record(sid, sequence, totals, "journal")
        self._deliver(inbox_lib.Record(self.journal.offset, header))
    if unknown:
      header = {"kind": "unknown", "sid": "", "reason": unknown}
      self.write([Entry(header)])
    if self.ack_log.damage:
      for sid, mark in marks.items():
        self.ack_log.add(sid, mark)
      self.ack_log.rewrite()

  def close(self) -> None:
    """Closes the journal."""
    self.journal.close()

  def _data_of(self, entry: Entry) -> bytes:
    if entry.data is not None:
      return entry.data
    return wire.encode(entry.header, entry.arrays, self._run.secret)

  def _unknown_loss(
      self,
      is_resumed: bool,
      searchers: Collection[str],
      leases: Mapping[str, Mapping[str, Any]],
  ) -> str:
    """Returns why acknowledged blocks may be lost unnoticed, or "".

    Without the acknowledgement log, the leases on disk show what was
    acknowledged, provided that all searchers keep them on this disk.

    Args:
      is_resumed: whether there is a checkpoint.
      searchers: ids that have sent blocks and are not written off.
      leases: content of the lease files, by searcher.
    """
    log = self.ack_log
    damage = log.damage
    if not log.existed and is_resumed:
      damage = f"{log.path}: missing, with what was acknowledged"
      self._on_event("journal_missing", damage)
    elif damage:
      self._on_event("damaged", damage)
    if not damage or (searchers and all(sid in leases for sid in searchers)):
      return ""
    return f"{damage}; blocks since the checkpoint may be lost"

  def _report_missing(self, header: Mapping[str, Any]) -> None:
    if header.get("kind") == "missing":
      sid = header["sid"]
      first, last = self.watermarks.get(sid, 0), header["next"] - 1
      why = {"journal": "acknowledged, but not in the journal",
             "searcher": "its searcher is gone"}[header["cause"]]  # fmt: skip
      message = f"{sid}: blocks {first} to {last} are lost: {why}"
      self._on_event("gap", message)

  def _note(self, offset: int, entry: Entry) -> None:
    """Delivers a journaled record."""
    header, groups = entry.header, entry.groups
    sid, kind = header["sid"], header.get("kind")
    if kind == "gone":
      self.written_off[sid] = header["totals"]
    elif kind != "unknown":
      is_block = "sequence" in header
      following = header["sequence"] + 1 if is_block else header["next"]
      totals = [header["totals"][unit] for unit in messages.UNITS]
      # The trainer's thread reads the marks.
      with self._lock:
        self.watermarks[sid] = following
        self.ack_log.add(sid, [following, *totals])
      if is_block and groups is None:
        try:
          groups = messages.unpack_groups(header, entry.arrays)
        except ValueError as error:
          self._on_event("refused_block", f"{sid}: {error}")
    self._deliver(inbox_lib.Record(offset, header, groups))
