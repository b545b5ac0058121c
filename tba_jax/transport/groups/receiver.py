# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Trainer-side channel of groups, as the replay service sees it."""

import abc
from collections.abc import Mapping
import threading
from typing import Any

import ml_collections

from tba_jax import schedule
from tba_jax.replay import prompt_order
from tba_jax.transport.groups import grants
from tba_jax.transport.groups import inbox
from tba_jax.transport.groups import intake


class Receiver(abc.ABC):
  """Grants prompts, and puts delivered blocks into the inbox.

  Its threads check a block, write it to the journal of a run directory, put it
  into the inbox and acknowledge it, in this order. Any thread may call any
  method.

  inbox: records that have arrived; after a restart, first the journal's records
    that the checkpoint lacks.
  epoch: start count of the trainer, -1 before it is known.
  urgent: whether the trainer waits for data; set by its thread.
  generation: counter of the store, 0 without one; for the status.
  """

  order: prompt_order.PromptOrder
  epoch = -1
  urgent = False
  generation = 0

  def __init__(self):
    self.inbox = inbox.Inbox()
    # Guards grants, marks and the state of searchers; taken only by methods of
    # this object.
    self.lock = threading.RLock()
    self.grants: grants.Grants | None = None
    self.intake: intake.Intake | None = None

  def _begin(
      self,
      config: ml_collections.ConfigDict,
      *,
      order: prompt_order.PromptOrder,
      epoch: int,
      first_version: int = 0,
      saved: Mapping[str, Any],
  ) -> None:
    """Makes `Grants` for the positions that the checkpoint lacks.

    Args:
      config: reads `search`, `rounds` and `train`.
      epoch: start count of the trainer.
      first_version: oldest version that can be sampled with.
      saved: `ReplayService.get_state` of a checkpoint, or {}.
    """
    self.order, self.epoch = order, epoch
    journaled = None
    if saved:
      journaled = prompt_order.Positions.from_state(saved["order"], order)
    self.grants = grants.Grants(
        order,
        prompts_per_round=config.search.prompts_per_round,
        schedule=schedule.make_schedule(config, first_version=first_version),
        journaled=journaled,
    )

  def _deliver(self, record: inbox.Record) -> None:
    """Puts a record into the inbox, then updates the grants."""
    # In this order: positions without a grant must be in the inbox already.
    self.inbox.put(record)
    with self.lock:
      self.grants.note(record)

  @abc.abstractmethod
  def _wake(self) -> None:
    """Wakes the searchers that wait for grants. Under the lock."""

  @property
  def journal_start(self) -> int:
    """Offset of the journal's oldest record, 0 without a journal."""
    return self.intake.journal.start if self.intake else 0

  @property
  def obstacle(self) -> str | None:
    """Reason why data cannot be journaled, for messages; None without one."""
    return self.intake and self.intake.obstacle

  @abc.abstractmethod
  def start(self) -> None:
    """Begins to serve searchers."""

  @abc.abstractmethod
  def close(self) -> None:
    """Ends serving, and closes the journal."""

  @abc.abstractmethod
  def check(self) -> None:
    """Raises TransportError if a thread has ended with an error."""

  def admit(self, limit: int) -> None:
    """Admits positions below `limit`, to be granted to searchers."""
    with self.lock:
      if self.grants.admit(limit):
        self._wake()

  def drain(self) -> bool:
    """Stops granting until `resume`.

    Returns whether the inbox has all granted positions but the ones of lost
    searchers.
    """
    with self.lock:
      return self.grants.drain()

  def resume(self, least_version: int) -> None:
    """Resumes granting prompts to sample with this version or a newer one."""
    with self.lock:
      self.grants.resume(least_version)
      self._wake()

  @abc.abstractmethod
  def announced(self, *, from_disk: bool = False) -> Mapping[str, Any]:
    """Returns the totals that each searcher has announced, by sid.

    Args:
      from_disk: whether to read the searchers' own files as well.
    """

  def acknowledged(self) -> dict[str, list[int]]:
    """Returns sid -> [next sequence, *totals] of journaled blocks."""
    return self.intake.acknowledged() if self.intake else {}

  @abc.abstractmethod
  def stop_searchers(self, *, done: bool) -> None:
    """Asks all searchers to deliver and leave; `done` at the end of the run."""

  @abc.abstractmethod
  def has_searchers(self) -> bool:
    """Returns whether a searcher is alive, or its end is not yet recorded."""

  @abc.abstractmethod
  def heard(self) -> dict[str, dict[str, Any]]:
    """Returns each searcher's last lease with its `age_s` and `alive`."""

  def set_status(self, status: dict[str, Any]) -> None:
    """Sets the run's status that other hosts can read, if any do."""

  def drop_journal_before(self, offset: int) -> None:
    """Deletes journal segments that end before an offset."""
    if self.intake:
      self.intake.journal.truncate_before(offset)
