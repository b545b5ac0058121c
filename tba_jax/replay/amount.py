# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""How much data there is, and how much of what is stored was trained on.

A completion is *untrained* until it is used first. A group (a prompt, in the
ledger's terms) is untrained until its first completion is used; where none ever
is, it leaves with its last one. So in each of the three units what was inserted
is at any time exactly

    used for the first time + left untrained + stored untrained.
"""

from collections.abc import Sequence
import dataclasses
from typing import NamedTuple, TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
  from tba_jax.replay import rows as rows_lib

# The last bin of a histogram of uses also holds all that is above.
_BINS = 9


class Amount(NamedTuple):
  """A count of data; adds and subtracts unit by unit.

  prompts: groups, one for each time a prompt was sampled.
  completions: of those groups.
  tokens: of those completions, stop tokens included.
  """

  prompts: int = 0
  completions: int = 0
  tokens: int = 0

  def __add__(self, other: tuple[int, int, int]) -> "Amount":
    return Amount(self[0] + other[0], self[1] + other[1], self[2] + other[2])

  def __sub__(self, other: tuple[int, int, int]) -> "Amount":
    return Amount(self[0] - other[0], self[1] - other[1], self[2] - other[2])


@dataclasses.dataclass(frozen=True)
class InsertResult:
  """What one insert did, in prompts (groups), completions and tokens.

  inserted: the group itself, duplicates within it included.
  replaced_untrained: older copies of its completions that no step had used,
    earlier copies within the group included. A prompt counts here or below when
    the last of its group's completions goes and none of them was ever used.
  replaced_trained: older copies that a step had used; `prompts` is 0.
  evicted_untrained: gone for lack of room before any step used them.
  evicted_trained: gone for lack of room after use; `prompts` is 0.
  """

  inserted: Amount
  replaced_untrained: Amount
  replaced_trained: Amount
  evicted_untrained: Amount
  evicted_trained: Amount

  @property
  def left_untrained(self) -> Amount:
    """All that left the buffer and no step had used: the ledger's `evicted`."""
    return self.replaced_untrained + self.evicted_untrained


class UseAccount:
  """Counts uses of the rows of a table.

  untrained: stored and never used.
  num_uses: sum of uses over stored completions.
  histogram: nine counts, from uses to stored completions.
  """

  def __init__(self, table: "rows_lib.RowTable"):
    self._table = table
    self.restore(np.zeros(0, np.int64))

  def add(self, group: int, lengths: Sequence[int]) -> None:
    """Counts the new rows of a group by their tokens."""
    self._groups[group] = len(lengths)
    self.untrained += sum_of(1, lengths)
    self.histogram[0] += len(lengths)

  def use(self, rows: np.ndarray) -> Amount:
    """Counts uses of rows, [n] int64 with repeats; returns the first uses."""
    rows, uses = np.unique(rows, return_counts=True)
    before = self._table.use_counts[rows]
    self._table.use_counts[rows] = before + uses
    change = _bins(before + uses) - _bins(before)
    self.histogram = [n + int(d) for n, d in zip(self.histogram, change)]
    self.num_uses += int(uses.sum())
    first = rows[before == 0]
    groups = set(self._table.groups[first].tolist())
    num_groups = sum(self._groups.pop(g, None) is not None for g in groups)
    trained = sum_of(num_groups, self._table.lengths[first].tolist())
    self.untrained -= trained
    return trained

  def remove(self, rows: np.ndarray) -> tuple[Amount, Amount]:
    """Counts rows that are about to be freed, [n] int64.

    Returns:
      What of it was never used, and what was (with `prompts` 0).
    """
    table, num_groups = self._table, 0
    never, ever = [], []
    for group, uses, length in zip(
        table.groups[rows].tolist(),
        table.use_counts[rows].tolist(),
        table.lengths[rows].tolist(),
        strict=True,
    ):
      (ever if uses else never).append(length)
      self.histogram[min(uses, _BINS - 1)] -= 1
      self.num_uses -= uses
      count = self._groups.get(group)
      if count == 1:
        del self._groups[group]
        num_groups += 1
      elif count is not None:
        self._groups[group] = count - 1
    untrained = sum_of(num_groups, never)
    self.untrained -= untrained
    return untrained, sum_of(0, ever)

  def untrained_groups(self) -> np.ndarray:
    """Returns the groups of which nothing was used, sorted, [n] int64."""
    return np.array(sorted(self._groups), np.int64)

  def restore(self, untrained_groups: np.ndarray) -> None:
    """Counts anew from the table and the groups of which nothing was used."""
    rows = self._table.live_rows()
    groups = self._table.groups[rows]
    groups, counts = np.unique(
        groups[np.isin(groups, untrained_groups)], return_counts=True
    )
    # Rows of each group of which nothing was used yet.
    self._groups = dict(zip(groups.tolist(), counts.tolist(), strict=True))
    uses = self._table.use_counts[rows]
    self.untrained = sum_of(
        len(groups), self._table.lengths[rows[uses == 0]].tolist()
    )
    self.histogram = _bins(uses).tolist()
    self.num_uses = int(uses.sum())

  def check_valid(self) -> None:
    """Raises RuntimeError where the counts are not those of the table."""
    fresh = UseAccount(self._table)
    fresh.restore(self.untrained_groups())
    if fresh._groups != self._groups:
      raise RuntimeError("an untrained group has lost or gained a row")
    if fresh.untrained != self.untrained:
      raise RuntimeError(f"{fresh.untrained} untrained, not {self.untrained}")
    if (fresh.num_uses, fresh.histogram) != (self.num_uses, self.histogram):
      raise RuntimeError("counts of uses do not add up")
    used = self._table.live_rows()
    used = used[self._table.use_counts[used] > 0]
    if np.isin(self._table.groups[used], self.untrained_groups()).any():
      raise RuntimeError("a used row in a group of which nothing was used")


def sum_of(num_groups: int, lengths: Sequence[int]) -> Amount:
  """Returns the amount of completions of these lengths."""
  return Amount(num_groups, len(lengths), sum(lengths))


def _bins(uses: np.ndarray) -> np.ndarray:
  return np.bincount(np.minimum(uses, _BINS - 1), minlength=_BINS)
