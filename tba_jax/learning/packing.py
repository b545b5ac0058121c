# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Packs the distinct completions of a batch into rows of the forward pass.

A row is a prompt with up to M of its completions, P + M T tokens. Completions
of a group with equal tokens are computed once. Where it saves more, a row is a
prompt with all of its completions, and only the C tokens that the loss counts
pass through the layers. The sizes are a function of the batch alone, so that a
resumed run repeats its bits, and are rounded, so that few programs are
compiled.

Axes: B prompts, K completions, P prompt tokens, T completion tokens, R rows, M
completions of a row, N parts of the rows, C tokens of a row's completions.
"""

from collections.abc import Mapping, Sequence
import dataclasses
import math

import jax
import ml_collections
import numpy as np

from tba_jax import types
from tba_jax.losses import objective_table as losses
from tba_jax.mesh import sharding

# Each size of narrow rows is this share of the next: a program takes as long to
# compile as tens of steps, or hundreds of a small model.
_SIZE_STEP = 3 / 4

# Padding of batches with fewer tokens costs less than more programs.
MIN_TOKENS = 768

# R, N, M of `types.Rows.indices`, and C of `types.Rows.tokens`, 0 if all are
# computed; None of a batch without rows.
Size = tuple[int, int, int, int] | None
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


def batch_shape(config: ml_collections.ConfigDict) -> tuple[int, int, int, int]:
  """Returns B, K, P, T of a batch."""
  train, sampling = config.train, config.sampling
  return (
      train.prompts_per_batch,
      train.completions_per_prompt,
      sampling.max_prompt_tokens,
      sampling.max_completion_tokens,
  )


def sizes(
    config: ml_collections.ConfigDict, shape: tuple[int, int, int, int]
) -> list[Size]:
  """Returns the sizes that `pack` chooses from, from large to small.

  Any batch fits the first, which is None if whole groups divide over the
  shards. Of the others, narrow rows have 3/4 of the tokens of the size before,
  and whole groups 2/3 of its C.

  Args:
    config: reads `train` and `mesh`.
    shape: B, K, P, T.
  """
  (B, K, P, T), train = shape, config.train
  shards = math.prod(config.mesh[a] for a in sharding.BATCH_AXES)
  num_micro = num_micro_batches(train, B, K)
  if not num_micro:
    # Only the number of parts differs.
    M = train.micro_batch_completions or K
    R = _round_up(train.micro_batch_prompts, shards)
    most = -(-B * -(-K // M) // R)
    step = max(int(most * (1 - _SIZE_STEP)), 1)
    return [
        (R, min(N, most), M, 0) for N in range(_round_up(most, step), 0, -step)
    ]

  num_prompts = B // num_micro
  widths = [K]
  while widths[-1] > 1:
    widths.append(-(-widths[-1] // 2))
  num_rows = {M: _round_up(num_prompts * -(-K // M), shards) for M in widths}
  num_tokens = {M: num_rows[M] * (P + M * T) for M in widths}
  M = min(num_tokens, key=num_tokens.get)
  whole = (num_rows[M] * num_micro, 1, M, 0)
  first = None if whole == (B, 1, K, 0) else whole

  # Two thirds of the tokens of a narrow row are completions, if K suffice.
  narrow, out = min(K, -(-2 * P // T)), []
  tokens = _SIZE_STEP * num_tokens[M]
  while (R := int(tokens / (P + narrow * T)) // shards * shards) >= num_prompts:
    out.append((R * num_micro, 1, narrow, 0))
    tokens *= _SIZE_STEP
  # Sequence parallelism cuts each completion, and has a device for each part.
  if config.mesh.sequence == 1:
    R = num_rows[K] * num_micro
    out += [(R, 1, K, C) for C in numbers_of_tokens(B, K, P, T)]

  def tokens_of(size: tuple[int, int, int, int]) -> int:
    R, _, M, C = size
    return R * (P + (C or M * T))

  out = [size for size in out if tokens_of(size) < tokens_of(whole)]
  return [first, *sorted(dict.fromkeys(out), key=tokens_of, reverse=True)]


def numbers_of_tokens(B: int, K: int, P: int, T: int) -> list[int]:
  """Returns each C for a prompt with K completions: 2/3, 4/9, … of K T.

  The last is as small as the tokens of the prompt allow it to matter.
  """
  out, C = [], K * T * 2 // 3
  while B * (P + K * T) >= MIN_TOKENS and C >= max(K, P // 4):
    out.append(C)
    C = C * 2 // 3
  return out


def size_of(rows: types.Rows | None) -> Size:
  if rows is None:
    return None
  C = 0 if rows.tokens is None else rows.tokens.shape[2]
  return *rows.indices.shape, C


def abstract_batch(
    config: ml_collections.ConfigDict,
    mesh: jax.sharding.Mesh,
    B: int,
    size: Size,
    columns: Mapping[str, tuple[int, ...]] | None = None,
) -> types.Batch:
  """Returns shapes, dtypes and shardings of a batch of B prompts.

  `columns` are the optional ones, see `collect.optional_columns`.
  """
  _, K, P, T = batch_shape(config)
  rows, integers = None, lambda *shape: jax.ShapeDtypeStruct(shape, "int32")
  if size is not None:
    *indices, C = size
    tokens = integers(*indices[:2], C) if C else None
    rows = types.Rows(integers(*indices), integers(B, K), tokens)
  prepared = {}
  if losses.baseline(config.loss) == "file":
    prepared["baselines_Bx1"] = jax.ShapeDtypeStruct((B, 1), "float32")
  batch = types.abstract_batch({"B": B, "K": K, "P": P, "T": T}, columns)
  return jax.tree.map(
      lambda x: jax.ShapeDtypeStruct(
          *(x.shape, x.dtype),
          sharding=sharding.place_of(x, mesh),
      ),
      dataclasses.replace(batch, rows=rows, prepared=prepared),
  )


def pack(
    config: ml_collections.ConfigDict,
    prompt_tokens_BxP: np.ndarray,
    completion_tokens_BxKxT: np.ndarray,
    completion_mask_BxKxT: np.ndarray,
    routes_BxKxTxNxA: np.ndarray | None = None,
) -> types.Rows | None:
  """Returns the rows of a batch; None if each is a prompt with its group.

  Args:
    config: reads `train` and `mesh`.
    prompt_tokens_BxP: only its shape matters.
    completion_tokens_BxKxT: int32.
    completion_mask_BxKxT: 1 on tokens that the loss counts.
    routes_BxKxTxNxA: experts of tokens: completions with others are no copies.
  """
  P, (B, K, T) = prompt_tokens_BxP.shape[1], completion_tokens_BxKxT.shape
  same = [completion_tokens_BxKxT]
  if routes_BxKxTxNxA is not None:
    same.append(routes_BxKxTxNxA)
  first_BxK = _first_copies(*same)
  first_BxK += K * np.arange(B)[:, None]
  distinct = [np.unique(first_K).tolist() for first_K in first_BxK]
  num_micro = num_micro_batches(config.train, B, K)
  micro = [distinct[m :: max(num_micro, 1)] for m in range(max(num_micro, 1))]

  lengths_BK = _lengths(completion_mask_BxKxT, first_BxK)
  longest = max(lengths_BK[own].sum() for own in distinct)

  def fits(size: Size) -> bool:
    R, N, M, C = size
    rows = max(sum(-(-len(own) // M) for own in part) for part in micro)
    return rows * len(micro) <= R * N and (not C or longest <= C)

  first, *smaller = sizes(config, (B, K, P, T))
  size = ([first] + [size for size in smaller if fits(size)])[-1]
  if size is None:
    return None
  R, N, M, C = size
  if num_micro:
    parts = [_cut_all(part, M) for part in micro]
  else:
    rows = _cut_all(distinct, M)
    parts = [rows[n::N] for n in range(N)]
  indices = _fill(parts, R * N // len(parts), M).reshape(R, N, M)
  slots = np.zeros(B * K, np.int32)
  # Padding repeats a completion that has its place before: the first one wins.
  flat = np.moveaxis(indices, 1, 0).ravel()[::-1]
  slots[flat] = np.arange(flat.size, dtype=np.int32)[::-1]
  tokens = None
  if C:
    # Each completion's first place has its tokens.
    own = slots[indices.ravel()].reshape(R, M) == np.arange(R * M).reshape(R, M)
    lengths_RxM = np.where(own, lengths_BK[indices[:, 0]], 0)
    tokens = _kept_tokens(lengths_RxM, T, C)[:, None]
  return types.Rows(indices, slots[first_BxK], tokens)


def without_padding(
    completion_mask_BxKxT: np.ndarray, numbers: Sequence[int]
) -> types.Rows | None:
  """Returns rows of whole groups without the tokens that are not counted.

  Args:
    completion_mask_BxKxT: 1 on tokens that the loss counts.
    numbers: each C to choose from, from large to small.

  Returns:
    Rows [B, 1, K] with tokens; None if a group has more than any C.
  """
  B, K, T = completion_mask_BxKxT.shape
  order_BxK = np.arange(B * K, dtype=np.int32).reshape(B, K)
  lengths_BxK = _lengths(completion_mask_BxKxT, order_BxK).reshape(B, K)
  longest = lengths_BxK.sum(axis=1).max()
  if not (enough := [C for C in numbers if longest <= C]):
    return None
  tokens_BxC = _kept_tokens(lengths_BxK, T, enough[-1])
  return types.Rows(order_BxK[:, None], order_BxK, tokens_BxC[:, None])


def _kept_tokens(lengths_RxM: np.ndarray, T: int, C: int) -> np.ndarray:
  """Returns [R, C] int32, `types.Rows.tokens` of one part.

  Args:
    lengths_RxM: tokens of each completion that are computed, at most C of a
      row.
    T: completion tokens.
    C: tokens of a row.
  """
  R, M = lengths_RxM.shape
  out = np.full((R, C), M * T, np.int32)
  for own, lengths_M in zip(out, lengths_RxM):
    places = np.concatenate(
        [m * T + np.arange(n) for m, n in enumerate(lengths_M)]
    )
    own[: len(places)] = places
  return out


def _lengths(mask_BxKxT: np.ndarray, first_BxK: np.ndarray) -> np.ndarray:
  """Returns [B K], the tokens up to the last that the loss counts.

  That of a first copy is the most of all copies, of which an environment may
  have said more or less.
  """
  lengths_BxK = mask_BxKxT.shape[2] - np.argmax(mask_BxKxT[..., ::-1] > 0, -1)
  lengths_BxK = np.where((mask_BxKxT > 0).any(-1), lengths_BxK, 0)
  out = np.zeros(lengths_BxK.size, np.int64)
  np.maximum.at(out, first_BxK.ravel(), lengths_BxK.ravel())
  return out


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


def _first_copies(*arrays: np.ndarray) -> np.ndarray:
  """Returns [B, K], the first completion of the group that is the same.

  Args:
    *arrays: [B, K, ...].
  """
  B, K = arrays[0].shape[:2]
  first_BxK = np.empty((B, K), np.int64)
  for b in range(B):
    seen = {}
    for k in range(K):
      same = tuple(x[b, k].tobytes() for x in arrays)
      first_BxK[b, k] = seen.setdefault(same, k)
  return first_BxK


def _round_up(number: int, step: int) -> int:
  return -(-number // step) * step
