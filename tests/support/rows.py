# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Packed rows of random lengths, and what attention of them reads."""

import dataclasses
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from tba_jax import types
from tba_jax.learning import packing
from tba_jax.models.net import packed


def make_places(*, B=5, K=3, P=20, T=60, length=256, seed=0) -> packed.Places:
  """Returns the places of packed rows, most with several groups."""
  rng = np.random.default_rng(seed)
  prompts_B = rng.integers(1, P + 1, B)
  lengths_BxK = rng.integers(1, T + 1, (B, K))
  prompt_mask = np.arange(P) >= P - prompts_B[:, None]
  mask = np.arange(T) < lengths_BxK[..., None]
  tokens = rng.integers(2, 99, (B, K, T)).astype(np.int32)
  with mock.patch.multiple(packing, _LENGTH=length):
    shapes = packing.Packing((B, K, P, T), B)
    packed_rows = packing.pack(shapes, prompt_mask, tokens, mask)
  tokens_RxL = packed_rows.tokens[:, 0]
  padding = -tokens_RxL.shape[1] % 128
  tokens_RxL = jnp.pad(tokens_RxL, ((0, 0), (0, padding)), constant_values=-1)
  return packed.places_of(tokens_RxL, jnp.asarray(prompt_mask), (B, K, T))


def pack(
    batch: types.Batch,
    micro_prompts: int = 1,
    micro_completions: int = 0,
    length: int = 1,
    one_part: bool = False,
    shards: int = 1,
    sequence: int = 1,
) -> types.Batch:
  """Returns a batch in rows of the smallest size, or of the largest."""
  (B, P), shape = batch.prompt_mask.shape, batch.completion_tokens.shape
  shapes = packing.Packing(
      (B, shape[1], P, shape[2]),
      micro_prompts,
      micro_completions,
      shards,
      sequence,
  )
  # More parts cost less, so that several are used.
  with mock.patch.multiple(
      packing,
      _LEAST_LENGTH=8,
      _LENGTH=2**20 if one_part else length,
      _LEAST_TOKENS=10**9 if one_part else 1,
      _PART_TOKENS=-1,
  ):
    packed_rows = packing.pack(
        shapes,
        np.asarray(batch.prompt_mask),
        np.asarray(batch.completion_tokens),
        np.asarray(batch.completion_mask),
        None if batch.routes is None else np.asarray(batch.routes),
    )
  return dataclasses.replace(batch, rows=packed_rows)


def num_parts(batch: types.Batch) -> int:
  return int(np.sum((batch.rows.tokens >= 0).any((0, 2))))


def make_inputs(places: packed.Places) -> list[jax.Array]:
  """Returns queries, keys and values of two groups of heads."""
  rng = np.random.default_rng(0)
  R, L = places.group.shape
  shapes = (R, L, 2, 2, 8), (R, L, 2, 8), (R, L, 2, 8)
  return [jnp.asarray(rng.normal(size=shape), "float32") for shape in shapes]


def needed_blocks(places: packed.Places, window: int, size: int) -> np.ndarray:
  """Returns [R, blocks, blocks] bool, blocks in which some query sees a key."""
  seen = np.asarray(packed.sees(places, places, window))
  seen = seen & np.asarray(places.group >= 0)[..., None]
  R, L, _ = seen.shape
  return seen.reshape(R, L // size, size, L // size, size).any((2, 4))
