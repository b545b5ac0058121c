# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Token sampling: temperature, top-k, top-p, min-p, and a draw.

`process` returns the exact log-probs of the sampling distribution, so a token's
behavior log-prob comes from the array that it is drawn from. `sample` inverts
the CDF at a given uniform number, so a token is a pure function of it.

Axes: R rows, V vocabulary.
"""

from collections.abc import Collection
import math

import jax
import jax.numpy as jnp

from tba_jax.losses import logprobs
from tba_jax.sampling import requests

# Folded into a row's key for its own temperature; no token position.
_TEMPERATURE_STREAM = 0x7E3B0000

# Width of a block in `_cumsum`.
_BLOCK = 128


def process(
    logits_RxV: jax.Array,
    *,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float = 0.0,
) -> jax.Array:
  """Returns the log-probs of the sampling distribution.

  In this order: divide by `temperature`; keep the `top_k` likeliest tokens;
  keep the smallest set of likeliest tokens whose probabilities, renormalized
  after top-k, reach `top_p`; keep those whose probability is at least `min_p`
  times the largest; renormalize. Tokens that tie with the last one kept are
  kept too, so the set does not depend on the order of the vocabulary.

  Args:
    logits_RxV: [R, V] float.
    temperature: 0 is greedy; the first of tokens that tie is taken.
    top_k: number of tokens to keep; 0 is off.
    top_p: in (0, 1]; 1 is off.
    min_p: in [0, 1); 0 is off.

  Returns:
    [R, V] float32, nats; -inf for a token that cannot be drawn.
  """
  logits_RxV = logits_RxV.astype(jnp.float32)
  if temperature == 0:
    best_Rx1 = jnp.argmax(logits_RxV, axis=-1, keepdims=True)
    vocab_RxV = jax.lax.broadcasted_iota(best_Rx1.dtype, logits_RxV.shape, 1)
    return jnp.where(vocab_RxV == best_Rx1, 0.0, -jnp.inf)
  logprobs_RxV = logprobs.log_softmax(logits_RxV, temperature=temperature)
  num_tokens = logits_RxV.shape[-1]
  if 0 < top_k < num_tokens:
    kept_RxK, _ = jax.lax.top_k(logprobs_RxV, top_k)
    logprobs_RxV = _keep_from(logprobs_RxV, kept_RxK[:, -1:])
  if top_p < 1:
    sorted_RxV = jnp.sort(logprobs_RxV, axis=-1, descending=True)
    probs_RxV = jnp.exp(sorted_RxV)
    # A token is in the set if those before it do not reach top_p; the first
    # always is.
    before_RxV = jnp.cumsum(probs_RxV, axis=-1) - probs_RxV
    in_set_RxV = (before_RxV < top_p) & (probs_RxV > 0)
    in_set_RxV = in_set_RxV.at[:, 0].set(True)
    least_Rx1 = jnp.min(
        jnp.where(in_set_RxV, sorted_RxV, jnp.inf), axis=-1, keepdims=True
    )
    logprobs_RxV = _keep_from(logprobs_RxV, least_Rx1)
  if min_p > 0:
    best_Rx1 = jnp.max(logprobs_RxV, axis=-1, keepdims=True)
    logprobs_RxV = _keep_from(logprobs_RxV, best_Rx1 + math.log(min_p))
  return logprobs_RxV


def sample(
    logprobs_RxV: jax.Array, uniform_R: jax.Array
) -> tuple[jax.Array, jax.Array]:
  """Returns the token at which the CDF passes `uniform_R`, and its log-prob.

      token = min {v : p_v > 0 and Σ_{w≤v} p_w > u Σ_w p_w}

  A token of probability 0 is never returned, however the sums are rounded.

  Args:
    logprobs_RxV: [R, V] float32, nats, as `process` returns them.
    uniform_R: [R] float32 in [0, 1).

  Returns:
    token_R: [R] int32.
    logprob_R: [R] float32, `logprobs_RxV` at the token.
  """
  probs_RxV = jnp.exp(logprobs_RxV)
  sums_RxV = _cumsum(probs_RxV)
  possible_RxV = probs_RxV > 0
  # Rounded sums may stay constant, or never pass u times the total: so a token
  # must have a probability above 0, and the last such token is the fallback.
  passed_RxV = possible_RxV & (sums_RxV > uniform_R[:, None] * sums_RxV[:, -1:])
  vocab_RxV = jax.lax.broadcasted_iota(jnp.int32, probs_RxV.shape, 1)
  num_tokens = probs_RxV.shape[-1]
  first_R = jnp.min(jnp.where(passed_RxV, vocab_RxV, num_tokens), axis=-1)
  last_R = jnp.max(jnp.where(possible_RxV, vocab_RxV, 0), axis=-1)
  token_R = jnp.minimum(first_R, last_R)
  return token_R, _at(logprobs_RxV, token_R)


def plain_logprob(
    logits_RxV: jax.Array, token_R: jax.Array, *, temperature: float
) -> jax.Array:
  """Returns [R] float32, the tokens' log-probs under the untruncated model.

  They are in nats; a temperature of 0 counts as 1.
  """
  logits_RxV = logits_RxV.astype(jnp.float32)
  return _at(
      logprobs.log_softmax(logits_RxV, temperature=temperature or 1.0),
      token_R,
  )


def _at(logprobs_RxV: jax.Array, token_R: jax.Array) -> jax.Array:
  """Returns [R], the entry of each row at its token."""
  vocab_RxV = jax.lax.broadcasted_iota(jnp.int32, logprobs_RxV.shape, 1)
  at_token_RxV = vocab_RxV == token_R[:, None]
  return jnp.sum(jnp.where(at_token_RxV, logprobs_RxV, 0.0), axis=-1)


def _keep_from(logprobs_RxV: jax.Array, least_Rx1: jax.Array) -> jax.Array:
  """Drops tokens below `least_Rx1` and renormalizes the rest."""
  kept_RxV = jnp.where(logprobs_RxV >= least_Rx1, logprobs_RxV, -jnp.inf)
  return jax.nn.log_softmax(kept_RxV)


def _cumsum(values_RxV: jax.Array) -> jax.Array:
  """Returns the inclusive cumulative sum over the last axis.

  It multiplies blocks by a triangular matrix: XLA's own takes about log V
  passes over the array, which shows in a small model's decode step.
  """
  num_rows, num_values = values_RxV.shape
  width = min(_BLOCK, num_values)
  num_blocks = -(-num_values // width)
  padded = jnp.pad(values_RxV, ((0, 0), (0, num_blocks * width - num_values)))
  blocks = padded.reshape(num_rows * num_blocks, width)
  within = jnp.dot(
      blocks,
      jnp.triu(jnp.ones((width, width), values_RxV.dtype)),
      # Accelerators default to a coarser product.
      precision=jax.lax.Precision.HIGHEST,
  ).reshape(num_rows, num_blocks, width)
  if num_blocks > 1:
    totals = within[:, :, -1]
    before = jnp.cumsum(totals, axis=-1) - totals
    within = within + before[:, :, None]
  return within.reshape(num_rows, num_blocks * width)[:, :num_values]


def explored_logits(
    settings: requests.Settings,
    logits_RxV: jax.Array,
    keys_R: jax.Array,
    position_R: jax.Array,
) -> jax.Array:
  """Returns the logits to draw from at `settings.temperature`.

  Greedy decoding does not explore.

  Args:
    settings: reads `explore`, `temperature` and `stop_ids`.
    logits_RxV: [R, V] float.
    keys_R: [R] random keys of the rows.
    position_R: [R] int32, of the token to draw.
  """
  explore = settings.explore
  if not settings.temperature:
    return logits_RxV
  if explore.fraction:
    own_R = own_temperature(explore, keys_R)
    factor_R = settings.temperature / jnp.maximum(own_R, 1e-6)
    factor_R = jnp.where(own_R > 0, factor_R, 1.0)
    logits_RxV = logits_RxV.astype(jnp.float32) * factor_R[:, None]
  if explore.min_tokens:
    early_R = position_R < explore.min_tokens
    logits_RxV = _forbid(logits_RxV, settings.stop_ids, early_R)
  return logits_RxV


def own_temperature(explore: requests.Explore, keys_R: jax.Array) -> jax.Array:
  """Returns each row's own temperature [R] float32; 0 where it has none."""
  own_R = jax.vmap(jax.random.fold_in, (0, None))(keys_R, _TEMPERATURE_STREAM)
  uniform_Rx2 = (jax.random.key_data(own_R) >> 8).astype(jnp.float32) * 2.0**-24
  low, high = explore.min_temperature, explore.max_temperature
  return jnp.where(
      uniform_Rx2[:, 0] < explore.fraction,
      low + (high - low) * uniform_Rx2[:, 1],
      0.0,
  )


def _forbid(
    logits_RxV: jax.Array, tokens: Collection[int], rows_R: jax.Array
) -> jax.Array:
  """Returns logits under which `tokens` are never drawn in `rows_R`."""
  vocab_1xV = jnp.arange(logits_RxV.shape[-1])[None, :]
  hit_1xV = jnp.zeros(vocab_1xV.shape, bool)
  for token in tokens:
    hit_1xV = hit_1xV | (vocab_1xV == token)
  # Not -inf, whose differences are NaN.
  lowest = jnp.finfo(jnp.float32).min / 4
  logits_RxV = logits_RxV.astype(jnp.float32)
  return jnp.where(hit_1xV & rows_R[:, None], lowest, logits_RxV)
