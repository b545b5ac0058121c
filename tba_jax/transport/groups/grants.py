# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Grants of prompt-order positions to searchers."""

from collections.abc import Collection
import dataclasses
import heapq
from typing import Any

from tba_jax import schedule as schedule_lib
from tba_jax.replay import prompt_order
from tba_jax.transport.groups import inbox as inbox_lib

# Most unstarted grants that a searcher may hold; with barriers, it holds one
# grant at most, started or not.
GRANTS_AHEAD = 2


@dataclasses.dataclass
class _Grant:
  """A grant that is not completely journaled.

  number: position among all grants, from 1.
  positions: prompts, as positions in the prompt order.
  is_begun: whether its searcher is known to have started it.
  """

  number: int
  version: int
  positions: list[int]
  is_begun: bool = False


class Grants:
  """Grants positions of the prompt order to searchers. Not thread-safe."""

  def __init__(
      self,
      order: prompt_order.PromptOrder,
      *,
      prompts_per_round: int,
      schedule: schedule_lib.Schedule,
      journaled: prompt_order.Positions | None = None,
  ):
    """Makes a scheduler without admitted positions.

    Args:
      prompts_per_round: prompts per full grant.
      schedule: version and step by position.
      journaled: positions in the journal; this object takes ownership.
    """
    self._order = order
    self._ungranted = prompt_order.Ungranted(
        prompt_order.Positions() if journaled is None else journaled
    )
    self._prompts_per_round = prompts_per_round
    self._schedule = schedule
    self._limit = 0
    self._grants_ahead = 1 if schedule.takes_newer else GRANTS_AHEAD
    self._is_paused = False
    self._least_version = -1
    self._grants: dict[str, list[_Grant]] = {}
    self._num_grants = 0
    self._changed: set[str] = set()

  def admit(self, limit: int) -> bool:
    """Admits positions below `limit`; returns False if they already were."""
    if limit <= self._limit:
      return False
    self._limit = limit
    return True

  def drain(self) -> bool:
    """Stops granting until `resume`; returns whether no grant is left."""
    self._is_paused = True
    return not any(self._grants.values())

  def resume(self, least_version: int) -> None:
    """Resumes granting prompts to sample with this version or a newer one."""
    self._is_paused, self._least_version = False, least_version

  @property
  def cursor(self) -> int:
    """First position that was never granted."""
    return self._ungranted.cursor

  def note(self, record: inbox_lib.Record) -> None:
    """Notes a record, once it is in the inbox."""
    sid = record.header["sid"]
    if record.groups:
      self.note_journaled(sid, {g.position for g in record.groups})
    else:
      self.forget(sid)

  def note_begun(self, sid: str, number: int) -> None:
    """Notes that a searcher has started its grants up to this number."""
    for grant in self._grants.get(sid, ()):
      grant.is_begun |= grant.number <= number

  def note_journaled(self, sid: str, positions: Collection[int]) -> None:
    """Removes delivered positions; a grant ends with its last group."""
    self._ungranted.note_journaled(positions)
    is_journaled = self._ungranted.is_journaled
    begun = -1
    for grant in list(self._grants.get(sid, ())):
      if not set(grant.positions).isdisjoint(positions):
        begun = grant.number
      if all(map(is_journaled, grant.positions)):
        self._grants[sid].remove(grant)
    self.note_begun(sid, begun)

  def forget(self, sid: str) -> None:
    """Takes back all grants of a searcher to grant them again."""
    ungranted = self._ungranted
    for grant in self._grants.pop(sid, ()):
      ungranted.release(
          p for p in grant.positions if not ungranted.is_journaled(p)
      )
    self._changed.discard(sid)

  def holds(self, sid: str) -> bool:
    """Returns whether a searcher has grants that are not in the journal."""
    return bool(self._grants.get(sid))

  def _num_ahead(self, sid: str) -> int:
    """Returns the number of a searcher's grants that have not started.

    Barriers wait for all grants, so with them started ones also count.
    """
    grants = self._grants.get(sid, ())
    if self._schedule.takes_newer:
      return len(grants)
    return sum(not grant.is_begun for grant in grants)

  def assign_again(self) -> None:
    """Makes the next `assign` return the grants of every searcher."""
    self._changed.update(self._grants)

  def assign(
      self, alive: Collection[str], asked: Collection[str] = ()
  ) -> dict[str, list[Any]]:
    """Grants admitted positions, each to the searcher with least work ahead.

    Args:
      alive: searchers that may receive grants.
      asked: searchers whose grants are returned even if unchanged.

    Returns:
      sid -> all its grants, for searchers whose grants changed, as in the
      message "work".
    """
    # Heap of searchers by grants ahead, by number of grants, then by name. Made
    # only if positions are available: there may be thousands of searchers.
    held = []
    if not self._is_paused and self._ungranted.available(self._open_limit):
      held = [
          (self._num_ahead(sid), len(self._grants.get(sid, ())), sid)
          for sid in alive
      ]
      heapq.heapify(held)
    while held and held[0][0] < self._grants_ahead:
      ahead, count, sid = held[0]
      grant = self._next_grant()
      if grant is None:
        break
      self._grants.setdefault(sid, []).append(grant)
      self._changed.add(sid)
      heapq.heapreplace(held, (ahead + 1, count + 1, sid))
    changed = {sid for sid in self._changed if sid in alive} | set(asked)
    self._changed -= changed
    return {
        sid: [
            {
                "number": grant.number,
                "version": grant.version,
                "prompts": [
                    (p, *self._order.prompt(p)) for p in grant.positions
                ],
            }
            for grant in self._grants.get(sid, ())
        ]
        for sid in changed
    }

  @property
  def _open_limit(self) -> int:
    """Exclusive upper bound of the positions that may be granted now.

    If each position belongs to a step, a step's positions are granted once all
    positions of the previous step have arrived. So the journal contains the
    steps one after another, and can be applied step by step.
    """
    schedule = self._schedule
    if not schedule.is_pinned:
      return self._limit
    step = schedule.step_of(self._ungranted.first_missing)
    return min(self._limit, schedule.needed(step))

  def _next_grant(self) -> _Grant | None:
    limit, size = self._open_limit, self._prompts_per_round
    available = self._ungranted.available(limit)
    # Makes a partial grant only if no other grant waits to start.
    if not available:
      return None
    if available < size and any(map(self._num_ahead, self._grants)):
      return None
    positions = self._ungranted.grant(size, limit)
    self._num_grants += 1
    version = self._schedule.version_of(positions[0])
    version = max(version, self._least_version)
    return _Grant(self._num_grants, version, positions)
