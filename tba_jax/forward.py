# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""What is read off a model's logits at each completion token.

Logits are as wide as the vocabulary: of 16k tokens and 150k words they fill 9
GiB in float32, and again for their gradient. So they are made for a few
positions at a time, read, and made once more in the backward pass.

Axes: B prompts, K completions, P prompt tokens, T completion tokens, D width, V
vocabulary.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from tba_jax import logprobs
from tba_jax import types
from tba_jax.models import split

PyTree = types.PyTree

# Logits held at a time, 128 MiB in float32.
MAX_LOGITS = 2**25


def map_logits(
    model: Any,
    params: PyTree,
    prompt_tokens_BxP: jax.Array,
    prompt_mask_BxP: jax.Array,
    completion_tokens_BxKxT: jax.Array,
    fn: Callable[[jax.Array, jax.Array], PyTree],
    *,
    max_logits: int = MAX_LOGITS,
) -> PyTree:
  """Returns `fn` of the logits that predict each completion token.

  Where all logits are at most `max_logits` numbers they are made at once, and
  nothing is computed twice.

  Args:
    model: a `models.build.Model`; its `completion_stream` and `unembed`.
    params: of the model.
    prompt_tokens_BxP: [B, P] int32, left-padded.
    prompt_mask_BxP: [B, P], 1 on prompt tokens.
    completion_tokens_BxKxT: [B, K, T] int32, right-padded.
    fn: (logits [B, K, t, V], tokens [B, K, t]) -> pytree of [B, K, t], each
      entry from the logits and the token of its own position alone.
    max_logits: the most logits held at a time, but for one position's.

  Returns:
    A pytree of [B, K, T].
  """
  tokens = completion_tokens_BxKxT
  stream_BxKxTxD = model.completion_stream(
      params, prompt_tokens_BxP, prompt_mask_BxP, tokens
  )
  parts, C = split.current(), split.current().count
  num_tokens = tokens.shape[2]
  B, K, T, D = stream_BxKxTxD.shape
  tokens = jnp.pad(tokens, ((0, 0), (0, 0), (0, T - num_tokens)))
  V = jax.eval_shape(model.unembed, params, stream_BxKxTxD).shape[-1]
  read = lambda stream, tokens: fn(model.unembed(params, stream), tokens)
  length = max(1, max_logits // (B * K * C * V))
  if length * C >= T:
    out = read(stream_BxKxTxD, tokens)
    return jax.tree.map(lambda x: x[..., :num_tokens], out)

  # Cut along T, so that a batch that is split over devices stays so; and in
  # each of the parts that T itself is split in.
  own = T // C
  num_chunks = -(-own // length)
  padding = num_chunks * length - own

  def cut(x: jax.Array) -> jax.Array:
    rest = x.shape[3:]
    x = x.reshape(B, K, C, own, *rest)
    x = jnp.pad(x, ((0, 0),) * 3 + ((0, padding),) + ((0, 0),) * len(rest))
    x = jnp.moveaxis(x.reshape(B, K, C, num_chunks, length, *rest), 3, 0)
    x = x.reshape(num_chunks, B, K, C * length, *rest)
    return parts.place(x, None, "batch", None, "length")

  def join(x: jax.Array) -> jax.Array:
    x = jnp.moveaxis(x.reshape(num_chunks, B, K, C, length), 0, 3)
    x = x.reshape(B, K, C, num_chunks * length)[..., :own]
    return x.reshape(B, K, T)[..., :num_tokens]

  chunk = jax.checkpoint(lambda pair: read(*pair))
  out = jax.lax.map(chunk, (cut(stream_BxKxTxD), cut(tokens)))
  return jax.tree.map(join, out)


def completion_logprobs(
    model: Any,
    params: PyTree,
    prompt_tokens_BxP: jax.Array,
    prompt_mask_BxP: jax.Array,
    completion_tokens_BxKxT: jax.Array,
    *,
    temperature: float,
) -> jax.Array:
  """Returns [B, K, T] float32, log π of each completion token, in nats.

  Policy, reference and `score` go through it, so that their log-probs are equal
  where their params are.

  Raises:
    ValueError: `temperature` is not above 0.
  """
  read = lambda logits, tokens: logprobs.token_logprobs(
      logits, tokens, temperature=temperature
  )
  return map_logits(
      model,
      params,
      prompt_tokens_BxP,
      prompt_mask_BxP,
      completion_tokens_BxKxT,
      read,
  )


def completion_values(
    value_model: Any, loss_params: PyTree, batch: types.Batch
) -> jax.Array:
  """Returns [B, K, T] float32, the value of the state before each token.

  Args:
    value_model: a `models.heads.ScalarModel`.
    loss_params: its params are under "value".
    batch: prompts and completions.
  """
  return value_model.completion_values(
      loss_params["value"],
      batch.prompt_tokens,
      batch.prompt_mask,
      batch.completion_tokens,
  )
