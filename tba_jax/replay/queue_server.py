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

from collections.abc import Callable, Mapping
import dataclasses
import json
import threading
import time
from typing import Any

from absl import logging
import numpy as np

from tba_jax import types
from tba_jax.replay import journal as journal_lib
from tba_jax.replay import messages
from tba_jax.replay import scheduler
from tba_jax.system import polling
from tba_jax.transport import base
from tba_jax.transport import wire

# What of a look at the queue is new, in order, and what can be thrown away.
#
# Each searcher numbers its blocks from 0. Its *watermark* is the next number
# that
# is wanted of it: a block below is a wire duplicate, one above waits for those
# before it, and only an authenticated block of this run counts as either.


# A gap in a searcher's sequence that lasts so long will not be filled: the
# journal that held the missing blocks is gone.
GAP_S = 6.0

_UNITS = ("prompts", "completions", "tokens")


@dataclasses.dataclass(frozen=True)
class IntakeMessage:
  """One block as it came.

  key: in the store.
  data: as sent, for the journal.
  header: of the wire message, its common fields checked.
  arrays: not checked yet.
  """

  key: str
  data: bytes
  header: dict[str, Any]
  arrays: dict[str, np.ndarray]


class Intake:
  """Sorts messages by the watermarks, which move only by `take`.

  watermarks: next sequence of each searcher.
  counts: messages refused, and wire duplicates.
  unanswered: searchers that are owed an acknowledgement; the owner takes them
    out.
  """

  def __init__(
      self,
      *,
      watermarks: Mapping[str, int],
      run_id: str,
      secret: bytes,
      on_event: Callable[[str, str], None],
      clock: Callable[[], float] = time.monotonic,
  ):
    self.watermarks = dict(watermarks)
    self.counts = {"wire_duplicates": 0, "refused": 0}
    self.unanswered: set[str] = set()
    self._run_id = run_id
    self._secret = secret
    self._on_event = on_event
    self._clock = clock
    self._gaps: dict[str, float] = {}

  def take(self, header: Mapping[str, Any]) -> None:
    """Notes that a block is safe: its copies are duplicates from now on."""
    self.watermarks[header["sid"]] = header["sequence"] + 1
    self.unanswered.add(header["sid"])

  def refuse(self, what: str) -> None:
    """Counts a message that is none of this run, and says which and why."""
    self.counts["refused"] += 1
    self._on_event("refused_message", what)

  def forget_gaps(self) -> None:
    """Begins the wait for missing blocks anew: everything is sent again."""
    self._gaps.clear()

  def sort(
      self, entries: Mapping[str, bytes]
  ) -> tuple[list[IntakeMessage], list[str]]:
    """Returns the new blocks in order, and the keys of what is of no use.

    Args:
      entries: key to bytes, sorted by key.
    """
    fresh, useless = [], []
    expected: dict[str, int] = {}
    for key, data in entries.items():
      try:
        header, arrays = wire.decode(data, self._secret)
        self._check(key, header)
      except wire.WireError as error:
        self.refuse(f"{key}: {error}")
        useless.append(key)
        continue
      sid, sequence = header["sid"], header["sequence"]
      want = expected.get(sid, self.watermarks.get(sid, 0))
      if sequence < want:
        self.counts["wire_duplicates"] += 1
        self.unanswered.add(sid)
        useless.append(key)
      elif sequence == want or self._gap_is_old(sid, want):
        fresh.append(IntakeMessage(key, data, header, arrays))
        expected[sid] = sequence + 1
        self._gaps.pop(sid, None)
    return fresh, useless

  def _check(self, key: str, header: Mapping[str, Any]) -> None:
    """Refuses what no searcher of this run puts under this key."""
    if header.get("run") != self._run_id:
      raise wire.WireError("header", f"of another run, {header.get('run')!r}")
    sid, sequence = header.get("sid"), header.get("sequence")
    if type(sequence) is not int or not key.endswith(f"/{sid}/{sequence:012d}"):
      raise wire.WireError("header", f"is block {sequence!r} of {sid!r}")
    for name in ("totals", "amount"):
      value = header.get(name)
      if not isinstance(value, dict) or any(
          type(value.get(u)) is not int or value[u] < 0 for u in _UNITS
      ):
        raise wire.WireError("header", f"{name} is {value!r}")

  def _gap_is_old(self, sid: str, want: int) -> bool:
    since = self._gaps.setdefault(sid, self._clock())
    if self._clock() - since < GAP_S:
      return False
    self._on_event("gap", f"{sid}: blocks from {want} on are lost")
    return True


# Which searchers are alive, by their leases and the reader's own clock.


@dataclasses.dataclass
class _Entry:
  lease: dict[str, Any]
  changed_at: float


class LeaseTable:
  """Leases as last read. A searcher is gone when its lease stands still, when
  it said goodbye, or when a newer process took its slot."""

  def __init__(self, lease_s: float, *, clock=time.monotonic):
    self._lease_s = lease_s
    self._clock = clock
    self._entries: dict[str, _Entry] = {}
    self._gone: set[str] = set()
    self._replaced: set[str] = set()
    # As `alive` returned it last; None once that may be wrong.
    self._alive: dict[str, dict[str, Any]] | None = None

  def update(self, leases: dict[str, dict[str, Any]]) -> None:
    """Takes the leases by sid as the store holds them now.

    A lease that is missing (the store may have been lost) is kept as it was.
    """
    now = self._clock()
    self._alive = None
    for sid, lease in leases.items():
      entry = self._entries.get(sid)
      # A lower one is a copy of an old lease, whoever put it there.
      if entry is None or lease["beat"] > entry.lease["beat"]:
        self._entries[sid] = _Entry(lease, now)
        # Somebody who was only slow is back; a replaced one stays gone.
        if not lease["final"] and sid not in self._replaced:
          self._gone.discard(sid)

  def excuse(self) -> None:
    """Starts everybody's patience anew: it was the reader that was away."""
    now = self._clock()
    for entry in self._entries.values():
      entry.changed_at = now

  def alive(self) -> dict[str, dict[str, Any]]:
    """Returns the leases of the searchers that are not gone, by sid.

    Not to be changed: it is the same one until something has changed.
    """
    if self._alive is None:
      self._alive = {
          sid: entry.lease
          for sid, entry in sorted(self._entries.items())
          if sid not in self._gone and not entry.lease["final"]
      }
    return self._alive

  def heard(self) -> dict[str, dict[str, Any]]:
    """Returns the last lease of every searcher, who is gone included.

    Each with `age_s`, seconds since it changed, and `alive`.
    """
    alive = self.alive()
    return {
        sid: {**entry.lease, "age_s": self.age_s(sid), "alive": sid in alive}
        for sid, entry in sorted(self._entries.items())
    }

  def age_s(self, sid: str) -> float:
    """Seconds since the lease of a known searcher changed."""
    return self._clock() - self._entries[sid].changed_at

  def take_gone(self) -> dict[str, str]:
    """Returns sid -> cause of the searchers newly gone; each is named once."""
    newest = {}
    for sid, entry in self._entries.items():
      slot, started = entry.lease["slot"], entry.lease["started"]
      if started >= newest.get(slot, (-1.0, ""))[0]:
        newest[slot] = (started, sid)
    out = {}
    for sid, entry in self._entries.items():
      if sid in self._gone:
        continue
      if entry.lease["final"]:
        out[sid] = "finished"
      elif newest[entry.lease["slot"]][1] != sid:
        out[sid] = "replaced"
        self._replaced.add(sid)
      elif self.age_s(sid) > self._lease_s:
        out[sid] = "expired"
    self._gone.update(out)
    self._alive = None
    return out

  def totals(self, sid: str) -> dict[str, int]:
    """Returns what the searcher last announced to have generated."""
    return self._entries[sid].lease["totals"]


# Reads searchers' leases from the store, those that changed.


# Between two looks; with thousands of leases, so many times what a look took.
_EVERY_S = 0.25
_EVERY_TIMES = 20


class LeaseReader:
  """Knows the leases it has read, so that it checks each only once."""

  def __init__(
      self,
      *,
      run_id: str,
      secret: bytes,
      refuse: Callable[[str], None],
      clock: Callable[[], float] = time.monotonic,
  ):
    """Has read nothing yet.

    Args:
      run_id: the run.
      secret: key of the run's messages.
      refuse: called with what was wrong with a message.
      clock: seconds.
    """
    self._run_id = run_id
    self._secret = secret
    self._refuse = refuse
    self._clock = clock
    self._due_at = clock()
    self._read: dict[str, bytes] = {}

  def is_due(self) -> bool:
    """True where it is time for the next look."""
    return self._clock() >= self._due_at

  def read(self, transport: base.Transport) -> dict[str, dict[str, Any]]:
    """Returns sid -> lease of those that are new; removes what is none.

    Raises:
      TransportError: as of the transport.
    """
    start = self._clock()
    before, self._read = self._read, transport.list("live")
    found = {}
    for key, data in self._read.items():
      if before.get(key) == data:
        continue
      try:
        lease = wire.decode_message(data, self._secret)
        if lease["run"] == self._run_id and key == f"live/{lease['sid']}":
          found[lease["sid"]] = lease
      except (wire.WireError, KeyError) as error:
        self._refuse(f"{key}: {error!r}")
        transport.delete(key)
    took_s = self._clock() - start
    self._due_at = start + max(_EVERY_S, _EVERY_TIMES * took_s)
    return found


# How long the drain's looks at the queue take, and what they find.


@dataclasses.dataclass
class PollStats:
  """Sums since the drain began.

  empty: looks that found no block.
  empty_s: seconds that they took.
  served: looks that found blocks.
  served_s: seconds that they took, answers to the searchers included.
  blocks: that were found.
  """

  empty: int = 0
  empty_s: float = 0.0
  served: int = 0
  served_s: float = 0.0
  blocks: int = 0

  def add(self, seconds: float, blocks: int) -> None:
    """Counts one look."""
    if blocks:
      self.served += 1
      self.served_s += seconds
      self.blocks += blocks
    else:
      self.empty += 1
      self.empty_s += seconds

  @property
  def busy_s(self) -> float:
    return self.empty_s + self.served_s

  def since(self, before: "PollStats") -> "PollStats":
    """Returns what came after an earlier copy of these sums."""
    mine, its = dataclasses.astuple(self), dataclasses.astuple(before)
    return PollStats(*(a - b for a, b in zip(mine, its, strict=True)))


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
      grants: scheduler.Grants,
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
    self.leases = LeaseTable(lease_s)
    self.generation = 0
    # Searchers that are gone and not yet written off, with the cause.
    self.leaving: dict[str, str] = {}
    # What keeps data from coming in, in words; None where nothing does.
    self.obstacle: str | None = None
    self.looks = PollStats()
    self._pending: list[Record] = []
    keys = {"run_id": run_id, "secret": secret}
    self._replies = messages.Replies(epoch=epoch, **keys)
    self._pace = polling.PollInterval(
        floor_s=_TICK_S,
        waiting_floor_s=_URGENT_TICK_S,
        share=_TICK_SHARE,
        cap_s=_LONGEST_TICK_S,
    )
    self._wake = threading.Event()
    self._intake = Intake(watermarks=watermarks, on_event=on_event, **keys)
    self._lease_reader = LeaseReader(refuse=self._intake.refuse, **keys)
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
        self._pace.stop_waiting()
      elif self._pace.start_waiting():
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
        groups = messages.unpack_groups(header, arrays)
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
          self._pace.polled(bool(found))
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
    transport.delete_all([f"live/{sid}", messages.reply_key(sid)])

  def _show(self, transport: base.Transport) -> None:
    status, self._status = self._status, None
    if status is not None:
      # Through JSON, so that what a reader gets is what was meant.
      status = json.loads(json.dumps(status))
      self._replies.put(transport, "status/run", status)
    if self._goodbye is not None:
      self._replies.put(transport, "ctl/stop", self._goodbye)


# A store serves one trainer's directory: whoever comes second is refused.
#
# Two trainers would each grant the same prompts, acknowledge the other's blocks
# and take each other's params back. Epochs tell apart only the starts of one
# directory; this tells apart directories.


_KEY = "meta/trainer"


class TakenError(ValueError):
  """The store serves the trainer of another directory."""


class StoreClaim:
  """What a trainer writes into a store before anything else."""

  def __init__(self, *, run_id: str, secret: bytes, owner: str, place: str):
    """Writes nothing yet.

    Args:
      run_id: the run.
      secret: key of the run's messages.
      owner: name of the trainer's directory; a copy of it has the same.
      place: of the directory, for people.
    """
    self._run_id = run_id
    self._secret = secret
    self._owner = owner
    self._place = place

  def take(self, transport: base.Transport) -> None:
    """Makes the store this trainer's; done where it is.

    Raises:
      TakenError: it is another one's.
      TransportError: as of the transport.
    """
    message = {"run": self._run_id, "key": _KEY, "owner": self._owner}
    message["place"] = self._place
    data = wire.encode_message(message, self._secret)
    if transport.put(_KEY, data, overwrite=False):
      return
    held = transport.get(_KEY)
    try:
      other = held and wire.decode_placed(
          held, self._secret, self._run_id, _KEY
      )
    except wire.WireError:
      other = None  # Nobody's who has the secret.
    if not other:
      transport.put(_KEY, data)
    elif other["owner"] != self._owner:
      raise TakenError(
          f"{self._place}: this store serves the trainer of {other['place']};"
          " go on there, or start the store anew"
      )
