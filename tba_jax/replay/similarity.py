# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Which stored completions of a prompt are much like a new one (NumPy).

Source: Lee et al. 2025 (arXiv:2405.18540), in the code that they released: an
edit distance of tokens, or the cosine of sentence embeddings.

Axes: N stored completions, T tokens, D width of an embedding.
"""

import abc
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
  from tba_jax.replay import rows as rows_lib

# (token ids of each completion, without stop tokens) -> [n, D] float32, of
# length 1.
EmbedFn = Callable[[Sequence[np.ndarray]], np.ndarray]


class Similarity(abc.ABC):
  """Compares completions; features of the stored ones are kept by row."""

  @abc.abstractmethod
  def features(self, completions: Sequence[np.ndarray]) -> np.ndarray:
    """Returns what is compared of new completions, [n, ...]."""

  @abc.abstractmethod
  def alike(
      self, completion: np.ndarray, feature: np.ndarray, rows: np.ndarray
  ) -> np.ndarray:
    """Returns which rows are like a new completion, [N] bool."""

  @abc.abstractmethod
  def alike_new(
      self,
      pair: tuple[np.ndarray, np.ndarray],
      features: tuple[np.ndarray, np.ndarray],
  ) -> bool:
    """Tells whether two new completions are alike."""

  def store(self, rows: np.ndarray, features: np.ndarray) -> None:
    """Keeps the features of completions under their rows."""
    del rows, features  # Tokens are in the table.


class EditDistance(Similarity):
  """Alike: fewer edits than `limit` times the sum of both lengths."""

  def __init__(self, table: "rows_lib.RowTable", limit: float):
    """Takes the table of the stored completions."""
    self._table = table
    self._limit = limit

  def features(self, completions: Sequence[np.ndarray]) -> np.ndarray:
    return np.zeros(len(completions), np.bool_)  # Tokens are enough.

  def alike(
      self, completion: np.ndarray, feature: np.ndarray, rows: np.ndarray
  ) -> np.ndarray:
    table = self._table
    return self._alike(
        completion,
        table.tokens[rows],
        table.lengths[rows] - table.stopped[rows],
    )

  def alike_new(
      self,
      pair: tuple[np.ndarray, np.ndarray],
      features: tuple[np.ndarray, np.ndarray],
  ) -> bool:
    first, second = pair
    lengths_1 = np.array([len(second)])
    return bool(self._alike(first, second[None, :], lengths_1)[0])

  def _alike(
      self, one: np.ndarray, tokens_NxT: np.ndarray, lengths_N: np.ndarray
  ) -> np.ndarray:
    size = len(one)
    limit_N = self._limit * (size + lengths_N)
    # Tokens in common, in whatever order, bound the distance from below: most
    # completions are told apart by that alone.
    columns_T = np.arange(tokens_NxT.shape[1])
    common_N = (
        np.isin(tokens_NxT, one) & (columns_T < lengths_N[:, None])
    ).sum(axis=1)
    least_N = np.maximum(size, lengths_N) - np.minimum(common_N, size)
    out_N = least_N < limit_N
    near = np.flatnonzero(out_N)
    out_N[near] = (
        edit_distances(one, tokens_NxT[near], lengths_N[near]) < limit_N[near]
    )
    return out_N


class Cosine(Similarity):
  """Alike: the cosine of their sentence embeddings is above `limit`."""

  def __init__(self, embed: EmbedFn, limit: float):
    """Takes the encoder."""
    self._embed = embed
    self._limit = limit
    self._features = np.zeros((0, 0), np.float32)

  def features(self, completions: Sequence[np.ndarray]) -> np.ndarray:
    return self._embed(completions)

  def alike(
      self, completion: np.ndarray, feature: np.ndarray, rows: np.ndarray
  ) -> np.ndarray:
    if not len(rows):
      return np.zeros(0, np.bool_)
    return self._features[rows] @ feature > self._limit

  def alike_new(
      self,
      pair: tuple[np.ndarray, np.ndarray],
      features: tuple[np.ndarray, np.ndarray],
  ) -> bool:
    return bool(features[0] @ features[1] > self._limit)

  def store(self, rows: np.ndarray, features: np.ndarray) -> None:
    if not len(rows):
      return
    held, needed = len(self._features), int(rows.max()) + 1
    if needed > held:
      grown = np.zeros((max(2 * held, needed), features.shape[1]), np.float32)
      if held:  # Before the first ones the width is not known.
        grown[:held] = self._features
      self._features = grown
    self._features[rows] = features


def edit_distances(
    one: np.ndarray, tokens_NxT: np.ndarray, lengths_N: np.ndarray
) -> np.ndarray:
  """Returns how many insertions, deletions and changes of tokens lead over.

      d[i, j] = min(d[i-1, j] + 1, d[i-1, j-1] + [aᵢ ≠ bⱼ], d[i, j-1] + 1)

  The last term, which goes along a row, is a running minimum of d - j.

  Args:
    one: [n] int.
    tokens_NxT: [N, T] int.
    lengths_N: [N] int, tokens that count.

  Returns:
    [N] int64.
  """
  count, width = tokens_NxT.shape
  steps = np.arange(width + 1)
  before = np.broadcast_to(steps, (count, width + 1))
  for i, token in enumerate(one, 1):
    now = before + 1
    now[:, 0] = i
    changed = before[:, :-1] + (tokens_NxT != token)
    np.minimum(now[:, 1:], changed, out=now[:, 1:])
    before = np.minimum.accumulate(now - steps, axis=1) + steps
  return np.take_along_axis(before, lengths_N[:, None], axis=1)[:, 0]
