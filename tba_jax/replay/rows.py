# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Storage of completions: a table of columns, and the rows of each prompt.

Rows are reused, *ids* are not: an id counts arrivals, so a lookup by id tells
whether the completion has been evicted.
"""

import bisect
from typing import Any

import numpy as np

_MIN_ROWS = 1024

# Integer columns and their types in draws and checkpoints. The table keeps them
# in one array, so that a row's integers are adjacent in memory.
_INTEGERS = {
    "ids": np.int64,
    "prompt_ids": np.int64,
    "groups": np.int64,
    "arrivals": np.int64,
    "lengths": np.int32,
    "stopped": np.bool_,
    "versions": np.int32,
    "epochs": np.int32,
    "use_counts": np.int64,
    "ref_versions": np.int32,
}
_TOKENS = {
    "tokens": np.int32,
    "behavior_logprobs": np.float32,
    "ref_logprobs": np.float32,
}


class RowTable:
  """Columns over rows, which grow geometrically; freed rows are reused.

  ids: [rows] int64, arrival count of the completion, -1 in a free row.
  prompt_ids, groups: [rows] int64, its prompt, and the group it arrived in.
  arrivals: [rows] int64, the step at which it arrived.
  lengths: [rows] int64, tokens with the stop token.
  stopped: [rows] int64, 0 or 1.
  versions: [rows] int64, step of the params that sampled it.
  epochs: [rows] int64, start count of the trainer that published them.
  use_counts: [rows] int64, how often it was trained on.
  ref_versions: [rows] int64, reference policy of `ref_logprobs`, -1 if not
    cached.
  rewards: [rows] float32.
  tokens: [rows, T] int32, 0 past the length.
  behavior_logprobs, ref_logprobs: [rows, T] float32, nats, 0 past the length;
    the latter are undefined where `ref_versions` is -1.
  """

  ids: np.ndarray
  prompt_ids: np.ndarray
  groups: np.ndarray
  arrivals: np.ndarray
  lengths: np.ndarray
  stopped: np.ndarray
  versions: np.ndarray
  epochs: np.ndarray
  use_counts: np.ndarray
  ref_versions: np.ndarray
  rewards: np.ndarray
  tokens: np.ndarray
  behavior_logprobs: np.ndarray
  ref_logprobs: np.ndarray

  def __init__(self, num_tokens: int, max_rows: int):
    """Makes an empty table for T tokens that grows to about `max_rows`."""
    self._num_tokens = num_tokens
    self._max_rows = max_rows
    self._columns = np.arange(num_tokens)
    self._clear()

  def __len__(self) -> int:
    return self._num_live

  def append(
      self,
      *,
      prompt_id: int,
      group: int,
      arrival: int,
      lengths: np.ndarray,
      stopped: np.ndarray,
      versions: np.ndarray,
      epoch: int,
      rewards: np.ndarray,
      tokens: np.ndarray,
      behavior_logprobs: np.ndarray,
  ) -> np.ndarray:
    """Stores n completions of one group; returns their rows, [n] int64.

    Lengths, stopped, versions and rewards are [n]. Tokens and behavior_logprobs
    are [n, W] for any W, and ignored past the length.
    """
    count = len(lengths)
    rows = self._allocate(count)
    integers = np.zeros((count, len(_INTEGERS)), np.int64)
    for i, value in enumerate(
        (
            np.arange(self.next_id, self.next_id + count),
            prompt_id,
            group,
            arrival,
            lengths,
            stopped,
            versions,
            epoch,
            0,
            -1,
        )
    ):
      integers[:, i] = value
    self._integers[rows] = integers
    self.next_id += count
    self.rewards[rows] = rewards
    width = min(tokens.shape[1], self._num_tokens)
    mask = self._columns[:width] < lengths[:, None]
    self.tokens[rows, :width] = np.where(mask, tokens[:, :width], 0)
    self.behavior_logprobs[rows, :width] = np.where(
        mask, behavior_logprobs[:, :width], 0
    )
    if width < self._num_tokens:
      self.tokens[rows, width:] = 0
      self.behavior_logprobs[rows, width:] = 0
    self._append_order(rows)
    return rows

  def integers(self, rows: np.ndarray) -> dict[str, np.ndarray]:
    """Returns the integer columns at rows of any shape, by name."""
    values = self._integers[rows]
    return {
        name: values[..., i].astype(dtype)
        for i, (name, dtype) in enumerate(_INTEGERS.items())
    }

  def free(self, rows: np.ndarray) -> None:
    """Frees rows, [n] int."""
    self.ids[rows] = -1
    self._free.extend(rows.tolist())
    self._num_live -= len(rows)

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
    """Returns rows of the complete groups, oldest first, [n, size] int64.

    Args:
      arrived_from: first step whose arrivals count.
      size: number of completions in a complete group.
    """
    rows = self.live_rows()
    rows = rows[self.arrivals[rows] >= arrived_from]
    rows = rows[np.argsort(self.ids[rows])]
    _, starts, counts = np.unique(
        self.groups[rows], return_index=True, return_counts=True
    )
    starts = starts[counts == size]
    return rows[starts[:, None] + np.arange(size)[None, :]]

  def token_mask(self, lengths: np.ndarray) -> np.ndarray:
    """Returns True on the tokens within lengths of any shape, [..., T] bool."""
    return self._columns < lengths[..., None]

  def get_state(self) -> dict[str, Any]:
    """Returns the live rows in order of arrival, tokens without padding."""
    rows = self.live_rows()
    state: dict[str, Any] = self.integers(rows)
    state["rewards"] = self.rewards[rows]
    mask = self.token_mask(self.lengths[rows])
    state["tokens"] = self.tokens[rows][mask]
    state["behavior_logprobs"] = self.behavior_logprobs[rows][mask]
    cached = rows[self.ref_versions[rows] >= 0]
    mask = self.token_mask(self.lengths[cached])
    state["ref_logprobs"] = self.ref_logprobs[cached][mask]
    state["next_id"] = self.next_id
    return state

  def set_state(self, state: dict[str, Any]) -> None:
    """Restores a state; raises ValueError if a completion is longer than T."""
    lengths = state["lengths"]
    if len(lengths) and lengths.max() > self._num_tokens:
      raise ValueError(
          f"saved completions of up to {lengths.max()} tokens; allowed:"
          f" max_completion_tokens={self._num_tokens}"
      )
    self._clear()
    rows = self._allocate(len(lengths))
    for i, name in enumerate(_INTEGERS):
      self._integers[rows, i] = state[name]
    self.rewards[rows] = state["rewards"]
    mask = self.token_mask(lengths)
    everywhere = np.ones(len(lengths), np.bool_)
    cached = state["ref_versions"] >= 0
    for name, some in (
        ("tokens", everywhere),
        ("behavior_logprobs", everywhere),
        ("ref_logprobs", cached),
    ):
      values = np.zeros(mask[some].shape, _TOKENS[name])
      values[mask[some]] = state[name]
      getattr(self, name)[rows[some]] = values
    self._append_order(rows)
    self.next_id = int(state["next_id"])

  def check_valid(self) -> None:
    """Raises RuntimeError if the table is inconsistent."""
    rows = self.live_rows()
    if len(rows) != self._num_live:
      raise RuntimeError(f"{len(rows)} live rows, {self._num_live} counted")
    everywhere = np.concatenate([rows, np.array(self._free, np.int64)])
    if not np.array_equal(np.sort(everywhere), np.arange(self._num_used)):
      raise RuntimeError("a row is neither live nor free, or is both")
    if np.any(np.diff(self.ids[rows]) <= 0):
      raise RuntimeError("ids do not increase in order of arrival")
    if np.any(np.diff(self.arrivals[rows]) < 0):
      raise RuntimeError("arrival steps decrease in order of arrival")
    if np.any(self.tokens[rows][~self.token_mask(self.lengths[rows])]):
      raise RuntimeError("a token past its completion's length")

  def _clear(self) -> None:
    self._free: list[int] = []
    self._num_used = 0
    self._num_live = 0
    self.next_id = 0
    # (id, row) of all arrivals since the oldest live one. Entries of freed rows
    # are removed when they come first or the array is full.
    self._order = np.empty((_MIN_ROWS, 2), np.int64)
    self._order_start = self._order_end = 0
    self._integers = np.empty((0, len(_INTEGERS)), np.int64)
    self.rewards = np.empty(0, np.float32)
    for name, dtype in _TOKENS.items():
      setattr(self, name, np.empty((0, self._num_tokens), dtype))
    self._grow(0)

  def _allocate(self, count: int) -> np.ndarray:
    """Returns unused rows, [count] int64."""
    first_reused = len(self._free) - min(count, len(self._free))
    rows = self._free[first_reused:]
    del self._free[first_reused:]
    fresh = count - len(rows)
    rows += range(self._num_used, self._num_used + fresh)
    self._num_used += fresh
    self._num_live += count
    if self._num_used > len(self._integers):
      self._grow(self._num_used)
    return np.array(rows, np.int64)

  def _grow(self, needed: int) -> None:
    size = len(self._integers)
    new = max(min(max(2 * size, _MIN_ROWS), self._max_rows), needed)
    for name in ("_integers", "rewards", *_TOKENS):
      old = getattr(self, name)
      column = np.empty((new, *old.shape[1:]), old.dtype)
      column[:size] = old
      setattr(self, name, column)
    for i, name in enumerate(_INTEGERS):
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


class PromptRows:
  """A prompt and its rows, oldest first.

  tokens: [P] int32, the prompt, without padding.
  """

  def __init__(self, tokens: np.ndarray):
    self.tokens = tokens
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

  def drop_oldest(self, count: int) -> None:
    self._start += count

  def remove(self, row: int, ids: np.ndarray) -> None:
    """Removes one of the rows; `ids` is the table's column."""
    view = self.view()
    place = bisect.bisect_left(view, ids[row], key=ids.__getitem__)
    view[place:-1] = view[place + 1 :]
    self._end -= 1

  def first_after(self, step: int, arrivals: np.ndarray) -> int:
    """Returns the index of the first row that arrived after `step`."""
    return bisect.bisect_right(self.view(), step, key=arrivals.__getitem__)
