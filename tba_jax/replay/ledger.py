# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Ledger of a run: accounts for everything that searchers generated.

In each of prompts (groups), completions and tokens:

    generated = trained_first_time + in_buffer_untrained + evicted_untrained
                + queued + rejected{reason} + lost{cause}

Searchers announce cumulative totals; every block carries those at its end. A
group is *accepted* once, when it is taken off the queue; then it is rejected or
enters the buffer. With sums over searchers,

    generated = Σ announced                queued = Σ announced - accepted
    accepted = rejected + lost by other causes + what entered the buffer

and what a departed searcher announced but never delivered is lost{searcher}.
Data in the buffer is *untrained* until its first use. A prompt (one group) is
trained with the first of its completions, and evicted untrained with its last
if none was used. The buffer and the ledger count separately: the equation holds
only if they agree.
"""

from collections.abc import Sequence
import dataclasses
from typing import Any, NamedTuple

import numpy as np

from tba_jax.replay import rows as rows_lib

# Bins of the histogram of uses; the last one is open.
_BINS = 9


class Amount(NamedTuple):
  """A count of data; adds and subtracts elementwise.

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
  """Amounts that an insert changed.

  A prompt is counted as untrained when the last completion of its group leaves
  and none of them was ever used.

  inserted: the group itself, duplicates within it included.
  replaced_untrained: replaced before any use, duplicates in the group included.
  replaced_trained: replaced after use; `prompts` is 0.
  evicted_untrained: evicted before any use.
  evicted_trained: evicted after use; `prompts` is 0.
  """

  inserted: Amount
  replaced_untrained: Amount
  replaced_trained: Amount
  evicted_untrained: Amount
  evicted_trained: Amount

  @property
  def left_untrained(self) -> Amount:
    """What left the buffer unused: `evicted_untrained` of the ledger."""
    return self.replaced_untrained + self.evicted_untrained


class UseAccount:
  """Counts uses of the rows of a table.

  untrained: stored and never used.
  num_uses: sum of uses over stored completions.
  histogram: nine counts, from uses to stored completions.
  """

  def __init__(self, table: rows_lib.RowTable):
    self._table = table
    self.restore(np.zeros(0, np.int64))

  def add(self, group: int, lengths: Sequence[int]) -> None:
    """Counts the new rows of a group, given their lengths."""
    self._groups[group] = len(lengths)
    self.untrained += sum_of_amounts(1, lengths)
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
    trained = sum_of_amounts(num_groups, self._table.lengths[first].tolist())
    self.untrained -= trained
    return trained

  def remove(self, rows: np.ndarray) -> tuple[Amount, Amount]:
    """Removes rows, [n] int64, that are about to be freed from the counts.

    Returns:
      The unused amount, and the used one (with `prompts` 0).
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
    untrained = sum_of_amounts(num_groups, never)
    self.untrained -= untrained
    return untrained, sum_of_amounts(0, ever)

  def untrained_groups(self) -> np.ndarray:
    """Returns the groups never used, sorted, [n] int64."""
    return np.array(sorted(self._groups), np.int64)

  def restore(self, untrained_groups: np.ndarray) -> None:
    """Recounts from the table and the groups never used."""
    rows = self._table.live_rows()
    groups = self._table.groups[rows]
    groups, counts = np.unique(
        groups[np.isin(groups, untrained_groups)], return_counts=True
    )
    # Number of rows of each group never used.
    self._groups = dict(zip(groups.tolist(), counts.tolist(), strict=True))
    uses = self._table.use_counts[rows]
    self.untrained = sum_of_amounts(
        len(groups), self._table.lengths[rows[uses == 0]].tolist()
    )
    self.histogram = _bins(uses).tolist()
    self.num_uses = int(uses.sum())

  def check_valid(self) -> None:
    """Raises RuntimeError if the counts do not match the table."""
    fresh = UseAccount(self._table)
    fresh.restore(self.untrained_groups())
    if fresh._groups != self._groups:
      raise RuntimeError("an untrained group has lost or gained a row")
    if fresh.untrained != self.untrained:
      raise RuntimeError(f"{fresh.untrained} untrained, not {self.untrained}")
    if (fresh.num_uses, fresh.histogram) != (self.num_uses, self.histogram):
      raise RuntimeError("use counts do not match the table")
    used = self._table.live_rows()
    used = used[self._table.use_counts[used] > 0]
    if np.isin(self._table.groups[used], self.untrained_groups()).any():
      raise RuntimeError("a used row in a group counted as never used")


def sum_of_amounts(num_groups: int, lengths: Sequence[int]) -> Amount:
  """Returns the amount of completions of these lengths."""
  return Amount(num_groups, len(lengths), sum(lengths))


def _bins(uses: np.ndarray) -> np.ndarray:
  return np.bincount(np.minimum(uses, _BINS - 1), minlength=_BINS)


AmountLike = tuple[int, int, int]


class Ledger:
  """Accounts for all generated data. Not thread-safe."""

  def __init__(self):
    self._announced: dict[str, Amount] = {}
    self._accepted: dict[str, Amount] = {}
    self._gone: set[str] = set()
    self._trained = Amount()
    self._evicted = Amount()
    self._rejected: dict[str, Amount] = {}
    self._lost: dict[str, Amount] = {}

  def searchers(self) -> list[str]:
    """Returns the searchers that are not gone, sorted."""
    return sorted(set(self._announced) - self._gone)

  def announce(self, searcher: str, totals: AmountLike) -> None:
    """Records a searcher's totals since its start; lower ones are ignored."""
    known = self._announced.get(searcher, Amount())
    self._announced[searcher] = Amount(*map(max, known, totals))

  def accept(
      self, searcher: str, totals_after: AmountLike, taken: AmountLike
  ) -> None:
    """Accepts one block of a searcher; call it once per block, not per copy.

    Args:
      searcher: that generated it.
      totals_after: the searcher's totals after this block.
      taken: the block's own amount.
    """
    self.announce(searcher, totals_after)
    known = self._accepted.get(searcher, Amount())
    self._accepted[searcher] = known + taken

  def generated(self) -> Amount:
    """Returns what all searchers announced: the left side of the equation."""
    return sum(self._announced.values(), Amount())

  def accepted(self, searcher: str) -> Amount:
    return self._accepted.get(searcher, Amount())

  def reject(self, reason: str, rejected: AmountLike) -> None:
    """Counts accepted groups that are not inserted."""
    self._rejected[reason] = self._rejected.get(reason, Amount()) + rejected

  def lost(self, cause: str, lost: AmountLike) -> None:
    """Counts accepted groups that were lost before their insert."""
    self._lost[cause] = self._lost.get(cause, Amount()) + lost

  def evict(self, left: AmountLike) -> None:
    """Counts `InsertResult.left_untrained`."""
    self._evicted += left

  def train_first(self, trained: AmountLike) -> None:
    """Counts first uses, from `ReplayBuffer.mark_trained`."""
    self._trained += trained

  def searcher_gone(self, searcher: str) -> None:
    """Counts as lost what a searcher announced and did not deliver.

    A block that is accepted later is subtracted from the loss.
    """
    self._gone.add(searcher)
    self.announce(searcher, Amount())

  def close(self, in_buffer_untrained: AmountLike) -> dict[str, Any]:
    """Returns all terms of the equation and whether it holds.

    Args:
      in_buffer_untrained: from `ReplayBuffer.untrained`.

    Returns:
      Each term as {"prompts", "completions", "tokens"}, `rejected` and `lost`
      by reason and cause; `accounted`, the right side's sum; `difference`, left
      minus right; `closed`: no difference, and no negative term.
    """
    lost = dict(self._lost)
    queued, undelivered = Amount(), Amount()
    rests = []
    for searcher, announced in self._announced.items():
      rest = announced - self._accepted.get(searcher, Amount())
      rests.append(rest)
      if searcher in self._gone:
        undelivered += rest
      else:
        queued += rest
    if any(undelivered):
      lost["searcher"] = lost.get("searcher", Amount()) + undelivered
    single = {
        "trained_first_time": self._trained,
        "in_buffer_untrained": Amount(*in_buffer_untrained),
        "evicted_untrained": self._evicted,
        "queued": queued,
    }
    parts = [*single.values(), *self._rejected.values(), *lost.values()]
    accounted = sum(parts, Amount())
    generated = self.generated()
    difference = generated - accounted
    whole = all(n >= 0 for part in parts + rests for n in part)
    return {
        "generated": generated._asdict(),
        **{term: part._asdict() for term, part in single.items()},
        "rejected": _table(self._rejected),
        "lost": _table(lost),
        "accounted": accounted._asdict(),
        "difference": difference._asdict(),
        "closed": whole and not any(difference),
    }

  def get_state(self) -> dict[str, Any]:
    """Returns the accounts as JSON values."""
    return {
        "announced": _lists(self._announced),
        "accepted": _lists(self._accepted),
        "gone": sorted(self._gone),
        "trained": list(self._trained),
        "evicted": list(self._evicted),
        "rejected": _lists(self._rejected),
        "lost": _lists(self._lost),
    }

  def set_state(self, state: dict[str, Any]) -> None:
    """Restores a state."""
    self._announced = _amounts(state["announced"])
    self._accepted = _amounts(state["accepted"])
    self._gone = set(state["gone"])
    self._trained = Amount(*state["trained"])
    self._evicted = Amount(*state["evicted"])
    self._rejected = _amounts(state["rejected"])
    self._lost = _amounts(state["lost"])


def _table(amounts: dict[str, Amount]) -> dict[str, dict[str, int]]:
  return {name: part._asdict() for name, part in sorted(amounts.items())}


def _lists(amounts: dict[str, Amount]) -> dict[str, list[int]]:
  return {name: list(part) for name, part in amounts.items()}


def _amounts(lists: dict[str, list[int]]) -> dict[str, Amount]:
  return {name: Amount(*part) for name, part in lists.items()}
