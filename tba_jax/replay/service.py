# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""The replay buffer as the trainer's loop sees it: admit, await, draw, account.

The drain thread brings records in journal order. They are *applied* here, on
the trainer's own thread and only between steps, so that buffer, watermarks,
prompt order and ledger always describe the same prefix of the journal: that
prefix is what a checkpoint holds, and the rest is replayed.

How much may be sampled ahead of training, and with which version, is `flow`.
"""

from collections.abc import Callable
import time
from typing import Any

from tba_jax import types
from tba_jax.replay import buffer as buffer_lib
from tba_jax.replay import ledger as ledger_lib
from tba_jax.replay import prompt_order
from tba_jax.replay import queue_server
from tba_jax.replay import scheduler
from tba_jax.transport import base

Amount = ledger_lib.Amount


class ReplayService:
  """Owner of the buffer. All methods belong to the trainer's thread."""

  def __init__(
      self,
      *,
      drain: queue_server.Drain,
      buffer: buffer_lib.ReplayBuffer,
      order: prompt_order.PromptOrder,
      ledger: ledger_lib.Ledger,
      flow: scheduler.Flow,
      applied: int,
      watermarks: dict[str, int],
      check_group: Callable[[types.Group], str | None],
      on_event: Callable[[str, str], None],
      score_groups: Callable[
          [list[types.Group]], list[types.Group]
      ] = lambda groups: groups,
  ):
    """Takes the parts, restored or new.

    Args:
      drain: not yet started, or running.
      buffer: of completions.
      order: of prompts, shared with the drain under its lock.
      ledger: of the run.
      flow: admission.
      applied: journal position after the last applied record.
      watermarks: next sequence of each searcher, as applied.
      check_group: why a group can't be trained on, None where it can.
      on_event: called with (kind, message).
      score_groups: gives groups their rewards, where searchers did not.
    """
    self._drain = drain
    self._buffer = buffer
    self._order = order
    self._ledger = ledger
    self._flow = flow
    self._applied = applied
    self._watermarks = dict(watermarks)
    self._check_group = check_group
    self._on_event = on_event
    self._score_groups = score_groups
    self.rejected: dict[str, int] = {}

  @property
  def buffer(self) -> buffer_lib.ReplayBuffer:
    return self._buffer

  @property
  def ledger(self) -> ledger_lib.Ledger:
    return self._ledger

  def open(self, step: int) -> None:
    """Admits what `step` needs, so that searchers begin; waits for nothing."""
    self._drain.admit(self._flow.admitted(step))

  def open_next(self, step: int) -> None:
    """Admits the round after the step's own; for rounds with a lag.

    To be called once the step has begun: all of its round is here then, and no
    searcher that waits for a version holds a prompt that the trainer awaits.
    """
    self._drain.admit(self._flow.admitted_next(step))

  def is_ready(self, step: int) -> bool:
    """True where `begin_step` would not wait and may come early.

    Never in lockstep, nor where a round begins: there a batch is drawn after
    all of the step before it, also where a journal has its data already.
    """
    flow = self._flow
    if flow.lockstep or (flow.round_prompts and step % flow.round_steps == 0):
      return False
    needed = flow.needed(step)
    with self._drain.lock:
      return self._here(needed) >= needed

  def begin_step(self, step: int, should_stop: Callable[[], bool]) -> bool:
    """Admits, waits for the step's data, and applies what has come.

    Waits for searchers, `starvation_s` at most without any news from them.

    Returns:
      False where `should_stop` ended the wait; nothing was applied then.

    Raises:
      DeadlineExceededError: no searcher delivered in time; it names them.
      TransportError: the drain thread has ended.
    """
    self.open(step)
    needed = self._flow.needed(step)
    with self._drain.lock:
      self._drain.urgent = True
      try:
        if not self._await(step, needed, should_stop):
          return False
      finally:
        self._drain.urgent = False
      self._apply(step)
    return True

  def finish(self, step: int, deadline_s: float) -> dict[str, Any]:
    """Stops the searchers, takes what they still deliver, closes the ledger.

    Waits until every searcher has left, for at most `deadline_s`; who has not
    left by then is written off.

    Returns:
      The closed ledger.
    """
    self.stop_searchers(deadline_s, done=True)
    with self._drain.lock:
      self._apply(step, all_of_it=True)
      present = self._ledger.searchers()
    for sid in present:
      self._ledger.searcher_gone(sid)
    return self.account()

  def stop_searchers(self, deadline_s: float, *, done: bool = False) -> None:
    """Asks the searchers to deliver what they have and leave; waits for it.

    Args:
      deadline_s: of the wait.
      done: whether the run is at its end. Where it is only interrupted, one
        that starts before the next trainer does not take this as meant for it.
    """
    self._drain.stop_searchers(done=done)
    deadline = time.monotonic() + deadline_s
    with self._drain.lock:
      while self._drain.leases.alive() or self._drain.leaving:
        self._drain.check()
        if time.monotonic() > deadline:
          break
        self._drain.lock.wait(0.05)

  def account(self) -> dict[str, Any]:
    """Returns the ledger as it stands, both sides; see `Ledger.close`."""
    self._hear_leases()
    return self._ledger.close(self._buffer.untrained())

  def generated(self) -> Amount:
    """Returns what all searchers have announced since the run began."""
    self._hear_leases()
    return self._ledger.generated()

  def _hear_leases(self) -> None:
    with self._drain.lock:
      for sid, lease in self._drain.leases.alive().items():
        self._ledger.announce(sid, _totals(lease["totals"]))

  def draw(
      self, num_prompts: int, num_completions: int, step: int
  ) -> buffer_lib.Draw:
    """Returns a batch: drawn from replay, or the round's next mini-batch.

    Args and raises: as `ReplayBuffer.sample`.
    """
    flow = self._flow
    if not flow.round_prompts:
      return self._buffer.sample(num_prompts, num_completions, step)
    done = step % flow.round_steps
    return self._buffer.sample_in_order(
        num_prompts,
        num_completions,
        step,
        arrived_from=step - done,
        skip=done * num_prompts % flow.round_prompts,
    )

  def mark_trained(self, draw: buffer_lib.Draw) -> None:
    """Counts the drawn completions as used by a step."""
    self._ledger.train_first(self._buffer.mark_trained(draw.rows))

  def get_state(self) -> dict[str, Any]:
    """Returns what a checkpoint holds of the data side."""
    with self._drain.lock:
      return {
          "applied": self._applied,
          "watermarks": dict(self._watermarks),
          "order": self._order.get_state(),
          "ledger": self._ledger.get_state(),
          "buffer": self._buffer.get_state(),
      }

  def _await(
      self, step: int, needed: int, should_stop: Callable[[], bool]
  ) -> bool:
    deadline = time.monotonic() + self._flow.starvation_s
    before = -1
    while True:
      self._drain.check()
      here = self._here(needed)
      if here >= needed:
        return True
      if should_stop():
        return False
      now = time.monotonic()
      if here != before:
        before, deadline = here, now + self._flow.starvation_s
      if now > deadline:
        raise base.DeadlineExceededError(self._starved(step, here, needed))
      self._drain.lock.wait(0.1)

  def _here(self, needed: int) -> int:
    """Distinct prompts that came, of the step's own where in lockstep."""
    return self._order.num_taken(needed if self._flow.is_pinned else None)

  def _apply(self, step: int, *, all_of_it: bool = False) -> None:
    """Applies pending records, up to the first that comes early for the step.

    Groups enter the buffer in the order of their positions, so that it does
    not depend on which searcher was faster.
    """
    count = 0
    arrived: list[types.Group] = []
    for record in self._drain.pending():
      if not all_of_it and self._is_early(record, step):
        break
      count += 1
      self._applied = record.position
      arrived += self._apply_record(record)
    self._drain.take(count)
    arrived = self._score_groups(sorted(arrived, key=lambda g: g.position))
    for group in arrived:
      result = self._buffer.insert(group, step)
      self._ledger.evict(result.left_untrained)

  def _is_early(self, record: queue_server.Record, step: int) -> bool:
    """True for data of a later step, which only a journal has already.

    A trainer that went back to a checkpoint finds there what was sampled since.
    It takes that in at the pace of its steps: taken at once, it would be all
    recent now and all stale later.
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
    header = record.header
    sid = header["sid"]
    if not record.is_block:
      self._ledger.announce(sid, _totals(header["totals"]))
      self._ledger.searcher_gone(sid)
      return []
    totals, amount = _totals(header["totals"]), _totals(header["amount"])
    self._watermarks[sid] = header["sequence"] + 1
    # What it had generated before and never came: the journal has lost it.
    gap = totals - amount - self._ledger.accepted(sid)
    if min(gap) >= 0 and any(gap):
      self._ledger.accept(sid, totals, gap)
      self._ledger.lost("journal", gap)
      self._on_event("journal_lost", f"{gap.completions} completions of {sid}")
    self._ledger.accept(sid, totals, amount)
    if record.groups is None:
      self._reject("malformed", amount)
      return []
    kept = []
    for group in record.groups:
      reason = self._refusal(group)
      if reason is None:
        kept.append(group)
      else:
        self._reject(reason, Amount(1, group.num_completions, group.num_tokens))
    return kept

  def _refusal(self, group: types.Group) -> str | None:
    """Returns why a group is rejected; its position counts as received."""
    position = group.position
    if not self._order.is_plausible(position):
      return "position"
    if not self._order.receive(position):
      return "duplicate"
    if (group.prompt_id, group.visit) != self._order.prompt(position):
      return "position"
    return self._check_group(group)

  def _reject(self, reason: str, amount: Amount) -> None:
    self.rejected[reason] = self.rejected.get(reason, 0) + amount.completions
    self._ledger.reject(reason, amount)
    self._on_event("rejected", f"{amount.completions} completions: {reason}")

  def _starved(self, step: int, here: int, needed: int) -> str:
    alive = self._drain.leases.alive()
    who = [
        f"{sid} (silent for {self._drain.leases.age_s(sid):.0f} s,"
        f" {lease['unacked']} blocks unacknowledged)"
        for sid, lease in alive.items()
    ]
    obstacle = self._drain.obstacle
    return (
        f"step {step} has {here} of {needed} prompts and none came for"
        f" {self._flow.starvation_s:.0f} s; "
        + (f"{obstacle}; " if obstacle else "")
        + f"searchers: {', '.join(who) or 'none alive'}"
    )


def _totals(totals: dict[str, int]) -> Amount:
  return Amount(totals["prompts"], totals["completions"], totals["tokens"])
