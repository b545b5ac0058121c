# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Packs the tokens of a batch into rows of one length.

A row holds groups one after another: a prompt's tokens, then those of its
completions, without padding between them. Groups go from large to small into
the first row with room. One that is longer than a row is split over several,
and its prompt is repeated. Equal completions of a group are computed once.

The rows are computed in parts, of which a step computes as many as the batch
fills. A group has all its completions in one part, unless
`train.micro_batch_completions` cuts groups. So one program serves batches of
any length; a few sizes of a part keep the last one from being mostly empty.
All is a function of the batch alone: a resumed run repeats its bits.

Axes: B prompts, K completions, P prompt tokens, T completion tokens, R rows, N
parts, L tokens of a row.
"""

from collections.abc import Mapping, Sequence
import dataclasses
import math
from typing import NamedTuple

import jax
import ml_collections
import numpy as np

from tba_jax import types
from tba_jax.losses import objective_table as losses
from tba_jax.mesh import sharding

# Tokens of a row: at most, unless a prompt with one completion has more, and of
# one with several groups of full length, which leave less of it empty.
_LENGTH, _SHORT_LENGTH = 8192, 512
# Divisor of the tokens of long rows: lanes of an accelerator.
_LANES = 128
# Shares of the largest part that a size has, and the least tokens of a shard's
# part. Small parts leave the last one less empty.
_SHARES, _LEAST_TOKENS = (1, 2, 5, 12), 512
# What a part costs on top of its tokens, in tokens of a shard: reading weights
# and adding gradients.
_PART_TOKENS = 256


class Size(NamedTuple):
  """R, N and L of `types.Rows`, the shape of a program."""

  rows: int
  parts: int
  length: int


@dataclasses.dataclass(frozen=True)
class Packing:
  """Shapes of batches, from which sizes follow.

  shape: B, K, P, T.
  micro_prompts: prompts of full length that a part has room for.
  micro_completions: completions of each, if groups are cut; 0 if not.
  shards: devices that rows are split over.
  sequence: devices that each row is split over.
  """

  shape: tuple[int, int, int, int]
  micro_prompts: int
  micro_completions: int = 0
  shards: int = 1
  sequence: int = 1

  @property
  def cuts_groups(self) -> bool:
    return 0 < self.micro_completions < self.shape[1]

  @property
  def length(self) -> int:
    """L: at least a prompt with one completion, at best whole groups."""
    _, K, P, T = self.shape
    length = max(P - 1 + T, min(P - 1 + K * T, _LENGTH))
    prompts = -(-min(self.micro_prompts, self.shape[0]) // self.shards)
    several = range(min(_SHORT_LENGTH // length, prompts), 1, -1)
    if not self.cuts_groups:
      length *= next((n for n in several if prompts % n == 0), 1)
    step = _LANES if length > 4 * _LANES else 8
    return round_up(length, math.lcm(step, self.sequence))

  @property
  def _worst(self) -> tuple[int, int]:
    """Groups of full length that a row has room for, or rows of a group."""
    _, K, P, T = self.shape
    if groups := self.length // (P - 1 + K * T):
      return groups, 1
    return 0, -(-K // ((self.length - P + 1) // T))

  def _num_parts(self, num_rows: int) -> int:
    """Returns the parts of a batch of full length, 0 if a group has no room."""
    B, (groups, rows) = self.shape[0], self._worst
    if groups:
      return -(-B // (groups * num_rows))
    if self.cuts_groups:
      return -(-B * rows // num_rows)
    return -(-B // (num_rows // rows)) if num_rows >= rows else 0

  def sizes(self) -> list[Size]:
    """Returns the sizes that `pack` chooses from, from large to small.

    Any batch fits the first.
    """
    B, K, P, T = self.shape
    K = self.micro_completions if self.cuts_groups else K
    num_tokens = min(self.micro_prompts, B) * (P - 1 + K * T)
    R = -(-num_tokens // self.length)
    if not self.cuts_groups:
      R = max(R, self._worst[1])
    R = round_up(R, self.shards)
    most, out = self._num_parts(R), []
    for share in _SHARES:
      rows = round_up(-(-R // share), self.shards)
      is_small = rows * self.length < _LEAST_TOKENS * self.shards
      if out and (is_small or rows == out[-1].rows):
        break
      # As many tokens in all as at first: batches with more take that size.
      out.append(Size(rows, -(-most * R // rows), self.length))
    return out


def make(
    config: ml_collections.ConfigDict,
    shape: tuple[int, int, int, int] | None = None,
) -> Packing:
  """Returns how the trainer packs; `shape` is `batch_shape` by default."""
  train, mesh = config.train, config.mesh
  return Packing(
      shape or batch_shape(config),
      train.micro_batch_prompts,
      train.micro_batch_completions,
      math.prod(mesh[axis] for axis in sharding.BATCH_AXES),
      mesh.sequence,
  )


def batch_shape(config: ml_collections.ConfigDict) -> tuple[int, int, int, int]:
  """Returns B, K, P, T of a batch."""
  train, sampling = config.train, config.sampling
  return (
      train.prompts_per_batch,
      train.completions_per_prompt,
      sampling.max_prompt_tokens,
      sampling.max_completion_tokens,
  )


def size_of(rows: types.Rows) -> Size:
  return Size(*rows.tokens.shape)


def abstract_rows(size: Size, B: int, K: int, T: int) -> types.Rows:
  """Returns shapes and dtypes of rows."""
  integers = lambda *shape: jax.ShapeDtypeStruct(shape, "int32")
  return types.Rows(integers(*size), integers(B, K, T))


def abstract_batch(
    config: ml_collections.ConfigDict,
    mesh: jax.sharding.Mesh,
    size: Size,
    columns: Mapping[str, tuple[int, ...]] | None = None,
) -> types.Batch:
  """Returns shapes, dtypes and shardings of a batch.

  `columns` are the optional ones, see `collect.optional_columns`.
  """
  B, K, P, T = batch_shape(config)
  prepared = {}
  if losses.baseline(config.loss) == "file":
    prepared["baselines_Bx1"] = jax.ShapeDtypeStruct((B, 1), "float32")
  batch = types.abstract_batch({"B": B, "K": K, "P": P, "T": T}, columns)
  rows = abstract_rows(size, B, K, T)
  return jax.tree.map(
      lambda x: jax.ShapeDtypeStruct(
          *(x.shape, x.dtype),
          sharding=sharding.place_of(x, mesh),
      ),
      dataclasses.replace(batch, rows=rows, prepared=prepared),
  )


def pack(
    packing: Packing,
    prompt_mask_BxP: np.ndarray,
    completion_tokens_BxKxT: np.ndarray,
    completion_mask_BxKxT: np.ndarray,
    routes_BxKxTxNxA: np.ndarray | None = None,
) -> types.Rows:
  """Returns the rows of a batch, of the size that costs least.

  Args:
    packing: shapes of batches; B may be less.
    prompt_mask_BxP: 1 on prompt tokens, which are left-padded.
    completion_tokens_BxKxT: int32.
    completion_mask_BxKxT: 1 on tokens that the loss counts.
    routes_BxKxTxNxA: experts of tokens: completions with others are no copies.
  """
  (B, P), (K, T) = prompt_mask_BxP.shape, completion_tokens_BxKxT.shape[1:]
  same = [completion_tokens_BxKxT]
  if routes_BxKxTxNxA is not None:
    same.append(routes_BxKxTxNxA)
  first_BxK = _first_copies(*same)
  lengths_BxK = _lengths(completion_mask_BxKxT, first_BxK)
  prompts_B = (prompt_mask_BxP > 0).sum(axis=1) - 1
  best, least = None, math.inf
  for size in packing.sizes():
    parts = _fill(packing, size, prompts_B, lengths_BxK)
    each = size.rows * size.length / packing.shards + _PART_TOKENS
    if parts is not None and len(parts) * each < least:
      best, least = (size, parts), len(parts) * each
  if best is None:
    size = packing.sizes()[0]
    best = size, _fill_as_if_full(packing, size, lengths_BxK)
  (R, N, L), parts = best
  tokens_RxNxL = np.full((R, N, L), -1, np.int32)
  slots_BxKxT = np.full((B, K, T), R * N * L, np.int32)
  for n, rows in enumerate(parts):
    for r, row in enumerate(rows):
      place, start = tokens_RxNxL[r, n], 0
      for b, completions in row.groups:
        # A prompt's last token is fed again before each completion.
        stop = start + prompts_B[b]
        place[start:stop] = (b + 1) * P - 1 + np.arange(start - stop, 0)
        for k in completions:
          start, stop = stop, stop + lengths_BxK[b, k]
          indices = np.arange(start, stop)
          place[start:stop] = B * P + (b * K + k) * T + indices - start
          slots_BxKxT[b, k, : stop - start] = (n * R + r) * L + indices
        start = stop
  slots_BxKxT = slots_BxKxT[np.arange(B)[:, None], first_BxK]
  return types.Rows(tokens_RxNxL, slots_BxKxT)


@dataclasses.dataclass
class _Row:
  """A row while it is filled: groups as (b, completions), and its room."""

  room: int
  groups: list[tuple[int, list[int]]] = dataclasses.field(default_factory=list)

  def add(self, b: int, completions: list[int], num_tokens: int) -> None:
    self.groups.append((b, completions))
    self.room -= num_tokens


def _fill(
    packing: Packing,
    size: Size,
    prompts_B: np.ndarray,
    lengths_BxK: np.ndarray,
) -> list[list[_Row]] | None:
  """Returns the rows of each part; None if the batch needs more parts."""
  order_BxK = np.argsort(-lengths_BxK, axis=1, kind="stable")
  totals_B = prompts_B + lengths_BxK.sum(axis=1)
  parts: list[list[_Row]] = []
  for b in np.argsort(-totals_B, kind="stable").tolist():
    completions = [k for k in order_BxK[b].tolist() if lengths_BxK[b, k]]
    if not completions:
      continue
    total, prompt = int(totals_B[b]), int(prompts_B[b])
    lengths = lengths_BxK[b].tolist()
    rows = [row for rows in parts for row in rows]
    whole = next((row for row in rows if row.room >= total), None)
    if whole is not None:
      whole.add(b, completions, total)
      continue
    together = [rows] if packing.cuts_groups else parts
    if any(_split(part, b, prompt, completions, lengths) for part in together):
      continue
    if len(parts) == size.parts:
      return None
    parts.append([_Row(size.length) for _ in range(size.rows)])
    if total <= size.length:
      parts[-1][0].add(b, completions, total)
      continue
    rows = sum(parts, []) if packing.cuts_groups else parts[-1]
    if not _split(rows, b, prompt, completions, lengths):
      return None
  return parts


def _fill_as_if_full(
    packing: Packing, size: Size, lengths_BxK: np.ndarray
) -> list[list[_Row]]:
  """Returns the rows of each part if all lengths were the longest.

  No batch needs more parts than the largest size has for these.
  """
  _, K, P, T = packing.shape
  groups, num_rows = packing._worst
  most = K if groups else (size.length - P + 1) // T
  rows: list[_Row] = []
  for b, lengths_K in enumerate(lengths_BxK):
    if not lengths_K.any():
      continue
    if groups and rows and len(rows[-1].groups) < groups:
      rows[-1].add(b, np.flatnonzero(lengths_K).tolist(), 0)
      continue
    left = -len(rows) % size.rows
    if not packing.cuts_groups and left < num_rows:
      rows += [_Row(0) for _ in range(left)]
    for k in range(0, K, most):
      own = k + np.flatnonzero(lengths_K[k : k + most])
      if own.size:
        rows.append(_Row(0, [(b, own.tolist())]))
  return [rows[i : i + size.rows] for i in range(0, len(rows), size.rows)]


def _split(
    rows: Sequence[_Row],
    b: int,
    prompt: int,
    completions: Sequence[int],
    lengths: Sequence[int],
) -> bool:
  """Adds a group to several rows, fullest last; returns whether it fits."""
  left, added = list(completions), []
  for row in sorted(rows, key=lambda row: -row.room):
    room, own = row.room - prompt, []
    for k in left:
      if lengths[k] <= room:
        room -= lengths[k]
        own.append(k)
    if own:
      added.append((row, own, row.room - room))
      left = [k for k in left if k not in own]
    if not left:
      for row, own, num_tokens in added:
        row.add(b, own, num_tokens)
      return True
  return False


def _lengths(mask_BxKxT: np.ndarray, first_BxK: np.ndarray) -> np.ndarray:
  """Returns [B, K], the tokens up to the last that the loss counts.

  That of a first copy is the most of all copies, of which an environment may
  have written more or less; others have 0.
  """
  lengths_BxK = mask_BxKxT.shape[2] - np.argmax(mask_BxKxT[..., ::-1] > 0, -1)
  lengths_BxK = np.where((mask_BxKxT > 0).any(-1), lengths_BxK, 0)
  out_BxK = np.zeros_like(lengths_BxK)
  rows_Bx1 = np.arange(len(out_BxK))[:, None]
  np.maximum.at(out_BxK, (rows_Bx1, first_BxK), lengths_BxK)
  return out_BxK


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


def round_up(number: int, step: int) -> int:
  return -(-number // step) * step
