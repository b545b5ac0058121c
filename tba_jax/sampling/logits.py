# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Token sampling: temperature, top-k, top-p, min-p, and a draw.

`process` returns the exact log-probs of the sampling distribution, so a token's
behavior log-prob comes from the array that it is drawn from. `sample` inverts
the CDF at a given uniform number, so a token is a pure function of it.

Where devices share the vocabulary, the functions run under `shard_map` with the
mesh axis `axis` and the device's own V / n tokens; no device has all logits of
a row, and they exchange only a few numbers a row.

Axes: R rows, V vocabulary, or a device's part of it.
"""

from collections.abc import Collection
import math

import jax
import jax.numpy as jnp
import numpy as np

from tba_jax.sampling import requests

# Folded into a row's key for its own temperature; no token position.
_TEMPERATURE_STREAM = 0x7E3B0000

# Width of a block in `_cumsum`.
_BLOCK = 128
# Above every token.
_NO_TOKEN = np.iinfo(np.int32).max


def process(
    logits_RxV: jax.Array,
    *,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float = 0.0,
    axis: str | None = None,
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
    top_p: probability mass to keep, in (0, 1]; 1 is off.
    min_p: least probability relative to the likeliest token's, in [0, 1); 0 is
      off.
    axis: mesh axis that splits the vocabulary; None does not.

  Returns:
    [R, V] float32, nats; -inf for a token that cannot be drawn.
  """
  logits_RxV = logits_RxV.astype(jnp.float32)
  if temperature == 0:
    best_RxV = logits_RxV == _max(logits_RxV, axis)
    vocab_RxV = _vocab(logits_RxV, axis)
    first_Rx1 = _min(jnp.where(best_RxV, vocab_RxV, _NO_TOKEN), axis)
    return jnp.where(vocab_RxV == first_Rx1, 0.0, -jnp.inf)
  logprobs_RxV = _log_softmax(logits_RxV / temperature, axis)
  # Tokens are ordered by their logits: a compiler that computes a log-prob in
  # two places may round it differently, and drop the last token to keep.
  num_tokens = logits_RxV.shape[-1]
  if 0 < top_k < num_tokens * (jax.lax.axis_size(axis) if axis else 1):
    likeliest, _ = jax.lax.top_k(logits_RxV, min(top_k, num_tokens))
    if axis is not None:
      likeliest = jax.lax.all_gather(likeliest, axis, axis=1, tiled=True)
      likeliest, _ = jax.lax.top_k(likeliest, top_k)
    kept_RxV = logits_RxV >= likeliest[:, -1:]
    logprobs_RxV = _keep(logprobs_RxV, kept_RxV, axis)
  if top_p < 1:
    kept_RxV = _in_top_p(logits_RxV, jnp.exp(logprobs_RxV), top_p, axis)
    logprobs_RxV = _keep(logprobs_RxV, kept_RxV, axis)
  if min_p > 0:
    least_Rx1 = _max(logprobs_RxV, axis) + math.log(min_p)
    logprobs_RxV = _keep(logprobs_RxV, logprobs_RxV >= least_Rx1, axis)
  return logprobs_RxV


def sample(
    logprobs_RxV: jax.Array, uniform_R: jax.Array, axis: str | None = None
) -> tuple[jax.Array, jax.Array]:
  """Returns the token at which the CDF passes `uniform_R`, and its log-prob.

      token = min {v : p_v > 0 and Σ_{w≤v} p_w > u Σ_w p_w}

  A token of probability 0 is never returned, however the sums are rounded.

  Args:
    logprobs_RxV: [R, V] float32, nats, as `process` returns them.
    uniform_R: [R] float32 in [0, 1).
    axis: mesh axis, see `process`.

  Returns:
    token_R: [R] int32.
    logprob_R: [R] float32, `logprobs_RxV` at the token.
  """
  probs_RxV = jnp.exp(logprobs_RxV)
  sums_RxV = _cumsum(probs_RxV)
  total_Rx1 = sums_RxV[:, -1:]
  if axis is not None:
    totals_RxN = jax.lax.all_gather(total_Rx1, axis, axis=1, tiled=True)
    upto_RxN = jnp.cumsum(totals_RxN, axis=-1)
    part = jax.lax.axis_index(axis)
    sums_RxV += jax.lax.dynamic_slice_in_dim(
        jnp.pad(upto_RxN, ((0, 0), (1, 0))), part, 1, axis=1
    )
    total_Rx1 = upto_RxN[:, -1:]
  possible_RxV = probs_RxV > 0
  # Rounded sums may stay constant, or never pass u times the total: so a token
  # must have a probability above 0, and the last such token is the fallback.
  passed_RxV = possible_RxV & (sums_RxV > uniform_R[:, None] * total_Rx1)
  vocab_RxV = _vocab(logprobs_RxV, axis)
  first_Rx1 = _min(jnp.where(passed_RxV, vocab_RxV, _NO_TOKEN), axis)
  last_Rx1 = _max(jnp.where(possible_RxV, vocab_RxV, 0), axis)
  token_R = jnp.minimum(first_Rx1, last_Rx1)[:, 0]
  return token_R, _at(logprobs_RxV, token_R, axis)


def plain_logprob(
    logits_RxV: jax.Array,
    token_R: jax.Array,
    *,
    temperature: float,
    axis: str | None = None,
) -> jax.Array:
  """Returns [R] float32, the tokens' log-probs under the untruncated model.

  They are in nats; a temperature of 0 counts as 1.
  """
  scaled_RxV = logits_RxV.astype(jnp.float32) / (temperature or 1.0)
  return _at(_log_softmax(scaled_RxV, axis), token_R, axis)


def _vocab(x_RxV: jax.Array, axis: str | None) -> jax.Array:
  """Returns [R, V] int32, the token of each entry."""
  vocab_RxV = jax.lax.broadcasted_iota(jnp.int32, x_RxV.shape, 1)
  if axis is not None:
    vocab_RxV += jax.lax.axis_index(axis) * x_RxV.shape[1]
  return vocab_RxV


def _sum(x_RxV: jax.Array, axis: str | None) -> jax.Array:
  """Returns [R, 1], over the whole vocabulary; so do `_max` and `_min`."""
  x_Rx1 = jnp.sum(x_RxV, axis=-1, keepdims=True)
  return x_Rx1 if axis is None else jax.lax.psum(x_Rx1, axis)


def _max(x_RxV: jax.Array, axis: str | None) -> jax.Array:
  x_Rx1 = jnp.max(x_RxV, axis=-1, keepdims=True)
  return x_Rx1 if axis is None else jax.lax.pmax(x_Rx1, axis)


def _min(x_RxV: jax.Array, axis: str | None) -> jax.Array:
  x_Rx1 = jnp.min(x_RxV, axis=-1, keepdims=True)
  return x_Rx1 if axis is None else jax.lax.pmin(x_Rx1, axis)


def _log_softmax(x_RxV: jax.Array, axis: str | None) -> jax.Array:
  shifted_RxV = x_RxV - _max(x_RxV, axis)
  return shifted_RxV - jnp.log(_sum(jnp.exp(shifted_RxV), axis))


def _at(
    logprobs_RxV: jax.Array, token_R: jax.Array, axis: str | None
) -> jax.Array:
  """Returns [R], the entry of each row at its token."""
  at_token_RxV = _vocab(logprobs_RxV, axis) == token_R[:, None]
  return _sum(jnp.where(at_token_RxV, logprobs_RxV, 0.0), axis)[:, 0]


def _keep(
    logprobs_RxV: jax.Array, kept_RxV: jax.Array, axis: str | None
) -> jax.Array:
  """Drops all other tokens and renormalizes."""
  return _log_softmax(jnp.where(kept_RxV, logprobs_RxV, -jnp.inf), axis)


def _in_top_p(
    logits_RxV: jax.Array,
    probs_RxV: jax.Array,
    top_p: float,
    axis: str | None,
) -> jax.Array:
  """Returns [R, V] bool, the smallest set of likeliest tokens to reach `top_p`.

  A token is in the set if those that are likelier do not reach `top_p`. Places
  are integers that grow as logits fall: the largest place before which the
  probabilities do not reach `top_p` is found bit by bit, in 32 sums where a
  sort takes some (log V)² passes on an accelerator.
  """
  zero_RxV = jnp.where(logits_RxV == 0, 0.0, logits_RxV)  # -0 ties with 0.
  bits_RxV = jax.lax.bitcast_convert_type(zero_RxV, jnp.uint32)
  # Bits of negative floats grow as they fall, those of positive ones as they
  # grow.
  sign = np.uint32(1 << 31)
  place_RxV = jnp.where(bits_RxV >= sign, bits_RxV, sign - 1 - bits_RxV)

  def set_bit(i: jax.Array, found_Rx1: jax.Array) -> jax.Array:
    tried_Rx1 = found_Rx1 | (sign >> i.astype(jnp.uint32))
    before_RxV = jnp.where(place_RxV < tried_Rx1, probs_RxV, 0.0)
    return jnp.where(_sum(before_RxV, axis) < top_p, tried_Rx1, found_Rx1)

  zeros_Rx1 = jnp.zeros((len(logits_RxV), 1), jnp.uint32)
  found_Rx1 = jax.lax.fori_loop(0, 32, set_bit, zeros_Rx1)
  return place_RxV <= found_Rx1


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
    axis: str | None = None,
) -> jax.Array:
  """Returns the logits to draw from at `settings.temperature`.

  Greedy decoding does not explore.

  Args:
    settings: settings, of which `explore`, `temperature` and `stop_ids` are
      read.
    logits_RxV: [R, V] float.
    keys_R: [R] random keys of the rows.
    position_R: [R] int32, position of the token to draw.
    axis: mesh axis, see `process`.
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
    logits_RxV = _forbid(logits_RxV, settings.stop_ids, early_R, axis)
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
    logits_RxV: jax.Array,
    tokens: Collection[int],
    rows_R: jax.Array,
    axis: str | None,
) -> jax.Array:
  """Returns logits under which `tokens` are never drawn in `rows_R`."""
  vocab_RxV = _vocab(logits_RxV, axis)
  hit_RxV = jnp.zeros(vocab_RxV.shape, bool)
  for token in tokens:
    hit_RxV = hit_RxV | (vocab_RxV == token)
  # Differences of -inf would be NaN.
  lowest = jnp.finfo(jnp.float32).min / 4
  logits_RxV = logits_RxV.astype(jnp.float32)
  return jnp.where(hit_RxV & rows_R[:, None], lowest, logits_RxV)
