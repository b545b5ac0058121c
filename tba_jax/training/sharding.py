# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""The mesh, and rules from logical axes to shardings.

Rules (`config.sharding`) map the name of a logical axis to a mesh axis, to
several joined by commas ("data,fsdp"), or to "" for replicated. A mesh axis
shards at most one axis of an array: the first that asks for it has it.
"""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import math
from typing import Any

import jax
from jax.experimental import mesh_utils
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec
import ml_collections
import numpy as np

from tba_jax import types

PyTree = types.PyTree

MESH_AXES = ("data", "fsdp", "sequence", "tensor")


def make_mesh(
    mesh_config: Mapping[str, int],
    devices: Sequence[jax.Device] | None = None,
) -> Mesh:
  """Returns the mesh with the axes of `MESH_AXES`.

  Args:
    mesh_config: `config.mesh`, the size of each axis.
    devices: as many as the sizes multiply to; None takes the first ones of
      `jax.devices()`.

  Raises:
    ValueError: another set of axes, a size below 1, or too few devices.
  """
  sizes = {name: mesh_config[name] for name in mesh_config}
  if set(sizes) != set(MESH_AXES):
    raise ValueError(f"config.mesh={sizes}: allowed axes {MESH_AXES}")
  for name, size in sizes.items():
    if size < 1:
      raise ValueError(f"config.mesh.{name}={size}: allowed 1 and above")
  shape = tuple(sizes[name] for name in MESH_AXES)
  needed = math.prod(shape)
  found = jax.devices() if devices is None else list(devices)
  all_of_them = devices is not None or jax.process_count() > 1
  if len(found) < needed or (all_of_them and len(found) != needed):
    raise ValueError(
        f"config.mesh={sizes} needs {needed} devices, {len(found)} are here"
        f" in {jax.process_count()} processes"
    )
  placed = arrange(found[:needed], shape, len(found) == needed)
  return Mesh(placed, MESH_AXES)


def arrange(
    devices: Sequence[jax.Device],
    shape: Sequence[int],
    all_of_them: bool = True,
) -> np.ndarray:
  """Returns devices in the shape of a mesh, neighbors along its last axes.

  Several slices lie along `data` as far as it divides, then along the axes
  after it: gradients pass between slices once a step, but params and
  activations of the other axes for every layer.

  Args:
    devices: as many as the mesh has.
    shape: of the mesh, in the order of `MESH_AXES`.
    all_of_them: whether they are all devices of their slices; others stay in
      order.
  """
  if devices[0].platform == "cpu" or not all_of_them:
    return np.asarray(devices).reshape(shape)
  slices = len({getattr(device, "slice_index", 0) for device in devices})
  over_slices, left = [], slices  # Of equal size: it ends at 1.
  for size in shape:
    over_slices.append(math.gcd(size, left))
    left //= over_slices[-1]
  within = [s // n for s, n in zip(shape, over_slices, strict=True)]
  if slices == 1:
    return mesh_utils.create_device_mesh(
        within, devices, allow_split_physical_axes=True
    )
  return mesh_utils.create_hybrid_device_mesh(
      within, over_slices, devices, allow_split_physical_axes=True
  )


def _mesh_axes(rules: Mapping[str, str], logical_axis: str) -> tuple[str, ...]:
  """Returns the mesh axes that a logical axis is sharded over."""
  if logical_axis not in rules:
    raise ValueError(
        f"config.sharding has no rule for {logical_axis!r}; it has"
        f" {sorted(rules)}"
    )
  axes = tuple(a.strip() for a in rules[logical_axis].split(",") if a.strip())
  for axis in axes:
    if axis not in MESH_AXES:
      raise ValueError(
          f"config.sharding.{logical_axis}={rules[logical_axis]!r}: allowed"
          f" mesh axes {MESH_AXES}, or '' for replicated"
      )
  return axes


def _parts(
    rules: Mapping[str, str], logical_axes: Sequence[str]
) -> list[tuple[str, ...]]:
  """Returns the mesh axes of each of an array's logical axes."""
  taken, parts = set(), []
  for name in logical_axes:
    axes = tuple(a for a in _mesh_axes(rules, name) if a not in taken)
    taken.update(axes)
    parts.append(axes)
  return parts


def _spec(
    rules: Mapping[str, str], logical_axes: Sequence[str]
) -> PartitionSpec:
  """Returns the partition of an array with these logical axes."""
  return PartitionSpec(*(axes or None for axes in _parts(rules, logical_axes)))


def _is_axes(node: Any) -> bool:
  return isinstance(node, tuple) and all(isinstance(a, str) for a in node)


def param_shardings(
    mesh: Mesh, rules: Mapping[str, str], logical_axes: PyTree
) -> PyTree:
  """Returns a NamedSharding for each leaf of params.

  Args:
    mesh: from `make_mesh`.
    rules: `config.sharding`.
    logical_axes: params with a tuple of axis names in place of each leaf, as
      `Model.logical_axes`.

  Raises:
    ValueError: a logical axis without rule, or a rule that names no mesh axis.
  """
  return jax.tree.map(
      lambda axes: NamedSharding(mesh, _spec(rules, axes)),
      logical_axes,
      is_leaf=_is_axes,
  )


def _splits(sharding: NamedSharding, ndim: int) -> list[tuple[str, ...]]:
  """Returns the mesh axes of each axis of an array."""
  parts = list(sharding.spec) + [None] * (ndim - len(sharding.spec))
  return [(p,) if isinstance(p, str) else tuple(p or ()) for p in parts]


def check_divisible(
    params: PyTree, shardings: PyTree, *, key: str = "mesh"
) -> None:
  """Checks that each leaf divides evenly over its mesh axes.

  Args:
    params: arrays, or their shapes from `jax.eval_shape`.
    shardings: as `param_shardings` returns them.
    key: of the config that the mesh is made of, for the message.

  Raises:
    ValueError: names every leaf, axis and mesh axis that do not divide.
  """
  problems = []

  def check(path, leaf, sharding):
    name = jax.tree_util.keystr(path, simple=True, separator="/")
    for i, axes in enumerate(_splits(sharding, len(leaf.shape))):
      size = math.prod(sharding.mesh.shape[a] for a in axes)
      if leaf.shape[i] % size:
        problems.append(
            f"{name}: axis {i} of {tuple(leaf.shape)} does not divide by mesh"
            f" axis {','.join(axes)} of size {size}"
        )

  jax.tree_util.tree_map_with_path(check, params, shardings)
  if problems:
    raise ValueError(
        f"params do not fit config.{key} and config.sharding: "
        + "; ".join(problems)
    )


def replicated(mesh: Mesh) -> NamedSharding:
  """Returns the sharding of an array that every device holds whole."""
  return NamedSharding(mesh, PartitionSpec())


def batch_sharding(mesh: Mesh, rules: Mapping[str, str]) -> NamedSharding:
  """Returns the sharding of arrays [B, ...]: only B is split.

  A prompt's K completions stay on one shard, so that means over a group are
  local.
  """
  return NamedSharding(mesh, _spec(rules, ("batch",)))


def token_axes(
    rules: Mapping[str, str],
) -> tuple[tuple[str, ...], tuple[str, ...]]:
  """Returns the mesh axes of activations [B, L, ...]: of B, and of L.

  Raises:
    ValueError: a rule is missing, or names no mesh axis.
  """
  batch, length = _parts(rules, ("batch", "length"))
  return batch, length


def shard_batch(batch: PyTree, mesh: Mesh, rules: Mapping[str, str]) -> PyTree:
  """Returns host arrays [B, ...] as device arrays that are split along B.

  Args:
    batch: all B rows.
    mesh: from `make_mesh`, of devices of this process.
    rules: `config.sharding`.

  Raises:
    ValueError: B does not divide by the mesh axes of the batch.
  """
  _check_rows(batch, mesh, rules)
  return jax.device_put(batch, batch_sharding(mesh, rules))


def make_spread(
    mesh: Mesh, rules: Mapping[str, str]
) -> Callable[[PyTree], PyTree]:
  """Returns a function that splits a batch of process 0 over all processes.

  All processes call it together. It is a sum over devices, of which one has the
  batch and the others zeros, and each keeps its rows. No host waits for it.

  Args:
    mesh: from `make_mesh`, of all processes.
    rules: `config.sharding`.

  Returns:
    spread(batch) -> as `shard_batch`. In other processes than 0 the leaves are
    `jax.ShapeDtypeStruct`.
  """
  devices = list(mesh.devices.flat)
  source = next(d for d in devices if d.process_index == 0)
  mine = [d for d in devices if d.process_index == jax.process_index()]
  one_each = NamedSharding(mesh, PartitionSpec(MESH_AXES))
  add = jax.jit(
      lambda batch: jax.tree.map(lambda x: x.sum(0, dtype=x.dtype), batch),
      out_shardings=batch_sharding(mesh, rules),
  )

  def put(leaf: Any) -> jax.Array:
    parts = [
        jax.device_put(leaf[None], device)
        if device == source
        else jnp.zeros((1, *leaf.shape), leaf.dtype, device=device)
        for device in mine
    ]
    return jax.make_array_from_single_device_arrays(
        (len(devices), *leaf.shape), one_each, parts
    )

  def spread(batch: PyTree) -> PyTree:
    _check_rows(batch, mesh, rules)
    return add(jax.tree.map(put, batch))

  return spread


def _check_rows(batch: PyTree, mesh: Mesh, rules: Mapping[str, str]) -> None:
  (axes,) = _splits(batch_sharding(mesh, rules), 1)
  size = math.prod(mesh.shape[a] for a in axes)
  for path, leaf in jax.tree_util.tree_leaves_with_path(batch):
    if leaf.shape[0] % size:
      name = jax.tree_util.keystr(path, simple=True, separator="/")
      raise ValueError(
          f"batch {name}: {leaf.shape[0]} prompts do not divide by"
          f" mesh axis {','.join(axes)} of size {size} (config.sharding.batch)"
      )


# Meshes of one process's own devices. A searcher samples on
# `config.search.mesh`: rows are split over `data` and `fsdp`, params by
# `config.sharding`. Process 0 of a trainer evaluates on its devices.

_KEY = "search.mesh"


@dataclasses.dataclass(frozen=True)
class Place:
  """Shardings of a searcher's params; None: on one device.

  model: of the model's params.
  trained: of what is trained, and published.
  """

  model: types.PyTree
  trained: types.PyTree

  def put(self, params: types.PyTree) -> types.PyTree:
    """Returns the model's params in their shardings."""
    return params if self.model is None else jax.device_put(params, self.model)


ONE_DEVICE = Place(None, None)


def searcher_mesh(
    search: ml_collections.ConfigDict, on_event: Callable[[str, str], None]
) -> jax.sharding.Mesh | None:
  """Returns a searcher's mesh; None for one device.

  Call it before anything asks for a device.

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
  return make_mesh({"sequence": 1, **sizes}, found[:needed])


def make_place(
    mesh: jax.sharding.Mesh | None,
    rules: ml_collections.ConfigDict,
    policy: Any,
) -> Place:
  """Returns the shardings of params on a searcher's mesh.

  Args:
    mesh: from `searcher_mesh`.
    rules: `config.sharding`.
    policy: a `policy.Policy`.

  Raises:
    ValueError: a leaf does not divide over the mesh; it is named.
  """
  if mesh is None:
    return ONE_DEVICE
  found = []
  for part in (policy.model, policy.trained):
    shardings = param_shardings(mesh, rules, part.logical_axes)
    shapes = jax.eval_shape(part.init, jax.random.PRNGKey(0))
    check_divisible(shapes, shardings, key=_KEY)
    found.append(shardings)
  return Place(*found)


def cut_rows(sizes: Mapping[str, int], num_devices: int) -> dict[str, int]:
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
  """Returns a function that gathers arrays to each process's own devices.

  All processes call it together. In a process, `fsdp` and `tensor` are as
  `cut_rows` gives them, so that its devices hold one copy together, not each.

  Args:
    mesh: of all processes, which have as many devices each.

  Returns:
    gather(tree of arrays on `mesh`) -> the same on devices of this process.
  """
  of_process: dict[int, list[jax.Device]] = {}
  for device in mesh.devices.flat:
    of_process.setdefault(device.process_index, []).append(device)
  own = of_process[jax.process_index()]
  sizes = cut_rows(mesh.shape, len(own))
  shape = [sizes[axis] for axis in MESH_AXES]
  devices = np.asarray([of_process[i] for i in sorted(of_process)])
  whole = jax.sharding.Mesh(
      devices.reshape(-1, *shape), ("process", *MESH_AXES)
  )
  here = jax.sharding.Mesh(np.asarray(own).reshape(shape), MESH_AXES)
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
