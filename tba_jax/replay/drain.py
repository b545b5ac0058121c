# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""The trainer's side of the queue: one thread between store and journal.

Order of things for a block: check, journal (synced), hand to the trainer's
thread, acknowledge (in one message with the grants), remove from the store. A
crash between two of them loses nothing and counts nothing twice: the journal is
replayed, and sequence numbers below a searcher's watermark are wire duplicates.
Where the journal has no room, blocks stay in the store, unacknowledged, until
it has: credits then hold the searchers back.

The same thread grants prompts to searchers, reads their leases and shows the
run's state, so that the trainer's own thread never talks to the store.
"""

from collections.abc import Callable
import dataclasses
import json
import threading
import time
from typing import Any

from absl import logging

from tba_jax import pace as pace_lib
from tba_jax import types
from tba_jax.replay import grants as grants_lib
from tba_jax.replay import intake as intake_lib
from tba_jax.replay import journal as journal_lib
from tba_jax.replay import lease_reader
from tba_jax.replay import leases as leases_lib
from tba_jax.replay import looks as looks_lib
from tba_jax.replay import packing
from tba_jax.replay import replies as replies_lib
from tba_jax.transport import base
from tba_jax.transport import wire

# Between two looks at the queue: while the trainer waits and while it works, at
# least and at most.
_URGENT_TICK_S = 0.002
_TICK_S = 0.02
_LONGEST_TICK_S = 0.1
# Of the time since a block came.
_TICK_SHARE = 0.05
# Between two tries to append to a journal without room.
_FULL_RETRY_S = 0.25


@dataclasses.dataclass(frozen=True)
class Record:
  """One journaled event: a block of groups, or a searcher that is gone.

  position: in the journal.
  header: of the wire message.
  groups: of a block, None where its content could not be read.
  """

  position: int
  header: dict[str, Any]
  groups: list[types.Group] | None

  @property
  def is_block(self) -> bool:
    return "sequence" in self.header


class Drain:
  """Runs the trainer's store thread; hands records over in journal order."""

  def __init__(
      self,
      make_transport: Callable[[], base.Transport],
      *,
      journal: journal_lib.Journal,
      grants: grants_lib.Grants,
      lease_s: float,
      watermarks: dict[str, int],
      replay_from: int,
      run_id: str,
      secret: bytes,
      epoch: int,
      partition: int,
      claim: Callable[[base.Transport], None],
      on_event: Callable[[str, str], None],
  ):
    """Replays the journal's tail into `pending`; `start` then begins to drain.

    Args:
      make_transport: makes the thread's own transport.
      journal: open for appending.
      grants: over the prompt order that the service shares; both are touched
        only under `lock`.
      lease_s: patience with a silent searcher.
      watermarks: next sequence of each searcher that a checkpoint had applied.
      replay_from: journal position of the first record not yet applied.
      run_id: the run.
      secret: key of the run's messages.
      epoch: the trainer's start count.
      partition: of the queue.
      claim: makes a store this trainer's, or raises.
      on_event: called with (kind, message).
    """
    self._make_transport = make_transport
    self._journal = journal
    self._grants = grants
    self._secret = secret
    self._partition = partition
    self._claim = claim
    self._on_event = on_event
    self.lock = threading.Condition(threading.RLock())
    self.leases = leases_lib.LeaseTable(lease_s)
    self.generation = 0
    # Searchers that are gone and not yet written off, with the cause.
    self.leaving: dict[str, str] = {}
    # What keeps data from coming in, in words; None where nothing does.
    self.obstacle: str | None = None
    self.looks = looks_lib.Looks()
    self._pending: list[Record] = []
    keys = {"run_id": run_id, "secret": secret}
    self._replies = replies_lib.Replies(epoch=epoch, **keys)
    self._pace = pace_lib.Pace(
        floor_s=_TICK_S,
        waiting_floor_s=_URGENT_TICK_S,
        share=_TICK_SHARE,
        cap_s=_LONGEST_TICK_S,
    )
    self._wake = threading.Event()
    self._intake = intake_lib.Intake(
        watermarks=watermarks, on_event=on_event, **keys
    )
    self._lease_reader = lease_reader.LeaseReader(
        refuse=self._intake.refuse, **keys
    )
    self._status: dict[str, Any] | None = None
    self._goodbye: dict[str, bool] | None = None
    self._stop = threading.Event()
    self._error: BaseException | None = None
    for position, payload in journal.replay(replay_from):
      self._restore(position, payload)
    # Whose ack was lost with the last trainer sends again.
    self._intake.unanswered.clear()
    self._thread = threading.Thread(target=self._run, name="drain", daemon=True)

  @property
  def counts(self) -> dict[str, int]:
    """Messages refused, and copies of blocks that were there already."""
    return dict(self._intake.counts)

  @property
  def urgent(self) -> bool:
    """True while somebody waits for data; to be set by who does."""
    return self._pace.waiting

  @urgent.setter
  def urgent(self, urgent: bool) -> None:
    with self.lock:
      if not urgent:
        self._pace.rest()
      elif self._pace.wait():
        self._wake.set()

  def start(self) -> None:
    self._thread.start()

  def close(self) -> None:
    """Ends the thread; what was acknowledged is in the journal."""
    self._stop.set()
    self._wake.set()
    if self._thread.is_alive():
      self._thread.join(timeout=10.0)

  def check(self) -> None:
    """Raises the thread's error in the calling thread, if it has one."""
    if self._error is not None:
      message = f"draining has ended: {self._error}"
      raise base.TransportError(message) from self._error

  def admit(self, limit: int) -> None:
    """Lets positions below `limit` be granted."""
    with self.lock:
      if self._grants.admit(limit):
        self._wake.set()

  def pending(self) -> list[Record]:
    """Returns the records not yet taken, in journal order. Under `lock`."""
    return self._pending

  def take(self, count: int) -> list[Record]:
    """Removes and returns the first records. Under `lock`."""
    taken, self._pending = self._pending[:count], self._pending[count:]
    return taken

  def heard(self) -> dict[str, dict[str, Any]]:
    """Returns the last leases of all searchers, with `age_s` and `alive`."""
    with self.lock:
      return self.leases.heard()

  def set_status(self, status: dict[str, Any]) -> None:
    """Sets what `status/run` shows from the next tick on."""
    self._status = status

  def stop_searchers(self, *, done: bool) -> None:
    """Asks all searchers to deliver and leave; `done` where the run is."""
    self._goodbye = {"done": done}

  def _restore(self, position: int, payload: bytes) -> None:
    try:
      header, arrays = wire.decode(payload, self._secret)
    except wire.WireError as error:
      self._intake.counts["refused"] += 1
      self._on_event("journal_refused", f"record at {position}: {error}")
      return
    self._note(position, header, arrays)

  def _note(self, position: int, header: dict[str, Any], arrays) -> None:
    sid, groups = header["sid"], None
    if "sequence" in header:
      self._intake.take(header)
      try:
        groups = packing.unpack_groups(header, arrays)
      except ValueError as error:
        self._on_event("refused_block", f"{sid}: {error}")
    with self.lock:
      self._pending.append(Record(position, header, groups))
      if groups:
        self._grants.deliver(sid, {g.position for g in groups})
      else:
        # Gone, or nobody knows which prompts it meant.
        self._grants.forget(sid)
      self.lock.notify_all()

  def _run(self) -> None:
    try:
      transport = self._make_transport()
      self.generation = transport.generation
      announced = False
      while not self._stop.is_set():
        started = time.perf_counter()
        found = 0
        try:
          if not announced:
            self._announce(transport)
            announced = True
          if self._lease_reader.is_due():
            self._read_leases(transport)
            self._show(transport)
          found = self._drain(transport)
        except base.TransportError as error:
          self._on_event("store_lost", f"drain: {error}")
          self.generation = transport.reconnect()
          announced = False
          self._intake.forget_gaps()
          with self.lock:
            self.leases.excuse()
        self.looks.add(time.perf_counter() - started, found)
        with self.lock:
          self._pace.asked(bool(found))
        if self.obstacle is not None:
          self._stop.wait(_FULL_RETRY_S)
        elif not found:
          self._wake.wait(self._pace.due_in_s())
        self._wake.clear()
      transport.close()
    except Exception as error:  # The trainer's thread raises it.
      logging.exception("drain ended")
      with self.lock:
        self._error = error
        self.lock.notify_all()

  def _announce(self, transport: base.Transport) -> None:
    # A new store knows no grants; acks follow when their blocks come again. One
    # that an earlier trainer has left may hold that trainer's goodbye.
    self._claim(transport)
    if self._goodbye is None:
      transport.delete("ctl/stop")
    with self.lock:
      self._grants.announce_again()

  def _drain(self, transport: base.Transport, *, grants: bool = True) -> int:
    entries = transport.list(f"q/{self._partition}")
    fresh, done = self._intake.sort(entries)
    positions = self._append([message.data for message in fresh])
    if positions is not None:
      for position, message in zip(positions, fresh, strict=True):
        self._note(position, message.header, message.arrays)
        done.append(message.key)
    self._answer(transport, grants)
    transport.delete_all(done)
    return len(positions or ())

  def _append(self, payloads: list[bytes]) -> list[int] | None:
    """Returns the journal's positions; None where it has no room."""
    if not payloads:
      return []
    try:
      positions = self._journal.append(payloads)
    except journal_lib.JournalFullError as error:
      if self.obstacle is None:
        self._on_event("journal_full", f"nothing is taken in: {error}")
      self.obstacle = f"the journal has no room: {error}"
      return None
    if self.obstacle is not None:
      self.obstacle = None
      self._on_event("journal_room", "the journal has room again")
    return positions

  def _answer(self, transport: base.Transport, grants: bool) -> None:
    """Acknowledges what was taken in, and may grant what is admitted."""
    with self.lock:
      alive = self.leases.alive() if grants and not self._goodbye else {}
      unanswered = set(self._intake.unanswered)
      work = self._grants.assign(alive, unanswered)
    self._replies.put_work(transport, work, self._intake.watermarks)
    self._intake.unanswered -= unanswered

  def _read_leases(self, transport: base.Transport) -> None:
    found = self._lease_reader.read(transport)
    with self.lock:
      self.leases.update(found)
      self.leaving.update(self.leases.take_gone())
    for sid, cause in list(self.leaving.items()):
      self._write_off(transport, sid, cause)

  def _write_off(self, transport: base.Transport, sid: str, cause: str) -> None:
    # Its blocks in the store count, and what it held is granted first.
    self._drain(transport, grants=False)
    header = {
        "kind": "gone",
        "sid": sid,
        "cause": cause,
        "totals": self.leases.totals(sid),
    }
    positions = self._append([wire.encode(header, {}, self._secret)])
    if positions is None:
      return
    self._on_event("searcher_gone", f"{sid} ({cause})")
    with self.lock:
      self._note(positions[0], header, {})
      del self.leaving[sid]
    self._intake.unanswered.discard(sid)
    transport.delete_all([f"live/{sid}", replies_lib.key_of(sid)])

  def _show(self, transport: base.Transport) -> None:
    status, self._status = self._status, None
    if status is not None:
      # Through JSON, so that what a reader gets is what was meant.
      status = json.loads(json.dumps(status))
      self._replies.put(transport, "status/run", status)
    if self._goodbye is not None:
      self._replies.put(transport, "ctl/stop", self._goodbye)
