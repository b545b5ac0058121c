# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Similarity filter: keeps the best of similar completions in the buffer.

Source: Lee et al. 2025 (arXiv:2405.18540), in the code that they released: an
edit distance of tokens, or the cosine of sentence embeddings.

Axes: N stored completions, T tokens, D width of an embedding.
"""

import abc
from collections.abc import Callable, Sequence
import dataclasses

import ml_collections
import numpy as np

from tba_jax import types
from tba_jax.replay import rows as rows_lib

# (token ids of each completion, without stop tokens) -> [n, D] float32, rows of
# unit length.
EmbedFn = Callable[[Sequence[np.ndarray]], np.ndarray]


class Similarity(abc.ABC):
  """Compares completions of a prompt."""

  @abc.abstractmethod
  def features(self, completions: Sequence[np.ndarray]) -> np.ndarray:
    """Returns features of new completions, [n, ...]."""

  @abc.abstractmethod
  def alike(
      self, completion: np.ndarray, feature: np.ndarray, rows: np.ndarray
  ) -> np.ndarray:
    """Returns which rows are similar to a new completion, [N] bool."""

  @abc.abstractmethod
  def alike_new(
      self,
      pair: tuple[np.ndarray, np.ndarray],
      features: tuple[np.ndarray, np.ndarray],
  ) -> bool:
    """Returns whether two new completions are similar."""

  def store(self, rows: np.ndarray, features: np.ndarray) -> None:
    """Stores the features of rows, for later `alike`."""
    del rows, features


class EditDistance(Similarity):
  """Similar: an edit distance below `limit` times the sum of both lengths."""

  def __init__(self, table: rows_lib.RowTable, limit: float):
    self._table = table
    self._limit = limit

  def features(self, completions: Sequence[np.ndarray]) -> np.ndarray:
    return np.zeros(len(completions), np.bool_)  # None are needed.

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
    # The number of common tokens gives a lower bound of the distance, which
    # decides most pairs.
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
  """Similar: a cosine of sentence embeddings above `limit`."""

  def __init__(self, embed: EmbedFn, limit: float):
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
      if held:  # The first features set the width.
        grown[:held] = self._features
      self._features = grown
    self._features[rows] = features


def edit_distances(
    one: np.ndarray, tokens_NxT: np.ndarray, lengths_N: np.ndarray
) -> np.ndarray:
  """Returns the edit distances of one completion to N others.

      d[i, j] = min(d[i-1, j] + 1, d[i-1, j-1] + [aᵢ ≠ bⱼ], d[i, j-1] + 1)

  The last term is a running minimum of d - j along the row.

  Args:
    one: [n] int.
    tokens_NxT: [N, T] int.
    lengths_N: [N] int; tokens past the length are ignored.

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


_RESTORE_ROWS = 1024


@dataclasses.dataclass(frozen=True)
class AdmissionPlan:
  """Effect of an insert, before eviction.

  kept: indices of the group's completions that enter, in order.
  leaving: rows that they replace.
  features: by index of `kept`; empty without a similarity.
  """

  kept: list[int]
  leaving: list[int]
  features: dict[int, np.ndarray]


class Admission:
  """Decides which new completions enter, and which old ones they replace.

  A completion enters if its reward is above that of all similar ones, which it
  then replaces. (Lee et al. 2025, arXiv:2405.18540, compare with the first
  similar one only, so their result depends on the order of the buffer.)
  """

  def __init__(
      self,
      config: ml_collections.ConfigDict,
      table: rows_lib.RowTable,
      embed: EmbedFn | None,
  ):
    self._duplicates = config.duplicates
    self._table = table
    self._similarity: Similarity | None = None
    if config.similarity == "edit":
      self._similarity = EditDistance(table, config.similarity_limit)
    elif config.similarity == "cosine":
      self._similarity = Cosine(embed, config.similarity_limit)

  def plan(
      self,
      group: types.Group,
      kept: Sequence[int],
      copies: Sequence[int | None],
      rows: np.ndarray,
  ) -> AdmissionPlan:
    """Returns what an insert does.

    Args:
      group: new completions.
      kept: indices of its distinct completions.
      copies: for each of `kept`, the stored row with the same tokens, or None.
      rows: the prompt's rows, oldest first.
    """
    if self._duplicates == "oldest":
      kept = [j for j, row in zip(kept, copies, strict=True) if row is None]
      leaving: list[int] = []
    else:
      leaving = [row for row in copies if row is not None]
    if self._similarity is None or not kept:
      return AdmissionPlan(list(kept), leaving, {})
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
    return AdmissionPlan(taken, leaving, {j: features[j] for j in taken})

  def store(
      self, rows: np.ndarray, plan: AdmissionPlan, stored: Sequence[int]
  ) -> None:
    """Stores the features of stored completions."""
    if self._similarity is not None and len(rows):
      features = np.stack([plan.features[j] for j in stored])
      self._similarity.store(rows, features)

  def restore(self) -> None:
    """Recomputes the features of all stored completions."""
    if self._similarity is None:
      return
    table, rows = self._table, self._table.live_rows()
    for start in range(0, len(rows), _RESTORE_ROWS):
      some = rows[start : start + _RESTORE_ROWS]
      ends = table.lengths[some] - table.stopped[some]
      tokens = [table.tokens[row, :end] for row, end in zip(some, ends)]
      self._similarity.store(some, self._similarity.features(tokens))
