# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Plain attention of packed rows (`packed.py`).

A query sees its own prompt or completion up to itself; a completion's query
also sees the prompt. Short rows are computed at once: each block of queries
scores the keys just before it and one prompt. Long rows are computed block by
block: keys that no query sees are skipped, and only one block of scores is held
  at a
time (Dao et al. 2022, arXiv:2205.14135, algorithms 1 and 4).

Axes: R rows, L places of a row, Q queries, S keys, G key-value heads, M query
heads per key-value head, Dh head width.
"""

from collections.abc import Callable
import functools
import math
from typing import Any

import jax
from jax import ad_checkpoint
import jax.numpy as jnp

from tba_jax.models.net import attention
from tba_jax.models.net import layers
from tba_jax.models.net import packed

# Longest row whose scores are all held at once.
WHOLE = 512
# Queries and keys per block. On a CPU, blocks should fit into its cache;
# elsewhere larger blocks are faster, but leave more of a short sequence's
# blocks empty.
BLOCK = {"cpu": 128, "short": 256, "long": 512}
# Prompts or completions with more tokens count as long.
_LONG = 16384

_product = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)


def attend_rows(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    queries: packed.Places,
    keys: packed.Places,
    window: int,
    platform: str,
    sinks: jax.Array | None = None,
) -> jax.Array:
  """Returns attention of packed rows.

  Args:
    q: [R, Q, G, M, Dh].
    k: [R, L, G, Dh].
    v: [R, L, G, Dh].
    queries: places of the queries, which are adjacent in each row.
    keys: places of whole rows.
    window: sliding window of positions; 0 is none.
    platform: name of the backend, such as "cpu".
    sinks: [G, M], logits of the heads' sinks; None if there are none.

  Returns:
    [R, Q, G, M, Dh]; finite but meaningless at places without a token.
  """
  if k.shape[1] > WHOLE:
    return _attend_blocks(q, k, v, sinks, queries, keys, window, platform)
  size = _near_size(keys)
  if q.shape[1] == k.shape[1] and size:
    return _attend_near(q, k, v, sinks, keys, window, size)
  return attention.attend_self(
      q, k, v, packed.sees(queries, keys, window), sinks
  )


def _near_size(places: packed.Places) -> int:
  """Returns the queries per block of `_attend_near`, 0 if it saves nothing.

  This is at least the number of earlier keys that a query sees in its own
  prompt or completion.
  """
  L = places.index.shape[1]
  before = max(places.num_prompt, places.num_completion) - 1
  size = -(-L // max(L // max(before, 1), 1))
  return size if 2 * size + places.num_prompt - 1 < L else 0


def _attend_near(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    sinks: jax.Array | None,
    places: packed.Places,
    window: int,
    size: int,
) -> jax.Array:
  """Returns `attend_rows`, where each block of queries attends to a few keys.

  These keys are the prompt of the block's first query, the block itself and the
  block before it. All other sequences in the block begin within it.
  """
  (R, L), P = places.index.shape, places.num_prompt
  q, k, v, places = _cut((q, k, v, places), size)
  first = jax.tree.map(lambda x: x[:, :, :1], places)
  prompts = jnp.maximum(first.prompt_start, 0) + jnp.arange(P - 1)[None, None]
  indices = first.index - size + jnp.arange(2 * size)[None, None]
  # Prompt tokens that are also near must count only once.
  is_key = [prompts < first.index - size, indices >= 0]
  is_key = jnp.concatenate(is_key, axis=2)[:, :, None]

  def seen_by_block(x: jax.Array) -> jax.Array:
    """Gathers [R, blocks, P - 1 + 2 size, ...] from [R, blocks, size, ...]."""
    rows = x.reshape(R, -1, *x.shape[3:])
    far = jax.vmap(lambda row, at: row.at[at].get(mode="clip"))(rows, prompts)
    before = jnp.pad(x, ((0, 0), (1, 0)) + ((0, 0),) * (x.ndim - 2))[:, :-1]
    return jnp.concatenate([far, before, x], axis=2)

  k, v, keys = jax.tree.map(seen_by_block, (k, v, places))
  seen = packed.sees(places, keys, window) & is_key
  blocks = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), (q, k, v, seen))
  out = attention.attend_self(*blocks, sinks)
  return out.reshape(R, -1, *out.shape[2:])[:, :L]


def block_size(places: packed.Places, platform: str) -> int:
  """Returns the number of queries and keys per block."""
  if platform == "cpu":
    return BLOCK["cpu"]
  longest = max(places.num_prompt, places.num_completion)
  return BLOCK["long" if longest > _LONG else "short"]


@functools.partial(jax.custom_vjp, nondiff_argnums=(6, 7))
def _attend_blocks(q, k, v, sinks, queries, keys, window, platform):
  """Returns `attend_rows` by blocks of queries and keys."""
  return _forward(q, k, v, sinks, queries, keys, window, platform)[0]


def _over_rows(platform: str) -> Callable[..., Any]:
  """Returns `jax.vmap`, or its equivalent that runs rows one by one."""
  # One row keeps a CPU busy, and skips the blocks that it does not see itself.
  one_by_one = lambda fn: functools.partial(jax.lax.map, fn)
  return one_by_one if platform == "cpu" else jax.vmap


def _forward(q, k, v, sinks, queries, keys, window, platform):
  """Returns the result, and the residuals for its gradient."""
  size, sinks = block_size(keys, platform), _per_query(sinks)

  def of_block(k, v, keys, block):
    q, queries = block
    Q, G, M, Dh = q.shape

    def add(n, carry):
      total, shift, out = carry
      scores, _, (_, v_S) = _scores(q, k, v, queries, keys, window, size, n)
      new = jnp.maximum(shift, scores.max(axis=-1))
      weights, scale = jnp.exp(scores - new[..., None]), jnp.exp(shift - new)
      added = _product("gmqs,sgd->gmqd", weights.astype(v.dtype), v_S)
      out = out * scale[..., None] + added
      return total * scale + weights.sum(axis=-1), new, out

    zeros = jnp.zeros((G, M, Q), jnp.float32)
    total, shift, out = jax.lax.fori_loop(
        0,
        _count(queries, window, size),
        add,
        (zeros, zeros + attention.MASKED_SCORE, jnp.zeros((G, M, Q, Dh))),
    )
    # Blocks without a token see no keys.
    total = jnp.where(total > 0, total, 1.0)
    out, logsumexp = attention.join_sinks(
        out / total[..., None], shift + jnp.log(total), sinks
    )
    out = jnp.transpose(out, (2, 0, 1, 3))
    return out.astype(q.dtype), logsumexp

  def of_row(row):
    k, v, keys, *blocks = row
    return jax.lax.map(functools.partial(of_block, k, v, keys), tuple(blocks))

  rows = *_whole((k, v, keys), size), *_cut((q, queries), size)
  out, logsumexp = _over_rows(platform)(of_row)(rows)
  # Named so that `train.remat="dots"` keeps them.
  named = lambda x: ad_checkpoint.checkpoint_name(x, layers.ATTENTION)
  out, logsumexp = named(_joined(out, q.shape[1])), named(logsumexp)
  return out, (q, k, v, sinks, queries, keys, out, logsumexp)


def _backward(window, platform, saved, grad):
  """Returns the gradients of queries, keys, values and sinks."""
  q, k, v, sinks, queries, keys, out, logsumexp = saved
  size = block_size(keys, platform)

  def of_block(k, v, keys, sums, block):
    q, out, grad, queries, logsumexp = block
    total = _product("qgmd,qgmd->gmq", out, grad)

    def add(n, carry):
      grad_q, grad_k, grad_v = carry
      scores, start, (k_S, v_S) = _scores(
          q, k, v, queries, keys, window, size, n
      )
      weights = jnp.exp(scores - logsumexp[..., None])
      of_weights = _product("qgmd,sgd->gmqs", grad, v_S)
      of_scores = weights * (of_weights - total[..., None])
      of_scores = (of_scores / math.sqrt(q.shape[-1])).astype(q.dtype)

      def put(sums, new):
        old = jax.lax.dynamic_slice_in_dim(sums, start, size)
        return jax.lax.dynamic_update_slice_in_dim(sums, old + new, start, 0)

      return (
          grad_q + _product("gmqs,sgd->qgmd", of_scores, k_S),
          put(grad_k, _product("gmqs,qgmd->sgd", of_scores, q)),
          put(
              grad_v, _product("gmqs,qgmd->sgd", weights.astype(q.dtype), grad)
          ),
      )

    grad_q, *sums = jax.lax.fori_loop(
        0,
        _count(queries, window, size),
        add,
        (jnp.zeros(q.shape, jnp.float32), *sums),
    )
    of_sinks = attention.sinks_gradient(total, logsumexp, sinks)
    return tuple(sums), (grad_q.astype(q.dtype), of_sinks)

  def of_row(row):
    k, v, keys, *blocks = row
    zeros = jnp.zeros(k.shape, jnp.float32), jnp.zeros(v.shape, jnp.float32)
    block = functools.partial(of_block, k, v, keys)
    sums, (grad_q, of_sinks) = jax.lax.scan(block, zeros, tuple(blocks))
    return grad_q, of_sinks, *sums

  blocks = _cut((q, out, grad.astype(q.dtype), queries), size)
  grad_q, of_sinks, grad_k, grad_v = _over_rows(platform)(of_row)(
      (*_whole((k, v, keys), size), *blocks, logsumexp)
  )
  own = lambda x, like: x[:, : like.shape[1]].astype(like.dtype)
  grad_q = _joined(grad_q, q.shape[1])
  if sinks is not None:
    of_sinks = of_sinks.sum(axis=(0, 1))[..., 0]
  return grad_q, own(grad_k, k), own(grad_v, v), of_sinks, None, None


_attend_blocks.defvjp(_forward, _backward)


def _per_query(sinks: jax.Array | None) -> jax.Array | None:
  """Returns sinks [G, M] as float32 [G, M, 1]; None stays None."""
  return None if sinks is None else sinks.astype(jnp.float32)[..., None]


def _count(queries: packed.Places, window: int, size: int) -> jax.Array:
  _, num_prompt, _, num_own = packed.seen_blocks(queries, window, size)
  return num_prompt + num_own


def _scores(q, k, v, queries, keys, window, size, n):
  """Returns [G, M, Q, S] scores against the nth block of keys, and the block.

  The block is given as its first index, and its keys and values.
  """
  prompt, num_prompt, start, _ = packed.seen_blocks(queries, window, size)
  first = size * jnp.where(n < num_prompt, prompt + n, start + n - num_prompt)
  block = jax.tree.map(
      lambda x: jax.lax.dynamic_slice_in_dim(x, first, size), (k, v, keys)
  )
  k_S, v_S, keys = block
  seen_QxS = packed.sees(queries, keys, window)
  scores = _product("qgmd,sgd->gmqs", q, k_S) / math.sqrt(q.shape[-1])
  scores = jnp.where(seen_QxS[None, None], scores, attention.MASKED_SCORE)
  return scores, first, (k_S, v_S)


def _whole(rows: Any, size: int) -> Any:
  """Returns arrays [R, L, ...] with L padded to a multiple of `size`."""

  def pad(x: jax.Array) -> jax.Array:
    padding = ((0, 0), (0, -x.shape[1] % size)) + ((0, 0),) * (x.ndim - 2)
    # Fields of places have two axes, where group -1 means no token.
    return jnp.pad(x, padding, constant_values=-1 if x.ndim == 2 else 0)

  return jax.tree.map(pad, rows)


def _cut(rows: Any, size: int) -> Any:
  """Returns arrays [R, Q, ...] as [R, blocks, size, ...], padded."""
  cut = lambda x: x.reshape(x.shape[0], -1, size, *x.shape[2:])
  return jax.tree.map(cut, _whole(rows, size))


def _joined(blocks: jax.Array, length: int) -> jax.Array:
  """Returns [R, blocks, size, ...] as [R, length, ...]."""
  whole = blocks.reshape(blocks.shape[0], -1, *blocks.shape[3:])
  return whole[:, :length]
