# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Meshes, and the shardings of params and batches on them.

`RULES` maps each logical axis of params to mesh axes. A mesh axis shards at
most one axis of an array, the first that maps to it.
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
from tba_jax.models import head_layout
from tba_jax.models.net import sequence
from tba_jax.models.net import spread
from tba_jax.policy import settings

PyTree = types.PyTree

MESH_AXES = settings.MESH_AXES
# Mesh axes over which B, L, heads and experts are split in activations. Devices
# along `tensor` hold the same tokens.
BATCH_AXES = ("data", "fsdp")
TOKEN_AXES = (BATCH_AXES, ("sequence",), ("tensor",), ("tensor",))
# Mesh axes over which each logical axis of params is split.
RULES = {
    "layers": (),
    "vocab": ("tensor",),
    "width": ("fsdp", "sequence"),
    "mlp": ("tensor",),
    "dense_mlp": ("tensor",),
    "shared_mlp": ("tensor",),
    "experts": ("tensor",),
    "heads": ("tensor",),
    "kv_heads": ("tensor",),
    "head_dim": (),
    "global_head_dim": (),
    "global_kv_heads": ("tensor",),
    "layer_input": (),
    "layer_inputs": ("fsdp", "sequence"),
    "one": (),
    "all_heads": (),
    "all_kv_heads": (),
    "gates": (),
    # The fused channels and the heads of a delta net are not split.
    "delta_channels": (),
    "delta_groups": (),
    "delta_qkvz": (),
    "delta_ba": (),
    "delta_heads": (),
    "delta_dim": (),
    "taps": (),
    # Latents are whole on each device, like the keys and values of one head.
    "latent": (),
    "latent_and_key": (),
    "query_rank": (),
    "key_and_value": (),
    "value_dim": (),
    "labels": (),
    "positions": (),
    "lora_rank": (),
}
# Logical axes that stay whole along a mesh axis that does not divide them; any
# other such axis is an error, except heads, whose widths are split instead
# (`models/net/spread.py`).
_MAY_BE_WHOLE = frozenset({
    ("vocab", "tensor"), ("width", "sequence"), ("layer_inputs", "sequence"),
})  # fmt: skip


def make_mesh(
    mesh_config: Mapping[str, int],
    devices: Sequence[jax.Device] | None = None,
) -> Mesh:
  """Returns the mesh with the axes of `MESH_AXES`.

  Args:
    mesh_config: `config.mesh`, the size of each axis.
    devices: exactly as many as the mesh needs; None takes the first ones of
      `jax.devices()`, which must be all of them with several processes.

  Raises:
    ValueError: a wrong number of devices.
  """
  sizes = {name: mesh_config[name] for name in MESH_AXES}
  shape = tuple(sizes.values())
  needed = math.prod(shape)
  present = jax.devices() if devices is None else list(devices)
  all_of_them = devices is not None or jax.process_count() > 1
  if len(present) < needed or (all_of_them and len(present) != needed):
    count = jax.process_count()
    virtual = (
        f"; config.trainer.cpu_devices={needed // count} makes virtual ones"
    )
    raise ValueError(
        f"config.mesh={sizes} needs {needed} devices, {len(present)} are"
        f" here in {count} processes{virtual * (present[0].platform == 'cpu')}"
    )
  placed = arrange(present[:needed], shape, len(present) == needed)
  return Mesh(placed, MESH_AXES)


def abstract_mesh(
    sizes: Mapping[str, int], platform: str
) -> jax.sharding.AbstractMesh:
  """Returns a mesh without devices, for shapes on an absent platform.

  Args:
    sizes: size of each axis of the mesh.
    platform: "cpu", "gpu" or "tpu".
  """
  device = jax.sharding.AbstractDevice(
      device_kind=platform, num_cores=None, platform=platform
  )
  return jax.sharding.AbstractMesh(
      tuple(sizes[name] for name in MESH_AXES),
      MESH_AXES,
      # The default for meshes with devices; jax 0.12 differs for this kind.
      axis_types=(jax.sharding.AxisType.Auto,) * len(MESH_AXES),
      abstract_device=device,
  )


def arrange(
    devices: Sequence[jax.Device],
    shape: Sequence[int],
    all_of_them: bool = True,
) -> np.ndarray:
  """Returns devices in the shape of a mesh, neighbors along its last axes.

  TPU slices are laid along `data` as far as they divide it, then along the
  following axes: `data` passes gradients between slices once per step, while
  the other axes communicate in every layer.

  Args:
    shape: lengths of the axes, in the order of `MESH_AXES`.
    all_of_them: whether these are all devices of their slices; if not, their
      order is kept.
  """
  if devices[0].platform == "cpu" or not all_of_them:
    return np.asarray(devices).reshape(shape)
  slices = len({getattr(device, "slice_index", 0) for device in devices})
  over_slices, left = [], slices  # Ends at 1: slices have equal sizes.
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


def _is_axes(node: Any) -> bool:
  return isinstance(node, tuple) and all(isinstance(a, str) for a in node)


def _place(
    mesh: Mesh | jax.sharding.AbstractMesh,
    leaf: jax.ShapeDtypeStruct,
    logical_axes: Sequence[str],
) -> tuple[NamedSharding, list[str]]:
  """Returns the sharding of a leaf, and messages on axes that do not divide."""
  taken, parts, problems = set(), [], []
  splits_widths = False
  for i, (size, name) in enumerate(zip(leaf.shape, logical_axes, strict=True)):
    split_by, rule = (), RULES[name]
    if splits_widths and name.endswith("head_dim"):
      rule = RULES["heads"]
    for axis in rule:
      if axis in taken:
        continue
      shards = math.prod(mesh.shape[a] for a in (*split_by, axis))
      if size % shards and name in spread.HEAD_AXES:
        splits_widths = True
        break
      taken.add(axis)
      if size % shards:
        if (name, axis) not in _MAY_BE_WHOLE:
          problems.append(
              f"axis {i} of {leaf.shape} does not divide by mesh axis {axis} of"
              f" size {mesh.shape[axis]}"
          )
        break
      split_by = (*split_by, axis)
    parts.append(split_by or None)
  return NamedSharding(mesh, PartitionSpec(*parts)), problems


def _places(
    mesh: Mesh | jax.sharding.AbstractMesh, model: Any
) -> tuple[PyTree, list[str]]:
  """Returns the shardings of a model's params, and messages as in `_place`."""
  shapes = jax.eval_shape(model.init, jax.random.key(0))
  problems = []

  def place(path, axes, leaf):
    found, wrong = _place(mesh, leaf, axes)
    name = jax.tree_util.keystr(path, simple=True, separator="/")
    problems.extend(f"{name}: {problem}" for problem in wrong)
    return found

  shardings = jax.tree_util.tree_map_with_path(
      place, model.logical_axes, shapes, is_leaf=_is_axes
  )
  return shardings, problems


def param_shardings(
    mesh: Mesh | jax.sharding.AbstractMesh, model: Any, *, key: str = "mesh"
) -> PyTree:
  """Returns a NamedSharding for each leaf of params.

  Args:
    mesh: result of `make_mesh`.
    model: object with `init` and `logical_axes`, and `config` if it has heads.
    key: config key of the mesh, for the message.

  Raises:
    ValueError: some axes do not divide; names each leaf, axis and mesh axis.
  """
  shardings, problems = _places(mesh, model)
  # Adapters have the heads of their model.
  size, shape = mesh.shape["tensor"], getattr(model, "config", None)
  if shape and (problem := head_layout.problem_of(shape, size)):
    problems.insert(0, f"tensor of size {size}: {problem}")
  if problems:
    raise ValueError(
        f"params do not fit config.{key}: {'; '.join(problems)}. Give the mesh"
        " axis a size that divides"
    )
  return shardings


def abstract_params(
    model: Any, mesh: Mesh | jax.sharding.AbstractMesh, key: str = "mesh"
) -> PyTree:
  """Returns shapes, dtypes and shardings of a model's or adapters' params.

  See `param_shardings` for `key` and errors.
  """
  shapes = jax.eval_shape(model.init, jax.random.key(0))
  return with_shardings(shapes, param_shardings(mesh, model, key=key))


def with_shardings(shapes: PyTree, shardings: PyTree) -> PyTree:
  """Returns shapes and dtypes with a sharding for each leaf."""
  return jax.tree.map(
      lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
      shapes,
      shardings,
  )


def frozen_shardings(mesh: Mesh | None, model: Any) -> PyTree:
  """Returns the shardings of a frozen model's params; None on one device.

  The mesh was chosen for the policy, so an axis of another model that does not
  divide is replicated.
  """
  if mesh is None or mesh.size == 1:
    return None
  return _places(mesh, model)[0]


def first_device_mesh() -> Mesh:
  """Returns the mesh of this process's first device."""
  first = np.asarray(jax.local_devices()[:1])
  return Mesh(first.reshape([1] * len(MESH_AXES)), MESH_AXES)


def split_rows(
    fn: Callable[..., jax.Array], mesh: Mesh | None
) -> Callable[..., jax.Array]:
  """Returns `fn`, traced with its rows split over batch and sequence axes.

  Args:
    fn: (params, arrays [B, L]) -> [B, ...]; any B.
    mesh: placement of the params; None is the first device.
  """
  mesh = mesh or first_device_mesh()
  # Rows are many and independent, so they are also split over the token axis.
  batch, length, *others = TOKEN_AXES
  axes = batch + length
  run = sequence.split_tokens(fn, mesh, axes, (), *others)
  if mesh.size == 1:
    return run
  count = math.prod(mesh.shape[a] for a in axes)
  over_rows = NamedSharding(mesh, PartitionSpec(axes))

  def split(params: PyTree, *arrays: jax.Array) -> jax.Array:
    B = len(arrays[0])
    # Pad with repeats, not zeros: a row without a token would have no maximum.
    pad = lambda x: jnp.concatenate([x, x[jnp.arange(-B % count) % B]])
    place = lambda x: jax.lax.with_sharding_constraint(pad(x), over_rows)
    return run(params, *map(place, arrays))[:B]

  return split


def replicated(mesh: Mesh) -> NamedSharding:
  """Returns the sharding of a replicated array."""
  return NamedSharding(mesh, PartitionSpec())


def batch_sharding(mesh: Mesh) -> NamedSharding:
  """Returns the sharding of arrays [B, ...], split only along B.

  A prompt's K completions stay on one shard, so means over a group are local.
  """
  return NamedSharding(mesh, PartitionSpec(BATCH_AXES))


def num_batch_shards(mesh: Mesh) -> int:
  """Returns the number of parts that `batch_sharding` splits B into."""
  return math.prod(mesh.shape[axis] for axis in BATCH_AXES)


def batch_shardings(num_prompts: int, mesh: Mesh) -> PyTree:
  """Returns the shardings of a `types.Batch`, as a prefix of its tree.

  A batch whose prompts do not divide is replicated, except its packed rows,
  which always divide.
  """
  over = batch_sharding(mesh)
  if num_prompts % num_batch_shards(mesh) == 0:
    return over
  whole = replicated(mesh)
  fields = {field.name: whole for field in dataclasses.fields(types.Batch)}
  return types.Batch(**fields | {"rows": types.Rows(over, whole)})


def shard_batch(batch: PyTree, mesh: Mesh) -> PyTree:
  """Puts host arrays [B, ...] onto a mesh of this process, split along B.

  An array whose B does not divide is replicated.
  """
  return jax.device_put(batch, jax.tree.map(lambda x: place_of(x, mesh), batch))


def place_of(leaf: Any, mesh: Mesh) -> NamedSharding:
  """Returns an array's sharding along B, replicated if B does not divide."""
  if leaf.shape[0] % num_batch_shards(mesh):
    return replicated(mesh)
  return batch_sharding(mesh)


def make_spread(mesh: Mesh) -> Callable[[PyTree], PyTree]:
  """Returns a function that scatters process 0's batch over all processes.

  The function is a collective: a sum over devices, one of which holds the batch
  and the others zeros, with sharded output. No host waits for it.

  Args:
    mesh: result of `make_mesh`, over all processes.

  Returns:
    spread(batch) -> as `shard_batch`. In processes other than 0 the leaves of
    `batch` are `jax.ShapeDtypeStruct`.
  """
  devices = list(mesh.devices.flat)
  source = next(d for d in devices if d.process_index == 0)
  mine = [d for d in devices if d.process_index == jax.process_index()]
  one_each = NamedSharding(mesh, PartitionSpec(MESH_AXES))

  @jax.jit
  def add(batch: PyTree) -> PyTree:
    batch = jax.tree.map(lambda x: x.sum(0, dtype=x.dtype), batch)
    places = jax.tree.map(lambda x: place_of(x, mesh), batch)
    return jax.lax.with_sharding_constraint(batch, places)

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
    return add(jax.tree.map(put, batch))

  return spread


_KEY = "search.mesh"


@dataclasses.dataclass(frozen=True)
class Placement:
  """Shardings of a searcher's params; None on a single device.

  model: shardings of the model's params.
  trained: shardings of the published params, which may be only adapters.
  """

  model: types.PyTree
  trained: types.PyTree

  def put(self, params: types.PyTree) -> types.PyTree:
    """Puts the model's params into their shardings."""
    return params if self.model is None else jax.device_put(params, self.model)


ONE_DEVICE = Placement(None, None)


def searcher_mesh(
    search: ml_collections.ConfigDict, on_event: Callable[[str, str], None]
) -> jax.sharding.Mesh | None:
  """Returns a searcher's mesh, None for one device.

  Must run before JAX initializes its devices. Decode rows are split over `data`
  and `fsdp`, params by `RULES`.

  Args:
    search: `config.search`.
    on_event: function called with (kind, text) if devices of this process stay
      idle.

  Raises:
    ValueError: there are fewer devices than the mesh needs.
  """
  if search.cpu_devices:
    jax.config.update("jax_num_cpu_devices", search.cpu_devices)
  sizes = search.mesh.to_dict()
  needed, devices = math.prod(sizes.values()), jax.local_devices()
  if needed > len(devices):
    virtual = f"; config.search.cpu_devices={needed} makes virtual ones"
    raise ValueError(
        f"config.{_KEY}={sizes} needs {needed} devices,"
        f" {len(devices)} of {devices[0].device_kind} are here"
        + virtual * (devices[0].platform == "cpu")
    )
  if needed < len(devices):
    on_event(
        "idle_devices",
        f"config.{_KEY}={sizes} uses {needed} of the {len(devices)} devices of"
        " this searcher",
    )
  if needed == 1:
    return None
  return make_mesh({"sequence": 1, **sizes}, devices[:needed])


def make_place(mesh: jax.sharding.Mesh | None, policy: Any) -> Placement:
  """Returns the shardings of params on a searcher's mesh.

  Args:
    mesh: result of `searcher_mesh`.
    policy: a `policy.Policy`.

  Raises:
    ValueError: some leaves do not divide over the mesh; names them.
  """
  if mesh is None:
    return ONE_DEVICE
  return Placement(
      *(
          param_shardings(mesh, part, key=_KEY)
          for part in (policy.model, policy.trained)
      )
  )


def mesh_by_process(mesh: Mesh) -> Mesh:
  """Returns the mesh (process, *MESH_AXES) of the same devices.

  An array replicated along `process` is complete in each process, and sharded
  there over axes with the sizes of `cut_rows`.
  """
  of_process: dict[int, list[jax.Device]] = {}
  for device in mesh.devices.flat:
    of_process.setdefault(device.process_index, []).append(device)
  devices = np.asarray([of_process[i] for i in sorted(of_process)])
  sizes = cut_rows(mesh.shape, devices.shape[1])
  shape = [sizes[axis] for axis in MESH_AXES]
  return Mesh(devices.reshape(-1, *shape), ("process", *MESH_AXES))


def own_mesh(mesh: Mesh) -> Mesh:
  """Returns the mesh of this process's own devices in `mesh_by_process`."""
  (own,) = (
      devices
      for devices in mesh_by_process(mesh).devices
      if devices.flat[0].process_index == jax.process_index()
  )
  return Mesh(own, MESH_AXES)


def cut_rows(sizes: Mapping[str, int], num_devices: int) -> dict[str, int]:
  """Returns the axis sizes of a smaller mesh for the same params.

  `tensor` and `fsdp` are the largest divisors of the larger mesh's sizes that
  fit, so params that divide there divide here; `data` takes the rest.

  Args:
    sizes: axis sizes of the larger mesh.
    num_devices: number of devices of the smaller mesh.
  """
  tensor = math.gcd(sizes["tensor"], num_devices)
  fsdp = math.gcd(sizes["fsdp"], num_devices // tensor)
  data = num_devices // tensor // fsdp
  return {"data": data, "fsdp": fsdp, "sequence": 1, "tensor": tensor}


def make_gather(mesh: Mesh) -> Callable[[PyTree], PyTree]:
  """Returns a collective that gathers arrays onto each process's devices.

  Each process's devices together hold one copy, sharded as by `cut_rows`.

  Args:
    mesh: devices of all processes, the same number in each.

  Returns:
    gather(arrays on `mesh`) -> the same on this process's devices.
  """
  by_process, here = mesh_by_process(mesh), own_mesh(mesh)
  # Outputs of a compiled program may lack a named sharding: replicate these.
  spec = lambda leaf: getattr(leaf.sharding, "spec", PartitionSpec())

  def own_part(leaf: jax.Array) -> jax.Array:
    parts = {shard.device: shard.data for shard in leaf.addressable_shards}
    return jax.make_array_from_single_device_arrays(
        leaf.shape,
        NamedSharding(here, spec(leaf)),
        [parts[device] for device in here.devices.flat],
    )

  def gather(tree: PyTree) -> PyTree:
    places = jax.tree.map(lambda x: NamedSharding(by_process, spec(x)), tree)
    return jax.tree.map(own_part, jax.device_put(tree, places))

  return gather
