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

from collections.abc import Callable, Sequence
import os
import socket
import threading
import time
from typing import Any

from absl import logging

from tba_jax import pace as pace_lib
from tba_jax import types
from tba_jax.replay import inbox as inbox_lib
from tba_jax.replay import packing
from tba_jax.replay import replies
from tba_jax.replay import ring as ring_lib
from tba_jax.replay import worklist
from tba_jax.transport import base
from tba_jax.transport import wire

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


Block = worklist.Block


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
    self._inbox = inbox_lib.Inbox(
        run_id=run_id, secret=secret, on_event=on_event
    )
    self._lock = threading.Condition()
    self._ring = ring_lib.Ring(_RESEND_S)
    self._totals = {"prompts": 0, "completions": 0, "tokens": 0}
    self._work = worklist.WorkList()
    self._stats: dict[str, Any] = {}
    self._lease = {
        "run": run_id,
        "sid": sid,
        "slot": f"{socket.gethostname()}/{index}",
        "index": index,
        "pid": os.getpid(),
        "started": time.time(),
    }
    self._pace = pace_lib.Pace(
        floor_s=_TICK_S,
        waiting_floor_s=_WAITING_TICK_S,
        share=_SHARE,
        cap_s=_LONGEST_TICK_S,
    )
    # Of the lease, which says what changes with each block.
    self._lease_pace = pace_lib.Pace(
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
      self._pace.rest()
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
      header, arrays = packing.pack_groups(groups)
      header.update(
          run=self._run_id,
          sid=self._sid,
          sequence=self._ring.next_sequence,
          totals=dict(self._totals),
          amount=amount,
      )
      self._ring.add(wire.encode(header, arrays, self._secret))
      self._pace.rest()
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
    if self._pace.wait():
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
      self, transport: base.Transport, messages: Sequence[ring_lib.Message]
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
    answer = self._inbox.get(transport, replies.key_of(self._sid))
    if answer is not None and answer["epoch"] > self.epoch:
      self._agree(transport)
    with self._lock:
      changed = answer is not None and self._work.hear(answer)
      if changed:
        self._ring.acknowledge(answer["acked"])
        self._lock.notify_all()
      self._pace.asked(changed)
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
      self._lease_pace.asked()
    transport.put(f"live/{self._sid}", wire.encode_message(lease, self._secret))
