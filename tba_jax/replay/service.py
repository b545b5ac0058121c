# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Replay for the trainer's loop: admits prompts, waits for data, draws batches.

Records from the queue server are applied in journal order, on the trainer's
thread and between steps, so buffer, watermarks, prompt order and ledger always
reflect the same prefix of the journal. A checkpoint has the state after that
prefix; the rest is replayed.
"""

from collections.abc import Callable, Mapping
import time
from typing import Any

import ml_collections

from tba_jax import types
from tba_jax.replay import buffer as buffer_lib
from tba_jax.replay import ledger as ledger_lib
from tba_jax.replay import messages
from tba_jax.replay import queue_server
from tba_jax.transport import base

Amount = ledger_lib.Amount


class ReplayService:
  """Owns buffer and ledger; used by the trainer's thread alone.

  rejected: number of completions by reason, since this process started.
  """

  def __init__(
      self,
      config: ml_collections.ConfigDict,
      *,
      server: queue_server.QueueServer,
      buffer: buffer_lib.ReplayBuffer,
      vocab_size: int,
      on_event: Callable[[str, str], None],
      score_groups: Callable[
          [list[types.Group]], list[types.Group]
      ] = lambda groups: groups,
      saved: Mapping[str, Any] | None = None,
  ):
    """Makes the service; restores a saved state.

    Args:
      config: reads `sampling` (P and T) and `reference.role`.
      server: made with the same `saved`.
      buffer: empty.
      vocab_size: upper bound of token ids.
      on_event: called with (kind, message).
      score_groups: rewards groups, if searchers do not.
      saved: `get_state` of a checkpoint.
    """
    self.buffer = buffer
    self.ledger = ledger_lib.Ledger()
    self.rejected: dict[str, int] = {}
    self._server = server
    self._order = server.order
    self._flow = server.flow
    self._limits = {
        "vocab_size": vocab_size,
        "max_prompt_tokens": config.sampling.max_prompt_tokens,
        "max_completion_tokens": config.sampling.max_completion_tokens,
        "has_ref_logprobs": config.reference.role == "searcher",
    }
    self._on_event = on_event
    self._score_groups = score_groups
    self._begun = False
    self._applied = server.journal.start
    self._watermarks: dict[str, int] = {}
    if saved:
      buffer.set_state(saved["buffer"])
      self.ledger.set_state(saved["ledger"])
      self._applied = saved["applied"]
      self._watermarks = dict(saved["watermarks"])

  def open(self, step: int) -> None:
    """Admits what `step` needs, without waiting."""
    if not self._begun:
      self._begun = True
      self.buffer.begin_epoch(self._server.epoch, step)
    self._server.admit(self._flow.admitted(step))

  def open_next(self, step: int) -> None:
    """Admits the round after the step's own, for rounds with a lag.

    Call it once the step has begun, that is when its round has arrived: then no
    searcher waiting for a version has a prompt that the trainer waits for.
    """
    self._server.admit(self._flow.admitted_next(step))

  def is_ready(self, step: int) -> bool:
    """Returns whether `begin_step` would not wait and may be called early.

    Never in lockstep or at the start of a round, where a batch is drawn only
    after the previous step is complete.
    """
    flow = self._flow
    if flow.lockstep or (flow.round_prompts and step % flow.round_steps == 0):
      return False
    needed = flow.needed(step)
    with self._server.lock:
      return self._num_arrived(needed) >= needed

  def begin_step(self, step: int, should_stop: Callable[[], bool]) -> bool:
    """Admits, waits for the step's data, and applies what has arrived.

    Returns:
      False if `should_stop` ended the wait; nothing was applied then.

    Raises:
      DeadlineExceededError: nothing was delivered for `starvation_s`; names the
        searchers.
      TransportError: the queue server has ended.
    """
    self.open(step)
    with self._server.lock:
      self._server.urgent = True
      try:
        if not self._await(step, should_stop):
          return False
      finally:
        self._server.urgent = False
    self._apply(step)
    return True

  def finish(self, step: int, deadline_s: float) -> dict[str, Any]:
    """Stops the searchers, applies what they deliver, returns the ledger.

    Waits for the searchers to leave for at most `deadline_s`, then writes off
    those that have not.
    """
    self.stop_searchers(deadline_s, done=True)
    self._server.read_files()
    self._apply(step, all_records=True)
    self._read_leases()
    for sid in self.ledger.searchers():
      self.ledger.searcher_gone(sid)
    return self.account()

  def stop_searchers(self, deadline_s: float, *, done: bool = False) -> None:
    """Asks the searchers to deliver what they have and leave; waits for it.

    Args:
      deadline_s: of the wait.
      done: whether the run is complete; if it is only interrupted, searchers
        started before the next trainer ignore the request.
    """
    self._server.stop_searchers(done=done)
    deadline = time.monotonic() + deadline_s
    with self._server.lock:
      while self._server.leases.alive() or self._server.leaving:
        self._server.check()
        if time.monotonic() > deadline:
          break
        self._server.lock.wait(0.05)

  def account(self) -> dict[str, Any]:
    """Returns the terms of the ledger; see `Ledger.close`."""
    self._read_leases()
    return self.ledger.close(self.buffer.untrained())

  def generated(self) -> Amount:
    """Returns what all searchers have announced since the run began."""
    self._read_leases()
    return self.ledger.generated()

  def _read_leases(self) -> None:
    with self._server.lock:
      for sid, totals in self._server.leases.announced().items():
        self.ledger.announce(sid, _amount(totals))

  def draw(
      self, num_prompts: int, num_completions: int, step: int
  ) -> buffer_lib.Draw:
    """Returns a batch: drawn from replay, or the round's next mini-batch."""
    flow = self._flow
    if not flow.round_prompts:
      return self.buffer.sample(num_prompts, num_completions, step)
    done = step % flow.round_steps
    return self.buffer.sample_in_order(
        num_prompts,
        num_completions,
        step,
        arrived_from=step - done,
        skip=done * num_prompts % flow.round_prompts,
    )

  def mark_trained(self, draw: buffer_lib.Draw) -> None:
    """Counts the drawn completions as used."""
    self.ledger.train_first(self.buffer.mark_trained(draw.rows))

  def get_state(self) -> dict[str, Any]:
    """Returns the state of replay for a checkpoint."""
    with self._server.lock:
      shared = {
          "acknowledged": {
              sid: list(mark) for sid, mark in self._server.acknowledged.items()
          },
          "order": self._order.get_state(),
      }
    # Of this thread alone, and large, so it is copied unlocked.
    return {
        "applied": self._applied,
        "watermarks": dict(self._watermarks),
        "ledger": self.ledger.get_state(),
        "buffer": self.buffer.get_state(),
        **shared,
    }

  def _await(self, step: int, should_stop: Callable[[], bool]) -> bool:
    """Waits for the step's data. Under the server's lock."""
    needed = self._flow.needed(step)
    deadline = time.monotonic() + self._flow.starvation_s
    before = -1
    while True:
      self._server.check()
      arrived = self._num_arrived(needed)
      if arrived >= needed:
        return True
      if should_stop():
        return False
      now = time.monotonic()
      if arrived != before:
        before, deadline = arrived, now + self._flow.starvation_s
      if now > deadline:
        message = self._starvation_message(step, arrived, needed)
        raise base.DeadlineExceededError(message)
      self._server.lock.wait(0.1)

  def _num_arrived(self, needed: int) -> int:
    """Returns how many prompts arrived; in lockstep, of those needed."""
    return self._order.num_taken(needed if self._flow.is_pinned else None)

  def _apply(self, step: int, *, all_records: bool = False) -> None:
    """Applies pending records, up to the first that is early for the step.

    Groups are inserted in order of position, so that the buffer does not depend
    on which searcher was faster. Scoring may take long, so it runs unlocked.
    """
    arrived: list[types.Group] = []
    rejected = dict(self.rejected)
    with self._server.lock:
      count = 0
      for record in self._server.pending():
        if not all_records and self._is_early(record, step):
          break
        count += 1
        self._applied = record.position
        arrived += self._apply_record(record)
      self._server.take(count)
    arrived.sort(key=lambda group: group.position)
    for group in self._score_groups(arrived):
      if self.buffer.has_other_tokens(group):
        self._reject("prompt", _amount_of(group))
      else:
        self.ledger.evict(self.buffer.insert(group, step))
    for reason, count in self.rejected.items():
      if new := count - rejected.get(reason, 0):
        self._on_event("rejected", f"{new} completions: {reason}")

  def _is_early(self, record: queue_server.Record, step: int) -> bool:
    """Returns whether a record is data of a later step, found in the journal.

    After going back to a checkpoint, the trainer applies the data sampled since
    at the pace of its steps: applied at once, it would all be recent now and
    stale later.
    """
    if not record.groups:
      return False
    if not self._flow.is_pinned:
      return self._order.num_received >= self._flow.admitted(step)
    needed = self._flow.needed(step)
    return any(
        g.position >= needed and self._order.is_plausible(g.position)
        for g in record.groups
    )

  def _apply_record(self, record: queue_server.Record) -> list[types.Group]:
    """Accounts for a record; returns the groups to insert."""
    header = record.header
    if record.kind == "unknown":
      self.ledger.note_unknown(header["reason"])
      return []
    sid, totals = header["sid"], _amount(header["totals"])
    if record.kind == "gone":
      self.ledger.announce(sid, totals)
      self.ledger.searcher_gone(sid)
      return []
    if record.kind == "missing":
      self._watermarks[sid] = header["next"]
      missing = totals - self.ledger.accepted(sid)
      self._lose(sid, totals, missing, header["cause"])
      return []
    amount = _amount(header["amount"])
    self._watermarks[sid] = header["sequence"] + 1
    # Blocks before this one that a damaged journal has lost.
    missing = totals - amount - self.ledger.accepted(sid)
    self._lose(sid, totals, missing, "journal")
    self.ledger.accept(sid, totals, amount)
    if record.groups is None:
      self._reject("malformed", amount)
      return []
    kept = []
    for group in record.groups:
      reason = self._reject_reason(group)
      if reason is None:
        kept.append(group)
      else:
        self._reject(reason, _amount_of(group))
    return kept

  def _lose(self, sid: str, totals: Amount, lost: Amount, cause: str) -> None:
    """Counts data that never comes: the journal or its searcher has lost it."""
    if min(lost) >= 0 and any(lost):
      self.ledger.accept(sid, totals, lost)
      self.ledger.lost(cause, lost)
      what = f"{lost.completions} completions of {sid}"
      self._on_event(f"{cause}_lost", what)

  def _reject_reason(self, group: types.Group) -> str | None:
    """Returns why a group is rejected, or None; marks its position received."""
    position = group.position
    if not self._order.is_plausible(position):
      return "position"
    if not self._order.receive(position):
      return "duplicate"
    if (group.prompt_id, group.visit) != self._order.prompt(position):
      return "position"
    return messages.reject_reason(group, **self._limits)

  def _reject(self, reason: str, amount: Amount) -> None:
    self.rejected[reason] = self.rejected.get(reason, 0) + amount.completions
    self.ledger.reject(reason, amount)

  def _starvation_message(self, step: int, arrived: int, needed: int) -> str:
    searchers = [
        f"{sid} (silent for {self._server.leases.age_s(sid):.0f} s,"
        f" {lease['unacked']} blocks unacknowledged)"
        for sid, lease in self._server.leases.alive().items()
    ]
    obstacle = self._server.obstacle
    return (
        f"step {step} has {arrived} of {needed} prompts and none came for"
        f" {self._flow.starvation_s:.0f} s; "
        + (f"{obstacle}; " if obstacle else "")
        + f"searchers: {', '.join(searchers) or 'none alive'}"
    )


def _amount_of(group: types.Group) -> Amount:
  return Amount(1, group.num_completions, group.num_tokens)


def _amount(totals: Mapping[str, int]) -> Amount:
  return Amount(*(totals[unit] for unit in messages.UNITS))
