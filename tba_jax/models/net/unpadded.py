# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Rows of tokens without their padding.

Everything in a layer except attention treats tokens independently, so padding
need not pass through it. `take` removes padding, and `put` puts the tokens back
where attention expects them. Both are gathers, and so are their gradients: the
default gradient, a scatter, is slow on every backend.

Axes: B rows, L tokens of a row with padding, C tokens without.
"""

import dataclasses

import jax
import jax.numpy as jnp


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Unpadded:
  """Indices between padded rows and the kept tokens.

  places: [B, C] int32, index of each kept token in its padded row, in any
    order; L or more means none.
  found: [B, L] int32, index of each token of a padded row among the kept ones;
    C if it is not kept.
  """

  places: jax.Array
  found: jax.Array


def find(places_BxC: jax.Array, length: int) -> Unpadded:
  """Returns the places with their inverse.

  Args:
    places_BxC: `Unpadded.places`; values below L are unique.
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

  The gradient is the same function with `there` and `back` exchanged.
  """
  del back
  # With vmap, the partitioner sees that rows do not mix.
  one = lambda x, there: x.at[there].get(mode="fill", fill_value=0)
  return jax.vmap(one)(x, there)


_gather.defvjp(
    lambda x, there, back: (_gather(x, there, back), (there, back)),
    lambda places, grad: (_gather(grad, *reversed(places)), None, None),
)


def take(x_BxLx: jax.Array, kept: Unpadded) -> jax.Array:
  """Returns [B, C, ...], the kept tokens of [B, L, ...]; 0 where none is."""
  return _gather(x_BxLx, kept.places, kept.found)


def put(x_BxCx: jax.Array, kept: Unpadded) -> jax.Array:
  """Returns [B, L, ...], the kept tokens in their places and 0 elsewhere."""
  return _gather(x_BxCx, kept.found, kept.places)
