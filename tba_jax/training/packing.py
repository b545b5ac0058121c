# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Packs the distinct completions of a batch into rows of the forward pass.

A row is a prompt with up to M of its completions, P + M T tokens. Completions
of a group with equal tokens are computed once. The sizes are a function of the
batch alone, so that a resumed run repeats its bits, and are rounded, so that
few programs are compiled.

Axes: B prompts, K completions, P prompt tokens, T completion tokens, R rows, M
completions of a row, S rows of one completion, N parts of the rows.
"""

from collections.abc import Sequence
import math

import ml_collections
import numpy as np

from tba_jax import types
from tba_jax.training import sharding

# Leaving out copies must save this share of the tokens: otherwise a batch
# shares the program of batches without copies. A program takes as long to
# compile as tens of steps, or hundreds of a small model.
_LEAST_SAVING = 1 / 4

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
    # Where weights are split, each block of rows would gather them again.
    has_single = config.mesh.fsdp == 1
    wide, single = _pack_groups(micro, shards, (K, P, T), has_single)
    if wide.shape == (B, 1, K):
      return None
  else:
    wide, single = _pack_parts(
        distinct,
        K,
        train.micro_batch_completions or K,
        _round_up(train.micro_batch_prompts, shards),
    )
  slots = np.zeros(B * K, np.int32)
  # Padding repeats a completion that has its place before: the first one wins.
  for rows, offset in ((single, wide.size), (wide, 0)):
    flat = np.moveaxis(rows, 1, 0).ravel()[::-1]
    slots[flat] = offset + np.arange(flat.size, dtype=np.int32)[::-1]
  return types.Rows(wide, single if single.size else None, slots[first_BxK])


def _pack_groups(
    micro: Sequence[Sequence[_Indices]],
    shards: int,
    shape: tuple[int, int, int],
    has_single: bool,
) -> tuple[np.ndarray, np.ndarray]:
  """Returns rows [R, 1, M] and [S, 1, 1], for micro-batches of whole groups.

  Each prompt has a row of M completions, and what it has beyond stands in rows
  of one. Without enough copies, or rows of one, all rows have one width: K if R
  divides over the shards.

  Args:
    micro: of each micro-batch and its prompts, the distinct completions.
    shards: that divide the rows of a micro-batch.
    shape: K, P, T of the batch.
    has_single: whether rows of one completion are allowed.
  """
  (K, P, T), num_prompts = shape, len(micro[0])
  widths = [K]
  while widths[-1] > 1:
    widths.append(-(-widths[-1] // 2))

  def num_uniform(M: int) -> int:
    return _round_up(num_prompts * -(-K // M), shards)

  def num_single(M: int) -> int:
    most = max(sum(max(len(own) - M, 0) for own in part) for part in micro)
    size = _round_up(max(num_prompts // 2, 1), shards)
    while size < most:
      size *= 2
    return size if most else 0

  num_wide = _round_up(num_prompts, shards)
  uniform = {M: num_uniform(M) * (P + M * T) for M in widths}
  mixed = {
      M: num_wide * (P + M * T) + num_single(M) * (P + T)
      for M in widths[1:]
      if has_single
  }
  M = min(uniform, key=uniform.get)
  least = min(mixed, key=mixed.get, default=None)
  if least and mixed[least] <= (1 - _LEAST_SAVING) * uniform[M]:
    M = least
    wide = [[own[:M] for own in part] for part in micro]
    single = [[[i] for own in part for i in own[M:]] for part in micro]
    return _fill(wide, num_wide, M), _fill(single, num_single(M), 1)
  rows = [[row for own in part for row in _cut(own, M)] for part in micro]
  return _fill(rows, num_uniform(M), M), np.zeros((0, 1, 1), np.int32)


def _pack_parts(
    distinct: Sequence[_Indices], K: int, M: int, num_rows: int
) -> tuple[np.ndarray, np.ndarray]:
  """Returns rows [R, N, M], N parts of R = `num_rows`, and no further ones."""
  rows = [row for own in distinct for row in _cut(own, M)]
  most = -(-len(distinct) * -(-K // M) // num_rows)
  parts = -(-len(rows) // num_rows)
  step = max(int(most * _LEAST_SAVING), 1)
  parts = min(_round_up(parts, step), most)
  wide = _fill([rows[n::parts] for n in range(parts)], num_rows, M)
  return wide.reshape(num_rows, parts, M), np.zeros((0, 1, 1), np.int32)


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


def _cut(own: _Indices, M: int) -> list[_Indices]:
  return [own[i : i + M] for i in range(0, len(own), M)]


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
