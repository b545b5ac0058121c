# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""From logits to the distribution that is sampled from, and a draw from it.

`process` gives the exact log-probs of that distribution, so the log-prob of a
drawn token, its behavior log-prob, is read from the same array that the draw
uses. `sample` inverts the distribution function at a given uniform number: one
number a token, and the token is a pure function of it.
"""

from collections.abc import Sequence
import dataclasses
import math
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from tba_jax.losses import logprobs

if TYPE_CHECKING:
  from tba_jax.sampling import rows


# Width of the blocks whose running sums are one triangular product.
_BLOCK = 128


def check_settings(
    *, temperature: float, top_k: int, top_p: float, min_p: float = 0.0
) -> None:
  """Raises ValueError naming the first setting that is out of range."""
  if not (temperature >= 0 and math.isfinite(temperature)):
    raise ValueError(
        f"sampling.temperature={temperature}: allowed 0 (greedy) or above"
    )
  if top_k < 0:
    raise ValueError(f"sampling.top_k={top_k}: allowed 0 (off) or above")
  if not 0 < top_p <= 1:
    raise ValueError(
        f"sampling.top_p={top_p}: allowed above 0 and up to 1 (off)"
    )
  if not 0 <= min_p < 1:
    raise ValueError(f"sampling.min_p={min_p}: allowed 0 (off) to below 1")


def process(
    logits_RxV: jax.Array,
    *,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float = 0.0,
) -> jax.Array:
  """Returns the log of the distribution that is sampled from.

  In this order: divide by `temperature`; keep the `top_k` likeliest tokens;
  keep the smallest set of likeliest tokens whose probabilities, renormalized
  after top-k, reach `top_p`; keep those whose probability is at least `min_p`
  times that of the likeliest; renormalize. Tokens that tie with the last one
  kept are kept too, so the set does not depend on the order of the vocabulary.

  Args:
    logits_RxV: [R, V] float.
    temperature: 0 is greedy: the likeliest token (the first among equals) has
      probability 1.
    top_k: number of tokens to keep; 0 is off.
    top_p: in (0, 1]; 1 is off.
    min_p: in [0, 1); 0 is off.

  Returns:
    [R, V] float32, nats; -inf for a token that cannot be drawn.

  Raises:
    ValueError: a setting is out of range.
  """
  check_settings(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
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
    # A token is in the set if those before it do not reach top_p yet; the
    # first one always is.
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
  """Returns the token at which the distribution function passes `uniform_R`.

      token = min {v : p_v > 0 and Σ_{w≤v} p_w > u Σ_w p_w}

  A token of probability 0 is never returned, whatever `u` and however the sums
  are rounded.

  Args:
    logprobs_RxV: [R, V] float32, nats, as `process` returns them.
    uniform_R: [R] float32 in [0, 1).

  Returns:
    token_R: [R] int32.
    logprob_R: [R] float32, `logprobs_RxV` at the token.
  """
  probs_RxV = jnp.exp(logprobs_RxV)
  sums_RxV = _running_sums(probs_RxV)
  possible_RxV = probs_RxV > 0
  # Rounded running sums need not grow, and may not reach their own total: so a
  # token is asked to be possible, and the last possible one closes the range.
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
  """Returns the tokens' log-probs under the tempered model, nothing dropped.

  Args:
    logits_RxV: [R, V] float.
    token_R: [R] int32.
    temperature: 0, which is no distribution of the model's, counts as 1.

  Returns:
    [R] float32, nats.
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
  """Drops what is below `least_Rx1` and renormalizes the rest."""
  kept_RxV = jnp.where(logprobs_RxV >= least_Rx1, logprobs_RxV, -jnp.inf)
  return jax.nn.log_softmax(kept_RxV)


def _running_sums(values_RxV: jax.Array) -> jax.Array:
  """Returns the inclusive running sums over the last axis.

  By triangular products within blocks: XLA's own cumulative sum takes about
  log V passes over the array, which shows in a small model's decode step.
  """
  num_rows, num_values = values_RxV.shape
  width = min(_BLOCK, num_values)
  num_blocks = -(-num_values // width)
  padded = jnp.pad(values_RxV, ((0, 0), (0, num_blocks * width - num_values)))
  blocks = padded.reshape(num_rows * num_blocks, width)
  within = jnp.dot(
      blocks,
      jnp.triu(jnp.ones((width, width), values_RxV.dtype)),
      # Not the faster, coarser product of some accelerators.
      precision=jax.lax.Precision.HIGHEST,
  ).reshape(num_rows, num_blocks, width)
  if num_blocks > 1:
    totals = within[:, :, -1]
    before = jnp.cumsum(totals, axis=-1) - totals
    within = within + before[:, :, None]
  return within.reshape(num_rows, num_blocks * width)[:, :num_values]


# What is changed of the logits so that sampling finds what is new.
#
# A share of the completions is drawn at a temperature of its own, and none ends
# before it has some tokens. The log-prob of a token under what it was drawn
# from
# is its behavior log-prob; the model's own is the plain one beside it.
#
# Source: Lee et al. 2025 (arXiv:2405.18540) and the code that they released,
# with
# one temperature a completion in place of one a batch.
#
# Axes: R rows, V vocabulary.


# Folded into a row's key for its own temperature: no position of a token.
_STREAM = 0x7E3B0000


@dataclasses.dataclass(frozen=True)
class Explore:
  """How completions differ from the model's own; the defaults are those.

  fraction: share that is drawn at a temperature of its own; 0 is off.
  min_temperature, max_temperature: of these, uniform between.
  min_tokens: of each completion before a token may end it.
  """

  fraction: float = 0.0
  min_temperature: float = 1.0
  max_temperature: float = 1.0
  min_tokens: int = 0


NONE = Explore()


def explored_logits(
    settings: "rows.Settings",
    logits_RxV: jax.Array,
    keys_R: jax.Array,
    position_R: jax.Array,
) -> jax.Array:
  """Returns the logits to draw from at `settings.temperature`.

  Args:
    settings: reads `explore`, `temperature` and `stop_ids`.
    logits_RxV: [R, V] float.
    keys_R: [R] keys of the rows; a completion keeps its temperature.
    position_R: [R] int32, of the token that is drawn.

  Returns:
    [R, V]; `logits_RxV` itself where nothing is asked for.
  """
  explore = settings.explore
  if explore.fraction:
    own_R = own_temperature(explore, keys_R)
    factor_R = settings.temperature / jnp.maximum(own_R, 1e-6)
    factor_R = jnp.where(own_R > 0, factor_R, 1.0)
    logits_RxV = logits_RxV.astype(jnp.float32) * factor_R[:, None]
  if explore.min_tokens:
    early_R = position_R < explore.min_tokens
    logits_RxV = _forbid(logits_RxV, settings.stop_ids, early_R)
  return logits_RxV


def own_temperature(explore: Explore, keys_R: jax.Array) -> jax.Array:
  """Returns the temperature of each row, [R] float32, 0 where it has none.

  A pure function of the row's key, as all random numbers of a completion are.
  """
  own_R = jax.vmap(jax.random.fold_in, (0, None))(keys_R, _STREAM)
  uniform_Rx2 = (jax.random.key_data(own_R) >> 8).astype(jnp.float32) * 2.0**-24
  low, high = explore.min_temperature, explore.max_temperature
  return jnp.where(
      uniform_Rx2[:, 0] < explore.fraction,
      low + (high - low) * uniform_Rx2[:, 1],
      0.0,
  )


def _forbid(
    logits_RxV: jax.Array, tokens: Sequence[int], rows_R: jax.Array
) -> jax.Array:
  """Returns logits under which `tokens` are never drawn in `rows_R`."""
  vocab_1xV = jnp.arange(logits_RxV.shape[-1])[None, :]
  hit_1xV = jnp.zeros(vocab_1xV.shape, bool)
  for token in tokens:
    hit_1xV = hit_1xV | (vocab_1xV == token)
  # Not -inf: a difference of two of those is no number.
  lowest = jnp.finfo(jnp.float32).min / 4
  logits_RxV = logits_RxV.astype(jnp.float32)
  return jnp.where(hit_1xV & rows_R[:, None], lowest, logits_RxV)
