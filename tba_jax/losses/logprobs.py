# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Log-probs of tokens, entropy, and logits in chunks.

All are float32 and in nats. Policy and reference use the same functions, so
their log-ratio is exactly 0 where their logits are equal. Leading axes `...`
are [B, K] in training and [R] in the sampler. Temperatures are above 0.

Axes: B prompts, K completions, P prompt tokens, T completion tokens, D width, V
vocabulary, N layers, A experts of a token.
"""

from collections.abc import Callable
import math
from typing import Any

import chex
import jax
import jax.numpy as jnp

from tba_jax import types
from tba_jax.models.net import sequence
from tba_jax.models.net import unpadded as kept_lib

PyTree = types.PyTree

# Logits that a device holds at a time: in float32 128 MiB on a CPU, where
# larger chunks are no faster, and 1 GiB on an accelerator, where a chunk is
# then 2,048 tokens of a vocabulary of 128k.
MAX_LOGITS = {"cpu": 2**25, "other": 2**28}


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
  # A compare and a sum, not a gather: its gradient is elementwise, where the
  # gather's is a scatter, which is slow on every backend.
  vocab = jax.lax.broadcasted_iota(jnp.int32, scaled.shape, scaled.ndim - 1)
  chosen = jnp.sum(jnp.where(vocab == tokens[..., None], scaled, 0.0), axis=-1)
  return chosen - jax.nn.logsumexp(scaled, axis=-1)


def log_softmax(logits: jax.Array, *, temperature: float) -> jax.Array:
  """Returns [..., V] float32, log softmax(logits / temperature), nats."""
  return jax.nn.log_softmax(logits.astype(jnp.float32) / temperature)


def entropy(logits: jax.Array, *, temperature: float) -> jax.Array:
  """Returns [...] float32, the entropy of the tempered next-token distribution.

      H = -Σ_v p_v log p_v,  p = softmax(logits / temperature)

  Args:
    logits: [..., V] float; -inf is a token that cannot occur.
    temperature: temperature of token sampling.
  """
  logprobs = log_softmax(logits, temperature=temperature)
  probs = jnp.exp(logprobs)
  # 0 log 0 = 0, in the gradient too.
  finite = jnp.where(probs > 0, logprobs, 0.0)
  return -jnp.sum(probs * finite, axis=-1)


def map_rows(
    fn: Callable[..., PyTree],
    params: PyTree,
    prompt_tokens_BxP: jax.Array,
    prompt_mask_BxP: jax.Array,
    completion_tokens_BxKxT: jax.Array,
    rows: types.Rows | None,
    routes: types.Routes | None = None,
) -> PyTree:
  """Returns `fn` of a batch, computed once for each distinct completion.

  The gradient of a completion is the sum over its copies. With several parts
  the backward pass computes each part's forward pass again.

  Args:
    fn: (params, [R, P], [R, P], [R, M, T]) -> pytree of [R, M, T, ...]; where
      `types.Rows` has tokens, (params, …, [R, C]) -> pytree of [R, 1, C, ...].
      With `routes` it gets those of its rows by name.
    params: first argument of `fn`.
    prompt_tokens_BxP, prompt_mask_BxP, completion_tokens_BxKxT: arrays of the
      batch.
    rows: packed rows of the batch; None computes `fn` of the batch as it is.
    routes: experts to use; None has the routers choose.

  Returns:
    A pytree of [B, K, T, ...].
  """
  others = {} if routes is None else {"routes": routes}
  if rows is None:
    return fn(
        params,
        prompt_tokens_BxP,
        prompt_mask_BxP,
        completion_tokens_BxKxT,
        **others,
    )
  K, T = completion_tokens_BxKxT.shape[1:]
  split = sequence.current_split()

  def of_rows(
      params: PyTree, rows_RxM: jax.Array, tokens_RxC: jax.Array | None
  ) -> PyTree:
    prompts_R = rows_RxM[:, 0] // K
    inputs = (
        prompt_tokens_BxP[prompts_R],
        prompt_mask_BxP[prompts_R],
        completion_tokens_BxKxT.reshape(-1, T)[rows_RxM],
    )
    inputs = tuple(split.place(x, "batch") for x in inputs)
    others = {}
    if routes is not None:
      own = routes.completions
      own = own.reshape(-1, *own.shape[2:])[rows_RxM]
      others["routes"] = types.Routes(routes.prompts[prompts_R], own)
    if tokens_RxC is None:
      return fn(params, *inputs, **others)
    out = fn(params, *inputs, tokens_RxC, **others)
    shape = (*rows_RxM.shape, T)
    kept = kept_lib.find(tokens_RxC, math.prod(shape[1:]))
    return jax.tree.map(
        lambda x: kept_lib.put(x[:, 0], kept).reshape(*shape, *x.shape[3:]), out
    )

  parts = jax.tree.map(
      lambda x: jnp.moveaxis(x, 1, 0), (rows.indices, rows.tokens)
  )
  single = rows.indices.shape[1] == 1
  if single:
    mapped = of_rows(params, *jax.tree.map(lambda x: x[0], parts))
  else:
    # Gradients are summed over the parts in float32 at least.
    values = jax.lax.stop_gradient(params)
    sums = jax.tree.map(_at_least_float32, params)

    @jax.checkpoint
    def of_part(part: PyTree) -> PyTree:
      return of_rows(jax.tree.map(_gradient_to, values, sums), *part)

    mapped = jax.lax.map(of_part, parts)

  def pick(x: jax.Array) -> jax.Array:
    x = x.reshape(-1, *x.shape[2 if single else 3 :])
    return split.place(x, None, "length")[rows.slots]

  return jax.tree.map(pick, mapped)


def map_logits(
    model: Any,
    params: PyTree,
    prompt_tokens_BxP: jax.Array,
    prompt_mask_BxP: jax.Array,
    completion_tokens_BxKxT: jax.Array,
    fn: Callable[[jax.Array, jax.Array], PyTree],
    *,
    rows: types.Rows | None = None,
    max_logits: int | None = None,
    targets_BxKxT: jax.Array | None = None,
    tokens_BxC: jax.Array | None = None,
    routes: types.Routes | None = None,
    with_routes: bool = False,
) -> PyTree:
  """Returns `fn` of the logits that predict each completion token.

  Logits of 16k tokens with a vocabulary of 150k take 9 GiB in float32, and so
  does their gradient. Beyond `max_logits` they are computed in chunks of
  positions, and recomputed in the backward pass.

  Args:
    model: a `models.transformer.Model`.
    params: params of the model.
    prompt_tokens_BxP: [B, P] int32, left-padded.
    prompt_mask_BxP: [B, P], 1 on prompt tokens.
    completion_tokens_BxKxT: [B, K, T] int32, right-padded.
    fn: (logits [B, K, t, V], tokens [B, K, t]) -> pytree of [B, K, t], each
      entry from the logits and the token of its own position alone.
    rows: packed rows of the batch, see `map_rows`.
    max_logits: most logits on a device at a time, but at least one position's;
      None takes `MAX_LOGITS`.
    targets_BxKxT: tokens that `fn` gets in place of the completion's; only
      without `rows`.
    tokens_BxC: `types.Rows.tokens`, of rows B; `fn` gets theirs alone, as [B,
      1, C].
    routes: experts to use; None has the routers choose.
    with_routes: whether to return the experts that predict each token, too.

  Returns:
    A pytree of [B, K, T]; of [B, 1, C] with `tokens_BxC`. With `with_routes` a
    pair of it and [B, K, T, N, A], or [B, 1, C, N, A].
  """
  if rows is not None:
    return map_rows(
        lambda params, *inputs, **others: map_logits(
            model,
            params,
            *inputs[:3],
            fn,
            max_logits=max_logits,
            tokens_BxC=inputs[3] if inputs[3:] else None,
            with_routes=with_routes,
            **others,
        ),
        params,
        prompt_tokens_BxP,
        prompt_mask_BxP,
        completion_tokens_BxKxT,
        rows,
        routes,
    )
  tokens = completion_tokens_BxKxT
  inputs = (params, prompt_tokens_BxP, prompt_mask_BxP, tokens)
  if tokens_BxC is not None:
    inputs = (*inputs, tokens_BxC)
  others = {} if routes is None else {"routes": routes}
  if with_routes:
    stream_BxKxTxD, chosen = model.stream_and_routes(*inputs, **others)
  else:
    stream_BxKxTxD = model.completion_stream(*inputs, **others)
  if targets_BxKxT is not None:
    tokens = targets_BxKxT
  if tokens_BxC is not None:
    flat = tokens.reshape(len(tokens), -1)
    tokens = jnp.take_along_axis(flat, tokens_BxC, 1, mode="clip")[:, None]
  out = _map_stream(model, params, stream_BxKxTxD, tokens, fn, max_logits)
  return (out, chosen[:, :, : tokens.shape[2]]) if with_routes else out


def _map_stream(
    model: Any,
    params: PyTree,
    stream_BxKxTxD: jax.Array,
    tokens: jax.Array,
    fn: Callable[[jax.Array, jax.Array], PyTree],
    max_logits: int | None,
) -> PyTree:
  """Returns `map_logits` of a stream, whose T may be padded."""
  parts = sequence.current_split()
  num_tokens = tokens.shape[2]
  B, K, T, _ = stream_BxKxTxD.shape
  tokens = jnp.pad(tokens, ((0, 0), (0, 0), (0, T - num_tokens)))
  V = jax.eval_shape(model.unembed, params, stream_BxKxTxD).shape[-1]
  max_logits = max_logits or MAX_LOGITS["other" if parts.accelerated else "cpu"]
  length = max(1, max_logits // (-(-B // parts.batch_count) * K * V))
  if length * parts.count >= T:
    out = fn(model.unembed(params, stream_BxKxTxD), tokens)
    return jax.tree.map(lambda x: x[..., :num_tokens], out)

  # Each device has its own copy of the head and sums its own gradient, in
  # float32: both pass between devices once, not once per chunk. `unembed` does
  # not use the blocks.
  head = {name: leaf for name, leaf in params.items() if name != "blocks"}
  copies = jax.tree.map(
      # `unembed` casts matrices to the stream's dtype, and no others.
      lambda x: parts.copy_to_each(
          x.astype(stream_BxKxTxD.dtype) if x.ndim > 1 else x
      ),
      jax.lax.stop_gradient(head),
  )
  sums = jax.tree.map(lambda x: parts.copy_to_each(_at_least_float32(x)), head)

  def read(head: PyTree, stream: jax.Array, tokens: jax.Array) -> PyTree:
    return fn(model.unembed({**params, **head}, stream), tokens)

  if parts.num_parts > 1:
    read = jax.vmap(read)

  @jax.checkpoint
  def chunk(pair: tuple[jax.Array, jax.Array]) -> PyTree:
    return read(jax.tree.map(_gradient_to, copies, sums), *pair)

  own = T // parts.count
  num_chunks = -(-own // length)

  axis = 2 + (parts.num_parts > 1)  # Axis of tokens.

  def cut(x: jax.Array) -> jax.Array:
    x = parts.cut_to_each(x)
    padding = [(0, 0)] * x.ndim
    padding[axis] = (0, num_chunks * length - own)
    shape = (*x.shape[:axis], num_chunks, length, *x.shape[axis + 1 :])
    return jnp.moveaxis(jnp.pad(x, padding).reshape(shape), axis, 0)

  def join(x: jax.Array) -> jax.Array:
    x = jnp.moveaxis(x, 0, axis)
    x = x.reshape(*x.shape[:axis], num_chunks * length)[..., :own]
    return parts.join_from_each(x)[..., :num_tokens]

  out = jax.lax.map(chunk, (cut(stream_BxKxTxD), cut(tokens)))
  return jax.tree.map(join, out)


def _at_least_float32(x: jax.Array) -> jax.Array:
  return x.astype(jnp.promote_types(x.dtype, jnp.float32))


@jax.custom_vjp
def _gradient_to(x: jax.Array, sum_of: jax.Array) -> jax.Array:
  """Returns `x`, whose gradient goes to `sum_of`, in the dtype of that."""
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
) -> jax.Array:
  """Returns [B, K, T] float32, log π of each completion token, in nats.

  Policy, reference and `score` all use it, so that their log-probs are equal
  where their params are, and their routes.
  """
  return map_logits(
      model,
      params,
      prompt_tokens_BxP,
      prompt_mask_BxP,
      completion_tokens_BxKxT,
      lambda logits, tokens: token_logprobs(
          logits, tokens, temperature=temperature
      ),
      rows=rows,
      routes=routes,
  )
