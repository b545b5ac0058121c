# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Searcher's end of the queue: receives grants, delivers blocks, renews leases.

A thread handles all of the searcher's communication except pulling params. It
keeps blocks until the trainer acknowledges them, and resends them if the store
was lost, their delivery key is gone, or the trainer asks. Credits limit the
number of unacknowledged blocks: `submit` waits when none is left.

Acknowledgements and grants share a message, polled at an adaptive interval.
"""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import math
import socket
import threading
import time
from typing import Any

import ml_collections

from tba_jax import types
from tba_jax.system import background
from tba_jax.system import polling
from tba_jax.transport import byte_store
from tba_jax.transport import ports
from tba_jax.transport import wire
from tba_jax.transport.groups import leases as leases_lib
from tba_jax.transport.groups import messages

# Time after which a searcher checks that an unacknowledged block is still in
# the store; doubles with each check.
RESEND_S = 2.0
_LONGEST_RESEND_S = 8.0
# Least time between two leases that report the loss of a trainer's message.
ASK_EVERY_S = 0.5
# Most earlier processes of a slot whose leases are kept on disk, and whose
# numbers are kept in the store.
_MAX_EARLIER = 100
# Most keys deleted in one read of these numbers.
_MAX_DELETED = 1000
# Poll intervals: while the searcher waits, while it works, and the longest.
_WAITING_TICK_S = 0.004
_TICK_S = 0.02
_LONGEST_TICK_S = 1.0
# Poll interval as a share of the time since the last change; large, since a
# searcher that runs out of work or credits polls at once.
_SHARE = 0.25
_STOP_EVERY_S = 0.1
_JOIN_DIGITS = 8


@dataclasses.dataclass
class _OutgoingBlock:
  """A block to be sent.

  totals: the searcher's totals after this block.
  sent_at: time at which the block was last written to the current store or seen
    in it; None if it has to be sent.
  times_seen: number of times the block was seen in the store since then.
  """

  sequence: int
  data: bytes
  totals: Mapping[str, int]
  sent_at: float | None = None
  times_seen: int = 0


class UnackedBlocks:
  """Unacknowledged blocks, in order. Not thread-safe.

  acked: totals after the last acknowledged block.
  """

  def __init__(
      self, resend_s: float, *, clock: Callable[[], float] = time.monotonic
  ):
    self._resend_s = resend_s
    self._clock = clock
    self._blocks: list[_OutgoingBlock] = []
    self.next_sequence = 0
    self.acked = dict.fromkeys(messages.UNITS, 0)

  def __len__(self) -> int:
    return len(self._blocks)

  @property
  def first(self) -> int:
    """Number of the oldest block; without blocks, of the next one."""
    return self._blocks[0].sequence if self._blocks else self.next_sequence

  def add(self, data: bytes, totals: Mapping[str, int]) -> None:
    self._blocks.append(_OutgoingBlock(self.next_sequence, data, totals))
    self.next_sequence += 1

  def acknowledge(self, sequence: int) -> None:
    """Drops the blocks below `sequence`."""
    while self._blocks and self._blocks[0].sequence < sequence:
      self.acked = dict(self._blocks.pop(0).totals)

  def send_again(self, sequence: int) -> None:
    """Marks a block as unsent, if it is still kept."""
    for block in self._blocks:
      if block.sequence == sequence:
        block.sent_at = None

  def forget_sent(self) -> None:
    """Marks all blocks as unsent, after the store was lost."""
    for block in self._blocks:
      block.sent_at = None

  def sent(self, block: _OutgoingBlock) -> None:
    block.sent_at, block.times_seen = self._clock(), 0

  def seen(self, block: _OutgoingBlock) -> None:
    """Records that a block is still in the store."""
    block.sent_at = self._clock()
    block.times_seen += 1

  def unsent(self) -> list[_OutgoingBlock]:
    return [b for b in self._blocks if b.sent_at is None]

  def overdue(self) -> list[_OutgoingBlock]:
    """Returns the blocks to look for in the store."""
    return [b for b in self._blocks if self._due_in_s(b) <= 0]

  def overdue_in_s(self) -> float:
    """Returns the seconds until a block is overdue."""
    return min(map(self._due_in_s, self._blocks), default=math.inf)

  def _due_in_s(self, block: _OutgoingBlock) -> float:
    if block.sent_at is None:
      return math.inf
    pause_s = self._resend_s * 2**block.times_seen
    due = block.sent_at + min(pause_s, _LONGEST_RESEND_S)
    return max(0.0, due - self._clock())


class GrantedAssignments:
  """Assignments that have not started, in order. Not thread-safe.

  pending: assignments in the order of their grants.
  begun: epoch and number of the last started assignment.
  """

  def __init__(self):
    self.pending: list[ports.Assignment] = []
    self.begun = (-1, -1)
    self._tag = (-1, -1)
    # Number of the current trainer's last assignment.
    self._last_number = -1

  @property
  def epoch(self) -> int:
    """Epoch of the newest trainer, -1 before the first."""
    return self._tag[0]

  @property
  def tag(self) -> tuple[int, int]:
    """Epoch and count of the newest message."""
    return self._tag

  def begin(self) -> ports.Assignment:
    """Removes and returns the next assignment."""
    assignment = self.pending.pop(0)
    self.begun = assignment.epoch, assignment.number
    return assignment

  def update(self, message: Mapping[str, Any]) -> bool:
    """Updates from the trainer's list of this searcher's assignments.

    Returns False for a message that is not newer than the last one, or from an
    older epoch.
    """
    epoch, tag = message["epoch"], (message["epoch"], message["count"])
    if tag <= self._tag:
      return False
    if epoch > self.epoch:
      self._last_number = -1
    self._tag = tag
    # An unlisted grant was taken back, or its trainer was replaced.
    listed = {(epoch, grant["number"]) for grant in message["blocks"]}
    self.pending = [a for a in self.pending if (a.epoch, a.number) in listed]
    for grant in message["blocks"]:
      if grant["number"] > self._last_number:
        self._last_number = grant["number"]
        prompts = tuple(map(tuple, grant["prompts"]))
        self.pending.append(
            ports.Assignment(epoch, grant["number"], grant["version"], prompts)
        )
    return True


class ReplacedError(ValueError):
  """A newer process has taken the searcher's slot."""


class QueueClient:
  """Receives grants, delivers blocks at least once, renews the lease.

  The `ports.GroupSink` of the store.

  stop_requested: whether the trainer has asked this searcher to leave.
  run_done: whether the trainer asked because the run is complete.
  begun_s: times at which the positions not yet submitted were begun, by
    `monotonic`, oldest first; kept by the searcher.
  works: function that returns whether the searcher is at work, as its
    supervisor sees it; set by the searcher.
  """

  def __init__(
      self,
      config: ml_collections.ConfigDict,
      run: wire.RunIdentity,
      *,
      make_transport: Callable[[], byte_store.Transport],
      sid: str,
      index: int,
      on_event: Callable[[str, str], None],
      check_trainer: Callable[
          [byte_store.Transport, int], bool
      ] = lambda transport, epoch: True,
      first_epoch: int = -1,
  ):
    """Starts the thread.

    Args:
      config: reads `search.credits` and `search.lease_s`.
      make_transport: makes the thread's own transport.
      sid: id of this searcher, never used before.
      index: slot on this host; a newer process replaces an older one.
      on_event: called with (kind, message).
      check_trainer: called with a trainer's epoch until it returns True; no
        grant is taken before. Raises if this searcher must not work for it.
      first_epoch: epoch of the first trainer that this searcher may work for;
        requests to stop from earlier trainers are ignored.
    """
    self.stop_requested = False
    self.run_done = False
    self._run = run
    self._make_transport = make_transport
    self._sid = sid
    self._credits = config.search.credits
    self._on_event = on_event
    self._check_trainer = check_trainer
    self._first_epoch = first_epoch
    self.refusals = wire.Refusals(on_event)
    self._lock = threading.Condition()
    self.unacked_blocks = UnackedBlocks(RESEND_S)
    self._granted = GrantedAssignments()
    self._totals = dict.fromkeys(messages.UNITS, 0)
    self._stats: dict[str, Any] = {}
    self.begun_s: dict[int, float] = {}
    self.works: Callable[[], bool] = lambda: False
    self.lease = {
        "sid": sid,
        "slot": f"{socket.gethostname()}/{index}",
        "index": index,
    }
    self._join_directory = f"join/{self.lease['slot']}"
    self._beat = 0
    self._file: leases_lib.LeaseFile | None = None
    self._earlier = self._open_file()
    self.interval = polling.PollInterval(
        floor_s=_TICK_S,
        waiting_floor_s=_WAITING_TICK_S,
        share=_SHARE,
        cap_s=_LONGEST_TICK_S,
    )
    # Four renewals per lease.
    lease_s = config.search.lease_s / 4
    self.lease_interval = polling.PollInterval(
        floor_s=min(1.0, lease_s),
        waiting_floor_s=min(1.0, lease_s),
        share=_SHARE,
        cap_s=lease_s,
    )
    self._next_stop_poll = self._next_ask = 0.0
    self._final = False
    self.worker = background.Thread("queue_client", self._serve, close_s=10.0)

  @property
  def epoch(self) -> int:
    """Epoch of the newest trainer seen, -1 before the first."""
    return self._granted.epoch

  @property
  def totals(self) -> dict[str, int]:
    """Prompts, completions and tokens submitted so far."""
    with self._lock:
      return dict(self._totals)

  def next_assignment(self, timeout_s: float) -> ports.Assignment | None:
    """Returns the next assignment, None after a timeout.

    Raises:
      ReplacedError: a newer process has taken the slot.
      TransportError: the thread has ended, with its error as the cause.
    """
    deadline = time.monotonic() + timeout_s
    with self._lock:
      # A caller that does not wait has other work, which polls would slow down.
      if timeout_s > 0 and not self._granted.pending:
        self._poll_now()
      while not self._granted.pending:
        self._check()
        if (left_s := deadline - time.monotonic()) <= 0:
          return None
        self._lock.wait(min(left_s, 0.1))
      self.interval.stop_waiting()
      assignment = self._granted.begin()
      # The lease reports the start, and the trainer grants another one.
      self.lease_interval.changed(at_once=not self._granted.pending)
      self._lock.notify_all()
      return assignment

  def submit(
      self,
      groups: Sequence[types.Group],
      should_stop: Callable[[], bool] = lambda: False,
  ) -> bool:
    """Sends groups; waits while no credit is left.

    Returns False if `should_stop` ended the wait. The block then does not count
    as generated, and its prompts will be granted again.
    """
    with self._lock:
      while len(self.unacked_blocks) >= self._credits:
        self._poll_now()
        self._lock.wait(0.1)
        self._check()
        if should_stop() and len(self.unacked_blocks) >= self._credits:
          return False
      amount = messages.amount_of(groups)
      for name, value in amount.items():
        self._totals[name] += value
      header, arrays = messages.pack_groups(groups)
      sequence = self.unacked_blocks.next_sequence
      header.update(
          sid=self._sid,
          sequence=sequence,
          totals=dict(self._totals),
          amount=amount,
      )
      key = messages.block_key(self._sid, sequence)
      data = messages.encode(self._run, key, header, arrays)
      self.unacked_blocks.add(data, header["totals"])
      self.interval.stop_waiting()
      self.interval.changed()
      self.lease_interval.changed()
      self._lock.notify_all()
    return True

  def set_stats(self, stats: dict[str, Any]) -> None:
    """Sets this searcher's statistics in the lease."""
    self._stats = dict(stats)

  def close(self, flush_s: float) -> bool:
    """Ends the thread after a last lease; returns whether all was acknowledged.

    Waits for acknowledgements for at most `flush_s`.
    """
    deadline = time.monotonic() + flush_s
    with self._lock:
      self._poll_now()
      while self.unacked_blocks and self.worker.is_alive():
        if (left_s := deadline - time.monotonic()) <= 0:
          break
        self._lock.wait(min(left_s, 0.1))
      flushed = not self.unacked_blocks
      self._final = True
      self._lock.notify_all()
    # After an error the trainer accounts for unacknowledged blocks.
    byte_store.close_thread(self.worker, "queue client")
    return flushed

  def _check(self) -> None:
    try:
      self.worker.check()
    except ReplacedError:
      raise
    except Exception as error:
      message = f"the queue client has ended: {error}"
      raise byte_store.TransportError(message) from error

  def _poll_now(self) -> None:
    """Makes the thread poll at once, then often. Under the lock."""
    if self.interval.start_waiting():
      self._lock.notify_all()

  def _open_file(self) -> dict[str, bytes]:
    """Opens the lease file; returns leases of this slot's earlier processes.

    Returns:
      Key -> message of each lease with unacknowledged blocks: a trainer on
      another host may not know these leases, if the store was lost too.
    """
    if self._run.workdir is None:
      return {}
    try:
      self._file = leases_lib.LeaseFile(self._run.workdir, self._sid)
      leases, damaged = leases_lib.read_files(self._run)
      mine = {
          sid: (lease, data)
          for sid, (lease, data) in leases.items()
          if lease["slot"] == self.lease["slot"] and sid != self._sid
      }
      leases_lib.remove_files(self._run, list(mine)[:-_MAX_EARLIER])
    except OSError as error:
      self._on_event("not_written", f"{leases_lib.FOLDER}: {error}")
      return {}
    for path in damaged:
      self._on_event("damaged", f"{path}: no valid lease")
    return {
        messages.lease_key(sid): data
        for sid, (lease, data) in mine.items()
        if lease["acked"] != lease["totals"]
    }

  def _serve(self, _: threading.Event) -> None:
    transport = self._make_transport()
    known_generation, closing = 0, False
    while not closing:
      closing = self._final  # Read first, so that a last exchange follows.
      try:
        if known_generation != transport.generation:
          for key, data in self._earlier.items():
            transport.put(key, data, overwrite=False)
          known_generation = transport.generation
        self.exchange(transport, closing)
      except byte_store.TransportError as error:
        if closing:
          break
        self._on_event("store_lost", f"queue client: {error}")
        transport.reconnect()
        with self._lock:
          self.unacked_blocks.forget_sent()
          self.lease_interval.changed(at_once=True)
      with self._lock:
        if not self._final and (rest_s := self._rest_s()) > 0:
          self._lock.wait(rest_s)
    transport.close()
    if self._file is not None:
      self._file.close()

  def _rest_s(self) -> float:
    """Returns the seconds until something is due. Under the lock."""
    if self.unacked_blocks.unsent():
      return 0.0
    return min(
        self.interval.due_in_s(),
        self.lease_interval.due_in_s(),
        self.unacked_blocks.overdue_in_s(),
    )

  def exchange(self, transport: byte_store.Transport, closing: bool) -> None:
    """Sends blocks, polls messages and renews the lease, as due."""
    if "joined" not in self.lease:
      self.lease["joined"] = self._join(transport)
    with self._lock:
      unsent = self.unacked_blocks.unsent()
    if unsent:
      self._make_lease()  # The lease file comes first, then the store.
    self._send(transport, unsent)
    with self._lock:
      overdue = self.unacked_blocks.overdue()
      polls = not self.interval.due_in_s()
    if overdue:
      self._send_missing(transport, overdue)
    elif polls:
      self._poll(transport)
    with self._lock:
      renews = closing or not self.lease_interval.due_in_s()
    if renews:
      self.check_slot(transport)
      data = self._make_lease()
      with self._lock:
        self.lease_interval.polled()
      transport.put(messages.lease_key(self._sid), data)

  def _send_missing(
      self, transport: byte_store.Transport, blocks: Sequence[_OutgoingBlock]
  ) -> None:
    """Polls and sends the blocks that are neither delivered nor acknowledged.

    The trainer acknowledges a block before it deletes the key of its delivery.
    """
    missing = []
    for block in blocks:
      key = messages.delivery_key(self._sid, block.sequence)
      if transport.get(key) is None:
        missing.append(block)
      else:
        self.unacked_blocks.seen(block)
    self._poll(transport)
    with self._lock:
      missing = [b for b in missing if b.sequence >= self.unacked_blocks.first]
    self._send(transport, missing)

  def _send(
      self, transport: byte_store.Transport, blocks: Sequence[_OutgoingBlock]
  ) -> None:
    for block in blocks:
      key = messages.block_key(self._sid, block.sequence)
      # Overwrites anything else that the key may hold.
      transport.put(key, block.data)
      # Last: the trainer downloads every block with a delivery key.
      key = messages.delivery_key(self._sid, block.sequence)
      transport.put(key, b"1")
      self.unacked_blocks.sent(block)

  def _poll(self, transport: byte_store.Transport) -> None:
    """Reads the trainer's messages."""
    work = self._get(transport, messages.work_key(self._sid), "work")
    if work is not None and work["epoch"] > self.epoch:
      if not self._check_trainer(transport, work["epoch"]):
        work = None
    with self._lock:
      changed = work is not None and self._granted.update(work)
      if changed:
        self.unacked_blocks.acknowledge(work["acked"])
        self.unacked_blocks.send_again(work["again"])
        self._lock.notify_all()
      self.interval.polled(changed)
      self._ask_if_lost(work)
    if time.monotonic() >= self._next_stop_poll:
      self._poll_stop(transport)
      self._next_stop_poll = time.monotonic() + _STOP_EVERY_S

  def _ask_if_lost(self, work: dict[str, Any] | None) -> None:
    """Renews the lease soon if the newest message is gone. Under the lock.

    The lease shows the trainer that this searcher missed the message.
    """
    tag, now = self._granted.tag, time.monotonic()
    is_there = work is not None and (work["epoch"], work["count"]) >= tag
    if self.epoch >= 0 and not is_there and now >= self._next_ask:
      self._next_ask = now + ASK_EVERY_S
      self.lease_interval.changed(at_once=True)

  def _poll_stop(self, transport: byte_store.Transport) -> None:
    """Reads the stop message.

    Ignores messages from an older epoch. A searcher without a trainer leaves
    only if the run is done: it may have been started for the next trainer.
    """
    stop = self._get(transport, messages.STOP_KEY, "stop", transport.generation)
    if stop is None or stop["epoch"] < max(self.epoch, self._first_epoch):
      return
    if stop["done"] or self.epoch >= 0:
      self.run_done = stop["done"]
      self.stop_requested = True

  def _get(
      self,
      transport: byte_store.Transport,
      key: str,
      kind: str,
      generation: int | None = None,
  ) -> dict[str, Any] | None:
    """Returns the trainer's valid message under a key, or None."""
    data = transport.get(key)
    if data is None:
      return None
    try:
      return messages.decode(self._run, key, data, kind, generation)[0]
    except wire.WireError as error:
      self.refusals.add(key, error)
      return None

  def _join(self, transport: byte_store.Transport) -> list[int]:
    """Returns [store generation, number], larger for a newer process of a slot.

    The store assigns the number, because a host's clock may be set back.
    """
    fields = {"generation": transport.generation}
    number = self._newest_joined(transport) + 1
    while True:
      key = f"{self._join_directory}/{number:0{_JOIN_DIGITS}d}"
      data = messages.encode(self._run, key, fields)
      if transport.put(key, data, overwrite=False):
        return [transport.generation, number]
      number += 1

  def check_slot(self, transport: byte_store.Transport) -> None:
    """Raises ReplacedError if a newer process has taken this one's slot."""
    newest = [transport.generation, self._newest_joined(transport)]
    if newest > self.lease["joined"] and newest[1] >= 0:
      raise ReplacedError(
          "a newer searcher has taken the place of this one,"
          f" {self.lease['slot']}: hosts with the same name must start"
          " searchers with different numbers"
      )

  def _newest_joined(self, transport: byte_store.Transport) -> int:
    """Returns the number of the newest process of this slot, -1 without one.

    Deletes old numbers and keys that no process of the run has written.
    """
    newest, useless = -1, []
    keys = sorted(transport.list(self._join_directory).items(), reverse=True)
    for i, (key, data) in enumerate(keys):
      try:
        messages.decode(self._run, key, data, "join", transport.generation)
      except wire.WireError as error:
        self.refusals.add(key, error)
        useless.append(key)
        continue
      newest = int(key.rpartition("/")[2])
      # Keep some: a process that joins meanwhile may have read an older number.
      useless += [key for key, _ in keys[i + 1 + _MAX_EARLIER :]]
      break
    transport.delete_all(useless[:_MAX_DELETED])
    return newest

  def _make_lease(self) -> bytes:
    """Returns a new lease, after writing its file."""
    self._beat += 1
    stats = dict(self._stats)
    if self.works():
      stats["works"] = True
    for begun_s in list(self.begun_s.values())[:1]:
      stats["block_age_s"] = time.monotonic() - begun_s
    with self._lock:
      lease = {
          **self.lease,
          "beat": self._beat,
          "totals": dict(self._totals),
          "unacked": len(self.unacked_blocks),
          "first": self.unacked_blocks.first,
          "acked": self.unacked_blocks.acked,
          "seen": self._granted.tag,
          "begun": self._granted.begun,
          "credits": self._credits,
          "final": self._final,
          "refused": self.refusals.count,
          "stats": stats,
      }
    key = messages.lease_key(self._sid)
    if self._file is not None:
      try:
        short = {**lease, "stats": {}}
        self._file.write(messages.encode(self._run, key, short))
      except OSError as error:
        self._on_event("not_written", f"{leases_lib.FOLDER}: {error}")
        self._file = None
    return messages.encode(self._run, key, lease)
