# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Log-probs of tokens and completions, entropy, and estimators of the KL.

Everything is in nats and float32, whatever the dtype of the logits. The policy
and the reference go through the same functions, so that their log-ratio is
exactly 0 where their logits are equal. Leading axes are free: `...` is [B, K]
in training and [R] in the sampler.
"""

import jax
import jax.numpy as jnp


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
