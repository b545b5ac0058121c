# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""The rows of one prompt in order of arrival."""

import bisect

import numpy as np


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
    """Adds rows, newest last."""
    end = self._end + len(rows)
    if end > len(self._rows):
      old = self.view()
      needed = len(old) + len(rows)
      # Half free after a move, so that moves cost constant time a row.
      target = self._rows
      if 2 * needed > len(target):
        target = np.empty(2 * needed, np.int64)
      target[: len(old)] = old
      self._rows, self._start, end = target, 0, needed
    self._rows[end - len(rows) : end] = rows
    self._end = end

  def drop_oldest(self, count: int) -> None:
    """Removes the oldest rows."""
    self._start += count

  def remove(self, row: int, ids: np.ndarray) -> None:
    """Removes a row that is among them; `ids` is the table's column."""
    view = self.view()
    place = bisect.bisect_left(view, ids[row], key=ids.__getitem__)
    view[place:-1] = view[place + 1 :]
    self._end -= 1

  def first_after(self, step: int, arrivals: np.ndarray) -> int:
    """Returns the index of the first row that arrived above `step`."""
    return bisect.bisect_right(self.view(), step, key=arrivals.__getitem__)
