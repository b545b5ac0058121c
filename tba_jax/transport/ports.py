# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Interfaces between the roles: three ports, and the receiver.

    searcher   GroupSink      assignments in, groups out
               ParamsSource   versions of the params
    trainer    ParamsSink     publishes versions
               Receiver       admits prompts, takes groups in (`receiver.py`)

A channel implements them: the store (`queue_server.py`, `queue_client.py`,
`transport/params/`) between processes, memory (`memory.py`) between threads.
The replay service makes the trainer's batches from a receiver's data.
"""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import os
import secrets
import time
from typing import Any, Protocol

from tba_jax import types
from tba_jax.transport.params import version as version_lib


def make_sid(index: int) -> str:
  """Returns a unique searcher id that is readable in a log."""
  unique = f"{int(time.time()):x}-{os.getpid():x}-{secrets.token_hex(4)}"
  return f"s{index:03d}-{unique}"


@dataclasses.dataclass(frozen=True)
class Assignment:
  """Positions of the prompt order that are granted to a searcher together.

  epoch: trainer start that granted them.
  number: position among all grants, from 1.
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

  The groups of an assignment are delivered in any order, in one or more blocks.
  A block that `submit` has accepted is journaled exactly once, or counted as
  lost with its searcher. At most `search.credits` blocks are in flight.

  epoch: newest trainer start seen, -1 before the first.
  stop_requested: whether the trainer has asked this searcher to leave.
  run_done: whether the trainer asked because the run is complete.
  totals: prompts, completions and tokens submitted so far.
  begun_s: start time of each position not yet submitted, by `monotonic`, oldest
    first; kept by the searcher.
  works: function that returns whether the searcher is at work, as its
    supervisor sees it; set by the searcher.
  """

  epoch: int
  stop_requested: bool
  run_done: bool
  totals: Mapping[str, int]
  begun_s: dict[int, float]
  works: Callable[[], bool]

  def next_assignment(self, timeout_s: float) -> Assignment | None:
    """Returns the next assignment, which the searcher begins at once.

    None after a timeout.

    Raises:
      TransportError: the channel has ended, with its error as the cause.
    """

  def submit(
      self,
      groups: Sequence[types.Group],
      should_stop: Callable[[], bool] = lambda: False,
  ) -> bool:
    """Delivers groups; waits while no credit is left.

    Returns False if `should_stop` ended the wait. The block then does not count
    as generated, and its prompts will be granted again. For errors, see
    `next_assignment`.
    """

  def set_stats(self, stats: dict[str, Any]) -> None:
    """Sets this searcher's statistics for the trainer to read."""

  def close(self, flush_s: float) -> bool:
    """Leaves; returns whether all blocks were acknowledged.

    Waits for acknowledgements for at most `flush_s`.
    """


class ParamsSource(Protocol):
  """A searcher's way to the trainer's params.

  Methods return a version and its leaves by path, whole and as the trainer
  submitted them, in the published dtypes. The leaves may be on devices and
  shared: do not donate them. Versions of `latest` never go back.

  stats: versions taken and refused.
  """

  stats: version_lib.PullStats

  def latest(self) -> tuple[version_lib.Version, dict[str, Any]] | None:
    """Returns the newest version, None before the first.

    Raises:
      TransportError: the channel has ended, with its error as the cause.
    """

  def wait_for(
      self, version: int, timeout_s: float
  ) -> tuple[version_lib.Version, dict[str, Any]] | None:
    """Returns exactly `version` of the newest epoch; None after a timeout.

    Older versions are available while among the newest `publish.keep_versions`;
    -1 stands for the newest. Raises as `latest` does.
    """

  def is_pulling(self) -> bool:
    """Returns whether a version is being transferred and not late."""

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
      version: step at which the params are published.
      params: the train state's params; may be donated afterwards.
      nonfinite: [] number, maybe on devices; the version is dropped unless it
        is 0.

    Raises:
      TransportError: the channel has ended, with its error as the cause.
    """

  def wait(self, version: int, should_stop: Callable[[], bool]) -> None:
    """Waits until `version` or a later one is readable, or for a stop.

    Raises:
      TransportError: error of `submit`.
    """

  def is_publishing(self) -> bool:
    """Returns whether a version is being written or waits for a retry."""

  def close(self) -> None:
    """Ends publishing; a pending version is dropped."""
