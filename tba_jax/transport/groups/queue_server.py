# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Trainer's end of the queue: a thread between the store and the journal.

A block is checked, journaled, put into the inbox, acknowledged and deleted from
the store, in this order. So a crash at any point loses nothing and counts
nothing twice: the journal is replayed, and blocks below a searcher's watermark
are duplicates. While the journal is full, blocks stay unacknowledged in the
store until searchers run out of credits and wait. A block missing from the
store is requested again; it is lost only if its searcher is gone.

The same thread grants prompts, reads leases and writes the run's status.
"""

import collections
from collections.abc import Callable, Mapping
import dataclasses
import threading
import time
from typing import Any

from absl import logging
import ml_collections
import numpy as np

from tba_jax.replay import prompt_order
from tba_jax.system import background
from tba_jax.system import polling
from tba_jax.transport import byte_store
from tba_jax.transport import wire
from tba_jax.transport.groups import intake as intake_lib
from tba_jax.transport.groups import journal as journal_lib
from tba_jax.transport.groups import leases as leases_lib
from tba_jax.transport.groups import messages
from tba_jax.transport.groups import receiver

# Seconds after which keys of an unknown searcher are deleted.
STRANGER_S = 6.0
# A poll stops downloading blocks at this size.
MAX_POLL_BYTES = 32 << 20
# Most refused blocks, and most deleted keys, of one poll.
_MAX_REFUSED = 64
_MAX_DELETED = 2000
# Most polls before a searcher is written off.
_MAX_POLLS = 1000

# Poll intervals: while the trainer waits, while it works, and the longest.
_URGENT_TICK_S = 0.002
_TICK_S = 0.02
_LONGEST_TICK_S = 0.1
# Poll interval as a share of the time since the last block.
_TICK_SHARE = 0.05
_FULL_RETRY_S = 0.25
# The trainer's lock and settings are rewritten periodically, in case a process
# has deleted or overwritten them.
_OPEN_EVERY_S = 5.0
# Least time between two requests for a block, and between repeats of a message
# that a searcher has not seen.
ASK_EVERY_S = 0.5
REPEAT_EVERY_S = 1.0


class StoreLockedError(ValueError):
  """The store is used by the trainer of another run directory."""


def lock_store(
    transport: byte_store.Transport,
    run: wire.RunIdentity,
    *,
    owner: str,
    place: str,
) -> None:
  """Takes the run lock of a store, unless `owner` already holds it.

  Two trainers on one store would grant the same prompts twice and acknowledge
  each other's blocks.

  Args:
    transport: store client of the calling thread.
    owner: id of the trainer's directory; a copy of the directory keeps the id.
    place: location of the directory, for the message.

  Raises:
    StoreLockedError: another trainer's directory holds the lock.
  """
  key, generation = messages.LOCK_KEY, transport.generation
  fields = {"generation": generation, "owner": owner, "place": place}
  data = messages.encode(run, key, fields)
  if transport.put(key, data, overwrite=False):
    return
  held = transport.get(key)
  try:
    other, _ = messages.decode(run, key, held or b"", "lock", generation)
  except wire.WireError:
    # The key was not written by a process of this run, in this store.
    transport.put(key, data)
    return
  if other["owner"] != owner:
    raise StoreLockedError(
        f"{place}: this store serves the trainer of {other['place']}; go on"
        " there, or restart the store"
    )


@dataclasses.dataclass(frozen=True)
class _IncomingBlock:
  """A downloaded block.

  sid, sequence: searcher, and number of the block.
  expected: number after the previous block; less than `sequence` if the blocks
    in between were lost with their searcher.
  data: the wire message, for the journal.
  header: message header with checked fields.
  """

  sid: str
  sequence: int
  expected: int
  data: bytes
  header: dict[str, Any]
  arrays: dict[str, np.ndarray]

  def skipped(self) -> dict[str, Any] | None:
    """Returns the journal's record of the lost blocks before this one."""
    if self.sequence == self.expected:
      return None
    before = {
        unit: self.header["totals"][unit] - self.header["amount"][unit]
        for unit in messages.UNITS
    }
    return intake_lib.missing_record(
        self.sid, self.sequence, before, "searcher"
    )


class Ingest:
  """Downloads delivered blocks in order, each once.

  Searchers number their blocks from 0. A searcher's *watermark* is the next
  expected number: a block below it is a duplicate, one above it waits for the
  missing ones, for as long as its searcher lives.

  watermarks: number of each searcher's next block; raised by the intake.
  unanswered: searchers that wait for an acknowledgement.
  missing: searcher -> number of its expected block, if that block is unreadable
    or only later ones were delivered.
  more: whether the last download stopped at its limit.
  """

  def __init__(
      self,
      run: wire.RunIdentity,
      *,
      watermarks: Mapping[str, int],
      leases: leases_lib.LeaseTable,
      refusals: wire.Refusals,
      clock: Callable[[], float] = time.monotonic,
  ):
    self.watermarks = watermarks
    self.num_duplicates = 0
    self.unanswered: set[str] = set()
    self.missing: dict[str, int] = {}
    self.more = False
    self._run = run
    self._leases = leases
    self._refusals = refusals
    self._clock = clock
    # Searcher without a lease -> time at which a key of it was first seen.
    self._strangers: dict[str, float] = {}

  def download(
      self, transport: byte_store.Transport
  ) -> tuple[list[_IncomingBlock], list[str]]:
    """Returns new blocks in order, and keys to delete.

    Stops after `MAX_POLL_BYTES`, or too many refused blocks.
    """
    directory = f"new/{messages.PARTITION}"
    blocks, useless = [], []
    num_bytes, num_refused, self.more = 0, 0, False
    self.missing = {}
    wanted: dict[str, int] = {}
    for key in transport.list(directory):
      sid, sequence = _parse(key, directory)
      if sequence < 0:
        error = wire.WireError("header", "not a block's key")
        self._refusals.add(key, error)
        useless.append(key)
        continue
      want = wanted.get(sid, self.watermarks.get(sid, 0))
      if sequence < want:
        self.num_duplicates += 1
        self.unanswered.add(sid)
        useless += _keys_of(sid, sequence)
        continue
      if sequence > want and not self._leases.is_gone(sid):
        if self._leases.knows(sid):
          self.missing.setdefault(sid, want)
        elif self._is_stranger(sid):
          useless += [f"{directory}/{sid}", f"q/{messages.PARTITION}/{sid}"]
        continue
      if num_bytes >= MAX_POLL_BYTES or num_refused >= _MAX_REFUSED:
        self.more = True
        break
      block = self._get(transport, sid, sequence, want)
      if block is None:
        num_refused += 1
        useless += _keys_of(sid, sequence)
        if self._leases.knows(sid):
          self.missing.setdefault(sid, want)
        continue
      wanted[sid] = sequence + 1
      num_bytes += len(block.data)
      blocks.append(block)
    return blocks, list(dict.fromkeys(useless))[:_MAX_DELETED]

  def _get(
      self,
      transport: byte_store.Transport,
      sid: str,
      sequence: int,
      expected: int,
  ) -> _IncomingBlock | None:
    key = messages.block_key(sid, sequence)
    data = transport.get(key)
    try:
      header, arrays = messages.decode(self._run, key, data or b"", "block")
      if (header["sid"], header["sequence"]) != (sid, sequence):
        raise wire.WireError("header", f"sid is {header['sid']!r}")
    except wire.WireError as error:
      self._refusals.add(key, error)
      return None
    return _IncomingBlock(sid, sequence, expected, data, header, arrays)

  def _is_stranger(self, sid: str) -> bool:
    """Returns whether a searcher has had no lease for too long."""
    now = self._clock()
    if now - self._strangers.setdefault(sid, now) < STRANGER_S:
      return False
    del self._strangers[sid]
    return True


def _parse(key: str, directory: str) -> tuple[str, int]:
  """Returns sid and sequence of a delivery's key; -1 if malformed."""
  sid, _, number = key[len(directory) + 1 :].rpartition("/")
  is_number = len(number) == 12 and number.isascii() and number.isdecimal()
  return sid, int(number) if sid and is_number else -1


def _keys_of(sid: str, sequence: int) -> list[str]:
  return [
      messages.delivery_key(sid, sequence),
      messages.block_key(sid, sequence),
  ]


class QueueServer(receiver.Receiver):
  """Serves the queue in a thread: the receiver for runs with a store.

  leaving: sid -> cause of searchers that are gone and not yet written off.
  poll_stats: totals: time of all polls `busy_s`; number of those without
    blocks `empty` and with blocks `served`, and the latter's `served_s` and
    `blocks`.
  """

  def __init__(
      self,
      config: ml_collections.ConfigDict,
      run: wire.RunIdentity,
      *,
      make_transport: Callable[[], byte_store.Transport],
      order: prompt_order.PromptOrder,
      epoch: int,
      open_store: Callable[[byte_store.Transport], None],
      on_event: Callable[[str, str], None],
      first_version: int = 0,
      saved: Mapping[str, Any] | None = None,
  ):
    """Opens the journal and replays its tail; `start` starts the thread.

    Args:
      config: reads `search`, `replay`, `rounds` and `train`.
      make_transport: makes the thread's own transport.
      epoch: the trainer's start count.
      open_store: locks a store and writes what searchers need to know.
      on_event: called with (kind, message).
      first_version: oldest version that can be sampled with.
      saved: `ReplayService.get_state` of a checkpoint.
    """
    super().__init__()
    self._begin(
        config,
        order=order,
        epoch=epoch,
        first_version=first_version,
        saved=saved or {},
    )
    self.leaving: dict[str, str] = {}
    self.poll_stats = collections.Counter()
    self._run = run
    self._make_transport = make_transport
    self._open_store = open_store
    self._on_event = on_event
    self._refusals = wire.Refusals(on_event)
    self.leases = leases_lib.LeaseTable(
        run, self._refusals, lease_s=config.search.lease_s
    )
    self.interval = polling.PollInterval(
        floor_s=_TICK_S,
        waiting_floor_s=_URGENT_TICK_S,
        share=_TICK_SHARE,
        cap_s=_LONGEST_TICK_S,
    )
    self._woken = threading.Event()
    self._worker: background.Thread | None = None
    # Downloaded blocks for which the journal has no room.
    self._held: list[_IncomingBlock] = []
    self._work_count = 0
    # By searcher: number and time of the last message, and when to ask again.
    self._written: dict[str, tuple[int, float]] = {}
    self._ask_at: dict[str, float] = {}
    self._status: dict[str, Any] | None = None
    self._stop_message: dict[str, Any] | None = None
    self._open_at = 0.0
    self.intake = intake_lib.Intake(
        config,
        run,
        deliver=self._deliver,
        on_event=on_event,
        lock=self.lock,
        saved=saved or {},
    )
    self.journal = self.intake.journal
    self.ingest = Ingest(
        run,
        watermarks=self.intake.watermarks,
        leases=self.leases,
        refusals=self._refusals,
    )
    self.intake.replay(self._read_files())

  @property
  def counts(self) -> dict[str, int]:
    """Numbers of refused messages and of duplicate blocks."""
    return {
        "refused": self._refusals.count,
        "wire_duplicates": self.ingest.num_duplicates,
    }

  @property
  def urgent(self) -> bool:
    """Whether the trainer waits for data; set by its thread."""
    return self.interval.waiting

  @urgent.setter
  def urgent(self, urgent: bool) -> None:
    with self.lock:
      if not urgent:
        self.interval.stop_waiting()
      elif self.interval.start_waiting():
        self._wake()

  def start(self) -> None:
    self._worker = background.Thread("queue_server", self._serve, close_s=10.0)

  def close(self) -> None:
    """Ends the thread and closes the journal."""
    try:
      if self._worker is not None:
        self._wake()
        byte_store.close_thread(self._worker, "queue server")
    finally:
      self.intake.close()

  def check(self) -> None:
    """Raises TransportError if the thread has ended with an error."""
    if self._worker is not None:
      byte_store.check_thread(self._worker, "the queue server")

  def announced(self, *, from_disk: bool = False) -> dict[str, dict[str, int]]:
    """Returns the totals that each searcher has announced, by sid.

    Args:
      from_disk: whether to read the leases on this disk as well.
    """
    with self.lock:
      if from_disk:
        self._read_files()
      return self.leases.announced()

  def has_searchers(self) -> bool:
    """Returns whether a searcher is alive, or not written off yet."""
    with self.lock:
      return bool(self.leases.alive() or self.leaving)

  def heard(self) -> dict[str, dict[str, Any]]:
    """Returns `LeaseTable.all`; for any thread."""
    with self.lock:
      return self.leases.all()

  def set_status(self, status: dict[str, Any]) -> None:
    """Sets the content of `status/run`."""
    self._status = status

  def stop_searchers(self, *, done: bool) -> None:
    """Asks all searchers to deliver and leave; `done` at the end of the run."""
    self._stop_message = {"done": done}

  def _wake(self) -> None:
    self._woken.set()

  def _read_files(self) -> dict[str, dict[str, Any]]:
    """Reads the lease files on this disk. Under the lock."""
    newest, damaged = leases_lib.read_files(self._run)
    for path in damaged:
      self._on_event("damaged", f"{path}: no valid lease")
    leases = {sid: lease for sid, (lease, _) in newest.items()}
    # Searchers that were written off stay forgotten.
    news = {
        sid: lease
        for sid, lease in leases.items()
        if self.leases.knows(sid)
        or self.intake.written_off.get(sid) != lease["totals"]
    }
    self.leases.update(news, is_live=False)
    return leases

  def _serve(self, stop: threading.Event) -> None:
    transport = self._make_transport()
    self.generation = transport.generation
    is_new = True
    while not stop.is_set():
      started = time.perf_counter()
      num_blocks = 0
      try:
        self._begin_store(transport, is_new)
        is_new = False
        if self.leases.is_due():
          self._read_leases(transport)
          self._write_status(transport)
        num_blocks = self._poll(transport)
      except byte_store.TransportError as error:
        self._on_event("store_lost", f"queue server: {error}")
        self.generation = transport.reconnect()
        is_new = True
        with self.lock:
          self.leases.restart_times()
      self._count_poll(time.perf_counter() - started, num_blocks)
      with self.lock:
        self.interval.polled(bool(num_blocks))
      if self.obstacle is not None:
        stop.wait(_FULL_RETRY_S)
      elif not num_blocks:
        self._woken.wait(self.interval.due_in_s())
      self._woken.clear()
    try:
      # A searcher whose lease has expired may still run, and would wait.
      self._write_status(transport)
    except byte_store.TransportError as error:
      logging.warning("queue server: no goodbye: %s", error)
    transport.close()

  def _count_poll(self, seconds: float, num_blocks: int) -> None:
    self.poll_stats["busy_s"] += seconds
    if not num_blocks:
      self.poll_stats["empty"] += 1
    else:
      self.poll_stats["served"] += 1
      self.poll_stats["served_s"] += seconds
      self.poll_stats["blocks"] += num_blocks

  def _begin_store(self, transport: byte_store.Transport, is_new: bool) -> None:
    """Locks the store; if it is new, writes all grants again."""
    now = time.monotonic()
    if is_new or now >= self._open_at:
      self._open_store(transport)
      self._open_at = now + _OPEN_EVERY_S
    if is_new:
      # An earlier trainer may have left a stop message.
      if self._stop_message is None:
        transport.delete(messages.STOP_KEY)
      with self.lock:
        self.grants.assign_again()

  def _poll(
      self, transport: byte_store.Transport, *, grants: bool = True
  ) -> int:
    """Ingests and acknowledges blocks; returns the number of blocks."""
    useless: list[str] = []
    if not self._held:
      self._held, useless = self.ingest.download(transport)
    num_blocks = 0
    try:
      if self._held:
        num_blocks = len(self._held)
        useless += self._journal_held()
      if self.intake.ack_log.sync() or num_blocks:
        self.intake.set_obstacle(None)
    except journal_lib.JournalFullError as error:
      self.intake.set_obstacle(error)
    else:
      self._answer(transport, grants)
    transport.delete_all(useless)
    return num_blocks

  def _journal_held(self) -> list[str]:
    """Moves held blocks to the journal; returns their keys."""
    entries, useless = [], []
    for block in self._held:
      if (skipped := block.skipped()) is not None:
        entries.append(intake_lib.Entry(skipped))
      entries.append(intake_lib.Entry(block.header, block.arrays, block.data))
      useless += _keys_of(block.sid, block.sequence)
    self.intake.write(entries)
    self.ingest.unanswered |= {block.sid for block in self._held}
    self._held = []
    return useless

  def _answer(self, transport: byte_store.Transport, grants: bool) -> None:
    """Writes acknowledgements and grants."""
    now = time.monotonic()
    with self.lock:
      alive = self.leases.alive() if grants and not self._stop_message else {}
      unanswered = set(self.ingest.unanswered)
      again = {
          sid: sequence
          for sid, sequence in self.ingest.missing.items()
          if now >= self._ask_at.get(sid, 0.0)
      }
      work = self.grants.assign(alive, unanswered | again.keys())
    values = {}
    for sid, blocks in work.items():
      self._work_count += 1  # Shows a searcher which message is newer.
      key = messages.work_key(sid)
      fields = {
          "count": self._work_count,
          "blocks": blocks,
          "acked": self.ingest.watermarks.get(sid, 0),
          "again": again.get(sid, -1),
      }
      values[key] = self._encode(key, fields)
      self._written[sid] = self._work_count, now
    transport.put_all(values)
    self._ask_at.update(dict.fromkeys(again, now + ASK_EVERY_S))
    self.ingest.unanswered -= unanswered

  def _encode(self, key: str, fields: Mapping[str, Any]) -> bytes:
    return messages.encode(self._run, key, {"epoch": self.epoch, **fields})

  def _read_leases(self, transport: byte_store.Transport) -> None:
    leases = self.leases.read(transport)
    now = time.monotonic()
    with self.lock:
      self.leases.update(leases)
      self.leaving.update(self.leases.take_gone(self.generation))
      for sid in leases.keys() & self.leases.alive().keys():
        count, written_at = self._written.get(sid, (-1, now))
        is_behind = tuple(leases[sid]["seen"]) < (self.epoch, count)
        if is_behind and now - written_at >= REPEAT_EVERY_S:
          self.ingest.unanswered.add(sid)  # The message may be gone.
        epoch, number = leases[sid]["begun"]
        if epoch == self.epoch:
          self.grants.note_begun(sid, number)
    self._skip_dropped()
    for sid, cause in list(self.leaving.items()):
      self._write_off(transport, sid, cause)

  def _skip_dropped(self) -> None:
    """Counts acknowledged blocks as lost if the journal lacks them.

    Their searchers no longer keep them.
    """
    with self.lock:
      records = [
          intake_lib.missing_record(sid, first, totals, "journal")
          for sid, (first, totals) in self.leases.dropped().items()
          if first > self.ingest.watermarks.get(sid, 0)
      ]
    if records:
      self.intake.try_to_write([intake_lib.Entry(r) for r in records])

  def _write_off(
      self, transport: byte_store.Transport, sid: str, cause: str
  ) -> None:
    """Counts undelivered blocks of a departed searcher as lost."""
    with self.lock:
      self._read_files()
    # First ingest the searcher's blocks that are in the store.
    self._poll(transport, grants=False)
    for _ in range(_MAX_POLLS):
      if not self.ingest.more or self._held:
        break
      self._poll(transport, grants=False)
    if self._held:
      return
    totals = self.leases.totals(sid)
    if self.intake.written_off.get(sid) == totals:
      with self.lock:
        self.grants.forget(sid)
    elif not self.intake.write_off(sid, totals, cause):
      return
    with self.lock:
      del self.leaving[sid]
      self.leases.depart(sid)
    self.ingest.unanswered.discard(sid)
    self._written.pop(sid, None)
    self._ask_at.pop(sid, None)
    transport.delete_all([messages.lease_key(sid), messages.work_key(sid)])

  def _write_status(self, transport: byte_store.Transport) -> None:
    status, self._status = self._status, None
    for key, fields in (
        (messages.STATUS_KEY, status),
        (messages.STOP_KEY, self._stop_message),
    ):
      if fields is not None:
        fields = {"generation": transport.generation, **fields}
        transport.put(key, self._encode(key, fields))
