# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Order in which prompts are sampled, and which of them are still missing.

Prompts follow one seeded permutation per pass over the data. A *position*
counts through these permutations: position p is prompt
`permutation[p // N][p % N]` at visit p // N. The trainer grants positions to
searchers, and grants a position again until it has been received.
"""

from collections.abc import Iterable
import heapq
from typing import Any

import numpy as np

# A position this far beyond the last granted one is refused. Positions granted
# after the checkpoint and before a crash are well within.
_SLACK = 1 << 20


class PromptOrder:
  """Grants positions and records which were received. Not thread-safe."""

  def __init__(self, num_prompts: int, *, seed: int):
    """Makes an order over N training prompts, permuted with `seed`."""
    if num_prompts < 1:
      raise ValueError(f"num_prompts={num_prompts}: allowed 1 or more")
    self._num_prompts = num_prompts
    self._seed = seed
    self._permutations: dict[int, np.ndarray] = {}
    self._cursor = 0
    self._returned: list[int] = []
    self._received_below = 0
    self._received_above: set[int] = set()
    self._delivered: set[int] = set()
    # Positions of both sets at or above the cursor; mostly empty.
    self._taken_ahead: set[int] = set()

  @property
  def cursor(self) -> int:
    """The first position that was never granted."""
    return self._cursor

  @property
  def num_received(self) -> int:
    """Number of distinct positions received."""
    return self._received_below + len(self._received_above)

  def num_taken(self, below: int | None = None) -> int:
    """Returns how many positions, below a limit, are received or delivered."""
    if below is None:
      return self.num_received + len(self._delivered)
    above = (*self._received_above, *self._delivered)
    return min(self._received_below, below) + sum(p < below for p in above)

  def prompt(self, position: int) -> tuple[int, int]:
    """Returns (prompt_id, visit) of a position."""
    visit, index = divmod(position, self._num_prompts)
    if visit not in self._permutations:
      # Positions in flight span at most two visits; older ones are recomputed.
      self._permutations = {
          v: p for v, p in self._permutations.items() if v >= visit - 1
      }
      self._permutations[visit] = np.random.default_rng(
          [self._seed, visit]
      ).permutation(self._num_prompts)
    return int(self._permutations[visit][index]), visit

  def available(self, limit: int) -> int:
    """Returns how many positions below `limit` wait for a searcher."""
    returned = sum(p < limit and not self.is_taken(p) for p in self._returned)
    ahead = max(0, limit - self._cursor)
    self._taken_ahead = {p for p in self._taken_ahead if p >= self._cursor}
    return returned + ahead - sum(p < limit for p in self._taken_ahead)

  def grant(self, count: int, limit: int) -> list[int]:
    """Returns at most `count` positions below `limit`, returned ones first."""
    granted = []
    while len(granted) < count:
      if self._returned and self._returned[0] < limit:
        position = heapq.heappop(self._returned)
      elif self._cursor < limit:
        position = self._cursor
        self._cursor += 1
      else:
        break
      # A searcher that lost the position may have delivered it late, or before
      # a crash, under a grant made after the checkpoint.
      if not self.is_taken(position):
        granted.append(position)
    return granted

  def deliver(self, positions: Iterable[int]) -> None:
    """Records that positions are in the journal; they are not granted again."""
    positions = set(filter(self.is_plausible, positions))
    self._delivered.update(p for p in positions if not self.is_received(p))
    self._taken_ahead.update(p for p in positions if p >= self._cursor)

  def receive(self, position: int) -> bool:
    """Records that a position was applied; returns False for a duplicate."""
    self._delivered.discard(position)
    if self.is_received(position):
      return False
    self._received_above.add(position)
    if position >= self._cursor:
      self._taken_ahead.add(position)
    while self._received_below in self._received_above:
      self._received_above.remove(self._received_below)
      self._received_below += 1
    # The position may have been granted after the checkpoint, before a crash.
    self._cursor = max(self._cursor, self._received_below)
    return True

  def is_plausible(self, position: int) -> bool:
    """Returns whether a position may have been granted."""
    return 0 <= position < self._cursor + _SLACK

  def is_received(self, position: int) -> bool:
    return position < self._received_below or position in self._received_above

  def is_taken(self, position: int) -> bool:
    """Returns whether a position was received or delivered."""
    return position in self._delivered or self.is_received(position)

  def release(self, positions: Iterable[int]) -> None:
    """Takes back granted positions, to be granted again."""
    for position in positions:
      heapq.heappush(self._returned, position)

  def get_state(self) -> dict[str, Any]:
    """Returns the received positions and the cursor."""
    return {
        "num_prompts": self._num_prompts,
        "cursor": self._cursor,
        "received_below": self._received_below,
        "received_above": np.asarray(sorted(self._received_above), np.int64),
    }

  def set_state(self, state: dict[str, Any]) -> None:
    """Restores a state; positions not yet received will be granted again.

    Raises:
      ValueError: the state has another number of prompts.
    """
    if state["num_prompts"] != self._num_prompts:
      raise ValueError(
          f"the prompt order was saved over {state['num_prompts']} prompts,"
          f" the task has {self._num_prompts}"
      )
    self._cursor = int(state["cursor"])
    self._received_below = int(state["received_below"])
    self._received_above = {int(p) for p in state["received_above"]}
    self._delivered = set()
    self._cursor = max(self._cursor, self._received_below)
    self._taken_ahead = {p for p in self._received_above if p >= self._cursor}
    self._returned = [
        p
        for p in range(self._received_below, self._cursor)
        if p not in self._received_above
    ]
