# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Replay for the trainer's loop: admits prompts, waits for data, draws batches.

Records of the receiver's inbox are applied in journal order, on the trainer's
thread and between steps, so buffer, watermarks, prompt order and ledger always
reflect the same prefix of the journal. A checkpoint has the state after that
prefix; the rest is replayed.
"""

import collections
from collections.abc import Callable, Mapping
import time
from typing import Any

import ml_collections

from tba_jax import schedule
from tba_jax import types
from tba_jax.replay import buffer as buffer_lib
from tba_jax.replay import ledger as ledger_lib
from tba_jax.replay import prompt_order
from tba_jax.transport import byte_store
from tba_jax.transport.groups import inbox as inbox_lib
from tba_jax.transport.groups import messages
from tba_jax.transport.groups import receiver as receiver_lib

Amount = ledger_lib.Amount

# Period of checking whether searchers have left.
_LEAVE_TICK_S = 0.02
# Most `search.starvation_s` without data, though searchers are at work.
MOST_WAITS = 10


class ReplayService:
  """A trainer's data, from any channel's receiver; for the trainer's thread.

  Prompts are admitted by step. Records are applied in journal order, and only
  in `begin_step` and `finish`, so the state always reflects a prefix of the
  journal. Each journaled block is applied once.

  buffer: replay buffer, read by batches and metrics.
  ledger: account of everything that was generated.
  rejected: number of completions by reason, since this process started.
  applied: journal offset, the end of the newest applied record.
  """

  def __init__(
      self,
      config: ml_collections.ConfigDict,
      *,
      receiver: receiver_lib.Receiver,
      buffer: buffer_lib.ReplayBuffer,
      vocab_size: int,
      num_experts: int = 0,
      on_event: Callable[[str, str], None],
      saved: Mapping[str, Any] | None = None,
  ):
    """Makes the service; restores a saved state.

    Args:
      config: reads `sampling` (P and T), and what `make_schedule` reads.
      receiver: trainer-side channel, made with the same `saved`.
      vocab_size: upper bound of token ids.
      num_experts: upper bound of the experts of routes; 0 without any.
      on_event: called with (kind, message).
      saved: `get_state` of a checkpoint.

    Raises:
      ValueError: a file of the prompt order is missing.
    """
    self.buffer = buffer
    self.ledger = ledger_lib.Ledger()
    self.rejected: dict[str, int] = {}
    self._failures: list[tuple[int, float]] = []
    self._receiver = receiver
    self._order = receiver.order
    self._schedule = schedule.make_schedule(config)
    self._starvation_s = config.search.starvation_s
    # Whether the trainer is publishing params that searchers may wait for.
    self.is_publishing: Callable[[], bool] = lambda: False
    self._limits = {
        "vocab_size": vocab_size,
        "max_prompt_tokens": config.sampling.max_prompt_tokens,
        "max_completion_tokens": config.sampling.max_completion_tokens,
        "columns": buffer.columns,
        "num_experts": num_experts,
    }
    self._on_event = on_event
    self._begun = False
    # Records taken from the inbox and not applied yet.
    self.unapplied: collections.deque[inbox_lib.Record] = collections.deque()
    self.applied = receiver.journal_start
    self.applied_positions = prompt_order.Positions()
    # Positions of all groups that have arrived, applied or not.
    self.journaled = prompt_order.Positions()
    self._watermarks: dict[str, int] = {}
    # Number of positions that had arrived by the last barrier.
    self._num_at_barrier = 0
    if saved:
      buffer.set_state(saved["buffer"])
      self.ledger.set_state(saved["ledger"])
      self.applied = saved["applied"]
      restore = prompt_order.Positions.from_state
      self.applied_positions = restore(saved["order"], self._order)
      self.journaled = restore(saved["order"], self._order)
      self._num_at_barrier = len(self.journaled)
      self._watermarks = dict(saved["watermarks"])
      self._order.set_state(saved.get("difficulty", {}))

  def open(self, step: int) -> None:
    """Admits what `step` needs, without waiting."""
    if not self._begun:
      self._begun = True
      self.buffer.begin_epoch(self._receiver.epoch, step)
    self._admit(self._schedule.admitted(step))

  def _admit(self, limit: int) -> None:
    self._order.extend(limit)
    self._receiver.admit(limit)

  def is_ready(self, step: int) -> bool:
    """Returns whether `begin_step` would not wait and may be called early.

    Always False if a batch is drawn only after the previous step is complete.
    """
    if not self._schedule.may_run_ahead(step):
      return False
    needed = self._schedule.needed(step)
    return self._num_journaled(needed) >= needed and self._passes(step)

  def begin_step(self, step: int, should_stop: Callable[[], bool]) -> bool:
    """Admits, waits for the step's data, and applies what has arrived.

    Returns:
      False if `should_stop` ended the wait; nothing was applied then.

    Raises:
      DeadlineExceededError: nothing was delivered for `starvation_s`, while no
        searcher was at work and no params were in transit, or for `MOST_WAITS`
        times that; the error names the searchers.
      TransportError: the receiver has ended.
    """
    self.open(step)
    self._receiver.urgent = True
    try:
      if not self._await(step, should_stop):
        return False
    finally:
      self._receiver.urgent = False
    self.apply(step)
    if self._schedule.has_barrier(step):
      self._num_at_barrier = len(self.journaled)
      self._receiver.resume(step)
    # Not earlier: a searcher that waits for a later version must not hold a
    # prompt that the trainer waits for.
    self._admit(self._schedule.admitted_after(step))
    return True

  def finish(self, step: int, deadline_s: float) -> dict[str, Any]:
    """Stops the searchers, applies what they deliver, returns the ledger.

    Waits for the searchers to leave for at most `deadline_s`, then writes off
    those that have not.
    """
    self.stop_searchers(deadline_s, done=True)
    self._read_announced(from_disk=True)
    self.apply(step, all_records=True)
    for sid in self.ledger.searchers():
      self.ledger.searcher_gone(sid)
    return self.account()

  def stop_searchers(self, deadline_s: float, *, done: bool = False) -> None:
    """Asks the searchers to deliver their blocks and leave; waits until done.

    Args:
      deadline_s: longest wait.
      done: whether the run is complete; if it is only interrupted, searchers
        started before the next trainer ignore the request.
    """
    self._receiver.stop_searchers(done=done)
    deadline = time.monotonic() + deadline_s
    while self._receiver.has_searchers():
      self._receiver.check()
      if time.monotonic() > deadline:
        break
      time.sleep(_LEAVE_TICK_S)

  def take_failures(self) -> list[tuple[int, float]]:
    """Returns (position, share of completions without a reward) of groups.

    Each applied group is returned once, including groups without a prompt from
    failed environments.
    """
    failures, self._failures = self._failures, []
    return failures

  def account(self) -> dict[str, Any]:
    """Returns the entries of the ledger; see `Ledger.close`."""
    self._read_announced()
    return self.ledger.close(self.buffer.untrained())

  def generated(self) -> Amount:
    """Returns what all searchers have announced since the run began."""
    self._read_announced()
    return self.ledger.generated()

  def _read_announced(self, *, from_disk: bool = False) -> None:
    announced = self._receiver.announced(from_disk=from_disk)
    for sid, totals in announced.items():
      self.ledger.announce(sid, _amount(totals))

  def draw(
      self, num_prompts: int, num_completions: int, step: int
  ) -> types.Draw:
    """Returns the batch of a step that has begun."""
    return self.buffer.draw(num_prompts, num_completions, step)

  def mark_drawn(self, draw: types.Draw) -> None:
    """Counts the drawn completions as used."""
    self.ledger.train_first(self.buffer.mark_drawn(draw.ids))

  def get_state(self) -> dict[str, Any]:
    """Returns the state for a checkpoint; "applied" is the prefix's end."""
    return {
        "applied": self.applied,
        "watermarks": dict(self._watermarks),
        "ledger": self.ledger.get_state(),
        "buffer": self.buffer.get_state(),
        "acknowledged": self._receiver.acknowledged(),
        "order": self.applied_positions.get_state(self._order),
        "difficulty": self._order.get_state(),
    }

  def drop_journal_before(self, offset: int) -> None:
    """Deletes the journal before an offset that no checkpoint needs."""
    self._receiver.drop_journal_before(offset)

  def _await(self, step: int, should_stop: Callable[[], bool]) -> bool:
    """Waits for the step's data."""
    needed = self._schedule.needed(step)
    begun = time.monotonic()
    deadline = begun + self._starvation_s
    before = -1
    while True:
      self._receiver.check()
      arrived = self._num_journaled(needed)
      if arrived >= needed and self._passes(step):
        return True
      if should_stop():
        return False
      now = time.monotonic()
      if arrived != before:
        before, begun, deadline = arrived, now, now + self._starvation_s
      if self._is_on_its_way():
        most_s = MOST_WAITS * self._starvation_s
        deadline = min(now + self._starvation_s, begun + most_s)
      if now > deadline:
        limit_s, searchers = now - begun, self._describe()
        if arrived >= needed:
          raise byte_store.DeadlineExceededError(
              f"step {step} waits for what searchers have in work and nothing"
              f" came for {limit_s:.0f} s; {searchers}"
          )
        raise byte_store.DeadlineExceededError(
            f"step {step} has {arrived} of {needed} prompts and none came for"
            f" {limit_s:.0f} s; {searchers}"
        )
      self._receiver.inbox.wait(0.1)

  def _is_on_its_way(self) -> bool:
    """Returns whether a searcher samples, or may wait for params in transit.

    Completions may be long and devices slow: the trainer then waits for up to
    `MOST_WAITS` times `search.starvation_s`.
    """
    return self.is_publishing() or any(
        lease["alive"]
        and (lease["stats"].get("is_pulling") or lease["stats"].get("works"))
        for lease in self._receiver.heard().values()
    )

  def _describe(self) -> str:
    """Returns live searchers and what delays data, for a message."""
    searchers = [
        f"{sid} (silent for {lease['age_s']:.0f} s, {lease['unacked']} blocks"
        " unacknowledged)"
        for sid, lease in self._receiver.heard().items()
        if lease["alive"]
    ]
    obstacle = self._receiver.obstacle
    obstacle = f"{obstacle}; " if obstacle else ""
    return f"{obstacle}searchers: {', '.join(searchers) or 'none alive'}"

  def _num_journaled(self, needed: int) -> int:
    """Returns how many positions arrived; if pinned, of the needed ones."""
    self.take_records()
    if self._schedule.is_pinned:
      return self.journaled.count(needed)
    return len(self.journaled)

  def _passes(self, step: int) -> bool:
    """Returns whether a step may begin; at a barrier, drains first.

    A barrier is passed only if positions have arrived since the last one.
    """
    if not self._schedule.has_barrier(step):
      return True
    if len(self.journaled) <= self._num_at_barrier:
      return False
    if not self._receiver.drain():
      return False
    self.take_records()
    return True

  def take_records(self) -> None:
    """Takes the records that have arrived in the inbox."""
    for record in self._receiver.inbox.take():
      self.unapplied.append(record)
      for group in record.groups or ():
        if self.journaled.is_plausible(group.position):
          self.journaled.add(group.position)

  def apply(self, step: int, *, all_records: bool = False) -> None:
    """Applies journaled records, up to the first one that is early for `step`.

    Groups are inserted in order of position, so that the buffer does not depend
    on which searcher was faster.

    Args:
      all_records: whether to apply early records too.
    """
    self.take_records()
    groups: list[types.Group] = []
    rejected = dict(self.rejected)
    while self.unapplied:
      if not all_records and self._is_early(self.unapplied[0], step):
        break
      record = self.unapplied.popleft()
      self.applied = record.offset
      groups += self._apply_record(record)
    groups.sort(key=lambda group: group.position)
    for group in groups:
      self._failures.append((group.position, group.failure_share))
      if self.buffer.has_other_tokens(group):
        self._reject("prompt", _amount_of(group))
        continue
      rewarded = self.buffer.rewarded(group)
      left_out = _amount_of(group) - _amount_of(rewarded)
      if any(left_out):
        self.ledger.reject("not_judged", left_out)
      if rewarded.num_completions:
        self.ledger.evict(self.buffer.insert(rewarded, step))
        self._order.note(rewarded)
    for reason, count in self.rejected.items():
      if new := count - rejected.get(reason, 0):
        self._on_event("rejected", f"{new} completions: {reason}")

  def _is_early(self, record: inbox_lib.Record, step: int) -> bool:
    """Returns whether a record is data of a later step, found in the journal.

    After going back to a checkpoint, the trainer applies data sampled after it
    at the pace of the steps: applied at once, the data would all be recent now
    and stale later.
    """
    if not record.groups:
      return False
    if not self._schedule.is_pinned:
      return len(self.applied_positions) >= self._schedule.admitted(step)
    needed = self._schedule.needed(step)
    if self.applied_positions.count(needed) < needed:
      return False  # Data that the step needs may come after this record.
    return any(
        g.position >= needed and self.journaled.is_plausible(g.position)
        for g in record.groups
    )

  def _apply_record(self, record: inbox_lib.Record) -> list[types.Group]:
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
      missing = totals - self.ledger.applied(sid)
      self._lose(sid, totals, missing, header["cause"])
      return []
    amount = _amount(header["amount"])
    self._watermarks[sid] = header["sequence"] + 1
    # Amount in earlier blocks that a damaged journal has lost.
    missing = totals - amount - self.ledger.applied(sid)
    self._lose(sid, totals, missing, "journal")
    self.ledger.apply(sid, totals, amount)
    if record.groups is None:
      self._reject("malformed", amount)
      return []
    kept = []
    for group in record.groups:
      self.ledger.note_environment(
          int(group.completion_lengths.sum()) - group.num_tokens
      )
      reason = self._reject_reason(group)
      if reason is None:
        kept.append(group)
      else:
        if reason == "environment":
          self._failures.append((group.position, 1.0))
        self._reject(reason, _amount_of(group))
    return kept

  def _lose(self, sid: str, totals: Amount, lost: Amount, cause: str) -> None:
    """Counts data that the journal or its searcher has lost."""
    if min(lost) >= 0 and any(lost):
      self.ledger.apply(sid, totals, lost)
      self.ledger.lost(cause, lost)
      what = f"{lost.completions} completions of {sid}"
      self._on_event(f"{cause}_lost", what)

  def _reject_reason(self, group: types.Group) -> str | None:
    """Returns why a group is rejected, or None; marks its position applied."""
    position = group.position
    if not self.journaled.is_plausible(position):
      return "position"
    if not self.applied_positions.add(position):
      return "duplicate"
    if (group.prompt_id, group.visit) != self._order.prompt(position):
      return "position"
    return messages.reject_reason(group, **self._limits)

  def _reject(self, reason: str, amount: Amount) -> None:
    self.rejected[reason] = self.rejected.get(reason, 0) + amount.completions
    self.ledger.reject(reason, amount)


def _amount_of(group: types.Group) -> Amount:
  has_any = int(group.num_completions > 0)
  return Amount(has_any, group.num_completions, group.num_tokens)


def _amount(totals: Mapping[str, int]) -> Amount:
  return Amount(*(totals[unit] for unit in messages.UNITS))
