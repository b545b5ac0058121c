# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Attention of packed rows by kernels for GPUs, in Triton.

A query sees two ranges of keys: its own prompt or completion up to itself, and
its prompt. Each program handles one block of queries, and computes only the
blocks of keys that at least one of its queries sees. For the gradient of keys
and values, each program handles one block of keys (Dao 2023, arXiv:2307.08691,
§3).

cuDNN's packed layout, which JAX has in a private module, would need two calls
for a completion and its prompt, a copy of the keys for each query head, and
compute capability 9.0; it has no sliding window.

Axes: R rows, L places of a row, G key-value heads, M query heads per key-value
head, H all query heads, Dh head width, N blocks of a row.
"""

import functools
import math

import jax
from jax import ad_checkpoint
import jax.numpy as jnp

from tba_jax.models.net import attention
from tba_jax.models.net import layers
from tba_jax.models.net import packed

# Queries or keys per block.
BLOCK = 64
_LEAST_WIDTH = 16  # Minimum width of a matrix product on a GPU.
_WIDE = 128  # Wider heads get twice the threads.
# Kernels index the elements of an array with 32 bits.
MAX_SIZE = 2**31 - 1


def attend(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    places: packed.Places,
    *,
    window: int,
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
    sinks: [G, M], logits of the heads' sinks; None if there are none.
    interpret: whether to run on a CPU, for tests.
  """
  R, L, *_, Dh = q.shape
  width = max(_LEAST_WIDTH, 1 << (Dh - 1).bit_length())
  rest = -L % BLOCK
  heads = lambda x: jnp.pad(
      x.reshape(R, L, -1, Dh), ((0, 0), (0, rest), (0, 0), (0, width - Dh))
  )
  places = jax.tree.map(
      lambda x: jnp.pad(x, ((0, 0), (0, rest)), constant_values=-1), places
  )
  rows = *map(heads, (q, k, v)), places
  if sinks is not None:
    sinks = sinks.reshape(1, -1, 1)
  run = lambda rows: _attend(*rows, sinks, window, 1 / math.sqrt(Dh), interpret)
  most = max(1, MAX_SIZE // (rows[0].size // R))
  at_once = max(n for n in range(1, R + 1) if R % n == 0 and n <= most)
  if at_once == R:
    out = run(rows)
  else:
    cut = lambda x: x.reshape(-1, at_once, *x.shape[1:])
    out = jax.lax.map(run, jax.tree.map(cut, rows)).reshape(rows[0].shape)
  return out[:, :L, :, :Dh].reshape(q.shape)


@functools.partial(jax.custom_vjp, nondiff_argnums=(5, 6, 7))
def _attend(q, k, v, places, sinks, window, scale, interpret):
  """Returns attention [R, L, H, Dh] for queries of that shape."""
  return _forward(q, k, v, places, sinks, window, scale, interpret)[0]


def _forward(q, k, v, places, sinks, window, scale, interpret):
  """Returns the result, and the residuals for its gradient."""
  from jax.experimental import pallas as pl
  from jax.experimental.pallas import triton as plgpu

  def kernel(spans_ref, runs_ref, q_ref, k_ref, v_ref, out_ref, sums_ref):
    i, q = pl.program_id(0), q_ref[...]
    spans = [spans_ref[n, :] for n in range(3)]

    def add(n, carry):
      total, shift, out = carry
      at = pl.ds(_nth_block(runs_ref, n), BLOCK)
      scores = plgpu.dot(q, k_ref[at, :], trans_b=True) * scale
      seen = _sees(spans, i * BLOCK, at.start)
      scores = jnp.where(seen, scores, attention.MASKED_SCORE)
      new = jnp.maximum(shift, scores.max(axis=1))
      weights = jnp.where(seen, jnp.exp(scores - new[:, None]), 0.0)
      fall = jnp.exp(shift - new)
      added = plgpu.dot(weights.astype(v_ref.dtype), v_ref[at, :])
      total = total * fall + weights.sum(axis=1)
      return total, new, out * fall[:, None] + added

    zeros = jnp.zeros(BLOCK, jnp.float32)
    total, shift, out = jax.lax.fori_loop(
        0,
        runs_ref[1] + runs_ref[3],
        add,
        (
            zeros,
            zeros + attention.MASKED_SCORE,
            jnp.zeros(q.shape, zeros.dtype),
        ),
    )
    # Places without a token see no keys.
    total = jnp.where(total > 0, total, 1.0)
    out_ref[...] = (out / total[:, None]).astype(out_ref.dtype)
    sums_ref[...] = shift + jnp.log(total)

  specs = _specs(q.shape, k.shape)
  R, L, H, _ = q.shape
  out, logsumexp = _call(
      kernel,
      grid=(L // BLOCK, R, H),
      in_specs=[specs[name] for name in ("spans", "runs", "q", "all", "all")],
      out_specs=[specs["q"], specs["sums"]],
      out_shape=[q, jax.ShapeDtypeStruct((R, H, L), jnp.float32)],
      interpret=interpret,
      name="packed_rows_forward",
  )(_spans(places, window), seen_runs(places, window), q, k, v)
  if sinks is not None:
    # In the axis order of the result.
    out, logsumexp = attention.join_sinks(
        out, jnp.swapaxes(logsumexp, 1, 2), jnp.swapaxes(sinks, 1, 2)
    )
    logsumexp = jnp.swapaxes(logsumexp, 1, 2)
  # Named so that `train.remat="dots"` keeps them.
  named = lambda x: ad_checkpoint.checkpoint_name(x, layers.ATTENTION)
  out, logsumexp = named(out), named(logsumexp)
  return out, (q, k, v, places, sinks, out, logsumexp)


def _backward(window, scale, interpret, saved, grad):
  """Returns the gradients of queries, keys, values and sinks."""
  from jax.experimental import pallas as pl
  from jax.experimental.pallas import triton as plgpu

  q, k, v, places, sinks, out, logsumexp = saved
  (R, L, H, _), G = q.shape, k.shape[2]
  grad = grad.astype(q.dtype)
  product = jnp.einsum(
      "rlhd,rlhd->rhl", out, grad, preferred_element_type=jnp.float32
  )

  def of_queries(
      spans_ref, runs_ref, q_ref, k_ref, v_ref, grad_ref, sums_ref, product_ref,
      grad_q_ref,
  ):  # fmt: skip
    i, q, grad = pl.program_id(0), q_ref[...], grad_ref[...]
    sums, product = sums_ref[...][:, None], product_ref[...][:, None]
    spans = [spans_ref[n, :] for n in range(3)]

    def add(n, total):
      at = pl.ds(_nth_block(runs_ref, n), BLOCK)
      k = k_ref[at, :]
      scores = plgpu.dot(q, k, trans_b=True) * scale
      seen = _sees(spans, i * BLOCK, at.start)
      weights = jnp.where(seen, jnp.exp(scores - sums), 0.0)
      of_weights = plgpu.dot(grad, v_ref[at, :], trans_b=True)
      of_scores = weights * (of_weights - product) * scale
      return total + plgpu.dot(of_scores.astype(k.dtype), k)

    total = jnp.zeros(q.shape, jnp.float32)
    total = jax.lax.fori_loop(0, runs_ref[1] + runs_ref[3], add, total)
    grad_q_ref[...] = total.astype(grad_q_ref.dtype)

  def of_keys(
      spans_ref, last_ref, q_ref, k_ref, v_ref, grad_ref, sums_ref, product_ref,
      grad_k_ref, grad_v_ref,
  ):  # fmt: skip
    j, k, v = pl.program_id(0), k_ref[...], v_ref[...]

    def of_head(m, carry):

      def add(i, carry):
        of_k, of_v = carry
        at = pl.ds(i * BLOCK, BLOCK)
        q, grad = q_ref[at, m, :], grad_ref[at, m, :]
        scores = plgpu.dot(q, k, trans_b=True) * scale
        spans = [spans_ref[n, at] for n in range(3)]
        seen = _sees(spans, i * BLOCK, j * BLOCK)
        weights = jnp.exp(scores - sums_ref[m, at][:, None])
        weights = jnp.where(seen, weights, 0.0)
        of_weights = plgpu.dot(grad, v, trans_b=True)
        of_scores = of_weights - product_ref[m, at][:, None]
        of_scores = weights * of_scores * scale
        of_k += plgpu.dot(of_scores.astype(q.dtype), q, trans_a=True)
        of_v += plgpu.dot(weights.astype(q.dtype), grad, trans_a=True)
        return of_k, of_v

      return jax.lax.fori_loop(j, last_ref[...] + 1, add, carry)

    zeros = jnp.zeros(k.shape, jnp.float32)
    of_k, of_v = jax.lax.fori_loop(0, H // G, of_head, (zeros, zeros))
    grad_k_ref[...] = of_k.astype(grad_k_ref.dtype)
    grad_v_ref[...] = of_v.astype(grad_v_ref.dtype)

  specs = _specs(q.shape, k.shape)
  spans, runs = _spans(places, window), seen_runs(places, window)
  inputs = q, k, v, grad, logsumexp, product
  names = "spans", "runs", "q", "all", "all", "q", "sums", "sums"
  grad_q = _call(
      of_queries,
      grid=(L // BLOCK, R, H),
      in_specs=[specs[name] for name in names],
      out_specs=specs["q"],
      out_shape=q,
      interpret=interpret,
      name="packed_rows_queries",
  )(spans, runs, *inputs)
  names = "whole spans", "last", "heads", "k", "k", "heads", *["whole sums"] * 2
  grad_k, grad_v = _call(
      of_keys,
      grid=(L // BLOCK, R, G),
      in_specs=[specs[name] for name in names],
      out_specs=[specs["k"]] * 2,
      out_shape=[k, v],
      interpret=interpret,
      name="packed_rows_keys",
  )(spans, last_seeing(runs), *inputs)
  of_sinks = attention.sinks_gradient(product, logsumexp, sinks)
  return grad_q, grad_k, grad_v, None, of_sinks


_attend.defvjp(_forward, _backward)


def _specs(q_shape, k_shape):
  """Returns the block specs of each array.

  The grid runs over blocks, rows, and query heads or key-value heads.
  """
  from jax.experimental import pallas as pl

  (_, L, H, Dh), G = q_shape, k_shape[2]
  M = H // G
  own = pl.BlockSpec((None, BLOCK, None, Dh), lambda i, r, h: (r, i, h, 0))
  return {
      "q": own,
      "k": own,
      "all": pl.BlockSpec(
          (None, L, None, Dh), lambda i, r, h: (r, 0, jax.lax.div(h, M), 0)
      ),
      "heads": pl.BlockSpec((None, L, M, Dh), lambda i, r, g: (r, 0, g, 0)),
      "sums": pl.BlockSpec((None, None, BLOCK), lambda i, r, h: (r, h, i)),
      "whole sums": pl.BlockSpec((None, M, L), lambda i, r, g: (r, g, 0)),
      "spans": pl.BlockSpec((None, 3, BLOCK), lambda i, r, h: (r, 0, i)),
      "whole spans": pl.BlockSpec((None, 3, L), lambda i, r, g: (r, 0, 0)),
      "runs": pl.BlockSpec((None, 4, None), lambda i, r, h: (r, 0, i)),
      "last": pl.BlockSpec((None, None), lambda i, r, g: (r, i)),
  }


def _call(kernel, *, out_shape, **options):
  from jax.experimental import pallas as pl
  from jax.experimental.pallas import triton as plgpu

  shapes = jax.tree.map(
      lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), out_shape
  )
  width = jax.tree.leaves(shapes)[0].shape[-1]
  return pl.pallas_call(
      kernel,
      out_shape=shapes,
      compiler_params=plgpu.CompilerParams(
          num_warps=4 if width <= _WIDE else 8, num_stages=2
      ),
      **options,
  )


def _spans(places: packed.Places, window: int) -> jax.Array:
  """Returns [R, 3, L] int32, the ranges of keys that each query sees.

  A query sees the keys from the first index up to itself, and those from the
  second index up to, but not including, the third.
  """
  is_real = places.group >= 0
  first = places.start
  begin, stop = places.prompt_start, places.prompt_stop
  if window:
    first = jnp.maximum(first, places.index - window + 1)
    begin += jnp.maximum(places.position - window + 1, 0)
  is_own = is_real & (places.owner > 0)
  # Larger than any key's index.
  first = jnp.where(is_real, first, 2**30)
  return jnp.stack([first, begin, jnp.where(is_own, stop, 0)], axis=1)


def _sees(spans, query, key):
  """Returns [queries, keys] bool for two blocks, given their first indices."""
  first, begin, stop = (x[:, None] for x in spans)
  queries = query + jnp.arange(BLOCK)[:, None]
  keys = key + jnp.arange(BLOCK)[None]
  own = (keys >= first) & (keys <= queries)
  return own | ((keys >= begin) & (keys < stop))


def seen_runs(places: packed.Places, window: int) -> jax.Array:
  """Returns [R, 4, N], `packed.seen_blocks` for each block of queries."""
  cut = lambda x: x.reshape(len(x), -1, BLOCK)
  blocks = jax.tree.map(cut, places)
  runs = packed.seen_blocks(blocks, window, BLOCK)
  return jnp.stack(runs, axis=1).astype(jnp.int32)


def _nth_block(runs_ref, n):
  """Returns the first index of a program's nth block of keys."""
  prompt, num_prompt, own = runs_ref[0], runs_ref[1], runs_ref[2]
  return jnp.where(n < num_prompt, prompt + n, own + n - num_prompt) * BLOCK


def last_seeing(runs: jax.Array) -> jax.Array:
  """Returns [R, N] int32, the last query block that sees each key block."""
  N = runs.shape[-1]
  prompt, num_prompt, own, num_own = jnp.moveaxis(runs[..., None], 1, 0)
  keys = jnp.arange(N)[None, None]
  seen = (keys >= prompt) & (keys < prompt + num_prompt)
  seen |= (keys >= own) & (keys < own + num_own)
  queries = jnp.arange(N, dtype=jnp.int32)[None, :, None]
  return jnp.max(jnp.where(seen, queries, -1), axis=1)
