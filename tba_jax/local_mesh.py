# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""A mesh of one process's own devices, and where params lie on it.

A searcher samples on `config.search.mesh`: rows are split over `data` and
`fsdp`, params by `config.sharding`. No other process has a part in it.
"""

from collections.abc import Callable
import dataclasses
import math
from typing import Any

import jax
import ml_collections

from tba_jax import sharding
from tba_jax import types

_KEY = "search.mesh"


@dataclasses.dataclass(frozen=True)
class Place:
  """Where params lie, as `jax.device_put` takes it; None: on one device.

  model: of each of the model's params.
  trained: of each leaf of what is trained, and published.
  """

  model: types.PyTree
  trained: types.PyTree

  def put(self, params: types.PyTree) -> types.PyTree:
    """Returns the model's params where they lie; those that do stay."""
    return params if self.model is None else jax.device_put(params, self.model)


ONE_DEVICE = Place(None, None)


def of_searcher(
    search: ml_collections.ConfigDict, on_event: Callable[[str, str], None]
) -> jax.sharding.Mesh | None:
  """Returns a searcher's mesh, None where that is one device.

  To be called before anything asks for a device.

  Args:
    search: `config.search`: `mesh` and `cpu_devices`.
    on_event: told of devices of this process that the mesh leaves idle.

  Raises:
    ValueError: there are fewer devices than the mesh needs.
  """
  if search.cpu_devices:
    jax.config.update("jax_num_cpu_devices", search.cpu_devices)
  sizes = search.mesh.to_dict()
  needed, found = math.prod(sizes.values()), jax.local_devices()
  if needed > len(found):
    virtual = f"; config.search.cpu_devices={needed} makes virtual ones"
    raise ValueError(
        f"config.{_KEY}={sizes} needs {needed} devices,"
        f" {len(found)} of {found[0].device_kind} are here"
        + virtual * (found[0].platform == "cpu")
    )
  if needed < len(found):
    on_event(
        "idle_devices",
        f"config.{_KEY}={sizes} uses {needed} of the {len(found)} devices of"
        " this searcher",
    )
  if needed == 1:
    return None
  return sharding.make_mesh({"sequence": 1, **sizes}, found[:needed])


def place(
    mesh: jax.sharding.Mesh | None,
    rules: ml_collections.ConfigDict,
    policy: Any,
) -> Place:
  """Returns where params lie on a searcher's mesh.

  Args:
    mesh: from `of_searcher`.
    rules: `config.sharding`.
    policy: has a model and what is trained of it, as `policy.Policy`.

  Raises:
    ValueError: a leaf does not divide over the mesh; it is named.
  """
  if mesh is None:
    return ONE_DEVICE
  found = []
  for part in (policy.model, policy.trained):
    shardings = sharding.param_shardings(mesh, rules, part.logical_axes)
    shapes = jax.eval_shape(part.init, jax.random.PRNGKey(0))
    sharding.check_divisible(shapes, shardings, key=_KEY)
    found.append(shardings)
  return Place(*found)
