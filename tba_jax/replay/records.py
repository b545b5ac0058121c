# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Storage of completions: a table of columns, and the rows of each prompt.

Rows are reused but *ids*, which number the arrivals, are not. A lookup by id
thus shows whether the completion has been evicted.
"""

import bisect
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from tba_jax import types
from tba_jax.replay import ledger

_MIN_ROWS = 1024
# Maximum tokens per page. On average a completion leaves half of its last page
# empty, and each page takes 4 bytes in its row's page table.
PAGE_TOKENS = 64
# Rows processed at a time in saving and restoring.
_PART_ROWS = 4096
# Bins of the use-count histogram; the last one is open.
_BINS = 9

# Integers of a row besides its columns -> dtype in draws and checkpoints.
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
  """Returns the stored columns whose first axis is `axis`.

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
  """A table of completions that grows geometrically and reuses freed rows.

  The columns of completions (`types.BufferColumns`) are attributes [rows],
  int64 or float32. Token columns are stored in as many pages as a row's tokens
  need: `tokens` returns them as [rows, T, ...] in their own dtype, 0 outside
  their mask. The reference log-probs are undefined where `ref_versions` is -1.

  columns: optional columns that are stored, see `collect.optional_columns`.
  ids: [rows] int64, arrival count of the completion, -1 in a free row.
  prompt_ids, groups: [rows] int64, the completion's prompt, and the group it
    arrived in.
  arrivals: [rows] int64, the step at which it arrived.
  epochs: [rows] int64, start count of the trainer that published the params.
  use_counts: [rows] int64, number of times it was trained on.
  ref_versions: [rows] int64, reference policy of `ref_logprobs`, -1 if not
    cached.
  num_sampled: [rows] int64, tokens that the policy sampled.
  equal: [rows] int64, 1 if all rewards of its group were equal on arrival, else
    0, whichever of its completions are stored.

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
  num_sampled: np.ndarray
  equal: np.ndarray
  rewards: np.ndarray

  def __init__(
      self,
      num_tokens: int,
      max_rows: int,
      columns: Mapping[str, tuple[int, ...]],
  ):
    """Makes an empty table.

    Args:
      num_tokens: T.
      max_rows: approximate maximum number of rows.
      columns: optional columns to store, see `collect.optional_columns`.
    """
    self.num_tokens = num_tokens
    self.max_rows = max_rows
    self.columns = dict(columns)
    self._places = np.arange(num_tokens)
    # Maximum pages per row, N, and tokens per page.
    self._most_pages = max(1, -(-num_tokens // PAGE_TOKENS))
    self._page_tokens = -(-num_tokens // self._most_pages)
    # Columns of shape [rows], and of shape [rows, T, ...].
    self._of_rows, self._of_tokens = {}, {}
    # One array for all integers, so that a row's are adjacent in memory.
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

  @property
  def free_pages(self) -> np.ndarray:
    """Freed pages, [n] int32; valid until a change."""
    return self._free_pages[: self._num_free_pages]

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
    values = (
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
      integers[:, i] = (
          values[i] if i < len(values) else getattr(group, name)[index]
      )
    self._integers[rows] = integers
    for name in self._of_rows:
      getattr(self, name)[rows] = getattr(group, name)[index]
    self.num_sampled[rows] = num_sampled = sampled.sum(axis=1)
    live = _live(self._allocate_pages(rows, lengths))
    for name, column in self._of_tokens.items():
      values = getattr(group, name)
      if values is None:  # Reference log-probs, which the trainer computes.
        continue
      mask = sampled if column.mask == "sampled" else inside
      if values.ndim > 2:
        mask = mask.reshape(*mask.shape, *[1] * (values.ndim - 2))
      self._write(name, live, np.where(mask, values[index, :width], 0))
    self._append_order(rows)
    self.unused_groups[self._next_group] = count
    self.untrained += ledger.amount_of(1, num_sampled.tolist())
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
        self.num_sampled[rows].tolist(),
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
    pages = self.pages[rows].ravel()
    pages = pages[pages > 0]
    start = self._num_free_pages
    self._num_free_pages += len(pages)
    self._free_pages[start : self._num_free_pages] = pages
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
    trained = ledger.amount_of(num_groups, self.num_sampled[first].tolist())
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
    out = {name: getattr(self, name)[rows] for name in self._of_rows}
    return out | {name: self.tokens(name, rows) for name in self._of_tokens}

  def tokens(self, name: str, rows: np.ndarray) -> np.ndarray:
    """Returns a token column at rows of any shape, [..., T, ...]."""
    values = np.take(self._in_pages[name], self.pages[rows], axis=0)
    size = self._most_pages * self._page_tokens
    flat = values.reshape(-1, size, *values.shape[rows.ndim + 2 :])
    flat = flat[:, : self.num_tokens]
    return flat.reshape(*rows.shape, *flat.shape[1:])

  def set_tokens(self, name: str, rows: np.ndarray, values: np.ndarray) -> None:
    """Writes a token column; does not change the lengths of the rows.

    Args:
      rows: [n] int64.
      values: [n, up to T, ...], 0 past the row's tokens.
    """
    self._write(name, _live(self.pages[rows]), values)

  def _write(
      self,
      name: str,
      live: tuple[int, np.ndarray, np.ndarray | None],
      values: np.ndarray,
  ) -> None:
    """Writes values [n, up to T, ...] into the pages of `_live`."""
    used, pages, places = live
    size, stored = used * self._page_tokens, self._in_pages[name]
    if values.shape[1] != size:
      shape = len(values), size, *stored.shape[2:]
      whole = np.zeros(shape, stored.dtype)
      width = min(values.shape[1], size)
      whole[:, :width] = values[:, :width]
      values = whole
    by_page = values.reshape(-1, *stored.shape[1:])
    stored[pages] = by_page if places is None else by_page[places]

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
      size: completions per group; a group with fewer repeats them.
    """
    rows = self.live_rows()
    rows = rows[self.arrivals[rows] >= arrived_from]
    _, starts, counts = np.unique(
        self.groups[rows], return_index=True, return_counts=True
    )
    places = np.arange(size)[None, :] % counts[:, None]
    return rows[starts[:, None] + places]

  def token_mask(self, lengths: np.ndarray) -> np.ndarray:
    """Returns [..., T] bool, True on the tokens within lengths of any shape."""
    return self._places < lengths[..., None]

  def get_state(self) -> dict[str, Any]:
    """Returns copies of the live rows in order of arrival, without padding."""
    rows = self.live_rows()
    cached = rows[self.ref_versions[rows] >= 0]
    state: dict[str, Any] = self.integers(rows)
    for name in self._of_rows:
      state[name] = getattr(self, name)[rows]
    for name in self._of_tokens:
      some = cached if name == "ref_logprobs" else rows
      state[name] = np.concatenate(
          [
              self.tokens(name, part)[
                  self.token_mask(self.completion_lengths[part])
              ]
              for part in _parts(some)
          ]
      )
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
    self._allocate_pages(rows, lengths)
    cached = rows[state["ref_versions"] >= 0]
    for name in self._of_tokens:
      start = 0
      for part in _parts(cached if name == "ref_logprobs" else rows):
        mask = self.token_mask(self.completion_lengths[part])
        end = start + int(mask.sum())
        shape = *mask.shape, *state[name].shape[1:]
        values = np.zeros(shape, state[name].dtype)
        values[mask] = state[name][start:end]
        self.set_tokens(name, part, values)
        start = end
    self._append_order(rows)
    self.next_id = int(state["next_id"])
    self._next_group = int(state["next_group"])
    groups = state["groups"]
    groups, counts = np.unique(
        groups[np.isin(groups, state["unused_groups"])], return_counts=True
    )
    self.unused_groups = dict(zip(groups.tolist(), counts.tolist()))
    uses = state["use_counts"]
    for part in _parts(rows):
      self.num_sampled[part] = self.tokens("sampled_mask", part).sum(axis=1)
    unused = self.num_sampled[rows[uses == 0]].tolist()
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
    # Group without a used row -> number of its rows.
    self.unused_groups: dict[int, int] = {}
    self.untrained = ledger.Amount()
    self.histogram = [0] * _BINS
    self.num_uses = 0
    # (id, row) of all arrivals since the oldest live one. Entries of freed rows
    # are removed when they come first or the array is full.
    self._order = np.empty((_MIN_ROWS, 2), np.int64)
    self._order_start = self._order_end = 0
    # Pages of each row, [rows, N], 0 past its tokens: page 0 is all zeros.
    self.pages = np.zeros((0, self._most_pages), np.int32)
    self.num_sampled = np.empty(0, np.int64)
    # A stack, with room for all pages.
    self._free_pages = np.empty(1, np.int32)
    self._num_free_pages = 0
    self.num_pages = 1
    self._integers = np.empty((0, len(self._integer_types)), np.int64)
    for name, column in self._of_rows.items():
      setattr(self, name, np.empty(0, column.dtype))
    self._in_pages: dict[str, np.ndarray] = {}
    for name, column in self._of_tokens.items():
      shape = 1, self._page_tokens, *self.columns.get(name, ())
      self._in_pages[name] = np.zeros(shape, column.dtype)
    self._grow(0)

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
    for name in ("_integers", "pages", "num_sampled", *self._of_rows):
      setattr(self, name, _longer(getattr(self, name), new))
    for i, name in enumerate(self._integer_types):
      setattr(self, name, self._integers[:, i])

  def _allocate_pages(
      self, rows: np.ndarray, lengths: np.ndarray
  ) -> np.ndarray:
    """Assigns each row the pages that its tokens need; returns [n, N]."""
    counts = -(-lengths // self._page_tokens)
    needed = int(counts.sum())
    remaining = max(0, self._num_free_pages - needed)
    pages = self._free_pages[remaining : self._num_free_pages]
    self._num_free_pages = remaining
    if fresh := needed - len(pages):
      pages = np.append(
          pages, np.arange(self.num_pages, self.num_pages + fresh)
      )
      self.num_pages += fresh
      if self.num_pages > len(self._free_pages):
        self._grow_pages()
    if needed < counts.size * self._most_pages:
      of_rows = np.zeros((counts.size, self._most_pages), np.int32)
      of_rows[np.arange(self._most_pages) < counts[:, None]] = pages
    else:
      of_rows = pages.reshape(counts.size, self._most_pages)
    self.pages[rows] = of_rows
    return of_rows

  def _grow_pages(self) -> None:
    most = self.max_rows * self._most_pages + 1
    new = max(2 * len(self._free_pages), _MIN_ROWS)
    new = max(min(new, most), self.num_pages)
    self._free_pages = _longer(self._free_pages, new)
    for name, column in self._in_pages.items():
      self._in_pages[name] = _longer(column, new)

  def _append_order(self, rows: np.ndarray) -> None:
    count = len(rows)
    if self._order_end + count > len(self._order):
      order = self._order[self._order_start : self._order_end]
      live = order[self.ids[order[:, 1]] == order[:, 0]]
      # Doubling makes appends amortized constant time.
      self._order = np.empty((2 * (len(live) + count) + _MIN_ROWS, 2), np.int64)
      self._order[: len(live)] = live
      self._order_start, self._order_end = 0, len(live)
    end = self._order_end + count
    self._order[self._order_end : end, 0] = self.ids[rows]
    self._order[self._order_end : end, 1] = rows
    self._order_end = end


class PromptRecords:
  """A prompt and its rows, oldest first.

  columns: prompt columns [P, ...] of the newest visit by name, unpadded.
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
    """Removes a row, in constant time if it is the oldest.

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


def _longer(column: np.ndarray, size: int) -> np.ndarray:
  out = np.empty((size, *column.shape[1:]), column.dtype)
  out[: len(column)] = column
  return out


def _live(
    pages_nxN: np.ndarray,
) -> tuple[int, np.ndarray, np.ndarray | None]:
  """Returns the pages of rows to write into.

  Returns:
    The number of pages of the longest row, U; all nonzero pages, row by row;
    and their flat indices in [n, U], None if all pages are nonzero.
  """
  live_nxN = pages_nxN > 0
  used = int(live_nxN.sum(axis=1).max(initial=0))  # A row's pages come first.
  pages = pages_nxN[:, :used].ravel()
  places = None
  if not pages.all():
    places = pages.nonzero()[0]
    pages = pages[places]
  return used, pages, places


def _parts(rows: np.ndarray) -> list[np.ndarray]:
  """Splits rows into one or more parts of `_PART_ROWS`."""
  starts = range(0, max(len(rows), 1), _PART_ROWS)
  return [rows[start : start + _PART_ROWS] for start in starts]


def _bins(uses: np.ndarray) -> np.ndarray:
  return np.bincount(np.minimum(uses, _BINS - 1), minlength=_BINS)
