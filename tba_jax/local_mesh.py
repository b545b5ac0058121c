# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""A mesh of one process's own devices, and where params lie on it.

A searcher samples on `config.search.mesh`: rows are split over `data` and
`fsdp`, params by `config.sharding`. No other process has a part in it. Nor has
one in the mesh on which process 0 of a trainer evaluates: its own devices.
"""

from collections.abc import Callable, Mapping
import dataclasses
import math
from typing import Any

import jax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec
import ml_collections
import numpy as np

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


def cut(sizes: Mapping[str, int], num_devices: int) -> dict[str, int]:
  """Returns the sizes of a mesh of fewer devices, for the same params.

  What divides over the larger mesh divides over this one: its `tensor` and
  `fsdp` are divisors of that one's, the largest that there are devices for.
  The devices that are left split rows, as `data`.

  Args:
    sizes: of the larger mesh, by axis.
    num_devices: of the smaller one.
  """
  tensor = math.gcd(sizes["tensor"], num_devices)
  fsdp = math.gcd(sizes["fsdp"], num_devices // tensor)
  data = num_devices // tensor // fsdp
  return {"data": data, "fsdp": fsdp, "sequence": 1, "tensor": tensor}


def make_gather(
    mesh: jax.sharding.Mesh,
) -> Callable[[types.PyTree], types.PyTree]:
  """Returns what brings arrays whole to each process, split over its devices.

  All processes call it together. What the mesh splits over `fsdp` and `tensor`
  is split over as many devices of a process as `cut` says, so that the devices
  of one process need room for it together, not each of them.

  Args:
    mesh: of all processes, which have as many devices each.

  Returns:
    gather(tree of arrays on `mesh`) -> the same on devices of this process.
  """
  of_process: dict[int, list[jax.Device]] = {}
  for device in mesh.devices.flat:
    of_process.setdefault(device.process_index, []).append(device)
  own = of_process[jax.process_index()]
  sizes = cut(mesh.shape, len(own))
  shape = [sizes[axis] for axis in sharding.MESH_AXES]
  devices = np.asarray([of_process[i] for i in sorted(of_process)])
  whole = jax.sharding.Mesh(
      devices.reshape(-1, *shape), ("process", *sharding.MESH_AXES)
  )
  here = jax.sharding.Mesh(np.asarray(own).reshape(shape), sharding.MESH_AXES)
  # What a compiled program has placed may have no names; it comes unsplit.
  spec = lambda leaf: getattr(leaf.sharding, "spec", PartitionSpec())

  def own_part(leaf: jax.Array) -> jax.Array:
    parts = {shard.device: shard.data for shard in leaf.addressable_shards}
    return jax.make_array_from_single_device_arrays(
        leaf.shape,
        NamedSharding(here, spec(leaf)),
        [parts[device] for device in here.devices.flat],
    )

  def gather(tree: types.PyTree) -> types.PyTree:
    places = jax.tree.map(lambda x: NamedSharding(whole, spec(x)), tree)
    return jax.tree.map(own_part, jax.device_put(tree, places))

  return gather
