# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Caches of many tokens at once: of prompts, and of rows with newer params.

Axes: B prompts, Q tokens they are padded to, P the most of them, T completion
tokens, L = P + T, R rows, V vocabulary.
"""

from collections.abc import Callable
import dataclasses
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from tba_jax import types

if TYPE_CHECKING:
  from tba_jax.sampling import rows as rows_lib


def prefill(
    model_prefill: Callable[..., tuple[jax.Array, types.PyTree]],
    max_prompt_tokens: int,
    params: types.PyTree,
    tokens_BxQ: jax.Array,
    mask_BxQ: jax.Array,
) -> tuple[jax.Array, types.PyTree, jax.Array]:
  """Runs prompts that are padded to Q tokens, up to P, as `refill` takes them.

  Returns:
    Logits [B, V] float32, the prompts' cache and their mask [B, P]: columns
    from Q on are padding, which nothing sees.
  """
  P = max_prompt_tokens
  outputs = *model_prefill(params, tokens_BxQ, mask_BxQ), mask_BxQ
  if mask_BxQ.shape[1] == P:
    return outputs
  whole = lambda x_BxQ: jnp.zeros((x_BxQ.shape[0], P), x_BxQ.dtype)
  shapes = jax.eval_shape(
      model_prefill, params, whole(tokens_BxQ), whole(mask_BxQ)
  )
  fill = lambda leaf, shape: jnp.pad(
      leaf, [(0, n - m) for m, n in zip(leaf.shape, shape.shape)]
  )
  return jax.tree.map(fill, outputs, (*shapes, whole(mask_BxQ)))


def recompute(
    model_prefill: Callable[..., tuple[jax.Array, types.PyTree]],
    fill_cache: Callable[..., types.PyTree],
    params: types.PyTree,
    state: "rows_lib.DecodeState",
    tokens_BxL: jax.Array,
    mask_BxL: jax.Array,
    slot_R: jax.Array,
) -> "rows_lib.DecodeState":
  """Makes the caches of some rows again, with other params.

  Args:
    model_prefill: the model's, as `fill_cache`.
    fill_cache: the model's.
    params: of the model.
    state: of the rows; those with slot_R < 0 stay as they are.
    tokens_BxL: [B, P + T] int32, as the cache's columns: prompts, and
      completions but for the last token, which is not fed yet.
    mask_BxL: [B, P + T] float32, 1 on these tokens.
    slot_R: [R] int32, the row's place among the B; -1: not made again.
  """
  _, cache = model_prefill(params, tokens_BxL, mask_BxL)
  return dataclasses.replace(
      state, cache=fill_cache(state.cache, cache, slot_R)
  )
