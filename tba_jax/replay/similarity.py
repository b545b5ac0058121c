# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Similarity filter: keeps the best of similar completions in the buffer.

Similarity is the token edit distance or the cosine of sentence embeddings, as
in the released code of Lee et al. 2025 (arXiv:2405.18540). That code compares
only with the first similar completion, so its result depends on the order of
the buffer; here a completion is compared with all similar ones.

Axes: N completions to compare with, T tokens, D width of an embedding.
"""

from collections.abc import Callable, Sequence

import ml_collections
import numpy as np

from tba_jax import types
from tba_jax.replay import records as records_lib

# (token ids of each completion, without stop tokens and stop strings) -> [n, D]
# float32, rows of unit length.
EmbedFn = Callable[[Sequence[np.ndarray]], np.ndarray]
# (tokens [n, T], sampled_mask [n, T]) -> [n, T] bool, the mask without stop
# tokens and stop strings.
ContentMaskFn = Callable[[np.ndarray, np.ndarray], np.ndarray]

_RESTORE_ROWS = 1024


class SimilarityFilter:
  """Admits a completion if its value exceeds the value of all similar ones.

  The completion then replaces them. The value is the reward, or log R =
  log π_ref + reward / β. The *feature* of a completion is its sampled tokens
  without stop tokens and stop strings, or their embedding.
  """

  def __init__(
      self,
      config: ml_collections.ConfigDict,
      table: records_lib.RecordTable,
      embed: EmbedFn | None,
      content_mask: ContentMaskFn,
      beta: float,
  ):
    """Makes a filter for an empty buffer.

    Args:
      config: `replay_filter`.
      embed: encoder, for similarity "cosine".
      content_mask: mask of sampled tokens without stop tokens and stop strings.
      beta: weight of the KL, for similarity_by "log_reward".
    """
    self._table = table
    self._content_mask = content_mask
    self._limit = config.similarity_limit
    self._embed = embed if config.similarity == "cosine" else None
    self._beta = beta if config.similarity_by == "log_reward" else None
    self._features: dict[int, np.ndarray] = {}  # by row

  def admit(
      self, group: types.Group, candidates: Sequence[int], rows: np.ndarray
  ) -> tuple[list[int], list[int], dict[int, np.ndarray]]:
    """Compares new completions with stored ones and with each other.

    Args:
      candidates: indices of completions that may be stored.
      rows: the prompt's rows.

    Returns:
      Indices of the admitted completions, rows that they replace, and the
      features of the candidates by index.
    """
    features = dict(
        zip(
            candidates,
            self._make_features(
                group.completion_tokens[candidates],
                group.sampled_mask[candidates],
            ),
        )
    )
    values_S = self._values(
        group.rewards, group.ref_logprobs, group.sampled_mask
    )
    admitted: list[int] = []
    replaced: list[int] = []
    for j in candidates:
      stored = [self._features[row] for row in rows.tolist()]
      stored += [features[i] for i in admitted]
      similar = self._similar(features[j], stored)
      old = rows[similar[: len(rows)]]
      new = [i for i, is_it in zip(admitted, similar[len(rows) :]) if is_it]
      of_old = self._values(
          self._table.rewards[old],
          self._table.tokens("ref_logprobs", old),
          self._table.tokens("sampled_mask", old),
      )
      values = [*of_old, *values_S[new]]
      if values and max(values) >= values_S[j]:
        continue
      replaced += old.tolist()
      rows = rows[~similar[: len(rows)]]
      admitted = [i for i in admitted if i not in new] + [j]
    return admitted, replaced, features

  def _values(
      self,
      rewards_N: np.ndarray,
      ref_logprobs_NxT: np.ndarray | None,
      sampled_NxT: np.ndarray,
  ) -> np.ndarray:
    """Returns the values of completions that are compared, [N] float."""
    if self._beta is None:
      return rewards_N
    ref_logprobs_N = ref_logprobs_NxT.sum(axis=-1, where=sampled_NxT)
    return rewards_N / self._beta + ref_logprobs_N

  def store(self, row: int, feature: np.ndarray) -> None:
    """Stores the feature of a newly filled row."""
    self._features[row] = feature

  def restore(self) -> None:
    """Recomputes the features of all stored completions."""
    self._features.clear()
    rows = self._table.live_rows()
    for start in range(0, len(rows), _RESTORE_ROWS):
      batch = rows[start : start + _RESTORE_ROWS]
      features = self._make_features(
          self._table.tokens("completion_tokens", batch),
          self._table.tokens("sampled_mask", batch),
      )
      self._features |= zip(batch.tolist(), features)

  def _make_features(
      self, tokens: np.ndarray, sampled_mask: np.ndarray
  ) -> Sequence[np.ndarray]:
    """Returns the features of completions, from [n, T] int and [n, T] bool."""
    content = self._content_mask(tokens, sampled_mask)
    completions = [row[mask] for row, mask in zip(tokens, content)]
    if self._embed is None or not completions:
      return completions
    return self._embed(completions)

  def _similar(
      self, new: np.ndarray, stored: Sequence[np.ndarray]
  ) -> np.ndarray:
    """Returns [N] bool, whether each stored feature is similar to `new`."""
    if not stored:
      return np.zeros(0, np.bool_)
    if self._embed is not None:
      return np.stack(stored) @ new > self._limit
    return similar_by_edits(new, stored, self._limit)


def similar_by_edits(
    new: np.ndarray, stored: Sequence[np.ndarray], limit: float
) -> np.ndarray:
  """Returns where the edit distance is below `limit` · the sum of lengths.

  Args:
    new: [n] int, tokens of one completion.
    stored: N completions, [·] int each.
    limit: largest distance in edits per token.

  Returns:
    [N] bool.
  """
  lengths_N = np.array([len(other) for other in stored])
  tokens_NxT = np.full((len(stored), lengths_N.max()), -1)
  for row, other in zip(tokens_NxT, stored):
    row[: len(other)] = other
  limits_N = limit * (len(new) + lengths_N)
  # The number of common tokens bounds the distance from below, which decides
  # most pairs.
  common_N = np.isin(tokens_NxT, new).sum(axis=1)
  least_N = np.maximum(len(new), lengths_N) - np.minimum(common_N, len(new))
  similar_N = least_N < limits_N
  near = np.flatnonzero(similar_N)
  distances = edit_distances(new, tokens_NxT[near], lengths_N[near])
  similar_N[near] = distances < limits_N[near]
  return similar_N


def edit_distances(
    new: np.ndarray, tokens_NxT: np.ndarray, lengths_N: np.ndarray
) -> np.ndarray:
  """Returns the edit distances of one completion to N others.

      d[i, j] = min(d[i-1, j] + 1, d[i-1, j-1] + [aᵢ ≠ bⱼ], d[i, j-1] + 1)

  The last term is a running minimum of d - j along the row.

  Args:
    new: [n] int.
    tokens_NxT: [N, T] int.
    lengths_N: [N] int; tokens past the length are ignored.

  Returns:
    [N] int64.
  """
  count, width = tokens_NxT.shape
  steps = np.arange(width + 1)
  before = np.broadcast_to(steps, (count, width + 1))
  for i, token in enumerate(new, 1):
    now = before + 1
    now[:, 0] = i
    changed = before[:, :-1] + (tokens_NxT != token)
    np.minimum(now[:, 1:], changed, out=now[:, 1:])
    before = np.minimum.accumulate(now - steps, axis=1) + steps
  return np.take_along_axis(before, lengths_N[:, None], axis=1)[:, 0]
