# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Packed rows of random lengths, and inputs of their attention."""

from collections.abc import Callable
import dataclasses
from typing import Any
from unittest import mock

import chex
import jax
import jax.numpy as jnp
import numpy as np

from tba_jax import types
from tba_jax.learning import packing
from tba_jax.models.net import packed
from tba_jax.models.net import row_attention


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
  token_indices_RxL = packed_rows.token_indices[:, 0]
  padding = -token_indices_RxL.shape[1] % 128
  token_indices_RxL = jnp.pad(
      token_indices_RxL, ((0, 0), (0, padding)), constant_values=-1
  )
  return packed.places_of(
      token_indices_RxL, jnp.asarray(prompt_mask), (B, K, T)
  )


def make_sinks(q: jax.Array) -> jax.Array:
  """Returns sinks [G, M] for queries [..., G, M, Dh], as large as scores."""
  return 2 * jax.random.normal(jax.random.key(1), q.shape[-3:-1])


def pack(
    batch: types.Batch,
    micro_prompts: int = 1,
    micro_completions: int = 0,
    length: int = 1,
    one_micro_batch: bool = False,
    shards: int = 1,
    sequence: int = 1,
) -> types.Batch:
  """Returns a batch packed in many small micro-batches, or in one."""
  (B, P), shape = batch.prompt_mask.shape, batch.completion_tokens.shape
  shapes = packing.Packing(
      (B, shape[1], P, shape[2]),
      micro_prompts,
      micro_completions,
      shards,
      sequence,
  )
  # A negative cost per micro-batch gives several.
  with mock.patch.multiple(
      packing,
      _SHORT_LENGTH=8,
      _LENGTH=2**20 if one_micro_batch else length,
      _LEAST_TOKENS=10**9 if one_micro_batch else 1,
      _MICRO_BATCH_TOKENS=-1,
  ):
    packed_rows = packing.pack(
        shapes,
        np.asarray(batch.prompt_mask),
        np.asarray(batch.completion_tokens),
        np.asarray(batch.completion_mask),
        *(
            None if x is None else np.asarray(x)
            for x in (batch.routes, batch.kept_ids)
        ),
    )
  return dataclasses.replace(batch, rows=packed_rows)


def num_micro_batches(batch: types.Batch) -> int:
  return int(np.sum((batch.rows.token_indices >= 0).any((0, 2))))


def make_inputs(places: packed.Places) -> list[jax.Array]:
  """Returns queries, keys and values of two groups of heads."""
  rng = np.random.default_rng(0)
  R, L = places.group.shape
  shapes = (R, L, 2, 2, 8), (R, L, 2, 8), (R, L, 2, 8)
  return [jnp.asarray(rng.normal(size=shape), "float32") for shape in shapes]


def assert_equals_plain(
    attend: Callable[..., jax.Array],
    places: packed.Places,
    window: int,
    **options: int,
) -> None:
  """Compares a kernel's outputs and gradients with plain attention.

  Heads with a window have sinks.

  Args:
    attend: kernel, called as (q, k, v, places, window=…, sinks=…,
      interpret=True, **options).
    places: places of the rows.
    window: sliding window; 0 is none.
    **options: further arguments of `attend`.
  """
  inputs = make_inputs(places)
  inputs.append(make_sinks(inputs[0]) if window else None)
  is_real = (places.group >= 0)[..., None, None, None]

  def run(fn: Callable[..., jax.Array]) -> Any:
    def loss(*inputs: jax.Array) -> tuple[jax.Array, jax.Array]:
      out = jnp.where(is_real, fn(*inputs), 0)
      return jnp.sum(jnp.sin(out)), out

    grad = jax.value_and_grad(loss, (0, 1, 2, 3), has_aux=True)
    return jax.jit(grad)(*inputs)

  plain = lambda q, k, v, sinks: row_attention.attend_rows(
      q, k, v, places, places, window, "cpu", sinks
  )
  kernel = lambda q, k, v, sinks: attend(
      *(q, k, v, places),
      window=window,
      sinks=sinks,
      interpret=True,
      **options,
  )
  chex.assert_trees_all_close(run(kernel), run(plain), rtol=1e-4, atol=1e-5)


def needed_blocks(places: packed.Places, window: int, size: int) -> np.ndarray:
  """Returns [R, blocks, blocks] bool: blocks in which a query sees a key."""
  seen = np.asarray(packed.sees(places, places, window))
  seen = seen & np.asarray(places.group >= 0)[..., None]
  R, L, _ = seen.shape
  return seen.reshape(R, L // size, size, L // size, size).any((2, 4))
