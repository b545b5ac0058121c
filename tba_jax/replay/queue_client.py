# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""The searcher's side of the queue: work in, blocks of groups out, lease kept.

One thread does all of a searcher's talk with the store except pulling params.
A block stays in the ring until the trainer acknowledges it; after a store was
lost the whole ring is sent again, in order, before anything new. The ring's
size (the credits) is the back-pressure: `submit` blocks while it is full.

The trainer's answers, acknowledgements and grants, are one message, which the
thread asks for at a pace: often where the searcher has nothing to do without
it, less and less often while nothing changes.
"""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import math
import os
import socket
import threading
import time
from typing import Any

from absl import logging

from tba_jax import types
from tba_jax.replay import messages as messages_lib
from tba_jax.system import polling
from tba_jax.transport import base
from tba_jax.transport import wire

# A searcher's blocks that the trainer has not acknowledged, in order.


@dataclasses.dataclass
class OutgoingBlock:
  """One block.

  sequence: its number.
  data: as it is sent.
  sent_at: when it was put into the present store, None = not yet.
  """

  sequence: int
  data: bytes
  sent_at: float | None = None


class Ring:
  """Messages by sequence. Not thread-safe: its owner locks."""

  def __init__(
      self, resend_s: float, *, clock: Callable[[], float] = time.monotonic
  ):
    """Is empty.

    Args:
      resend_s: an unacknowledged message is offered again so often.
      clock: seconds.
    """
    self._resend_s = resend_s
    self._clock = clock
    self._messages: list[OutgoingBlock] = []
    self.next_sequence = 0

  def __len__(self) -> int:
    return len(self._messages)

  def add(self, data: bytes) -> None:
    """Takes the next message."""
    self._messages.append(OutgoingBlock(self.next_sequence, data))
    self.next_sequence += 1

  def acknowledge(self, sequence: int) -> None:
    """Lets go of the messages below `sequence`."""
    self._messages = [m for m in self._messages if m.sequence >= sequence]

  def forget_sent(self) -> None:
    """Makes all of them unsent: the store that had them is gone."""
    for message in self._messages:
      message.sent_at = None

  def sent(self, message: OutgoingBlock) -> None:
    message.sent_at = self._clock()

  def unsent(self) -> list[OutgoingBlock]:
    return [m for m in self._messages if m.sent_at is None]

  def overdue(self) -> list[OutgoingBlock]:
    """Returns those to be offered again."""
    return [m for m in self._messages if self._resend_in_s(m) <= 0]

  def overdue_in_s(self) -> float:
    """Returns the seconds until one is, infinite where none was sent."""
    return min(map(self._resend_in_s, self._messages), default=math.inf)

  def _resend_in_s(self, message: OutgoingBlock) -> float:
    if message.sent_at is None:
      return math.inf
    return max(0.0, message.sent_at + self._resend_s - self._clock())


# What a searcher hears of the trainer: its messages, and its goodbye.


class Inbox:
  """Reads the trainer's messages; refuses and counts what is not its own.

  refused: messages that were not the trainer's.
  stop_requested: the trainer has asked this searcher to leave.
  run_done: it did so because the run is at its end.
  """

  def __init__(
      self, *, run_id: str, secret: bytes, on_event: Callable[[str, str], None]
  ):
    """Has heard nothing yet.

    Args:
      run_id: the run.
      secret: key of the run's messages.
      on_event: called with (kind, message).
    """
    self._run_id = run_id
    self._secret = secret
    self._on_event = on_event
    self.refused = 0
    self.stop_requested = False
    self.run_done = False
    # The last reason by key.
    self._refusals: dict[str, str] = {}

  def get(self, transport: base.Transport, key: str) -> dict[str, Any] | None:
    """Returns the trainer's message under a key; None where there is none."""
    data = transport.get(key)
    try:
      return data and wire.decode_placed(data, self._secret, self._run_id, key)
    except wire.WireError as error:
      self.refused += 1
      # One that stays there is read again and again.
      if str(error) != self._refusals.get(key):
        self._refusals[key] = str(error)
        self._on_event("refused_message", f"{key}: {error}")
      return None

  def read_goodbye(self, transport: base.Transport, epoch: int) -> None:
    """Takes the trainer's goodbye, where it is meant for this searcher.

    That of an older epoch than the searcher's is not: its trainer was replaced.
    A searcher without one came after the goodbye; where the run was only
    interrupted, it came for the next trainer.

    Args:
      transport: of the calling thread.
      epoch: of the newest trainer that this searcher has served, -1 = none.
    """
    goodbye = self.get(transport, "ctl/stop")
    if goodbye is None or goodbye["epoch"] < epoch:
      return
    if goodbye["done"] or epoch >= 0:
      self.run_done = goodbye["done"]
      self.stop_requested = True


# What a searcher has been granted and has not begun.


@dataclasses.dataclass(frozen=True)
class Block:
  """Positions of the prompt order to sample in one round.

  epoch: of the trainer that granted it.
  block: number of the grant.
  require_version: the version to sample with; -1 = the newest.
  prompts: (position, prompt_id, visit) of each prompt.
  """

  epoch: int
  block: int
  require_version: int
  prompts: tuple[tuple[int, int, int], ...]


class WorkList:
  """Blocks in the order of their grants. Not thread-safe: its owner locks.

  blocks: granted and not begun.
  epoch: of the newest trainer that was heard of, -1 before the first.
  """

  def __init__(self):
    self.blocks: list[Block] = []
    self._tag = (-1, -1)
    # The last block that was taken from the present trainer.
    self._last_block = -1

  @property
  def epoch(self) -> int:
    return self._tag[0]

  def hear(self, message: Mapping[str, Any]) -> bool:
    """Takes the trainer's list of what this searcher holds.

    Returns:
      False where it is no news: it was heard before, or is a replaced
      trainer's, whose epoch is older.
    """
    epoch, tag = message["epoch"], (message["epoch"], message["count"])
    if tag <= self._tag:
      return False
    if epoch > self.epoch:
      self._last_block = -1
    self._tag = tag
    # What is not listed any more was taken back, or granted by a trainer that
    # is gone.
    listed = {(epoch, block) for block, _, _ in message["blocks"]}
    self.blocks = [b for b in self.blocks if (b.epoch, b.block) in listed]
    for block, version, prompts in message["blocks"]:
      if block > self._last_block:
        self._last_block = block
        prompts = tuple(tuple(p) for p in prompts)
        self.blocks.append(Block(epoch, block, version, prompts))
    return True


# How often an unacknowledged block is offered again: the key may have been
# taken by a forged message, which the trainer removes.
_RESEND_S = 2.0
# Between two questions: while the searcher waits and while it works, at least
# and at most.
_WAITING_TICK_S = 0.004
_TICK_S = 0.02
_LONGEST_TICK_S = 1.0
# Of the time since something changed, while the searcher works; large, as who
# runs out of work or of credit asks at once.
_SHARE = 0.25
# Between two questions whether the trainer has said goodbye, at least.
_GOODBYE_EVERY_S = 0.1


class Outbox:
  """Sends blocks at least once and keeps the searcher's lease and work list."""

  def __init__(
      self,
      make_transport: Callable[[], base.Transport],
      *,
      sid: str,
      index: int,
      run_id: str,
      secret: bytes,
      partition: int,
      credits: int,
      lease_s: float,
      on_event: Callable[[str, str], None],
      agree: Callable[[base.Transport], Any] = lambda transport: None,
  ):
    """Starts the thread.

    Args:
      make_transport: makes the thread's own transport.
      sid: name of this searcher; never used before.
      index: place of this searcher in its launcher; a newer process at the same
        host and index replaces an older one.
      run_id: the run.
      secret: key of the run's messages.
      partition: of the queue.
      credits: blocks that may wait for an acknowledgement.
      lease_s: the trainer's patience; the lease is renewed at least four times
        as often.
      on_event: called with (kind, message).
      agree: raises where this searcher must not work for the trainer that
        grants; asked before the first work of each.
    """
    self._make_transport = make_transport
    self._sid = sid
    self._run_id = run_id
    self._secret = secret
    self._partition = partition
    self._credits = credits
    self._on_event = on_event
    self._agree = agree
    self._inbox = Inbox(run_id=run_id, secret=secret, on_event=on_event)
    self._lock = threading.Condition()
    self._ring = Ring(_RESEND_S)
    self._totals = {"prompts": 0, "completions": 0, "tokens": 0}
    self._work = WorkList()
    self._stats: dict[str, Any] = {}
    self._lease = {
        "run": run_id,
        "sid": sid,
        "slot": f"{socket.gethostname()}/{index}",
        "index": index,
        "pid": os.getpid(),
        "started": time.time(),
    }
    self._pace = polling.PollInterval(
        floor_s=_TICK_S,
        waiting_floor_s=_WAITING_TICK_S,
        share=_SHARE,
        cap_s=_LONGEST_TICK_S,
    )
    # Of the lease, which says what changes with each block.
    self._lease_pace = polling.PollInterval(
        floor_s=min(1.0, lease_s / 4),
        waiting_floor_s=min(1.0, lease_s / 4),
        share=_SHARE,
        cap_s=lease_s / 4,
    )
    self._beat = 0
    self._next_goodbye = 0.0
    self._final = False
    self._closing = threading.Event()
    self._error: BaseException | None = None
    self._thread = threading.Thread(
        target=self._run, name="outbox", daemon=True
    )
    self._thread.start()

  @property
  def stop_requested(self) -> bool:
    """True once the trainer has asked every searcher to finish."""
    return self._inbox.stop_requested

  @property
  def run_done(self) -> bool:
    """True where it did so because the run is at its end."""
    return self._inbox.run_done

  @property
  def epoch(self) -> int:
    """The newest trainer epoch that was heard of, -1 before the first."""
    return self._work.epoch

  @property
  def totals(self) -> dict[str, int]:
    """Prompts, completions and tokens submitted so far."""
    with self._lock:
      return dict(self._totals)

  @property
  def unacked(self) -> int:
    return len(self._ring)

  def next_block(self, timeout_s: float) -> Block | None:
    """Returns the next granted block; None when none came in time.

    Raises:
      TransportError: the thread has ended, with its error as the cause.
    """
    with self._lock:
      if not self._work.blocks:
        self._ask_now()
      self._lock.wait_for(
          lambda: self._work.blocks or self._error is not None, timeout_s
      )
      self._check()
      if not self._work.blocks:
        return None
      self._pace.stop_waiting()
      return self._work.blocks.pop(0)

  def submit(
      self,
      groups: Sequence[types.Group],
      should_stop: Callable[[], bool] = lambda: False,
  ) -> bool:
    """Puts a block into the ring; waits while the ring is full.

    Args:
      groups: of one round.
      should_stop: asked ten times a second while waiting.

    Returns:
      False where it gave up because of `should_stop`: the block is not counted
      as generated and its prompts will be granted again.
    """
    with self._lock:
      while len(self._ring) >= self._credits:
        self._ask_now()
        self._lock.wait(0.1)
        self._check()
        if should_stop() and len(self._ring) >= self._credits:
          return False
      amount = {
          "prompts": len(groups),
          "completions": sum(g.num_completions for g in groups),
          "tokens": sum(g.num_tokens for g in groups),
      }
      for name, value in amount.items():
        self._totals[name] += value
      header, arrays = messages_lib.pack_groups(groups)
      header.update(
          run=self._run_id,
          sid=self._sid,
          sequence=self._ring.next_sequence,
          totals=dict(self._totals),
          amount=amount,
      )
      self._ring.add(wire.encode(header, arrays, self._secret))
      self._pace.stop_waiting()
      self._pace.changed()
      self._lease_pace.changed()
      self._lock.notify_all()
    return True

  def set_stats(self, stats: dict[str, Any]) -> None:
    """Sets what the lease tells a user of this searcher (rates, version)."""
    self._stats = dict(stats)

  def close(self, flush_s: float) -> bool:
    """Sends what is left, writes a last lease and ends the thread.

    Waits for acknowledgements for at most `flush_s`.

    Returns:
      True if every block was acknowledged.
    """
    deadline = time.monotonic() + flush_s
    with self._lock:
      self._ask_now()
      self._lock.wait_for(
          lambda: not self._ring or self._error is not None, flush_s
      )
      flushed = not self._ring
      self._final = True
      self._closing.set()
      self._lock.notify_all()
    self._thread.join(timeout=max(1.0, deadline - time.monotonic()))
    return flushed

  def _check(self) -> None:
    if self._error is not None:
      message = f"the outbox has ended: {self._error}"
      raise base.TransportError(message) from self._error

  def _ask_now(self) -> None:
    """Makes the thread ask at once, and often from then on. Under the lock."""
    if self._pace.start_waiting():
      self._lock.notify_all()

  def _run(self) -> None:
    try:
      transport = self._make_transport()
      while True:
        closing = self._closing.is_set()
        try:
          self._speak(transport, closing)
        except base.TransportError as error:
          if closing:
            break
          self._on_event("store_lost", f"outbox: {error}")
          transport.reconnect()
          with self._lock:
            self._ring.forget_sent()
            self._lease_pace.changed(at_once=True)
        if closing:
          break
        with self._lock:
          if (rest_s := self._rest_s()) > 0:
            self._lock.wait(rest_s)
      transport.close()
    except Exception as error:  # The searcher's thread raises it.
      logging.exception("outbox ended")
      with self._lock:
        self._error = error
        self._lock.notify_all()

  def _rest_s(self) -> float:
    """Returns the seconds until there is something to do. Under the lock."""
    if self._closing.is_set() or self._ring.unsent():
      return 0.0
    return min(
        self._pace.due_in_s(),
        self._lease_pace.due_in_s(),
        self._ring.overdue_in_s(),
    )

  def _speak(self, transport: base.Transport, closing: bool) -> None:
    """Does what is due."""
    with self._lock:
      unsent = self._ring.unsent()
    self._send(transport, unsent)
    with self._lock:
      asks = not self._pace.due_in_s() or not self._ring.overdue_in_s()
      renews = closing or not self._lease_pace.due_in_s()
    if asks:
      self._ask(transport)
      with self._lock:
        overdue = self._ring.overdue()
      self._send(transport, overdue)
    if renews:
      self._write_lease(transport)

  def _send(
      self, transport: base.Transport, messages: Sequence[OutgoingBlock]
  ) -> None:
    for message in messages:
      transport.put(
          f"q/{self._partition}/{self._sid}/{message.sequence:012d}",
          message.data,
          overwrite=False,
      )
      self._ring.sent(message)

  def _ask(self, transport: base.Transport) -> None:
    """Reads the trainer's answer, and every now and then its goodbye."""
    answer = self._inbox.get(transport, messages_lib.reply_key(self._sid))
    if answer is not None and answer["epoch"] > self.epoch:
      self._agree(transport)
    with self._lock:
      changed = answer is not None and self._work.hear(answer)
      if changed:
        self._ring.acknowledge(answer["acked"])
        self._lock.notify_all()
      self._pace.polled(changed)
    if time.monotonic() >= self._next_goodbye:
      self._inbox.read_goodbye(transport, self.epoch)
      self._next_goodbye = time.monotonic() + _GOODBYE_EVERY_S

  def _write_lease(self, transport: base.Transport) -> None:
    self._beat += 1
    with self._lock:
      lease = {
          **self._lease,
          "beat": self._beat,
          "totals": dict(self._totals),
          "unacked": len(self._ring),
          "credits": self._credits,
          "final": self._final,
          "refused": self._inbox.refused,
          "stats": self._stats,
      }
      self._lease_pace.polled()
    transport.put(f"live/{self._sid}", wire.encode_message(lease, self._secret))
