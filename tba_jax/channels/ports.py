# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""What the roles know of each other: four ports, and the trainer's receiver.

    searcher   GroupSink      assignments in, groups out
               ParamsSource   versions of the params
    trainer    GroupSource    admits prompts, draws batches, keeps the ledger
               ParamsSink     publishes versions

A channel implements them: the store's (`queue_server.py`, `queue_client.py`,
`learning/publication.py`) between processes, memory (`memory.py`) between
threads. The replay service is the trainer's `GroupSource` over either; of a
channel it needs a `Receiver`.
"""

import collections
from collections.abc import Callable, Mapping, Sequence
import dataclasses
import os
import secrets
import time
from typing import Any, Protocol

from tba_jax import types
from tba_jax.channels import inbox as inbox_lib
from tba_jax.replay import buffer as buffer_lib
from tba_jax.replay import ledger as ledger_lib
from tba_jax.replay import prompt_order

# (epoch, version): versions of a restarted trainer are newer than all before.
Tag = tuple[int, int]


def make_sid(index: int) -> str:
  """Returns a unique searcher id that is readable in a log."""
  unique = f"{int(time.time()):x}-{os.getpid():x}-{secrets.token_hex(4)}"
  return f"s{index:03d}-{unique}"


@dataclasses.dataclass(frozen=True)
class Assignment:
  """Positions of the prompt order that a searcher is to sample in one round.

  epoch: epoch of the trainer that granted them.
  number: number of the grant.
  require_version: version to sample with, or with barriers the oldest allowed;
    -1 for the newest.
  prompts: (position, prompt_id, visit) of each prompt.
  """

  epoch: int
  number: int
  require_version: int
  prompts: tuple[tuple[int, int, int], ...]


class GroupSink(Protocol):
  """A searcher's way to the trainer: assignments in, groups out.

  A block that `submit` has accepted is journaled exactly once, or counted as
  lost with its searcher. At most `search.credits` blocks are under way.

  epoch: epoch of the newest trainer seen, -1 before the first.
  stop_requested: the trainer has asked this searcher to leave.
  run_done: the reason is that the run is complete.
  totals: prompts, completions and tokens submitted so far.
  begun_s: start time of each block not yet submitted, by `monotonic`, oldest
    first; kept by the searcher.
  """

  epoch: int
  stop_requested: bool
  run_done: bool
  totals: Mapping[str, int]
  begun_s: collections.deque[float]

  def next_block(self, timeout_s: float) -> Assignment | None:
    """Returns the next assignment, None after a timeout.

    Raises:
      TransportError: the channel has ended, with its error as the cause.
    """

  def submit(
      self,
      groups: Sequence[types.Group],
      should_stop: Callable[[], bool] = lambda: False,
  ) -> bool:
    """Delivers the groups of one round; waits while no credit is left.

    Returns False if `should_stop` ended the wait: the block is not counted as
    generated, and its prompts will be granted again. Raises as `next_block`.
    """

  def set_stats(self, stats: dict[str, Any]) -> None:
    """Sets the statistics that the trainer reads of this searcher."""

  def close(self, flush_s: float) -> bool:
    """Leaves; returns whether all blocks were acknowledged.

    Waits for acknowledgements for at most `flush_s`.
    """


@dataclasses.dataclass
class PullStats:
  """Numbers of versions taken and refused."""

  taken: int = 0
  refused: int = 0


class ParamsSource(Protocol):
  """A searcher's way to the trainer's params.

  A version is (tag, leaves by path); its leaves are whole and are those that
  the trainer submitted, in the published dtypes. The leaves may be on devices
  and shared: do not donate them. Tags of `latest` never go back.

  stats: versions taken and refused.
  """

  stats: PullStats

  def latest(self) -> tuple[Tag, dict[str, Any]] | None:
    """Returns the newest version, None before the first.

    Raises:
      TransportError: the channel has ended, with its error as the cause.
    """

  def wait_for(
      self, version: int, timeout_s: float
  ) -> tuple[Tag, dict[str, Any]] | None:
    """Returns exactly `version` of the newest epoch; None after a timeout.

    An older version is there while it is among the newest
    `publish.keep_versions`. -1 stands for the newest. Raises as `latest`.
    """

  def close(self) -> None:
    """Ends the channel's work for this searcher."""


class ParamsSink(Protocol):
  """The trainer's way to the searchers' params."""

  def submit(
      self, version: int, params: types.PyTree, nonfinite: Any = 0
  ) -> int | None:
    """Copies the params; returns the pending version that is skipped, if any.

    Does not wait for the devices. The newest `publish.keep_versions` are kept.

    Args:
      version: version of the params.
      params: params of the train state; may be donated afterwards.
      nonfinite: [] number, maybe on devices; the version is dropped unless it
        is 0.

    Raises:
      TransportError: the channel has ended, with its error as the cause.
    """

  def wait(self, version: int, deadline_s: float) -> None:
    """Waits until `version` or a later one is readable.

    Raises:
      DeadlineExceededError: no such version within `deadline_s`.
      TransportError: error of `submit`.
    """

  def close(self) -> None:
    """Ends publishing; a pending version is dropped."""


class GroupSource(Protocol):
  """A trainer's way to its data; for the trainer's thread alone.

  Prompts are admitted by step, records applied in the order of the journal,
  and only in `begin_step` and `finish`: the state is always that after a prefix
  of the journal. Each journaled block is applied once.

  buffer: replay buffer, read by batches and metrics.
  rejected: number of completions by reason, since this process started.
  applied: position in the journal up to which records are applied.
  """

  buffer: buffer_lib.ReplayBuffer
  rejected: Mapping[str, int]
  applied: int

  def open(self, step: int) -> None:
    """Admits what `step` needs, without waiting."""

  def is_ready(self, step: int) -> bool:
    """Returns whether `begin_step` would not wait and may be called early."""

  def take_failures(self) -> list[tuple[int, float]]:
    """Returns (position, share that was not judged) of groups; each once."""

  def begin_step(self, step: int, should_stop: Callable[[], bool]) -> bool:
    """Admits, waits for the step's data, and applies what has arrived.

    Returns False if `should_stop` ended the wait; nothing was applied then.

    Raises:
      DeadlineExceededError: nothing came for `search.starvation_s`.
      TransportError: the channel has ended, with its error as the cause.
    """

  def draw(
      self, num_prompts: int, num_completions: int, step: int
  ) -> types.Draw:
    """Returns a batch for a step that has begun."""

  def mark_trained(self, draw: types.Draw) -> None:
    """Counts the drawn completions as used."""

  def stop_searchers(self, deadline_s: float, *, done: bool = False) -> None:
    """Asks the searchers to deliver what they have and leave; waits for it.

    Args:
      deadline_s: longest wait.
      done: whether the run is complete, not only interrupted.
    """

  def finish(self, step: int, deadline_s: float) -> dict[str, Any]:
    """Stops the searchers, applies what they deliver, returns the ledger."""

  def account(self) -> dict[str, Any]:
    """Returns the terms of the ledger; see `Ledger.close`."""

  def generated(self) -> ledger_lib.Amount:
    """Returns what all searchers have announced since the run began."""

  def get_state(self) -> dict[str, Any]:
    """Returns the state for a checkpoint; its "applied" is the prefix's end."""

  def drop_journal_before(self, position: int) -> None:
    """Lets the journal before a position go: no checkpoint needs it."""


class Receiver(Protocol):
  """The trainer's end of a channel of groups, as the replay service sees it.

  Its threads check a block, write it to the journal of a run directory, put it
  into the inbox and acknowledge it, in this order. Every method is for any
  thread.

  inbox: records that have arrived, beginning with those that a restart found in
    the journal after the checkpoint.
  order: order of the prompts.
  epoch: start count of the trainer.
  journal_start: position of the journal's oldest record, 0 without a journal.
  urgent: whether the trainer waits for data; set by its thread.
  generation: generation of the store, 0 without one; for the status.
  obstacle: why no data is journaled, for messages; None if it is.
  """

  inbox: inbox_lib.Inbox
  order: prompt_order.PromptOrder
  epoch: int
  journal_start: int
  urgent: bool
  generation: int
  obstacle: str | None

  def start(self) -> None:
    """Begins to serve searchers."""

  def close(self) -> None:
    """Ends serving, and closes the journal."""

  def admit(self, limit: int) -> None:
    """Admits positions below `limit`, to be granted to searchers."""

  def drain(self) -> bool:
    """Grants no more until `resume`.

    Returns whether all that was granted is in the inbox; what lost searchers
    had is not waited for.
    """

  def resume(self, least_version: int) -> None:
    """Grants again, to be sampled with this version or a newer one."""

  def check(self) -> None:
    """Raises TransportError if a thread has ended with an error."""

  def announced(self, *, from_disk: bool = False) -> Mapping[str, Any]:
    """Returns the totals that each searcher has announced, by sid.

    Args:
      from_disk: whether to read the searchers' own files as well.
    """

  def acknowledged(self) -> dict[str, list[int]]:
    """Returns sid -> [next sequence, *totals] of acknowledged blocks."""

  def stop_searchers(self, *, done: bool) -> None:
    """Asks all searchers to deliver and leave; `done` at the end of the run."""

  def has_searchers(self) -> bool:
    """Returns whether a searcher lives, or its end is not in the journal."""

  def heard(self) -> dict[str, dict[str, Any]]:
    """Returns each searcher's last lease with its `age_s` and `alive`."""

  def set_status(self, status: dict[str, Any]) -> None:
    """Shows the run's status to other hosts, where they read it."""

  def drop_journal_before(self, position: int) -> None:
    """Deletes segments of the journal that end before a position."""
