# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Order in which prompts are sampled, and which of them are still missing.

Each pass over the data is a seeded permutation of the prompts. A *position*
indexes the concatenated passes: position p is prompt
`permutation[p // N][p % N]` at visit p // N. A position is granted to a
searcher, and granted again until it is in the journal; see the diagram of its
states in `docs/reference/replay.md`.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
import heapq
from typing import Any

import numpy as np

from tba_jax import types

# A position this far beyond the number of journaled positions is rejected: it
# cannot have been granted.
_SLACK = 1 << 20


class PromptOrder:
  """Maps positions to prompts; thread-safe."""

  def __init__(
      self,
      num_prompts: int,
      *,
      seed: int,
      prompt_ids: Sequence[int] | None = None,
  ):
    """Makes an order over N training prompts, permuted with `seed`.

    Args:
      num_prompts: N.
      prompt_ids: N prompt ids; None uses 0 to N - 1.
    """
    if num_prompts < 1:
      raise ValueError(f"num_prompts={num_prompts}: must be 1 or more")
    self.num_prompts = num_prompts
    self._prompt_ids = prompt_ids
    self._seed = seed
    self._permutations: dict[int, np.ndarray] = {}

  @property
  def size(self) -> int:
    """Number of prompts that positions are mapped to."""
    return self.num_prompts

  def prompt(self, position: int) -> tuple[int, int]:
    """Returns (prompt_id, visit) of a position."""
    visit, index = divmod(position, self.num_prompts)
    permutation = self._permutations.get(visit)
    if permutation is None:
      permutation = np.random.default_rng([self._seed, visit]).permutation(
          self.num_prompts
      )
      # Positions in flight span at most two visits; older ones are recomputed.
      self._permutations = {
          v: p for v, p in self._permutations.items() if v >= visit - 1
      } | {visit: permutation}
    return self.id_of(int(permutation[index])), visit

  def id_of(self, index: int) -> int:
    """Returns the prompt id of an index below N."""
    return index if self._prompt_ids is None else self._prompt_ids[index]

  def extend(self, limit: int) -> None:
    """Fixes the prompts of positions below `limit` before their admission."""

  def note(self, group: types.Group) -> None:
    """Updates the order's statistics with an applied group."""

  def get_state(self) -> dict[str, Any]:
    """Returns what the order has learned from applied groups."""
    return {}

  def set_state(self, state: Mapping[str, Any]) -> None:
    """Restores a state; raises ValueError if one of its files is missing."""


class MixedOrder(PromptOrder):
  """An order whose positions partly belong to another order."""

  def __init__(
      self,
      num_prompts: int,
      *,
      other: PromptOrder,
      takes_other: Callable[[int], bool],
      **common: Any,
  ):
    """Makes an order over the prompts of both.

    Args:
      num_prompts, **common: arguments of `PromptOrder`.
      other: source of some positions, with other prompt ids.
      takes_other: function of a position, whether it belongs to `other`.
    """
    super().__init__(num_prompts, **common)
    self._other, self._takes_other = other, takes_other

  @property
  def size(self) -> int:
    return self.num_prompts + self._other.size

  def prompt(self, position: int) -> tuple[int, int]:
    if self._takes_other(position):
      return self._other.prompt(position)
    return super().prompt(position)


class Positions:
  """A set of positions that fills up from 0. Not thread-safe."""

  def __init__(self):
    self._below = 0
    self._above: set[int] = set()

  def __len__(self) -> int:
    return self._below + len(self._above)

  def __contains__(self, position: int) -> bool:
    return position < self._below or position in self._above

  @property
  def first_missing(self) -> int:
    """The first position that is not in the set."""
    return self._below

  def after_gap(self) -> set[int]:
    """Returns the positions of the set above the first missing one."""
    return set(self._above)

  def count(self, below: int) -> int:
    """Returns the number of positions in the set below a limit."""
    return min(self._below, below) + sum(p < below for p in self._above)

  def add(self, position: int) -> bool:
    """Adds a position; returns False if it is already in the set."""
    if position in self:
      return False
    self._above.add(position)
    while self._below in self._above:
      self._above.remove(self._below)
      self._below += 1
    return True

  def is_plausible(self, position: int) -> bool:
    """Returns whether a position is close enough to the set to be valid."""
    return 0 <= position < len(self) + _SLACK

  def get_state(self, order: PromptOrder) -> dict[str, Any]:
    """Returns the set, and the size of the order that it belongs to."""
    return {
        "num_prompts": order.size,
        "received_below": self._below,
        "received_above": np.asarray(sorted(self._above), np.int64),
    }

  @classmethod
  def from_state(
      cls, state: Mapping[str, Any], order: PromptOrder
  ) -> "Positions":
    """Returns a set saved by `get_state`.

    Raises:
      ValueError: the saved order had another number of prompts.
    """
    if state["num_prompts"] != order.size:
      raise ValueError(
          f"the prompt order was saved with {state['num_prompts']} prompts, but"
          f" the task and its log (config.offline.path) have {order.size}"
      )
    made = cls()
    made._below = int(state["received_below"])
    made._above = {int(p) for p in state["received_above"]}
    return made


class Ungranted:
  """Positions to grant, lowest first, except those in the journal.

  Not thread-safe.

  cursor: the first position that was never granted.
  """

  def __init__(self, journaled: Positions):
    """Takes ownership of the set of journaled positions."""
    self.cursor = journaled.first_missing
    self._journaled = journaled
    self._returned: list[int] = []
    # Journaled positions at or above the cursor; mostly empty.
    self._journaled_ahead = journaled.after_gap()

  @property
  def first_missing(self) -> int:
    """The first position that is not in the journal."""
    return self._journaled.first_missing

  def available(self, limit: int) -> int:
    """Returns the number of positions below `limit` that can be granted."""
    returned = sum(
        p < limit and p not in self._journaled for p in self._returned
    )
    self._journaled_ahead = {
        p for p in self._journaled_ahead if p >= self.cursor
    }
    ahead = max(0, limit - self.cursor)
    return returned + ahead - sum(p < limit for p in self._journaled_ahead)

  def grant(self, count: int, limit: int) -> list[int]:
    """Returns at most `count` positions below `limit`, returned ones first."""
    granted = []
    while len(granted) < count:
      if self._returned and self._returned[0] < limit:
        position = heapq.heappop(self._returned)
      elif self.cursor < limit:
        position = self.cursor
        self.cursor += 1
      else:
        break
      # A searcher that lost its grant may have delivered late, or, before a
      # crash, under a grant newer than the checkpoint.
      if position not in self._journaled:
        granted.append(position)
    return granted

  def note_journaled(self, positions: Iterable[int]) -> None:
    """Records journaled positions, so that they are not granted again."""
    for position in filter(self._journaled.is_plausible, positions):
      self._journaled.add(position)
      if position >= self.cursor:
        self._journaled_ahead.add(position)
    self.cursor = max(self.cursor, self._journaled.first_missing)

  def is_journaled(self, position: int) -> bool:
    return position in self._journaled

  def release(self, positions: Iterable[int]) -> None:
    """Returns granted positions to the pool, to be granted again."""
    for position in positions:
      heapq.heappush(self._returned, position)
