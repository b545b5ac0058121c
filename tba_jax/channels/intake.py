# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Journals blocks, and puts them into the inbox: the core of any receiver.

A block is journaled before it is acknowledged, and put into the inbox in the
order of the journal. After a restart the inbox begins with what the journal has
beyond the checkpoint.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
import dataclasses
import threading
from typing import Any, NamedTuple

import ml_collections
import numpy as np

from tba_jax import schedule
from tba_jax.channels import grants as grants_lib
from tba_jax.channels import inbox as inbox_lib
from tba_jax.channels import journal as journal_lib
from tba_jax.channels import leases as leases_lib
from tba_jax.channels import messages
from tba_jax.replay import prompt_order
from tba_jax.transport import wire


class Entry(NamedTuple):
  """A record to be journaled.

  header: header of the record.
  arrays: arrays of a block.
  data: wire message of both; None to encode it.
  """

  header: dict[str, Any]
  arrays: Mapping[str, np.ndarray] = {}
  data: bytes | None = None


def missing_record(
    sid: str, sequence: int, totals: Mapping[str, int], cause: str
) -> dict[str, Any]:
  """Returns the journal's record of blocks that never come.

  Args:
    sid: their searcher.
    sequence: number after the last of them.
    totals: searcher's totals after the last of them.
    cause: "journal" if they were acknowledged, "searcher" if it is gone.
  """
  header = {"kind": "missing", "sid": sid, "next": sequence}
  return header | {"totals": dict(totals), "cause": cause}


class Intake:
  """The journal, the marks of acknowledgement, the inbox, and the grants.

  Blocks are journaled by one thread at a time. `lock` guards grants and marks,
  never a write to the disk.

  inbox: journaled records, for the trainer's thread.
  journal: journal of the run; one that keeps nothing without a directory.
  ack_log: marks of acknowledged blocks.
  grants: grants of positions that are not journaled.
  watermarks: sid -> number of the next block; those below are journaled.
  written_off: sid -> totals with which a searcher was written off.
  obstacle: reason why no data is journaled, for messages; None if it is.
  """

  def __init__(
      self,
      config: ml_collections.ConfigDict,
      run: messages.RunIdentity,
      *,
      order: prompt_order.PromptOrder,
      on_event: Callable[[str, str], None],
      lock: threading.RLock,
      first_version: int,
      saved: Mapping[str, Any],
  ):
    """Opens the journal; `replay` reads it.

    Args:
      config: reads `search`, `replay`, `rounds` and `train`.
      run: the run; without a directory nothing is written.
      order: order of the prompts.
      on_event: function called with (kind, message).
      lock: the receiver's lock.
      first_version: oldest version that can be sampled with.
      saved: `ReplayService.get_state` of a checkpoint, or {}.
    """
    self.inbox = inbox_lib.Inbox()
    self.obstacle: str | None = None
    self.watermarks: dict[str, int] = dict(saved.get("watermarks", {}))
    self._run = run
    self._on_event = on_event
    self._lock = lock
    self._saved = saved
    if run.workdir is None:
      self.journal, self.ack_log = NoJournal(), NoAckLog()
    else:
      self.journal = journal_lib.Journal(
          run.workdir / "replay",
          max_segment_bytes=int(config.replay.max_segment_mb * 1e6),
          min_position=saved.get("applied", 0),
          on_event=on_event,
      )
      self.ack_log = journal_lib.AckLog(run.workdir / "replay")
    journaled = None
    if saved:
      journaled = prompt_order.Positions.from_state(saved["order"], order)
    self.grants = grants_lib.Grants(
        order,
        prompts_per_round=config.search.prompts_per_round,
        schedule=schedule.make_schedule(config, first_version=first_version),
        journaled=journaled,
    )
    self.written_off: dict[str, dict[str, int]] = {}
    if "ledger" in saved:
      announced = saved["ledger"]["announced"]
      for sid in saved["ledger"]["gone"]:
        totals = zip(messages.UNITS, announced[sid], strict=True)
        self.written_off[sid] = dict(totals)

  def describe(self, heard: Mapping[str, Mapping[str, Any]]) -> str:
    """Returns the living searchers of `Receiver.heard`, and the obstacle."""
    searchers = [
        f"{sid} (silent for {lease['age_s']:.0f} s, {lease['unacked']} blocks"
        " unacknowledged)"
        for sid, lease in heard.items()
        if lease["alive"]
    ]
    obstacle = f"{self.obstacle}; " if self.obstacle else ""
    return f"{obstacle}searchers: {', '.join(searchers) or 'none alive'}"

  def acknowledged(self) -> dict[str, list[int]]:
    """Returns sid -> [next sequence, *totals] of acknowledged blocks."""
    with self._lock:
      return {sid: list(mark) for sid, mark in self.ack_log.marks.items()}

  def write(self, entries: Sequence[Entry]) -> None:
    """Journals records, and puts them into the inbox.

    Raises:
      JournalFullError: no room; none of them is in the journal.
      OSError: another failure of the disk; likewise.
    """
    positions = self.journal.append([self._data_of(entry) for entry in entries])
    for position, entry in zip(positions, entries, strict=True):
      self._tell_missing(entry.header)
      self._note(position, entry.header, entry.arrays)

  def try_to_write(self, entries: Sequence[Entry]) -> bool:
    """Journals records; returns False if there is no room for them."""
    try:
      self.write(entries)
    except journal_lib.JournalFullError as error:
      self.set_obstacle(error)
      return False
    return True

  def write_off(self, sid: str, totals: Mapping[str, int], cause: str) -> bool:
    """Journals that a searcher is gone; returns False if there is no room."""
    header = {"kind": "gone", "sid": sid, "cause": cause, "totals": totals}
    if not self.try_to_write([Entry(header)]):
      return False
    self.set_obstacle(None)
    self._on_event("searcher_gone", f"{sid} ({cause})")
    return True

  def set_obstacle(self, error: journal_lib.JournalFullError | None) -> None:
    """Records that the journal has no room, or with None that it has."""
    if error is not None and self.obstacle is None:
      self._on_event("journal_full", f"no data is accepted: {error}")
    elif error is None and self.obstacle is not None:
      self._on_event("journal_room", "the journal has room again")
    self.obstacle = error and f"the journal has no room: {error}"

  def replay(self, kept: Mapping[str, Mapping[str, Any]]) -> None:
    """Puts what the journal has beyond the checkpoint into the inbox.

    Args:
      kept: leases on disk.
    """
    if self.written_off:
      # The checkpoint has all that these searchers announced.
      ended = [
          sid
          for sid, lease in kept.items()
          if self.written_off.get(sid) == lease["totals"]
      ]
      leases_lib.remove_files(self._run, ended)
    saved = self._saved
    start = saved.get("applied", self.journal.start)
    for position, payload in self.journal.replay(start):
      try:
        header, arrays = wire.decode(payload, self._run.secret)
      except wire.WireError as error:
        self._on_event("journal_refused", f"record at {position}: {error}")
        continue
      self._note(position, header, arrays)
    known = {*saved.get("acknowledged", {}), *self.watermarks}
    unknown = self._unknown_loss(bool(saved), known - {*self.written_off}, kept)
    marks = dict(saved.get("acknowledged", {}))
    told = {
        sid: [
            lease["first"],
            *(lease["acked"][unit] for unit in messages.UNITS),
        ]
        for sid, lease in kept.items()
    }
    for source in (self.ack_log.marks, told):
      for sid, mark in source.items():
        marks[sid] = max(marks.get(sid, mark), mark)
    for sid, (sequence, *totals) in marks.items():
      if self.watermarks.get(sid, 0) < sequence:
        self.watermarks[sid] = sequence
        totals = dict(zip(messages.UNITS, totals, strict=True))
        header = missing_record(sid, sequence, totals, "journal")
        self.inbox.put(inbox_lib.Record(self.journal.position, header))
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
    if entry.data is not None or self._run.workdir is None:
      return entry.data or b""
    return wire.encode(entry.header, entry.arrays, self._run.secret)

  def _unknown_loss(
      self,
      is_resumed: bool,
      known: Collection[str],
      kept: Mapping[str, Mapping[str, Any]],
  ) -> str:
    """Returns why acknowledged blocks may be lost unnoticed, "" if they cannot.

    Without the acknowledgement log, the leases on disk show what was
    acknowledged, if all searchers keep theirs here.

    Args:
      is_resumed: whether there is a checkpoint.
      known: searchers that have sent blocks and are not written off.
      kept: leases on disk.
    """
    log = self.ack_log
    damage = log.damage
    if not log.existed and is_resumed:
      damage = f"{log.path}: missing, with what was acknowledged"
      self._on_event("journal_missing", damage)
    elif damage:
      self._on_event("damaged", damage)
    if not damage or (known and all(sid in kept for sid in known)):
      return ""
    return f"{damage}; blocks since the checkpoint may be lost"

  def _tell_missing(self, header: Mapping[str, Any]) -> None:
    if header.get("kind") == "missing":
      sid = header["sid"]
      first, last = self.watermarks.get(sid, 0), header["next"] - 1
      why = {"journal": "acknowledged, but not in the journal",
             "searcher": "its searcher is gone"}[header["cause"]]  # fmt: skip
      message = f"{sid}: blocks {first} to {last} are lost: {why}"
      self._on_event("gap", message)

  def _note(
      self,
      position: int,
      header: dict[str, Any],
      arrays: Mapping[str, np.ndarray],
  ) -> None:
    """Puts a journaled record into the inbox."""
    sid, kind, groups = header["sid"], header.get("kind"), None
    if kind == "unknown":
      self.inbox.put(inbox_lib.Record(position, header))
      return
    if kind == "gone":
      self.written_off[sid] = header["totals"]
    else:
      is_block = "sequence" in header
      following = header["sequence"] + 1 if is_block else header["next"]
      totals = [header["totals"][unit] for unit in messages.UNITS]
      # The trainer's thread reads the marks.
      with self._lock:
        self.watermarks[sid] = following
        self.ack_log.add(sid, [following, *totals])
      if is_block:
        try:
          groups = messages.unpack_groups(header, arrays)
        except ValueError as error:
          self._on_event("refused_block", f"{sid}: {error}")
    # First, since what no searcher holds any more must be in the inbox.
    self.inbox.put(inbox_lib.Record(position, header, groups))
    with self._lock:
      if groups:
        self.grants.note_journaled(sid, {g.position for g in groups})
      else:
        # The searcher is gone, or the block's prompts are unknown.
        self.grants.forget(sid)


@dataclasses.dataclass
class NoJournal:
  """Stands in for a `Journal` where nothing is to outlive the process.

  position: number of records.
  start: position of the oldest record.
  """

  position: int = 0
  start: int = 0

  def append(self, payloads: Sequence[bytes]) -> list[int]:
    first = self.position + 1
    self.position += len(payloads)
    return list(range(first, self.position + 1))

  def replay(self, from_position: int) -> Iterator[tuple[int, bytes]]:
    del from_position
    return iter(())

  def truncate_before(self, position: int) -> int:
    del position
    return 0

  def close(self) -> None:
    """Does nothing."""


@dataclasses.dataclass
class NoAckLog:
  """Stands in for an `AckLog` where nothing is to outlive the process."""

  marks: dict[str, list[int]] = dataclasses.field(default_factory=dict)
  existed: bool = True
  damage: str = ""

  def add(self, sid: str, mark: Sequence[int]) -> None:
    self.marks[sid] = list(mark)

  def sync(self) -> bool:
    return False
