# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Which new completions the buffer takes in, and which old ones they replace.

Of completions that are much alike, only the one with the highest reward stays:
a new one with no more reward than any like it is refused, else all like it go.
(Lee et al. 2025, arXiv:2405.18540, compare with the first one alone that they
find, so that what stays depends on the order of their buffer.)
"""

from collections.abc import Callable, Sequence
import dataclasses
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
  from tba_jax import types
  from tba_jax.replay import rows as rows_lib
  from tba_jax.replay import similarity as similarity_lib

_RESTORE_ROWS = 1024


@dataclasses.dataclass(frozen=True)
class Rules:
  """How a buffer is kept; the defaults are those of TBA's own buffer.

  duplicates: of equal completions the "newest" or the "oldest" stays.
  evict: "oldest" or "lowest_reward", where a capacity is reached; of equal
    rewards the oldest.
  freeze_step: from the first insert of this step on the buffer does not grow;
    0 = never.
  make_similarity: (table) -> what tells who is alike; None: nothing does.
  """

  duplicates: str = "newest"
  evict: str = "oldest"
  freeze_step: int = 0
  make_similarity: (
      "Callable[[rows_lib.RowTable], similarity_lib.Similarity] | None"
  ) = None


PLAIN = Rules()


@dataclasses.dataclass(frozen=True)
class Plan:
  """What an insert does before the capacities are looked at.

  kept: places in the group that are taken in, in their order.
  leaving: rows that they replace.
  features: of `kept`, by place, where completions are compared.
  """

  kept: list[int]
  leaving: list[int]
  features: dict[int, np.ndarray]


class Admission:
  """Applies rules to the groups of one table."""

  def __init__(self, rules: Rules, table: "rows_lib.RowTable"):
    """Takes the rules and the table of what is stored."""
    self._rules = rules
    self._table = table
    self._similarity = (
        rules.make_similarity(table) if rules.make_similarity else None
    )

  def plan(
      self,
      group: "types.Group",
      kept: Sequence[int],
      copies: Sequence[int | None],
      rows: np.ndarray,
  ) -> Plan:
    """Returns what an insert does.

    Args:
      group: new completions.
      kept: places in it, each completion once.
      copies: for each of `kept` the row that holds it already, or None.
      rows: of the prompt, oldest first.
    """
    if self._rules.duplicates == "oldest":
      kept = [j for j, row in zip(kept, copies, strict=True) if row is None]
      leaving: list[int] = []
    else:
      leaving = [row for row in copies if row is not None]
    if self._similarity is None or not kept:
      return Plan(list(kept), leaving, {})
    tokens = {
        j: group.completion_tokens[
            j, : group.completion_lengths[j] - group.stopped[j]
        ]
        for j in kept
    }
    features = dict(
        zip(kept, self._similarity.features([tokens[j] for j in kept]))
    )
    rows = rows[~np.isin(rows, leaving)]
    taken: list[int] = []
    for j in kept:
      reward = group.rewards[j]
      old = rows[self._similarity.alike(tokens[j], features[j], rows)]
      new = [
          i
          for i in taken
          if self._similarity.alike_new(
              (tokens[j], tokens[i]), (features[j], features[i])
          )
      ]
      rewards = [*self._table.rewards[old], *group.rewards[new]]
      if rewards and max(rewards) >= reward:
        continue
      leaving += old.tolist()
      rows = rows[~np.isin(rows, old)]
      taken = [i for i in taken if i not in new] + [j]
    return Plan(taken, leaving, {j: features[j] for j in taken})

  def store(self, rows: np.ndarray, plan: Plan, stored: Sequence[int]) -> None:
    """Notes what is compared of the completions that were stored."""
    if self._similarity is not None and len(rows):
      features = np.stack([plan.features[j] for j in stored])
      self._similarity.store(rows, features)

  def restore(self) -> None:
    """Makes anew what is compared of all that is stored."""
    if self._similarity is None:
      return
    table, rows = self._table, self._table.live_rows()
    for start in range(0, len(rows), _RESTORE_ROWS):
      some = rows[start : start + _RESTORE_ROWS]
      ends = table.lengths[some] - table.stopped[some]
      tokens = [table.tokens[row, :end] for row, end in zip(some, ends)]
      self._similarity.store(some, self._similarity.features(tokens))
