# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Storage of completions: a table of columns, and the rows of each prompt.

Rows are reused, *ids* are not: an id counts arrivals, so a lookup by id tells
whether the completion has been evicted.
"""

import bisect
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from tba_jax import types
from tba_jax.replay import ledger

_MIN_ROWS = 1024
# Bins of the histogram of uses; the last one is open.
_BINS = 9

# Integers of a row besides its columns, and their types in draws and
# checkpoints.
_INTEGERS = {
    "ids": "int64",
    "prompt_ids": "int64",
    "groups": "int64",
    "arrivals": "int64",
    "epochs": "int32",
    "use_counts": "int64",
    "ref_versions": "int32",
    "equal": "bool",
}


def stored_columns(
    columns: Mapping[str, tuple[int, ...]], axis: str
) -> dict[str, types.Column]:
  """Returns the columns that a buffer stores whose first axis is `axis`.

  Args:
    columns: optional columns of the run, see `collect.optional_columns`.
    axis: "S" or "P".
  """
  return {
      name: column
      for name, column in types.columns_of(types.BufferColumns).items()
      if column.axes[0] == axis and (not column.when or name in columns)
  }


class RecordTable:
  """Columns over rows, which grow geometrically; freed rows are reused.

  The columns of completions (`types.BufferColumns`) are attributes [rows],
  int64 or float32, and [rows, T, ...] of their type, 0 outside their mask. The
  reference log-probs are undefined where `ref_versions` is -1.

  columns: optional columns that are stored, see `collect.optional_columns`.
  ids: [rows] int64, arrival count of the completion, -1 in a free row.
  prompt_ids, groups: [rows] int64, the completion's prompt, and the group it
    arrived in.
  arrivals: [rows] int64, the step at which it arrived.
  epochs: [rows] int64, start count of the trainer that published them.
  use_counts: [rows] int64, number of times it was trained on.
  ref_versions: [rows] int64, reference policy of `ref_logprobs`, -1 if not
    cached.
  equal: [rows] int64, 1 if its group came with equal rewards throughout, 0 if
    they differ, whichever of its completions are stored.

  untrained: amount never used. A group counts as a prompt until one of its
    completions is used or all are gone.
  num_uses: sum of `use_counts`.
  histogram: number of completions used 0, 1, … times; the last bin is open.
  """

  ids: np.ndarray
  prompt_ids: np.ndarray
  groups: np.ndarray
  arrivals: np.ndarray
  completion_lengths: np.ndarray
  epochs: np.ndarray
  use_counts: np.ndarray
  ref_versions: np.ndarray
  equal: np.ndarray
  rewards: np.ndarray
  completion_tokens: np.ndarray
  sampled_mask: np.ndarray
  ref_logprobs: np.ndarray

  def __init__(
      self,
      num_tokens: int,
      max_rows: int,
      columns: Mapping[str, tuple[int, ...]],
  ):
    """Makes an empty table.

    Args:
      num_tokens: T.
      max_rows: number of rows that it grows to, about.
      columns: optional columns to store, see `collect.optional_columns`.
    """
    self.num_tokens = num_tokens
    self.max_rows = max_rows
    self.columns = dict(columns)
    self._places = np.arange(num_tokens)
    # Columns [rows], and [rows, T, ...].
    self._of_rows, self._of_tokens = {}, {}
    # One array has all integers, so that a row's are adjacent in memory.
    self._integer_types = dict(_INTEGERS)
    for name, column in stored_columns(columns, "S").items():
      if column.mask:
        self._of_tokens[name] = column
      elif column.dtype.kind == "f":
        self._of_rows[name] = column
      else:
        self._integer_types[name] = column.dtype
    self.clear()

  def __len__(self) -> int:
    return self._num_live

  def append(
      self, group: types.Group, indices: Sequence[int], step: int
  ) -> np.ndarray:
    """Stores some completions of a group; returns their rows, [n] int64."""
    count = len(indices)
    index = np.array(indices) if count < len(group.rewards) else slice(None)
    rows = self._allocate(count)
    lengths = group.completion_lengths[index]
    width = min(group.completion_tokens.shape[1], self.num_tokens)
    inside = self._places[:width] < lengths[:, None]
    sampled = group.sampled_mask[index, :width]
    # In the order of `_INTEGERS`.
    own = (
        np.arange(self.next_id, self.next_id + count),
        group.prompt_id,
        self._next_group,
        step,
        group.epoch,
        0,
        # A fixed reference has version 0.
        -1 if group.ref_logprobs is None else 0,
        not np.ptp(group.rewards),
    )
    integers = np.empty((count, len(self._integer_types)), np.int64)
    for i, name in enumerate(self._integer_types):
      integers[:, i] = own[i] if i < len(own) else getattr(group, name)[index]
    self._integers[rows] = integers
    for name in self._of_rows:
      getattr(self, name)[rows] = getattr(group, name)[index]
    for name, column in self._of_tokens.items():
      values, stored = getattr(group, name), getattr(self, name)
      if values is None:  # Reference log-probs, which the trainer computes.
        continue
      mask = sampled if column.mask == "sampled" else inside
      if values.ndim > 2:
        mask = mask.reshape(*mask.shape, *[1] * (values.ndim - 2))
      stored[rows, :width] = np.where(mask, values[index, :width], 0)
      if width < self.num_tokens:
        stored[rows, width:] = 0
    self._append_order(rows)
    self.unused_groups[self._next_group] = count
    self.untrained += ledger.amount_of(1, sampled.sum(axis=1).tolist())
    self.histogram[0] += count
    self._next_group += 1
    self.next_id += count
    return rows

  def free(self, rows: np.ndarray) -> None:
    """Frees rows, [n] int64."""
    num_groups, unused = 0, []
    for group, uses, num_tokens in zip(
        self.groups[rows].tolist(),
        self.use_counts[rows].tolist(),
        self._num_sampled(rows),
        strict=True,
    ):
      if not uses:
        unused.append(num_tokens)
      self.histogram[min(uses, _BINS - 1)] -= 1
      self.num_uses -= uses
      if group in self.unused_groups:
        self.unused_groups[group] -= 1
        if not self.unused_groups[group]:
          del self.unused_groups[group]
          num_groups += 1
    self.untrained -= ledger.amount_of(num_groups, unused)
    self.ids[rows] = -1
    self.free_rows.extend(rows.tolist())
    self._num_live -= len(rows)

  def use(self, rows: np.ndarray) -> ledger.Amount:
    """Counts uses of rows, [n] int64 with repeats; returns the first uses."""
    rows, uses = np.unique(rows, return_counts=True)
    before = self.use_counts[rows]
    self.use_counts[rows] = before + uses
    change = _bins(before + uses) - _bins(before)
    self.histogram = [n + int(d) for n, d in zip(self.histogram, change)]
    self.num_uses += int(uses.sum())
    first = rows[before == 0]
    groups = set(self.groups[first].tolist())
    num_groups = sum(
        self.unused_groups.pop(g, None) is not None for g in groups
    )
    trained = ledger.amount_of(num_groups, self._num_sampled(first))
    self.untrained -= trained
    return trained

  def integers(
      self, rows: np.ndarray, without: Collection[str] = ()
  ) -> dict[str, np.ndarray]:
    """Returns the integers at rows of any shape, by name."""
    values = self._integers[rows]
    return {
        name: values[..., i].astype(dtype)
        for i, (name, dtype) in enumerate(self._integer_types.items())
        if name not in without
    }

  def take(self, rows: np.ndarray) -> dict[str, np.ndarray]:
    """Returns the other columns at rows of any shape, by name."""
    return {
        name: getattr(self, name)[rows]
        for name in (*self._of_rows, *self._of_tokens)
    }

  def find(self, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the rows of ids of any shape, and whether each is still stored.

    The row of an evicted completion is 0.
    """
    order = self._order[self._order_start : self._order_end]
    if not len(order):
      return np.zeros(ids.shape, np.int64), np.zeros(ids.shape, np.bool_)
    places = np.searchsorted(order[:, 0], ids)
    entries = order[np.minimum(places, len(order) - 1)]
    rows = entries[..., 1]
    alive = (entries[..., 0] == ids) & (self.ids[rows] == ids)
    return np.where(alive, rows, 0), alive

  def oldest(self, count: int) -> np.ndarray:
    """Returns the `count` live rows that arrived first, [count] int64."""
    size = count
    while True:
      order = self._order[self._order_start : self._order_end][:size]
      alive = self.ids[order[:, 1]] == order[:, 0]
      rows = order[alive, 1]
      if len(rows) >= count:
        break
      size *= 2
    # Later calls skip the entries of freed rows at the front.
    self._order_start += int(alive.argmax())
    return rows[:count]

  def live_rows(self) -> np.ndarray:
    """Returns all rows in order of arrival, [n] int64."""
    order = self._order[self._order_start : self._order_end]
    return order[self.ids[order[:, 1]] == order[:, 0], 1]

  def whole_groups(self, arrived_from: int, size: int) -> np.ndarray:
    """Returns the rows of groups, oldest first, [n, size] int64.

    Args:
      arrived_from: first step whose arrivals count.
      size: number of completions of a group; one that has fewer repeats them.
    """
    rows = self.live_rows()
    rows = rows[self.arrivals[rows] >= arrived_from]
    _, starts, counts = np.unique(
        self.groups[rows], return_index=True, return_counts=True
    )
    places = np.arange(size)[None, :] % counts[:, None]
    return rows[starts[:, None] + places]

  def token_mask(self, lengths: np.ndarray) -> np.ndarray:
    """Returns True on the tokens within lengths of any shape, [..., T] bool."""
    return self._places < lengths[..., None]

  def get_state(self) -> dict[str, Any]:
    """Returns copies of the live rows, by arrival, tokens without padding."""
    rows = self.live_rows()
    cached = rows[self.ref_versions[rows] >= 0]
    state: dict[str, Any] = self.integers(rows)
    for name in self._of_rows:
      state[name] = getattr(self, name)[rows]
    for name in self._of_tokens:
      some = cached if name == "ref_logprobs" else rows
      state[name] = getattr(self, name)[some][
          self.token_mask(self.completion_lengths[some])
      ]
    state["next_id"] = self.next_id
    state["next_group"] = self._next_group
    state["unused_groups"] = np.array(sorted(self.unused_groups), np.int64)
    return state

  def set_state(self, state: dict[str, Any]) -> None:
    """Restores a state; raises ValueError if a completion is longer than T."""
    lengths = state["completion_lengths"]
    if lengths.max(initial=0) > self.num_tokens:
      raise ValueError(
          f"saved completions of up to {lengths.max()} tokens; must be at most"
          f" max_completion_tokens={self.num_tokens}"
      )
    self.clear()
    rows = self._allocate(len(lengths))
    for i, name in enumerate(self._integer_types):
      self._integers[rows, i] = state[name]
    for name in self._of_rows:
      getattr(self, name)[rows] = state[name]
    mask = self.token_mask(lengths)
    cached = state["ref_versions"] >= 0
    for name in self._of_tokens:
      some = cached if name == "ref_logprobs" else slice(None)
      stored = getattr(self, name)
      values = np.zeros((*mask[some].shape, *stored.shape[2:]), stored.dtype)
      values[mask[some]] = state[name]
      stored[rows[some]] = values
    self._append_order(rows)
    self.next_id = int(state["next_id"])
    self._next_group = int(state["next_group"])
    groups = state["groups"]
    groups, counts = np.unique(
        groups[np.isin(groups, state["unused_groups"])], return_counts=True
    )
    self.unused_groups = dict(zip(groups.tolist(), counts.tolist()))
    uses = state["use_counts"]
    unused = self._num_sampled(rows[uses == 0])
    self.untrained = ledger.amount_of(len(groups), unused)
    self.histogram = _bins(uses).tolist()
    self.num_uses = int(uses.sum())

  def clear(self) -> None:
    """Removes all rows and restarts the ids."""
    self.free_rows: list[int] = []
    self.num_used = 0
    self._num_live = 0
    self.next_id = 0
    self._next_group = 0
    # Rows of each group of which none was used.
    self.unused_groups: dict[int, int] = {}
    self.untrained = ledger.Amount()
    self.histogram = [0] * _BINS
    self.num_uses = 0
    # (id, row) of all arrivals since the oldest live one. Entries of freed rows
    # are removed when they come first or the array is full.
    self._order = np.empty((_MIN_ROWS, 2), np.int64)
    self._order_start = self._order_end = 0
    self._integers = np.empty((0, len(self._integer_types)), np.int64)
    for name, column in self._of_rows.items():
      setattr(self, name, np.empty(0, column.dtype))
    for name, column in self._of_tokens.items():
      shape = 0, self.num_tokens, *self.columns.get(name, ())
      setattr(self, name, np.empty(shape, column.dtype))
    self._grow(0)

  def _num_sampled(self, rows: np.ndarray) -> list[int]:
    """Returns the number of sampled tokens of each row."""
    return self.sampled_mask[rows].sum(axis=1).tolist()

  def _allocate(self, count: int) -> np.ndarray:
    """Returns unused rows, [count] int64."""
    first_reused = len(self.free_rows) - min(count, len(self.free_rows))
    rows = self.free_rows[first_reused:]
    del self.free_rows[first_reused:]
    fresh = count - len(rows)
    rows += range(self.num_used, self.num_used + fresh)
    self.num_used += fresh
    self._num_live += count
    if self.num_used > len(self._integers):
      self._grow(self.num_used)
    return np.array(rows, np.int64)

  def _grow(self, needed: int) -> None:
    size = len(self._integers)
    new = max(min(max(2 * size, _MIN_ROWS), self.max_rows), needed)
    for name in ("_integers", *self._of_rows, *self._of_tokens):
      old = getattr(self, name)
      column = np.empty((new, *old.shape[1:]), old.dtype)
      column[:size] = old
      setattr(self, name, column)
    for i, name in enumerate(self._integer_types):
      setattr(self, name, self._integers[:, i])

  def _append_order(self, rows: np.ndarray) -> None:
    count = len(rows)
    if self._order_end + count > len(self._order):
      order = self._order[self._order_start : self._order_end]
      kept = order[self.ids[order[:, 1]] == order[:, 0]]
      # Doubling makes appends amortized constant time.
      self._order = np.empty((2 * (len(kept) + count) + _MIN_ROWS, 2), np.int64)
      self._order[: len(kept)] = kept
      self._order_start, self._order_end = 0, len(kept)
    end = self._order_end + count
    self._order[self._order_end : end, 0] = self.ids[rows]
    self._order[self._order_end : end, 1] = rows
    self._order_end = end


class PromptRecords:
  """A prompt and its rows, oldest first.

  columns: columns [P, ...] of its newest visit by name, without padding.
  """

  def __init__(self, columns: Mapping[str, np.ndarray]):
    self.columns = dict(columns)
    self._rows = np.empty(8, np.int64)
    self._start = self._end = 0

  def __len__(self) -> int:
    return self._end - self._start

  def view(self) -> np.ndarray:
    """Returns the rows, [n] int64, oldest first; valid until a change."""
    return self._rows[self._start : self._end]

  def append(self, rows: np.ndarray) -> None:
    """Appends rows, newest last."""
    end = self._end + len(rows)
    if end > len(self._rows):
      old = self.view()
      needed = len(old) + len(rows)
      # Doubling makes appends amortized constant time.
      target = self._rows
      if 2 * needed > len(target):
        target = np.empty(2 * needed, np.int64)
      target[: len(old)] = old
      self._rows, self._start, end = target, 0, needed
    self._rows[end - len(rows) : end] = rows
    self._end = end

  def remove(self, row: int, ids: np.ndarray) -> None:
    """Removes one of the rows, the oldest in constant time.

    `ids` is the table's column.
    """
    view = self.view()
    if view[0] == row:
      self._start += 1
      return
    place = bisect.bisect_left(view, ids[row], key=ids.__getitem__)
    view[place:-1] = view[place + 1 :]
    self._end -= 1

  def first_after(self, step: int, arrivals: np.ndarray) -> int:
    """Returns the index of the first row that arrived after `step`."""
    return bisect.bisect_right(self.view(), step, key=arrivals.__getitem__)


def _bins(uses: np.ndarray) -> np.ndarray:
  return np.bincount(np.minimum(uses, _BINS - 1), minlength=_BINS)
