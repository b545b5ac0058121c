# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Attention of packed rows with the TPU splash kernel.

The kernel masks by equality of segments and by a function of the query's and
key's indices; no such mask lets a query see its completion and its prompt, but
no other completion. So there are two calls, one for the tokens of the query's
own prompt or completion and one for a completion's prompt; their results are
weighted by their sums of exponentials. The kernel's gradient takes these sums
from the caller: given the sums over both calls, the gradients of the calls add
up.

A call skips the blocks that are empty in the given rows. Which blocks to skip
is a private argument of JAX's kernel; the public functions set it to static
masks.

Axes: R rows, L places of a row, G key-value heads, M query heads per key-value
head, Dh head width, Q and S blocks of queries and keys.
"""

import functools
import math
from typing import Any

import jax
from jax import ad_checkpoint
import jax.numpy as jnp

from tba_jax.models.net import attention
from tba_jax.models.net import layers
from tba_jax.models.net import packed

# The two calls: a query's own prompt or completion, and a completion's prompt.
_OWN, _PROMPT = range(2)


def attend(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    places: packed.Places,
    *,
    window: int,
    block: int,
    sinks: jax.Array | None = None,
    interpret: bool = False,
) -> jax.Array:
  """Returns `row_attention.attend_rows` of whole rows.

  Args:
    q: [R, L, G, M, Dh].
    k: [R, L, G, Dh].
    v: [R, L, G, Dh].
    places: description of each place in the rows.
    window: sliding window of positions; 0 is none.
    block: queries and keys per block, a multiple of 128 that divides L.
    sinks: [G, M], logits of the heads' sinks; None if there are none.
    interpret: whether to run on a CPU, for tests.
  """
  R, L, G, M, Dh = q.shape
  q = q * jnp.asarray(1 / math.sqrt(Dh), q.dtype)
  heads_first = lambda x: jnp.moveaxis(x.reshape(R, L, -1, Dh), 1, 2)
  inputs = map(heads_first, (q, k, v))
  if sinks is not None:
    sinks = sinks.reshape(-1, 1)
  out = _attend(*inputs, places, sinks, window, block, interpret)
  return jnp.moveaxis(out, 2, 1).reshape(R, L, G, M, Dh)


@functools.partial(jax.custom_vjp, nondiff_argnums=(5, 6, 7))
def _attend(q, k, v, places, sinks, window, block, interpret):
  """Returns attention [R, H, L, Dh] for scaled queries."""
  return _forward(q, k, v, places, sinks, window, block, interpret)[0]


def _forward(q, k, v, places, sinks, window, block, interpret):
  """Returns the result, and the residuals for its gradient."""

  def of_row(row):
    q, k, v, places = row
    calls = [
        _call_forward(q, k, v, places, window, block, interpret, call)
        for call in (_OWN, _PROMPT)
    ]
    # A query that sees no key in a call has no valid results there.
    sums = [
        jnp.where(x > attention.MASKED_SCORE, x, attention.MASKED_SCORE)
        for _, x in calls
    ]
    total = jnp.logaddexp(*sums)
    out = jnp.zeros(q.shape, jnp.float32)
    for (own, _), own_sum in zip(calls, sums):
      weight = jnp.exp(own_sum - total)[..., None]
      has_key = (own_sum > attention.MASKED_SCORE)[..., None]
      out += jnp.where(has_key, weight * own, 0.0)
    out, total = attention.join_sinks(out, total, sinks)
    is_real = (places.group >= 0)[None]
    return out.astype(q.dtype), jnp.where(is_real, total, 0.0)

  out, total = jax.lax.map(of_row, (q, k, v, places))
  # Named so that `train.remat="dots"` keeps them.
  named = lambda x: ad_checkpoint.checkpoint_name(x, layers.ATTENTION)
  out, total = named(out), named(total)
  return out, (q, k, v, places, sinks, out, total)


def _backward(window, block, interpret, saved, grad):
  """Returns the gradients of queries, keys, values and sinks."""
  *inputs, sinks, out, total = saved

  def of_row(row):
    *row, grad = row
    calls = [
        _call_backward(*row, grad, window, block, interpret, call)
        for call in (_OWN, _PROMPT)
    ]
    add = lambda x, y: (x.astype(jnp.float32) + y).astype(x.dtype)
    return jax.tree.map(add, *calls)

  grad = grad.astype(out.dtype)
  grads = jax.lax.map(of_row, (*inputs, out, total, grad))
  of_sinks = None
  if sinks is not None:
    product = jnp.einsum(
        "rhld,rhld->rhl", out, grad, preferred_element_type=jnp.float32
    )
    of_sinks = attention.sinks_gradient(product, total, sinks[None])[0]
  return *grads, None, of_sinks


_attend.defvjp(_forward, _backward)


def _library() -> Any:
  # Half a second of imports that other platforms do not need.
  from jax.experimental.pallas.ops.tpu.splash_attention import (
      splash_attention_kernel,
  )

  return splash_attention_kernel


def _call_forward(q, k, v, places, window, block, interpret, call):
  """Returns a call's result [H, L, Dh], and its logsumexp [H, L]."""
  library, (fn, segments) = _library(), _mask(places, window, call)
  out, (logsumexp,) = library._splash_attention_forward(
      _mask_info(places, window, block, call, fn is not None),
      q,
      k,
      v,
      segments,
      None,
      mask_value=library.DEFAULT_MASK_VALUE,
      is_mqa=False,
      block_sizes=_block_sizes(block),
      residual_checkpoint_name=None,
      save_residuals=True,
      mask_function=fn,
      interpret=interpret,
  )
  return out, logsumexp


def _call_backward(
    q, k, v, places, out, total, grad, window, block, interpret, call
):
  """Returns a call's gradients of q, k, v from `out`, `total` of both calls."""
  library, (fn, segments) = _library(), _mask(places, window, call)
  info = functools.partial(
      _mask_info, places, window, block, call, fn is not None
  )
  found = library._splash_attention_bwd(
      False,
      library.DEFAULT_MASK_VALUE,
      False,
      _block_sizes(block),
      None,
      fn,
      None,
      interpret,
      (q, k, v, segments, None, out, total, info(), info(for_keys=True)),
      grad,
  )
  return found[3:6]


def _block_sizes(block: int) -> Any:
  return _library().BlockSizes(
      block_q=block,
      block_kv=block,
      block_q_dkv=block,
      block_kv_dkv=block,
      block_q_dq=block,
      block_kv_dq=block,
  )


def _mask(places: packed.Places, window: int, call: int) -> tuple[Any, Any]:
  """Returns a call's mask function of `_mask_info`'s numbers, and segments."""
  none_q, none_k = -1, -2  # Places without a token neither see nor are seen.
  if call == _OWN:
    is_real = places.group >= 0
    # A sequence's start index identifies it.
    queries = jnp.where(is_real, places.start, none_q)
    keys = jnp.where(is_real, places.start, none_k)
    fn = lambda q, k: q >= k
    if window:
      fn = lambda q, k: (q >= k) & (q - k < window)
  else:
    is_prompt = (places.group >= 0) & (places.owner == 0)
    queries = jnp.where(places.owner > 0, places.group, none_q)
    keys = jnp.where(is_prompt, places.group, none_k)
    fn = (lambda q, k: q - k < window) if window else None
  return fn, _library().SegmentIds(queries, keys)


def _mask_info(
    places: packed.Places,
    window: int,
    block: int,
    call: int,
    has_function: bool,
    for_keys: bool = False,
) -> Any:
  """Returns the kernel's description of the blocks that a call computes.

  Args:
    places: [L], description of each place in a row.
    window: sliding window; 0 is none.
    block: queries and keys per block.
    call: `_OWN` or `_PROMPT`.
    has_function: whether the mask has a function of the queries' numbers.
    for_keys: whether this is for the gradient of keys and values.
  """
  from jax.experimental.pallas.ops.tpu.splash_attention import (
      splash_attention_mask_info as info_lib,
  )

  seen_QxS = computed_blocks(places, window, block)[call]
  # The kernel's grid is as wide as the maximum number of blocks, because even
  # steps that compute nothing take time.
  longest = max(places.num_prompt, places.num_completion)
  axis, width = 1, -(-(longest - 1) // block) + 1
  if call == _PROMPT:
    width = -(-places.num_prompt // block) + 2
  if for_keys:
    axis, width = 0, width if call == _OWN else seen_QxS.shape[0]
  order = jnp.argsort(~seen_QxS, axis=axis, stable=True)
  kept = lambda x: jax.lax.slice_in_dim(
      x, 0, min(width, x.shape[axis]), axis=axis
  )
  order, seen = kept(order), kept(jnp.sort(~seen_QxS, axis=axis)) == 0
  # The function compares this number with a key's index: it is the index that a
  # token at the query's position would have in the prompt's sequence.
  numbers = places.index
  if call == _PROMPT:
    numbers = places.prompt_start + places.position
  return info_lib.MaskInfo(
      data_next=jnp.where(seen, order, 0).astype(jnp.int32)[None],
      mask_next=None,
      block_mask=seen.astype(jnp.int32)[None],
      partial_mask_blocks=None,
      q_sequence=numbers if has_function else None,
  )


def computed_blocks(
    places: packed.Places, window: int, block: int
) -> tuple[jax.Array, jax.Array]:
  """Returns the blocks [..., Q, S] bool that the two calls compute.

  Args:
    places: [..., L], description of each place in the rows.
    window: sliding window; 0 is none.
    block: queries and keys per block.
  """
  cut = lambda x: x.reshape(*x.shape[:-1], -1, block)
  blocks = jax.tree.map(cut, places)
  shape = (*blocks.group.shape[:-1], blocks.group.shape[-2])
  of_q, of_k = (
      jax.lax.broadcasted_iota(jnp.int32, shape, len(shape) - axis)
      for axis in (2, 1)
  )
  between = lambda first, last: (of_k >= first[..., None]) & (
      of_k <= last[..., None]
  )
  _, _, start, num_own = packed.seen_blocks(blocks, window, block)
  own = between(start, start + num_own - 1)
  # Blocks of the first completion's prompt, and of groups that begin in this
  # block.
  is_query = blocks.owner > 0
  at = jnp.argmax(is_query, axis=-1)[..., None]
  first = lambda x: jnp.take_along_axis(x, at, axis=-1)
  is_same = is_query & (blocks.group == first(blocks.group))
  nearest = jnp.min(
      jnp.where(is_same, blocks.position, 2**30), axis=-1, keepdims=True
  )
  begin = first(blocks.prompt_start)
  if window:
    begin += jnp.maximum(nearest - window + 1, 0)
  last = first(blocks.prompt_stop) - 1
  has_first = is_query.any(axis=-1, keepdims=True) & (begin <= last)
  prompt = between(begin[..., 0] // block, last[..., 0] // block) & has_first
  has_other = (is_query & ~is_same).any(axis=-1, keepdims=True)
  return own, prompt | (has_other & (of_q == of_k))
