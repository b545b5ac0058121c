# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Rows of tokens without their padding.

All of a layer but its attention is the same for each token, so that padding
need not pass through it. `take` leaves it out, `put` puts the tokens back where
attention expects them. Both are gathers, and so are their gradients: the
scatter that would be one's is slow on every backend.

Axes: B rows, L tokens of a row with padding, C without.
"""

import dataclasses

import jax
import jax.numpy as jnp


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Unpadded:
  """Places of the tokens that are kept.

  places: [B, C] int32, place in its row of each token that is kept, in any
    order; L or more is none.
  found: [B, L] int32, place of each token of a row among those that are kept; C
    is one that is not.
  """

  places: jax.Array
  found: jax.Array


def find(places_BxC: jax.Array, length: int) -> Unpadded:
  """Returns the places with their inverse.

  Args:
    places_BxC: `Unpadded.places`; each below L is there once.
    length: L.
  """
  C = places_BxC.shape[1]
  order_C = jnp.arange(C, dtype=jnp.int32)
  found = lambda places_C: (
      jnp.full(length, C, jnp.int32).at[places_C].set(order_C, mode="drop")
  )
  return Unpadded(places_BxC, jax.vmap(found)(places_BxC))


@jax.custom_vjp
def _gather(x: jax.Array, there: jax.Array, back: jax.Array) -> jax.Array:
  """Returns x[b, there[b, i]], 0 past the end of `x`.

  The gradient is the same with `there` and `back` exchanged.
  """
  del back
  # Under vmap the partitioner sees that rows do not mix.
  one = lambda x, there: x.at[there].get(mode="fill", fill_value=0)
  return jax.vmap(one)(x, there)


_gather.defvjp(
    lambda x, there, back: (_gather(x, there, back), (there, back)),
    lambda places, grad: (_gather(grad, *reversed(places)), None, None),
)


def take(x_BxLx: jax.Array, kept: Unpadded) -> jax.Array:
  """Returns [B, C, ...], the kept tokens of [B, L, ...]; 0 where is none."""
  return _gather(x_BxLx, kept.places, kept.found)


def put(x_BxCx: jax.Array, kept: Unpadded) -> jax.Array:
  """Returns [B, L, ...], kept tokens in their places and 0 in all others."""
  return _gather(x_BxCx, kept.found, kept.places)
