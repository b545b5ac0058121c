# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Packs the tokens of a batch into rows of equal length.

A row holds groups one after another: the prompt, then its completions, without
padding. Groups are placed first-fit, largest first. A group longer than a row
is split over several rows, each with a copy of the prompt. Equal completions of
a group are computed once.

A step runs as many micro-batches as the batch fills, so one program serves
batches of any length. There are several micro-batch sizes, so that the last
micro-batch is not mostly empty. All completions of a group share a micro-batch
unless `train.micro_batch_completions` splits groups. Packing depends only on
the batch, so a resumed run is bitwise identical.

Axes: B prompts, K completions, P prompt tokens, T completion tokens, R rows, N
micro-batches, L tokens of a row.
"""

from collections.abc import Mapping, Sequence
import dataclasses
import math
from typing import NamedTuple

import jax
import ml_collections
import numpy as np

from tba_jax import types
from tba_jax.losses import objective_table
from tba_jax.mesh import sharding

# Maximum tokens per row, unless a prompt with one completion needs more, and
# maximum tokens of rows made longer to hold several full-length groups, which
# leaves less of a row empty.
_LENGTH, _SHORT_LENGTH = 8192, 512
# Long rows are a multiple of this many tokens, the lanes of an accelerator.
_LANES = 128
# Micro-batch sizes, as divisors of the largest, and the fewest tokens per shard
# of a micro-batch. The smaller the micro-batches, the less empty the last one.
_SHARES, _LEAST_TOKENS = (1, 2, 5, 12), 512
# Fixed cost of a micro-batch (reading weights, adding gradients), in tokens per
# shard.
_MICRO_BATCH_TOKENS = 256


class Size(NamedTuple):
  """R, N and L of `types.Rows`; each size is a separate program."""

  rows: int
  micro_batches: int
  length: int


@dataclasses.dataclass(frozen=True)
class Packing:
  """Shape of a batch and its mesh, which determine the packed sizes.

  shape: B, K, P, T.
  micro_prompts: number of full-length prompts that fit into a micro-batch.
  micro_completions: number of completions that fit into a micro-batch per
    prompt; 0 keeps groups whole.
  shards: number of devices that rows are distributed over.
  sequence: number of devices that each row is split over.
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
    """L: fits at least a prompt with one completion, ideally whole groups."""
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
    """(full-length groups per row, 1), or (0, rows per full-length group)."""
    _, K, P, T = self.shape
    if groups := self.length // (P - 1 + K * T):
      return groups, 1
    return 0, -(-K // ((self.length - P + 1) // T))

  def _num_micro_batches(self, num_rows: int) -> int:
    """Returns how many micro-batches a full-length batch needs.

    0 if a group does not fit into one.
    """
    B, (groups, rows) = self.shape[0], self._worst
    if groups:
      return -(-B // (groups * num_rows))
    if self.cuts_groups:
      return -(-B * rows // num_rows)
    return -(-B // (num_rows // rows)) if num_rows >= rows else 0

  def sizes(self) -> list[Size]:
    """Returns the sizes that `pack` chooses from, largest first.

    Any batch fits the first size.
    """
    B, K, P, T = self.shape
    K = self.micro_completions if self.cuts_groups else K
    num_tokens = min(self.micro_prompts, B) * (P - 1 + K * T)
    R = -(-num_tokens // self.length)
    if not self.cuts_groups:
      R = max(R, self._worst[1])
    R = round_up(R, self.shards)
    most, out = self._num_micro_batches(R), []
    for share in _SHARES:
      rows = round_up(-(-R // share), self.shards)
      is_small = rows * self.length < _LEAST_TOKENS * self.shards
      if out and (is_small or rows == out[-1].rows):
        break
      # No more tokens than the first size in total; larger batches use that.
      out.append(Size(rows, -(-most * R // rows), self.length))
    return out


def make(
    config: ml_collections.ConfigDict,
    shape: tuple[int, int, int, int] | None = None,
) -> Packing:
  """Returns the trainer's packing; `shape` defaults to `batch_shape`."""
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
  return Size(*rows.token_indices.shape)


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

  Args:
    columns: optional columns, see `collect.optional_columns`.
  """
  B, K, P, T = batch_shape(config)
  prepared = {}
  if objective_table.baseline(config.loss) == "file":
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
    *others: np.ndarray | None,
) -> types.Rows:
  """Packs a batch into rows of the cheapest size.

  Args:
    packing: shapes; the batch may have fewer prompts.
    prompt_mask_BxP: 1 on prompt tokens, which are left-padded.
    completion_tokens_BxKxT: int32.
    completion_mask_BxKxT: 1 on tokens that the loss counts.
    *others: [B, K, ...] or None, such as experts of tokens. Equal completions
      that differ in them are not duplicates.
  """
  (B, P), (K, T) = prompt_mask_BxP.shape, completion_tokens_BxKxT.shape[1:]
  others = (x for x in others if x is not None)
  first_BxK = _first_copies(completion_tokens_BxKxT, *others)
  lengths_BxK = _lengths(completion_mask_BxKxT, first_BxK)
  prompts_B = (prompt_mask_BxP > 0).sum(axis=1) - 1
  best, least = None, math.inf
  for size in packing.sizes():
    micro_batches = _fill(packing, size, prompts_B, lengths_BxK)
    each = size.rows * size.length / packing.shards + _MICRO_BATCH_TOKENS
    if micro_batches is not None and len(micro_batches) * each < least:
      best, least = (size, micro_batches), len(micro_batches) * each
  if best is None:
    size = packing.sizes()[0]
    best = size, _fill_as_if_full(packing, size, lengths_BxK)
  (R, N, L), micro_batches = best
  token_indices_RxNxL = np.full((R, N, L), -1, np.int32)
  place_indices_BxKxT = np.full((B, K, T), R * N * L, np.int32)
  for n, rows in enumerate(micro_batches):
    for r, row in enumerate(rows):
      place, start = token_indices_RxNxL[r, n], 0
      for b, completions in row.groups:
        # The last prompt token is fed again before each completion.
        stop = start + prompts_B[b]
        place[start:stop] = (b + 1) * P - 1 + np.arange(start - stop, 0)
        for k in completions:
          start, stop = stop, stop + lengths_BxK[b, k]
          indices = np.arange(start, stop)
          place[start:stop] = B * P + (b * K + k) * T + indices - start
          place_indices_BxKxT[b, k, : stop - start] = (n * R + r) * L + indices
        start = stop
  place_indices_BxKxT = place_indices_BxKxT[np.arange(B)[:, None], first_BxK]
  return types.Rows(token_indices_RxNxL, place_indices_BxKxT)


@dataclasses.dataclass
class _Row:
  """A row being filled: groups as (b, completions), and remaining tokens."""

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
  """Returns the rows of each micro-batch; None if the batch does not fit."""
  order_BxK = np.argsort(-lengths_BxK, axis=1, kind="stable")
  totals_B = prompts_B + lengths_BxK.sum(axis=1)
  micro_batches: list[list[_Row]] = []
  for b in np.argsort(-totals_B, kind="stable").tolist():
    completions = [k for k in order_BxK[b].tolist() if lengths_BxK[b, k]]
    if not completions:
      continue
    total, prompt = int(totals_B[b]), int(prompts_B[b])
    lengths = lengths_BxK[b].tolist()
    rows = [row for rows in micro_batches for row in rows]
    whole = next((row for row in rows if row.room >= total), None)
    if whole is not None:
      whole.add(b, completions, total)
      continue
    together = [rows] if packing.cuts_groups else micro_batches
    if any(_split(part, b, prompt, completions, lengths) for part in together):
      continue
    if len(micro_batches) == size.micro_batches:
      return None
    micro_batches.append([_Row(size.length) for _ in range(size.rows)])
    if total <= size.length:
      micro_batches[-1][0].add(b, completions, total)
      continue
    rows = sum(micro_batches, []) if packing.cuts_groups else micro_batches[-1]
    if not _split(rows, b, prompt, completions, lengths):
      return None
  return micro_batches


def _fill_as_if_full(
    packing: Packing, size: Size, lengths_BxK: np.ndarray
) -> list[list[_Row]]:
  """Returns the rows of each micro-batch as if all lengths were maximal.

  This always fits the largest size.
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
      completions = k + np.flatnonzero(lengths_K[k : k + most])
      if completions.size:
        rows.append(_Row(0, [(b, completions.tolist())]))
  return [rows[i : i + size.rows] for i in range(0, len(rows), size.rows)]


def _split(
    rows: Sequence[_Row],
    b: int,
    prompt: int,
    completions: Sequence[int],
    lengths: Sequence[int],
) -> bool:
  """Spreads a group over rows, emptiest first; returns whether it fits."""
  left, added = list(completions), []
  for row in sorted(rows, key=lambda row: -row.room):
    room, fitting = row.room - prompt, []
    for k in left:
      if lengths[k] <= room:
        room -= lengths[k]
        fitting.append(k)
    if fitting:
      added.append((row, fitting, row.room - room))
      left = [k for k in left if k not in fitting]
    if not left:
      for row, fitting, num_tokens in added:
        row.add(b, fitting, num_tokens)
      return True
  return False


def _lengths(mask_BxKxT: np.ndarray, first_BxK: np.ndarray) -> np.ndarray:
  """Returns [B, K], the number of tokens up to the last counted one.

  Of equal completions, the first has the longest length, because environments
  may have written different tokens of each; the others have 0.
  """
  lengths_BxK = mask_BxKxT.shape[2] - np.argmax(mask_BxKxT[..., ::-1] > 0, -1)
  lengths_BxK = np.where((mask_BxKxT > 0).any(-1), lengths_BxK, 0)
  out_BxK = np.zeros_like(lengths_BxK)
  rows_Bx1 = np.arange(len(out_BxK))[:, None]
  np.maximum.at(out_BxK, (rows_Bx1, first_BxK), lengths_BxK)
  return out_BxK


def _first_copies(*arrays: np.ndarray) -> np.ndarray:
  """Returns [B, K], the index of the first equal completion in the group.

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
