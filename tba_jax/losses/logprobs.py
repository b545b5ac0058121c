# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Log-probs of tokens, entropy, and logits in chunks.

All results are float32, in nats. Policy and reference use the same functions,
so their log-ratio is exactly 0 where their logits are equal. Leading axes `...`
are [B, K] in training and [R] in the sampler. Temperatures are above 0.

Axes: B prompts, K completions, P prompt tokens, T completion tokens, R rows, L
places of a row, D width, V vocabulary, N layers, A experts of a token, C tokens
that truncated sampling keeps.
"""

from collections.abc import Callable
import functools
from typing import Any

import chex
import jax
import jax.numpy as jnp

from tba_jax import types
from tba_jax.models.net import packed
from tba_jax.models.net import sequence
from tba_jax.models.net import unpadded

PyTree = types.PyTree

# Maximum number of logits on a device at a time. In float32: 128 MiB on a CPU,
# where larger chunks are no faster, and 1 GiB on an accelerator, which is 2,048
# tokens with a vocabulary of 128k.
MAX_LOGITS = {"cpu": 2**25, "other": 2**28}
# Maximum chunks per micro-batch and minimum tokens per chunk. Chunks without
# tokens to predict are skipped.
# Params that `unembed` does not read; a tied head is the embedding.
_NOT_OF_HEAD = ("blocks", "layer_embed", "layer_map", "layer_map_norm")
_NUM_CHUNKS, _LEAST_CHUNK = 16, 128


def token_logprobs(
    logits: jax.Array, tokens: jax.Array, *, temperature: float
) -> jax.Array:
  """Returns [...] float32, the log-prob of each token.

      log π(y_t | x, y_<t) = z_{y_t} - log Σ_v exp z_v,  z = logits / τ

  Args:
    logits: [..., V] float, the logits that predict `tokens`.
    tokens: [...] int32 in [0, V).
    temperature: τ, of token sampling.
  """
  chex.assert_shape(tokens, logits.shape[:-1])
  scaled = logits.astype(jnp.float32) / temperature
  # Compare and sum instead of gather: the gradient is elementwise, while that
  # of a gather is a scatter, which is slow on every backend.
  vocab = jax.lax.broadcasted_iota(jnp.int32, scaled.shape, scaled.ndim - 1)
  chosen = jnp.sum(jnp.where(vocab == tokens[..., None], scaled, 0.0), axis=-1)
  return chosen - jax.nn.logsumexp(scaled, axis=-1)


def log_softmax(logits: jax.Array, *, temperature: float) -> jax.Array:
  """Returns [..., V] float32, log softmax(logits / temperature), nats."""
  return jax.nn.log_softmax(logits.astype(jnp.float32) / temperature)


def keep_only(
    logits: jax.Array, tokens: jax.Array, kept: jax.Array
) -> jax.Array:
  """Returns logits that are -inf but for some tokens.

  Log-probs of the result are relative to the tokens that the sampler kept, as
  if no others existed. Source: the sampling mask of DeepSeek-V3.2
  (arXiv:2512.02556), §3.1.

  Args:
    logits: [..., V] float.
    tokens: [...] int32, sampled tokens, which are always kept.
    kept: [..., C] int32, ids to keep; negative ones are none.
  """
  V = logits.shape[-1]
  ids = jnp.concatenate([kept, tokens[..., None]], axis=-1)
  ids = jnp.where(ids < 0, V, ids).reshape(-1, ids.shape[-1])
  # A scatter of booleans, which has no gradient.
  rows = jnp.arange(len(ids))[:, None]
  is_kept = jnp.zeros((len(ids), V), bool).at[rows, ids].set(True, mode="drop")
  return jnp.where(is_kept.reshape(logits.shape), logits, -jnp.inf)


def entropy(logits: jax.Array, *, temperature: float) -> jax.Array:
  """Returns [...] float32, the entropy of the tempered next-token distribution.

      H = -Σ_v p_v log p_v,  p = softmax(logits / temperature)

  Args:
    logits: [..., V] float; -inf for tokens that cannot occur.
  """
  logprobs = log_softmax(logits, temperature=temperature)
  probs = jnp.exp(logprobs)
  # 0 log 0 = 0, also in the gradient.
  finite = jnp.where(probs > 0, logprobs, 0.0)
  return -jnp.sum(probs * finite, axis=-1)


def map_micro_batches(
    fn: Callable[[jax.Array], PyTree], rows: types.Rows, others: PyTree
) -> PyTree:
  """Returns `fn` of all non-empty micro-batches, gathered by completion token.

  With several micro-batches, the result has no gradient.

  Args:
    fn: (token_indices_RxL of a micro-batch) -> pytree of [R, L, ...], a value
      for the token that each place predicts.
    others: pytree of [B, K, T, ...], values of tokens that no place predicts.
  """
  R, N, L = rows.token_indices.shape

  def add(n: jax.Array | int, values: PyTree) -> PyTree:
    out = fn(rows.token_indices[:, n])
    return jax.tree.map(
        lambda x, before: packed.merge(x, rows, n, before), out, values
    )

  if N == 1:
    return add(0, others)
  return jax.lax.fori_loop(0, packed.num_micro_batches(rows), add, others)


def map_logits(
    model: Any,
    params: PyTree,
    prompt_tokens_BxP: jax.Array,
    prompt_mask_BxP: jax.Array,
    completion_tokens_BxKxT: jax.Array,
    fn: Callable[[jax.Array, jax.Array], PyTree],
    *,
    token_indices_RxL: jax.Array | None = None,
    max_logits: int | None = None,
    targets_BxKxT: jax.Array | None = None,
    routes: types.Routes | None = None,
    with_routes: bool = False,
    kept_BxKxTxC: jax.Array | None = None,
) -> PyTree:
  """Returns `fn` of the logits that predict each completion token.

  In float32, the logits of 16k tokens with a vocabulary of 150k take 9 GiB, and
  their gradient another 9 GiB. Beyond `max_logits`, logits are computed in
  chunks of tokens and recomputed in the backward pass.

  Args:
    model: a `models.transformer.Model`.
    prompt_tokens_BxP: [B, P] int32, left-padded.
    prompt_mask_BxP: [B, P], 1 on prompt tokens.
    completion_tokens_BxKxT: [B, K, T] int32, right-padded.
    fn: (logits [..., V], tokens [...]) -> pytree of [...]; each entry depends
      only on the logits and the token of its position.
    token_indices_RxL: a micro-batch of `types.Rows.token_indices`; None
      computes the whole padded batch.
    max_logits: maximum number of logits on a device at a time, at least one
      token's; None uses `MAX_LOGITS`.
    targets_BxKxT: tokens passed to `fn` in place of the completion's.
    routes: experts to use; None lets the routers choose.
    with_routes: whether to also return the experts that predict each token.
    kept_BxKxTxC: tokens that truncated sampling kept: `fn` gets -inf for all
      others, see `keep_only`; None keeps all.

  Returns:
    A pytree of [B, K, T], or of [R, L] for packed rows, with arbitrary values
    at places that predict no completion token. With `with_routes`, a pair of
    the pytree and the experts, [B, K, T, N, A] or [R, L, N, A].
  """
  tokens = completion_tokens_BxKxT
  inputs = (params, prompt_tokens_BxP, prompt_mask_BxP, tokens)
  others = {} if routes is None else {"routes": routes}
  if token_indices_RxL is not None:
    others["token_indices_RxL"] = token_indices_RxL
  if with_routes:
    stream, chosen = model.stream_and_routes(*inputs, **others)
  else:
    stream = model.completion_stream(*inputs, **others)
  if targets_BxKxT is not None:
    tokens = targets_BxKxT
  if token_indices_RxL is not None:
    P = prompt_tokens_BxP.shape[1]
    counts = token_indices_RxL >= len(tokens) * P
    tokens = packed.predicted(token_indices_RxL, tokens, P)
    kept = kept_BxKxTxC
    if kept is not None:
      kept = packed.predicted(token_indices_RxL, kept, P)
    out = _map_stream(
        model, params, stream, tokens, fn, max_logits, counts, kept
    )
  else:
    B, K, T = tokens.shape
    kept = kept_BxKxTxC
    if kept is not None:
      kept = kept.reshape(B, K * T, -1)
    out = _map_stream(
        *(model, params, stream.reshape(B, K * T, -1)),
        *(tokens.reshape(B, K * T), fn, max_logits, None, kept),
    )
    out = jax.tree.map(lambda x: x.reshape(B, K, T), out)
  return (out, chosen) if with_routes else out


def chunk_length(num_tokens: int, most: int) -> int:
  """Returns the number of tokens in a chunk of a device's share of rows."""
  return min(most, max(_LEAST_CHUNK, -(-num_tokens // _NUM_CHUNKS)))


def _map_stream(
    model: Any,
    params: PyTree,
    stream_RxLxD: jax.Array,
    tokens_RxL: jax.Array,
    fn: Callable[[jax.Array, jax.Array], PyTree],
    max_logits: int | None,
    counts_RxL: jax.Array | None = None,
    kept_RxLxC: jax.Array | None = None,
) -> PyTree:
  """Returns [R, L], `map_logits` of a stream.

  Chunks compute only the tokens in `counts_RxL`; None computes all.
  """

  def apply(logits: jax.Array, tokens: jax.Array, *kept: jax.Array) -> PyTree:
    return fn(keep_only(logits, tokens, *kept) if kept else logits, tokens)

  others = () if kept_RxLxC is None else (kept_RxLxC,)
  parts = sequence.current_split()
  R, L, _ = stream_RxLxD.shape
  V = jax.eval_shape(model.unembed, params, stream_RxLxD).shape[-1]
  max_logits = max_logits or MAX_LOGITS["other" if parts.accelerated else "cpu"]
  length = max(1, max_logits // V)
  if -(-R * L // parts.num_parts) <= length:
    return apply(model.unembed(params, stream_RxLxD), tokens_RxL, *others)

  # Each device has its own copy of the head and sums its gradient locally, in
  # float32, so both pass between devices once, not once per chunk.
  head = {n: leaf for n, leaf in params.items() if n not in _NOT_OF_HEAD}
  copies = jax.tree.map(
      # `unembed` casts only matrices to the stream's dtype.
      lambda x: parts.copy_to_each(
          x.astype(stream_RxLxD.dtype) if x.ndim > 1 else x
      ),
      jax.lax.stop_gradient(head),
  )
  sums = jax.tree.map(lambda x: parts.copy_to_each(_at_least_float32(x)), head)

  def read(head: PyTree, stream: jax.Array, *inputs: jax.Array) -> PyTree:
    return apply(model.unembed({**params, **head}, stream), *inputs)

  if parts.num_parts > 1:
    read = jax.vmap(read)
  padding = ((0, 0), (0, -L % parts.count))
  tokens = parts.cut_to_each(jnp.pad(tokens_RxL, padding))
  wide = lambda x: parts.cut_to_each(jnp.pad(x, (*padding, (0, 0))))
  stream, *others = map(wide, (stream_RxLxD, *others))
  axis = tokens.ndim - 1  # Token axis, after the axis of parts, if any.
  own = tokens.shape[axis]
  count, order = own, None
  if counts_RxL is not None:
    # Put counted tokens first, and skip chunks without any.
    length = chunk_length(own, length)
    counts = parts.cut_to_each(jnp.pad(counts_RxL, padding))
    count = jnp.max(jnp.sum(counts, axis=axis))
    places = jnp.argsort(~counts, axis=axis, stable=True).reshape(-1, own)
    order = unpadded.find(places, own)
    flat = lambda x: x.reshape(-1, own, *x.shape[axis + 1 :])
    move = lambda fn, x: fn(flat(x), order).reshape(x.shape)
    stream, tokens, *others = (
        move(unpadded.take, x) for x in (stream, tokens, *others)
    )
  num_chunks = -(-own // length)

  def cut(x: jax.Array) -> jax.Array:
    padding = [(0, 0)] * x.ndim
    padding[axis] = (0, num_chunks * length - own)
    shape = (*x.shape[:axis], num_chunks, length, *x.shape[axis + 1 :])
    return jnp.moveaxis(jnp.pad(x, padding).reshape(shape), axis, 0)

  def join(x: jax.Array) -> jax.Array:
    x = jnp.moveaxis(x, 0, axis)
    x = x.reshape(*x.shape[:axis], num_chunks * length)[..., :own]
    x = x if order is None else move(unpadded.put, x)
    return parts.join_from_each(x, (R, L + padding[1][1]))[:, :L]

  @jax.checkpoint
  def chunk(chunk: tuple[jax.Array, ...]) -> PyTree:
    n, *inputs = chunk
    compute = lambda: read(jax.tree.map(_gradient_to, copies, sums), *inputs)
    if order is None:
      return compute()
    none = lambda: jax.tree.map(
        lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(compute)
    )
    return jax.lax.cond(n * length < count, compute, none)

  indices = jnp.arange(num_chunks, dtype=jnp.int32)
  out = jax.lax.map(chunk, (indices, *map(cut, (stream, tokens, *others))))
  return jax.tree.map(join, out)


def _at_least_float32(x: jax.Array) -> jax.Array:
  return x.astype(jnp.promote_types(x.dtype, jnp.float32))


@jax.custom_vjp
def _gradient_to(x: jax.Array, sum_of: jax.Array) -> jax.Array:
  """Returns `x`; its gradient goes to `sum_of`, in that array's dtype."""
  del sum_of
  return x


_gradient_to.defvjp(
    lambda x, sum_of: (x, jnp.zeros((), sum_of.dtype)),
    lambda like, grad: (None, grad.astype(like.dtype)),
)


def completion_logprobs(
    model: Any,
    params: PyTree,
    prompt_tokens_BxP: jax.Array,
    prompt_mask_BxP: jax.Array,
    completion_tokens_BxKxT: jax.Array,
    *,
    temperature: float,
    rows: types.Rows | None = None,
    routes: types.Routes | None = None,
    kept_BxKxTxC: jax.Array | None = None,
) -> jax.Array:
  """Returns [B, K, T] float32, log π of each completion token, in nats.

  Policy, reference and `score` all use this function, so equal params, routes
  and kept tokens give equal log-probs. Tokens missing from `rows` get 0.
  """
  inputs = params, prompt_tokens_BxP, prompt_mask_BxP, completion_tokens_BxKxT
  read = lambda logits, tokens: token_logprobs(
      logits, tokens, temperature=temperature
  )
  others = {"routes": routes, "kept_BxKxTxC": kept_BxKxTxC}
  run = functools.partial(map_logits, model, *inputs, read, **others)
  if rows is None:
    return run()
  zeros = jnp.zeros(completion_tokens_BxKxT.shape, jnp.float32)
  return map_micro_batches(
      lambda indices_RxL: run(token_indices_RxL=indices_RxL), rows, zeros
  )
