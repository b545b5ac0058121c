# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Log-probs of tokens and completions, entropy, and estimators of the KL.

Everything is in nats and float32, whatever the dtype of the logits. The policy
and the reference go through the same functions, so that their log-ratio is
exactly 0 where their logits are equal. Leading axes are free: `...` is [B, K]
in training and [R] in the sampler.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from tba_jax import types
from tba_jax.models import sequence


def log_softmax(logits: jax.Array, *, temperature: float) -> jax.Array:
  """Returns log softmax(logits / temperature) over the last axis.

  Args:
    logits: [..., V] float of any width.
    temperature: of token sampling, above 0.

  Returns:
    [..., V] float32, nats.

  Raises:
    ValueError: `temperature` is not above 0.
  """
  _check_temperature(temperature)
  return jax.nn.log_softmax(logits.astype(jnp.float32) / temperature)


def token_logprobs(
    logits: jax.Array, tokens: jax.Array, *, temperature: float
) -> jax.Array:
  """Returns the log-prob of each token under the tempered logits.

      log π(y_t | x, y_<t) = z_{y_t} - log Σ_v exp z_v,  z = logits / τ

  Args:
    logits: [..., V] float, the logits that predict `tokens`.
    tokens: [...] int32 in [0, V).
    temperature: τ, of token sampling, above 0.

  Returns:
    [...] float32, nats.

  Raises:
    ValueError: `temperature` is not above 0, or the shapes do not fit.
  """
  _check_temperature(temperature)
  if logits.shape[:-1] != tokens.shape:
    raise ValueError(
        f"logits {logits.shape} and tokens {tokens.shape}: all axes of the"
        " logits but the last must be those of the tokens"
    )
  scaled = logits.astype(jnp.float32) / temperature
  # A compare and a sum, not a gather: its gradient is elementwise, where the
  # gather's is a scatter, which is slow on every backend.
  vocab = jax.lax.broadcasted_iota(jnp.int32, scaled.shape, scaled.ndim - 1)
  chosen = jnp.sum(jnp.where(vocab == tokens[..., None], scaled, 0.0), axis=-1)
  return chosen - jax.nn.logsumexp(scaled, axis=-1)


def sequence_logprobs(logprobs: jax.Array, mask: jax.Array) -> jax.Array:
  """Returns the log-prob of each completion, Σ_t mask_t log π(y_t | x, y_<t).

  Args:
    logprobs: [..., T] float32, nats; any value, inf and nan too, where the mask
      is 0.
    mask: [..., T], 1 on the tokens that count, else 0.

  Returns:
    [...] float32, nats.
  """
  # A product would turn -inf behind the mask into nan.
  return jnp.sum(jnp.where(mask > 0, logprobs, 0.0), axis=-1)


def entropy(logits: jax.Array, *, temperature: float) -> jax.Array:
  """Returns the entropy of the tempered next-token distribution.

      H = -Σ_v p_v log p_v,  p = softmax(logits / temperature)

  Args:
    logits: [..., V] float; -inf is a token that cannot occur.
    temperature: of token sampling, above 0.

  Returns:
    [...] float32 in nats, from 0 to log V.

  Raises:
    ValueError: `temperature` is not above 0.
  """
  logprobs = log_softmax(logits, temperature=temperature)
  probs = jnp.exp(logprobs)
  # 0 log 0 = 0, in the gradient too.
  finite = jnp.where(probs > 0, logprobs, 0.0)
  return -jnp.sum(probs * finite, axis=-1)


def kl_estimators(
    logprobs: jax.Array, ref_logprobs: jax.Array
) -> dict[str, jax.Array]:
  """Returns three one-sample estimates of KL(π || π_ref) for y drawn from π.

      k1 = δ,  k2 = δ² / 2,  k3 = exp(-δ) - 1 + δ,  δ = log π(y) - log π_ref(y)

  k1 and k3 are unbiased, k2 and k3 are never negative. Source: J. Schulman,
  Approximating KL Divergence, http://joschu.net/blog/kl-approx.html (2020).

  Args:
    logprobs: [...] float32, log π of tokens or of completions, nats.
    ref_logprobs: [...] float32, log π_ref of the same, nats.

  Returns:
    `k1`, `k2`, `k3`: [...] float32, nats.
  """
  delta = logprobs - ref_logprobs
  return {
      "k1": delta,
      "k2": 0.5 * delta * delta,
      "k3": jnp.expm1(-delta) + delta,
  }


def _check_temperature(temperature: float) -> None:
  if not temperature > 0:
    raise ValueError(f"temperature={temperature}: allowed above 0")


# What is read off a model's logits at each completion token.
#
# Logits are as wide as the vocabulary: of 16k tokens and 150k words they fill 9
# GiB in float32, and again for their gradient. So they are made for a few
# positions at a time, read, and made once more in the backward pass.
#
# Axes: B prompts, K completions, P prompt tokens, T completion tokens, D width,
# V
# vocabulary.


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
  parts, C = sequence.current_split(), sequence.current_split().count
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
  read = lambda logits, tokens: token_logprobs(
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
