# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Where the arrays of a sampler lie."""

import math
from typing import Any

import jax

from tba_jax import types

# Axes of a mesh that prompts are split over: a sampler's rows are, too.
_BATCH_AXES = ("data", "fsdp")


def of_params(params: types.PyTree) -> jax.sharding.Sharding:
  """Returns where the sampler's own arrays lie: with the params, replicated."""
  for leaf in jax.tree.leaves(params):
    sharding = getattr(leaf, "sharding", None)
    if isinstance(sharding, jax.sharding.NamedSharding):
      return jax.sharding.NamedSharding(
          sharding.mesh, jax.sharding.PartitionSpec()
      )
    if sharding is not None:
      return sharding
  return jax.sharding.SingleDeviceSharding(jax.local_devices()[0])


def of_rows(
    place: jax.sharding.Sharding, num_rows: int
) -> jax.sharding.Sharding:
  """Returns where rows [R, ...] lie: split over the axes of a batch.

  They are whole on every device where they do not divide over these.
  """
  if not isinstance(place, jax.sharding.NamedSharding):
    return place
  axes = tuple(a for a in _BATCH_AXES if place.mesh.shape.get(a, 1) > 1)
  if num_rows % math.prod(place.mesh.shape[a] for a in axes):
    return place
  return jax.sharding.NamedSharding(
      place.mesh, jax.sharding.PartitionSpec(axes or None)
  )


def of_state(place: jax.sharding.Sharding, state: Any) -> Any:
  """Returns where the leaves of a decode state lie, or where all do.

  Rows lie as `of_rows`; the heads of caches are split over `tensor`, as those
  of params are, where they divide.

  Args:
    place: from `of_params`.
    state: shapes of a `rows.DecodeState`.
  """
  rows = of_rows(place, state.active.shape[0])
  if not isinstance(place, jax.sharding.NamedSharding):
    return rows
  tensor = place.mesh.shape.get("tensor", 1)

  def sharding(leaf: Any) -> jax.sharding.NamedSharding:
    # Keys and values alone have four axes, the second of heads.
    if leaf.ndim < 4 or tensor == 1 or leaf.shape[1] % tensor:
      return rows
    parts = (*rows.spec, *[None] * (1 - len(rows.spec)), "tensor")
    return jax.sharding.NamedSharding(
        place.mesh, jax.sharding.PartitionSpec(*parts)
    )

  return jax.tree.map(sharding, state)


def put(params: types.PyTree, place: jax.sharding.Sharding) -> types.PyTree:
  """Returns the params as device arrays; those that are lie where they lay."""
  # An array that was never put anywhere counts as another kind of input, and
  # would be compiled for once more.
  return jax.tree.map(
      lambda leaf: jax.device_put(leaf, getattr(leaf, "sharding", place)),
      params,
  )
