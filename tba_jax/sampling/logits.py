# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Token sampling: temperature, top-k, top-p, min-p, and a draw.

`process` returns the exact log-probs of the sampling distribution, so a token's
behavior log-prob comes from the array that it is drawn from. `sample` inverts
the CDF at a given uniform number, so a token is a pure function of it.

If devices split the vocabulary, the functions run under `shard_map` over the
mesh axis `axis`, each device with its V / n tokens. No device gathers all
logits of a row; they exchange only a few numbers per row.

Axes: R rows, V vocabulary, or a device's shard of it.
"""

from collections.abc import Collection
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np

from tba_jax.sampling import requests

# Folded into a row's key for its random temperature; above all positions.
_TEMPERATURE_STREAM = 0x7E3B0000

# Tokens of a tile of the vocabulary.
_TILE = 128
_SIGN = np.uint32(1 << 31)
_LAST_PLACE = np.uint32(2**32 - 1)
# Larger than any token id.
_NO_TOKEN = np.iinfo(np.int32).max
# Below the log-prob of any token that may be sampled.
_LEAST_KEPT = -1e30


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
  times the largest; renormalize. Tokens that tie with the last kept one are
  also kept, so the set does not depend on the order of the vocabulary.

  Args:
    logits_RxV: [R, V] float.
    temperature: 0 is greedy and takes the first of tied tokens.
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
  # Orders tokens by logits: a compiler that computes a log-prob in two places
  # may round it differently and drop the last token to keep.
  place_RxV = _place(logits_RxV)
  num_tokens = logits_RxV.shape[-1]
  # With few tokens to keep, only the tiles that can contain them are searched.
  take = lambda x_RxV, _: x_RxV
  if 0 < top_k < num_tokens * (jax.lax.axis_size(axis) if axis else 1):
    if top_k * _TILE <= num_tokens // 4:
      take = functools.partial(_take_tiles, _likeliest(logits_RxV, top_k))
    place_RxC = take(place_RxV, _LAST_PLACE)
    last_Rx1 = _last_place(place_RxC, jnp.int32(1), top_k, axis)
    logprobs_RxV = _keep(logprobs_RxV, place_RxV <= last_Rx1, axis)
  if top_p < 1:
    probs_RxC = jnp.exp(take(logprobs_RxV, -jnp.inf))
    place_RxC = take(place_RxV, _LAST_PLACE)
    last_Rx1 = _last_place(place_RxC, probs_RxC, top_p, axis)
    logprobs_RxV = _keep(logprobs_RxV, place_RxV <= last_Rx1, axis)
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
  # First the tile in which the CDF passes u, then the token in it. So there are
  # cumulative sums over tiles and over the tokens of one tile only.
  tiles_RxNxW = _tiles(logprobs_RxV, -jnp.inf)
  sums_RxN = jnp.sum(jnp.exp(tiles_RxNxW), axis=-1)
  upto_RxN = jnp.cumsum(sums_RxN, axis=-1)
  total_Rx1, offset = upto_RxN[:, -1:], 0
  if axis is not None:
    totals_RxD = jax.lax.all_gather(total_Rx1, axis, axis=1, tiled=True)
    ends_RxD = jnp.cumsum(totals_RxD, axis=-1)
    shard = jax.lax.axis_index(axis)
    upto_RxN += jax.lax.dynamic_slice_in_dim(
        jnp.pad(ends_RxD, ((0, 0), (1, 0))), shard, 1, axis=1
    )
    total_Rx1 = ends_RxD[:, -1:]
    offset = shard * logprobs_RxV.shape[1]
  passes_Rx1 = uniform_R[:, None] * total_Rx1
  tile_R, passed_R = _first(sums_RxN, upto_RxN > passes_Rx1)
  entry = jax.vmap(lambda x, index: x[index])
  logprobs_RxW = entry(tiles_RxNxW, tile_R)
  probs_RxW = jnp.exp(logprobs_RxW)
  before_R = entry(upto_RxN - sums_RxN, tile_R)
  upto_RxW = before_R[:, None] + jnp.cumsum(probs_RxW, axis=-1)
  place_R, _ = _first(probs_RxW, upto_RxW > passes_Rx1)
  local_R = offset + tile_R * tiles_RxNxW.shape[2] + place_R
  logprob_R = entry(logprobs_RxW, place_R)
  if axis is None:
    return local_R, logprob_R
  # The first shard in which the CDF passes u, else the last possible token.
  first_R = jax.lax.pmin(jnp.where(passed_R, local_R, _NO_TOKEN), axis)
  possible_R = jnp.any(sums_RxN > 0, axis=-1)
  last_R = jax.lax.pmax(jnp.where(possible_R, local_R, 0), axis)
  token_R = jnp.where(first_R < _NO_TOKEN, first_R, last_R)
  mine_R = token_R == local_R
  return token_R, jax.lax.psum(jnp.where(mine_R, logprob_R, 0.0), axis)


def keep_likeliest(
    logprobs_RxV: jax.Array, num_kept: int, axis: str | None = None
) -> tuple[jax.Array, jax.Array]:
  """Returns the likeliest tokens, renormalized, and their log-probs.

  If more tokens are possible, others that tie with the last one are dropped.

  Args:
    logprobs_RxV: [R, V] float32, nats, as `process` returns them.
    num_kept: C, most tokens to keep.
    axis: mesh axis, see `process`.

  Returns:
    [R, C] float32, nats, likeliest first, and [R, C] int32, token ids; -inf and
    -1 after the last possible token.
  """

  def likeliest(logprobs_RxN, ids_RxN):
    count = min(num_kept, logprobs_RxN.shape[1])
    logprobs_RxC, places_RxC = jax.lax.top_k(logprobs_RxN, count)
    return logprobs_RxC, jnp.take_along_axis(ids_RxN, places_RxC, axis=1)

  logprobs_RxC, ids_RxC = likeliest(logprobs_RxV, _vocab(logprobs_RxV, axis))
  if axis is not None:
    gather = lambda x: jax.lax.all_gather(x, axis, axis=1, tiled=True)
    logprobs_RxC, ids_RxC = likeliest(gather(logprobs_RxC), gather(ids_RxC))
  padding = ((0, 0), (0, num_kept - ids_RxC.shape[1]))
  logprobs_RxC = jnp.pad(logprobs_RxC, padding, constant_values=-jnp.inf)
  ids_RxC = jnp.pad(ids_RxC, padding, constant_values=-1)
  # Forbidden tokens have the lowest finite log-probs.
  is_kept = logprobs_RxC > _LEAST_KEPT
  return _log_softmax(logprobs_RxC, None), jnp.where(is_kept, ids_RxC, -1)


def _first(
    probs_RxN: jax.Array, passed_RxN: jax.Array
) -> tuple[jax.Array, jax.Array]:
  """Returns the first possible entry that passed, else the last possible one.

  Rounded sums may stay constant or never exceed u times the total. So an entry
  must have positive probability, and the last such entry is the fallback.

  Returns:
    [R] int32, the entry, and [R] bool, whether any passed.
  """
  possible_RxN = probs_RxN > 0
  passed_RxN &= possible_RxN
  at_RxN = jax.lax.broadcasted_iota(jnp.int32, probs_RxN.shape, 1)
  first_R = jnp.min(jnp.where(passed_RxN, at_RxN, _NO_TOKEN), axis=-1)
  last_R = jnp.max(jnp.where(possible_RxN, at_RxN, 0), axis=-1)
  passed_R = first_R < _NO_TOKEN
  return jnp.where(passed_R, first_R, last_R), passed_R


def plain_logprob(
    logits_RxV: jax.Array,
    token_R: jax.Array,
    *,
    temperature: float,
    axis: str | None = None,
) -> jax.Array:
  """Returns [R] float32, log-probs under the untruncated model, nats."""
  scaled_RxV = logits_RxV.astype(jnp.float32) / temperature
  return _at(_log_softmax(scaled_RxV, axis), token_R, axis)


def _vocab(x_RxV: jax.Array, axis: str | None) -> jax.Array:
  """Returns [R, V] int32, the token of each entry."""
  vocab_RxV = jax.lax.broadcasted_iota(jnp.int32, x_RxV.shape, 1)
  if axis is not None:
    vocab_RxV += jax.lax.axis_index(axis) * x_RxV.shape[1]
  return vocab_RxV


def _sum(x_RxV: jax.Array, axis: str | None) -> jax.Array:
  """Returns [R, 1], reduced over the whole vocabulary, as `_max` and `_min`."""
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


def _place(logits_RxV: jax.Array) -> jax.Array:
  """Returns [R, V] uint32, integers that grow as logits fall; 0 equals -0."""
  zero_RxV = jnp.where(logits_RxV == 0, 0.0, logits_RxV)
  bits_RxV = jax.lax.bitcast_convert_type(zero_RxV, jnp.uint32)
  # Bit patterns of negative floats increase as the float decreases; bits of
  # positive floats increase with it.
  return jnp.where(bits_RxV >= _SIGN, bits_RxV, _SIGN - 1 - bits_RxV)


def _last_place(
    place_RxC: jax.Array,
    weights_RxC: jax.Array,
    limit: float,
    axis: str | None,
) -> jax.Array:
  """Returns [R, 1] uint32, the last place of the smallest set to reach a limit.

  A token is in the set if the weights of likelier tokens sum to less than
  `limit`. A bitwise search finds the last such place with 32 sums; a sort takes
  about (log V)² passes on an accelerator.

  Args:
    place_RxC: [R, C] uint32, places of all candidate tokens.
    weights_RxC: [R, C] or [], at least 0: probabilities, or 1 to count tokens.
    limit: sum to reach, above 0.
    axis: mesh axis, see `process`.
  """

  def set_bit(i: jax.Array, found_Rx1: jax.Array) -> jax.Array:
    tried_Rx1 = found_Rx1 | (_SIGN >> i.astype(jnp.uint32))
    before_RxC = jnp.where(place_RxC < tried_Rx1, weights_RxC, 0)
    return jnp.where(_sum(before_RxC, axis) < limit, tried_Rx1, found_Rx1)

  zeros_Rx1 = jnp.zeros((len(place_RxC), 1), jnp.uint32)
  return jax.lax.fori_loop(0, 32, set_bit, zeros_Rx1)


def _tiles(x_RxV: jax.Array, padding: float) -> jax.Array:
  """Returns [R, N, W], the vocabulary in tiles, the last one padded."""
  num_rows, num_tokens = x_RxV.shape
  width = min(_TILE, num_tokens)
  missing = -num_tokens % width
  if missing:
    x_RxV = jnp.pad(x_RxV, ((0, 0), (0, missing)), constant_values=padding)
  return x_RxV.reshape(num_rows, -1, width)


def _likeliest(logits_RxV: jax.Array, top_k: int) -> jax.Array:
  """Returns [R, top_k] int32, the tiles with the largest logits.

  Fewer than `top_k` tiles contain a token likelier than the `top_k`-th, so
  these tiles contain all such tokens and the `top_k`-th itself.
  """
  largest_RxN = jnp.max(_tiles(logits_RxV, -jnp.inf), axis=-1)
  return jax.lax.top_k(largest_RxN, top_k)[1]


def _take_tiles(
    tiles_RxB: jax.Array, x_RxV: jax.Array, padding: float
) -> jax.Array:
  """Returns [R, B * W], the entries of the given tiles."""
  tiles_RxNxW = _tiles(x_RxV, padding)
  taken = jax.vmap(lambda x, at: x[at])(tiles_RxNxW, tiles_RxB)
  return taken.reshape(len(x_RxV), -1)


def explored_logits(
    settings: requests.SamplingSettings,
    logits_RxV: jax.Array,
    keys_R: jax.Array,
    position_R: jax.Array,
    axis: str | None = None,
) -> jax.Array:
  """Returns the logits with exploration, to be divided by the temperature.

  Greedy decoding does not explore.

  Args:
    settings: values of `explore`, `temperature` and `stop_ids`.
    logits_RxV: [R, V] float.
    keys_R: [R] random keys.
    position_R: [R] int32, index of the token to draw in its completion.
    axis: mesh axis, see `process`.
  """
  explore = settings.explore
  if not settings.temperature:
    return logits_RxV
  if explore.fraction:
    random_R = random_temperature(explore, keys_R)
    factor_R = settings.temperature / jnp.maximum(random_R, 1e-6)
    factor_R = jnp.where(random_R > 0, factor_R, 1.0)
    logits_RxV = logits_RxV.astype(jnp.float32) * factor_R[:, None]
  if explore.min_tokens:
    early_R = position_R < explore.min_tokens
    logits_RxV = _forbid(logits_RxV, settings.stop_ids, early_R, axis)
  if explore.max_tokens:
    late_R = position_R >= explore.max_tokens
    logits_RxV = _forbid(
        logits_RxV, settings.stop_ids, late_R, axis, others=True
    )
  return logits_RxV


def random_temperature(
    explore: requests.Explore, keys_R: jax.Array
) -> jax.Array:
  """Returns [R] float32, each row's random temperature; 0 without one."""
  keys_R = jax.vmap(jax.random.fold_in, (0, None))(keys_R, _TEMPERATURE_STREAM)
  bits_Rx2 = jax.random.key_data(keys_R) >> 8
  uniform_Rx2 = bits_Rx2.astype(jnp.float32) * 2.0**-24
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
    others: bool = False,
) -> jax.Array:
  """Returns logits that exclude `tokens`, or all others, in `rows_R`."""
  vocab_RxV = _vocab(logits_RxV, axis)
  hit_RxV = jnp.zeros(vocab_RxV.shape, bool)
  for token in tokens:
    hit_RxV = hit_RxV | (vocab_RxV == token)
  hit_RxV = hit_RxV ^ others
  # Differences of -inf would be NaN.
  lowest = jnp.finfo(jnp.float32).min / 4
  logits_RxV = logits_RxV.astype(jnp.float32)
  return jnp.where(hit_RxV & rows_R[:, None], lowest, logits_RxV)
