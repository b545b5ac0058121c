# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Rows of packed tokens: the token fed at each place, and what it sees.

A row holds groups in sequence, each a prompt followed by some of its
completions. The first place of a completion is fed the prompt's last token, so
that place t of a completion predicts its token t; the prompt itself leaves that
token out.

Axes: B prompts, K completions, P prompt tokens, T completion tokens, R rows, L
places of a row.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp

from tba_jax import types


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Places:
  """Places of rows, each [R, L] int32.

  group: index b of the token's prompt, -1 without a token.
  owner: 0 for a prompt token, 1 + b K + k for a completion token.
  index: place in the row.
  start: index at which the prompt or the completion begins.
  prompt_start, prompt_stop: indices of the group's prompt in the row; the
    second is only valid for completions.
  position: number of tokens before this one in its sequence.
  num_prompt, num_completion: P and T.
  """

  group: jax.Array
  owner: jax.Array
  index: jax.Array
  start: jax.Array
  prompt_start: jax.Array
  prompt_stop: jax.Array
  position: jax.Array
  num_prompt: int = dataclasses.field(metadata=dict(static=True))
  num_completion: int = dataclasses.field(metadata=dict(static=True))


def places_of(
    token_indices_RxL: jax.Array,
    prompt_mask_BxP: jax.Array,
    shape: tuple[int, int, int],
) -> Places:
  """Returns the places of rows.

  Args:
    token_indices_RxL: `types.Rows.token_indices` of one micro-batch.
    prompt_mask_BxP: 1 on prompt tokens, left-padded.
    shape: B, K, T.
  """
  (B, K, T), P = shape, prompt_mask_BxP.shape[1]
  own_RxL = token_indices_RxL - B * P  # b K T + k T + t for a completion token.
  is_prompt = own_RxL < 0
  group = jnp.where(is_prompt, token_indices_RxL // P, own_RxL // (K * T))
  owner = jnp.where(is_prompt, 0, own_RxL // T + 1)
  group = jnp.where(token_indices_RxL < 0, -1, group)
  lengths_B = jnp.sum(prompt_mask_BxP > 0, axis=1, dtype=jnp.int32)
  lengths = lengths_B[jnp.maximum(group, 0)]
  position = jnp.where(
      is_prompt, token_indices_RxL % P - P + lengths, lengths - 1 + own_RxL % T
  )
  index = jax.lax.broadcasted_iota(jnp.int32, token_indices_RxL.shape, 1)
  changes = lambda x: jnp.diff(x, axis=1, prepend=x[:, :1] - 1) != 0
  # For each place, the last place up to it at which the condition holds.
  last = lambda is_so: jax.lax.cummax(jnp.where(is_so, index, 0), axis=1)
  begins = changes(group)
  return Places(
      group=group,
      owner=owner,
      index=index,
      start=last(begins | changes(owner)),
      prompt_start=last(begins),
      prompt_stop=last((begins | changes(owner == 0)) & (owner > 0)),
      position=jnp.maximum(position, 0),
      num_prompt=P,
      num_completion=T,
  )


def whole(mask_BxL: jax.Array) -> Places:
  """Returns the places of rows with one sequence each and padding.

  Args:
    mask_BxL: bool, True on real tokens, which are contiguous.
  """
  index = jax.lax.broadcasted_iota(jnp.int32, mask_BxL.shape, 1)
  start = jnp.argmax(mask_BxL, axis=1).astype(jnp.int32)[:, None]
  start = jnp.broadcast_to(start, mask_BxL.shape)
  return Places(
      group=jnp.where(mask_BxL, 0, -1),
      owner=jnp.zeros_like(index),
      index=index,
      start=start,
      prompt_start=start,
      prompt_stop=start,
      position=jnp.maximum(index - start, 0),
      num_prompt=mask_BxL.shape[1],
      num_completion=0,
  )


def before(places: Places, count: int) -> jax.Array:
  """Returns [R, L] int32, the place `count` tokens earlier; -1 if none.

  A completion's tokens are preceded by its prompt's.
  """
  index = places.index - count
  in_prompt = places.prompt_stop - (places.start - index)
  has_prompt = (places.owner > 0) & (in_prompt >= places.prompt_start)
  in_prompt = jnp.where(has_prompt, in_prompt, -1)
  return jnp.where(index >= places.start, index, in_prompt)


def sees(queries: Places, keys: Places, window: int) -> jax.Array:
  """Returns [..., Q, S] bool, True where a query of a row sees a key."""
  queries = jax.tree.map(lambda x: x[..., :, None], queries)
  keys = jax.tree.map(lambda x: x[..., None, :], keys)
  seen = (queries.group == keys.group) & (keys.index <= queries.index)
  seen &= (keys.owner == 0) | (keys.owner == queries.owner)
  if window:
    seen &= queries.position - keys.position < window
  return seen


def seen_blocks(
    queries: Places, window: int, size: int
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
  """Returns the blocks of keys that any query of a block sees, [...] each.

  These are two ranges, each given as a first block and a number of blocks: the
  first query's prompt, and the keys from the start of the first query's
  sequence to the last query.

  Args:
    queries: places [..., Q] of a block of queries.
    window: sliding window; 0 is none.
    size: keys per block.
  """
  is_real = queries.group >= 0
  at = jnp.argmax(is_real, axis=-1)[..., None]
  first = jax.tree.map(
      lambda x: jnp.take_along_axis(x, at, axis=-1)[..., 0], queries
  )
  start, prompt = first.start, first.prompt_start
  if window:
    start = jnp.maximum(start, first.index - window + 1)
    # Later completions start over at the end of the prompt.
    is_same = (queries.group == first.group[..., None]) & (queries.owner > 0)
    nearest = jnp.min(jnp.where(is_same, queries.position, 2**30), axis=-1)
    prompt += jnp.maximum(nearest - window + 1, 0)
  start //= size
  last = jnp.max(jnp.where(is_real, queries.index, 0), axis=-1) // size
  stop = jnp.minimum((first.prompt_stop - 1) // size + 1, start)
  has_prompt = (first.owner > 0) & (prompt < first.prompt_stop)
  prompt //= size
  any_real = is_real.any(axis=-1)
  num_prompt = jnp.where(
      any_real & has_prompt, jnp.maximum(stop - prompt, 0), 0
  )
  return prompt, num_prompt, start, jnp.where(any_real, last - start + 1, 0)


def fed(
    token_indices_RxL: jax.Array,
    prompts_BxPx: jax.Array,
    completions_BxKxTx: jax.Array,
) -> jax.Array:
  """Returns [R, L, ...], the tokens fed at each place, or values for them.

  Args:
    token_indices_RxL: `types.Rows.token_indices` of one micro-batch.
    prompts_BxPx: [B, P, ...], left-padded.
    completions_BxKxTx: [B, K, T, ...].
  """
  (B, P), (K, T) = prompts_BxPx.shape[:2], completions_BxKxTx.shape[1:3]
  rest = prompts_BxPx.shape[2:]
  own_RxL = token_indices_RxL - B * P
  last_RxL = (own_RxL // (K * T) + 1) * P - 1
  before_RxL = jnp.where(own_RxL % T == 0, last_RxL, token_indices_RxL - 1)
  indices_RxL = jnp.where(own_RxL < 0, token_indices_RxL, before_RxL)
  flat = lambda x: x.reshape(-1, *rest)
  both = [flat(prompts_BxPx), flat(completions_BxKxTx)]
  return jnp.concatenate(both)[jnp.maximum(indices_RxL, 0)]


def predicted(
    token_indices_RxL: jax.Array, x_BxKxT: jax.Array, P: int
) -> jax.Array:
  """Returns [R, L, ...], the values of the tokens predicted at places, or 0.

  `x_BxKxT` may have more axes.
  """
  own_RxL = token_indices_RxL - len(x_BxKxT) * P
  rest = x_BxKxT.shape[3:]
  values = x_BxKxT.reshape(-1, *rest)[jnp.maximum(own_RxL, 0)]
  is_none = (own_RxL < 0).reshape(*own_RxL.shape, *[1] * len(rest))
  return jnp.where(is_none, 0, values)


def unpacked(
    prompt_mask_BxP: jax.Array, shape: tuple[int, int, int], multiple: int = 1
) -> jax.Array:
  """Returns [B, L], token indices with one row per group, including padding.

  Place P - 1 + k T + t predicts token t of completion k.

  Args:
    prompt_mask_BxP: 1 on prompt tokens, left-padded.
    shape: B, K, T.
    multiple: divisor of L.
  """
  (B, K, T), P = shape, prompt_mask_BxP.shape[1]
  prompts_BxP = jnp.arange(B * P, dtype=jnp.int32).reshape(B, P)
  prompts_BxP = jnp.where(prompt_mask_BxP > 0, prompts_BxP, -1)
  own = B * P + jnp.arange(math.prod(shape), dtype=jnp.int32)
  tokens = jnp.concatenate([prompts_BxP[:, :-1], own.reshape(B, K * T)], axis=1)
  padding = -tokens.shape[1] % multiple
  return jnp.pad(tokens, ((0, 0), (0, padding)), constant_values=-1)


def merge(
    outputs_RxLx: jax.Array,
    rows: types.Rows,
    n: jax.Array | int,
    others_BxKxTx: jax.Array,
) -> jax.Array:
  """Returns [B, K, T, ...], a micro-batch's outputs merged into the others.

  Args:
    outputs_RxLx: [R, L, ...], predictions at each place of the micro-batch.
    rows: `types.Batch.rows`.
    n: index of the micro-batch.
    others_BxKxTx: values for completions in other micro-batches.
  """
  R, _, L = rows.token_indices.shape
  place_indices_BxKxT = rows.place_indices - n * (R * L)
  is_here = (place_indices_BxKxT >= 0) & (place_indices_BxKxT < R * L)
  rest = outputs_RxLx.shape[2:]
  # Tokens in other micro-batches contribute no gradient.
  place_indices_BxKxT = jnp.where(is_here, place_indices_BxKxT, R * L)
  here = outputs_RxLx.reshape(R * L, *rest)
  here = here.at[place_indices_BxKxT].get(mode="fill", fill_value=0)
  is_here = is_here.reshape(*is_here.shape, *[1] * len(rest))
  return jnp.where(is_here, here, others_BxKxTx)


def num_micro_batches(rows: types.Rows) -> jax.Array:
  """Returns [], the number of non-empty micro-batches; they come first."""
  return jnp.sum(jnp.any(rows.token_indices >= 0, axis=(0, 2)), dtype=jnp.int32)
