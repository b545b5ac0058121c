# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""The searcher's side of the queue: work in, blocks of groups out, lease kept.

One thread does all of a searcher's talk with the store except pulling params.
A block stays in the ring until the trainer acknowledges it; after a store was
lost the whole ring is sent again, in order, before anything new. The ring's
size (the credits) is the back-pressure: `submit` blocks while it is full.
"""

from collections.abc import Callable, Sequence
import dataclasses
import os
import socket
import threading
import time
from typing import Any

from absl import logging

from tba_jax import types
from tba_jax.replay import inbox as inbox_lib
from tba_jax.replay import packing
from tba_jax.transport import base
from tba_jax.transport import wire

# How often an unacknowledged block is offered again: the key may have been
# taken by a forged message, which the trainer removes.
_RESEND_S = 2.0
_TICK_S = 0.004


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


@dataclasses.dataclass
class _Message:
  sequence: int
  data: bytes
  sent_at: float | None = None


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
      lease_s: the trainer's patience; the lease is renewed four times as often.
      on_event: called with (kind, message).
    """
    self._make_transport = make_transport
    self._sid = sid
    self._run_id = run_id
    self._secret = secret
    self._partition = partition
    self._credits = credits
    self._lease_every_s = min(1.0, lease_s / 4)
    self._on_event = on_event
    self._inbox = inbox_lib.Inbox(
        run_id=run_id, secret=secret, on_event=on_event
    )
    self._lock = threading.Condition()
    self._ring: list[_Message] = []
    self._next_sequence = 0
    self._totals = {"prompts": 0, "completions": 0, "tokens": 0}
    self._work: list[Block] = []
    self._work_tag = (-1, -1)
    self._ack_epoch = -1
    self._last_block: dict[int, int] = {}
    self._stats: dict[str, Any] = {}
    self._lease = {
        "run": run_id,
        "sid": sid,
        "slot": f"{socket.gethostname()}/{index}",
        "index": index,
        "pid": os.getpid(),
        "started": time.time(),
    }
    self._beat = 0
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
    """The newest trainer epoch that granted work, -1 before the first."""
    return self._work_tag[0]

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
      self._lock.wait_for(
          lambda: self._work or self._error is not None, timeout_s
      )
      self._check()
      return self._work.pop(0) if self._work else None

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
      header, arrays = packing.pack_groups(groups)
      header.update(
          run=self._run_id,
          sid=self._sid,
          sequence=self._next_sequence,
          totals=dict(self._totals),
          amount=amount,
      )
      data = wire.encode(header, arrays, self._secret)
      self._ring.append(_Message(self._next_sequence, data))
      self._next_sequence += 1
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
      self._lock.wait_for(
          lambda: not self._ring or self._error is not None, flush_s
      )
      flushed = not self._ring
      self._final = True
    self._closing.set()
    self._thread.join(timeout=max(1.0, deadline - time.monotonic()))
    return flushed

  def _check(self) -> None:
    if self._error is not None:
      message = f"the outbox has ended: {self._error}"
      raise base.TransportError(message) from self._error

  def _run(self) -> None:
    try:
      transport = self._make_transport()
      next_lease = 0.0
      next_slow = 0.0
      while True:
        closing = self._closing.is_set()
        try:
          self._send(transport)
          self._read_acks(transport)
          now = time.monotonic()
          if now >= next_lease or closing:
            self._write_lease(transport)
            next_lease = now + self._lease_every_s
          if now >= next_slow:
            known = max(self._ack_epoch, self.epoch)
            self._inbox.read_goodbye(transport, known)
            next_slow = now + 0.1
          self._read_work(transport)
        except base.TransportError as error:
          if closing:
            break
          self._on_event("store_lost", f"outbox: {error}")
          transport.reconnect()
          next_lease = 0.0
          with self._lock:
            for message in self._ring:
              message.sent_at = None
        if closing:
          break
        with self._lock:
          idle = not self._ring and bool(self._work)
          self._lock.wait(0.02 if idle else _TICK_S)
      transport.close()
    except Exception as error:  # The searcher's thread raises it.
      logging.exception("outbox ended")
      with self._lock:
        self._error = error
        self._lock.notify_all()

  def _send(self, transport: base.Transport) -> None:
    with self._lock:
      ring = list(self._ring)
    now = time.monotonic()
    for message in ring:
      if message.sent_at is not None and now - message.sent_at < _RESEND_S:
        continue
      transport.put(
          f"q/{self._partition}/{self._sid}/{message.sequence:012d}",
          message.data,
          overwrite=False,
      )
      message.sent_at = now

  def _read_acks(self, transport: base.Transport) -> None:
    if not self._ring:
      return
    acks = self._inbox.get(transport, f"ack/{self._partition}")
    if acks is None:
      return
    # A replaced trainer's word is of an older epoch.
    if acks["epoch"] < self._ack_epoch:
      return
    self._ack_epoch = acks["epoch"]
    done = acks["table"].get(self._sid, 0)
    with self._lock:
      if self._ring and self._ring[0].sequence < done:
        self._ring = [m for m in self._ring if m.sequence >= done]
        self._lock.notify_all()

  def _read_work(self, transport: base.Transport) -> None:
    work = self._inbox.get(transport, f"work/{self._sid}")
    if work is None:
      return
    tag = (work["epoch"], work["count"])
    # A replaced trainer's grants are of an older epoch.
    if tag <= self._work_tag:
      return
    with self._lock:
      # What is not listed any more was taken back, or granted by a trainer
      # that is gone.
      epoch = work["epoch"]
      listed = {(epoch, block) for block, _, _ in work["blocks"]}
      self._work = [b for b in self._work if (b.epoch, b.block) in listed]
      self._work_tag = tag
      taken = self._last_block.get(epoch, -1)
      for block, version, prompts in work["blocks"]:
        if block > taken:
          taken = block
          prompts = tuple(tuple(p) for p in prompts)
          self._work.append(Block(epoch, block, version, prompts))
      self._last_block = {epoch: taken}
      self._lock.notify_all()

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
    transport.put(f"live/{self._sid}", wire.encode_message(lease, self._secret))
