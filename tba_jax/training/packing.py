# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Packs the distinct completions of a batch into rows of the forward pass.

A row is a prompt with up to M of its completions, P + M T tokens. Completions
of a group with equal tokens are computed once. The sizes are a function of the
batch alone, so that a resumed run repeats its bits, and are rounded, so that
few programs are compiled.

Axes: B prompts, K completions, P prompt tokens, T completion tokens, R rows, M
completions of a row, N parts of the rows.
"""

from collections.abc import Sequence
import math

import ml_collections
import numpy as np

from tba_jax import types
from tba_jax.training import sharding

# Each size of a batch is this share of the next: a program takes as long to
# compile as tens of steps, or hundreds of a small model.
_SIZE_STEP = 3 / 4

# Indices b K + k: the distinct completions of a prompt, or those of a row.
_Indices = Sequence[int]


def num_micro_batches(
    train: ml_collections.ConfigDict, num_prompts: int, num_completions: int
) -> int:
  """Returns the number of micro-batches of whole groups.

  It is 0 if groups are cut: a forward-backward has fewer than K completions of
  a prompt, or the prompts do not divide. The loss is then one of all groups,
  and the forward pass a loop over parts of the rows.
  """
  if (
      0 < train.micro_batch_completions < num_completions
      or num_prompts % train.micro_batch_prompts
  ):
    return 0
  return num_prompts // train.micro_batch_prompts


def pack(
    config: ml_collections.ConfigDict,
    prompt_tokens_BxP: np.ndarray,
    completion_tokens_BxKxT: np.ndarray,
) -> types.Rows | None:
  """Returns the rows of a batch; None if each is a prompt with its group.

  Args:
    config: reads `train`, `mesh` and `sharding.batch`.
    prompt_tokens_BxP: only its shape matters.
    completion_tokens_BxKxT: int32.
  """
  P, (B, K, T) = prompt_tokens_BxP.shape[1], completion_tokens_BxKxT.shape
  train = config.train
  shards = math.prod(
      config.mesh[a] for a in sharding.token_axes(config.sharding)[0]
  )
  first_BxK = _first_copies(completion_tokens_BxKxT)
  first_BxK += K * np.arange(B)[:, None]
  distinct = [np.unique(first_K).tolist() for first_K in first_BxK]
  num_micro = num_micro_batches(train, B, K)
  if num_micro:
    micro = [distinct[m::num_micro] for m in range(num_micro)]
    indices = _pack_groups(micro, shards, (K, P, T))
    if indices.shape == (B, 1, K):
      return None
  else:
    indices = _pack_parts(
        distinct,
        K,
        train.micro_batch_completions or K,
        _round_up(train.micro_batch_prompts, shards),
    )
  slots = np.zeros(B * K, np.int32)
  # Padding repeats a completion that has its place before: the first one wins.
  flat = np.moveaxis(indices, 1, 0).ravel()[::-1]
  slots[flat] = np.arange(flat.size, dtype=np.int32)[::-1]
  return types.Rows(indices, slots[first_BxK])


def _pack_groups(
    micro: Sequence[Sequence[_Indices]],
    shards: int,
    shape: tuple[int, int, int],
) -> np.ndarray:
  """Returns rows [R, 1, M], for micro-batches of whole groups.

  Without enough copies to save a quarter of the tokens, the rows are those that
  any batch fits into: whole groups, if they divide over the shards.

  Args:
    micro: of each micro-batch and its prompts, the distinct completions.
    shards: that divide the rows of a micro-batch.
    shape: K, P, T of the batch.
  """
  (K, P, T), num_prompts = shape, len(micro[0])
  widths = [K]
  while widths[-1] > 1:
    widths.append(-(-widths[-1] // 2))
  num_rows = {M: _round_up(num_prompts * -(-K // M), shards) for M in widths}
  num_tokens = {M: num_rows[M] * (P + M * T) for M in widths}
  M = min(num_tokens, key=num_tokens.get)
  most, R = num_tokens[M], num_rows[M]

  # Two thirds of the tokens of a narrow row are completions, if K suffice.
  narrow = min(K, -(-2 * P // T))
  needed = max(sum(-(-len(own) // narrow) for own in part) for part in micro)
  size = _SIZE_STEP * most
  while (fits := int(size / (P + narrow * T)) // shards * shards) >= needed:
    M, R = narrow, fits
    size *= _SIZE_STEP
  return _fill([_cut_all(part, M) for part in micro], R, M)


def _pack_parts(
    distinct: Sequence[_Indices], K: int, M: int, num_rows: int
) -> np.ndarray:
  """Returns rows [R, N, M], N parts of R = `num_rows`."""
  rows = _cut_all(distinct, M)
  most = -(-len(distinct) * -(-K // M) // num_rows)
  parts = -(-len(rows) // num_rows)
  step = max(int(most * (1 - _SIZE_STEP)), 1)
  parts = min(_round_up(parts, step), most)
  filled = _fill([rows[n::parts] for n in range(parts)], num_rows, M)
  return filled.reshape(num_rows, parts, M)


def _fill(
    parts: Sequence[Sequence[_Indices]], num_rows: int, M: int
) -> np.ndarray:
  """Returns [R N, 1, M] int32; row r of part n stands at r N + n.

  Places without a completion repeat another one.
  """
  out = np.zeros((num_rows, len(parts), M), np.int32)
  for n, rows in enumerate(parts):
    for r, row in enumerate(rows):
      out[r, n] = row[0]
      out[r, n, : len(row)] = row
  return out.reshape(-1, 1, M)


def _cut_all(distinct: Sequence[_Indices], M: int) -> list[_Indices]:
  return [own[i : i + M] for own in distinct for i in range(0, len(own), M)]


def _first_copies(tokens_BxKxT: np.ndarray) -> np.ndarray:
  """Returns [B, K], the first completion of the group with the same tokens."""
  first_BxK = np.empty(tokens_BxKxT.shape[:2], np.int64)
  for b, tokens_KxT in enumerate(tokens_BxKxT):
    seen = {}
    for k, tokens_T in enumerate(tokens_KxT):
      first_BxK[b, k] = seen.setdefault(tokens_T.tobytes(), k)
  return first_BxK


def _round_up(number: int, step: int) -> int:
  return -(-number // step) * step
