# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""The trainer's side of the queue: one thread between store and journal.

Order of things for a block: check, journal (synced), hand to the trainer's
thread, acknowledge, remove from the store. A crash between two of them loses
nothing and counts nothing twice: the journal is replayed, and sequence numbers
below a searcher's watermark are wire duplicates. Where the journal has no room,
blocks stay in the store, unacknowledged, until it has: credits then hold the
searchers back.

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

from tba_jax import types
from tba_jax.replay import grants as grants_lib
from tba_jax.replay import intake as intake_lib
from tba_jax.replay import journal as journal_lib
from tba_jax.replay import leases as leases_lib
from tba_jax.replay import packing
from tba_jax.transport import base
from tba_jax.transport import wire

# Between two looks at the queue: while the trainer waits, and while it works
# (a look costs its core about a quarter of a millisecond).
_URGENT_TICK_S = 0.002
_TICK_S = 0.02
_LEASES_EVERY_S = 0.25
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
    self._run_id = run_id
    self._secret = secret
    self._epoch = epoch
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
    # Set by whoever waits for data.
    self.urgent = False
    self.busy_s = 0.0
    self._pending: list[Record] = []
    self._work_count = 0
    self._intake = intake_lib.Intake(
        watermarks=watermarks, run_id=run_id, secret=secret, on_event=on_event
    )
    self._status: dict[str, Any] | None = None
    self._goodbye: dict[str, bool] | None = None
    self._stop = threading.Event()
    self._error: BaseException | None = None
    for position, payload in journal.replay(replay_from):
      self._restore(position, payload)
    self._thread = threading.Thread(target=self._run, name="drain", daemon=True)

  @property
  def counts(self) -> dict[str, int]:
    """Messages refused, and copies of blocks that were there already."""
    return dict(self._intake.counts)

  def start(self) -> None:
    self._thread.start()

  def close(self) -> None:
    """Ends the thread; what was acknowledged is in the journal."""
    self._stop.set()
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
      self._grants.admit(limit)

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
      next_leases = 0.0
      announced = False
      while not self._stop.is_set():
        started = time.perf_counter()
        worked = False
        try:
          if not announced:
            self._announce(transport)
            announced = True
          worked = self._drain(transport)
          if time.monotonic() >= next_leases:
            self._read_leases(transport)
            next_leases = time.monotonic() + _LEASES_EVERY_S
            self._show(transport)
          self._write_grants(transport)
        except base.TransportError as error:
          self._on_event("store_lost", f"drain: {error}")
          self.generation = transport.reconnect()
          announced = False
          self._intake.forget_gaps()
          with self.lock:
            self.leases.excuse()
        self.busy_s += time.perf_counter() - started
        if self.obstacle is not None:
          self._stop.wait(_FULL_RETRY_S)
        elif not worked:
          self._stop.wait(_URGENT_TICK_S if self.urgent else _TICK_S)
      transport.close()
    except Exception as error:  # The trainer's thread raises it.
      logging.exception("drain ended")
      with self.lock:
        self._error = error
        self.lock.notify_all()

  def _announce(self, transport: base.Transport) -> None:
    # A new store knows nothing: acks and grants are written again. One that
    # an earlier trainer has left may hold that trainer's goodbye.
    self._claim(transport)
    if self._goodbye is None:
      transport.delete("ctl/stop")
    self._write_acks(transport)
    with self.lock:
      self._grants.announce_again()

  def _drain(self, transport: base.Transport) -> bool:
    entries = transport.list(f"q/{self._partition}")
    fresh, done = self._intake.sort(entries)
    positions = self._append([message.data for message in fresh])
    if positions is not None:
      for position, message in zip(positions, fresh, strict=True):
        self._note(position, message.header, message.arrays)
        done.append(message.key)
    if done:
      self._write_acks(transport)
      transport.delete_all(done)
    return bool(positions)

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

  def _write_acks(self, transport: base.Transport) -> None:
    self._put(
        transport,
        f"ack/{self._partition}",
        {"table": dict(self._intake.watermarks)},
    )

  def _put(self, transport, key: str, message: dict[str, Any]) -> None:
    transport.put(key, self._seal(key, message))

  def _seal(self, key: str, message: dict[str, Any]) -> bytes:
    # The key, so that no message can stand in the place of another.
    about = {"run": self._run_id, "epoch": self._epoch, "key": key}
    return wire.encode_message({**about, **message}, self._secret)

  def _read_leases(self, transport: base.Transport) -> None:
    found = {}
    for key, data in transport.list("live").items():
      try:
        lease = wire.decode_message(data, self._secret)
        if lease["run"] == self._run_id and key == f"live/{lease['sid']}":
          found[lease["sid"]] = lease
      except (wire.WireError, KeyError) as error:
        self._intake.counts["refused"] += 1
        self._on_event("refused_message", f"{key}: {error!r}")
        transport.delete(key)
    with self.lock:
      self.leases.update(found)
      self.leaving.update(self.leases.take_gone())
    for sid, cause in list(self.leaving.items()):
      self._write_off(transport, sid, cause)

  def _write_off(self, transport: base.Transport, sid: str, cause: str) -> None:
    # Its blocks that are in the store count before it is written off.
    self._drain(transport)
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
    transport.delete(f"live/{sid}")
    transport.delete(f"work/{sid}")

  def _write_grants(self, transport: base.Transport) -> None:
    with self.lock:
      alive = [] if self._goodbye else list(self.leases.alive())
      work = self._grants.assign(alive)
    messages = {}
    for sid, blocks in work.items():
      self._work_count += 1
      message = {"count": self._work_count, "blocks": blocks}
      messages[f"work/{sid}"] = self._seal(f"work/{sid}", message)
    transport.put_all(messages)

  def _show(self, transport: base.Transport) -> None:
    status, self._status = self._status, None
    if status is not None:
      # Through JSON, so that what a reader gets is what was meant.
      self._put(transport, "status/run", json.loads(json.dumps(status)))
    if self._goodbye is not None:
      self._put(transport, "ctl/stop", self._goodbye)
