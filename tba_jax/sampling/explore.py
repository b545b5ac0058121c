# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""What is changed of the logits so that sampling finds what is new.

A share of the completions is drawn at a temperature of its own, and none ends
before it has some tokens. The log-prob of a token under what it was drawn from
is its behavior log-prob; the model's own is the plain one beside it.

Source: Lee et al. 2025 (arXiv:2405.18540) and the code that they released, with
one temperature a completion in place of one a batch.

Axes: R rows, V vocabulary.
"""

from collections.abc import Sequence
import dataclasses
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

if TYPE_CHECKING:
  from tba_jax.sampling import rows

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


def explored(
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
