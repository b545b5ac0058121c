# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Gathers arrays of two processes: child of `gather_test.py`.

Usage: gather_child.py PROCESS PORT. Prints one JSON object of what is wrong.
"""

import json
import os
import sys

_MESHES = (
    # Sizes of data, fsdp, tensor; of one process's mesh; order of the devices.
    ((1, 4, 1), (1, 2, 1), (0, 1, 2, 3)),
    ((1, 2, 2), (1, 1, 2), (0, 1, 2, 3)),
    ((4, 1, 1), (2, 1, 1), (0, 1, 2, 3)),
    # As where near devices of an accelerator are of several hosts.
    ((2, 2, 1), (1, 2, 1), (0, 2, 1, 3)),
)


def main(process: str, port: str) -> None:
  os.environ["JAX_PLATFORMS"] = "cpu"
  os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"

  import jax
  import numpy as np

  from tba_jax.mesh import sharding
  from tests.support import tiny_model

  jax.config.update("jax_cpu_collectives_implementation", "gloo")
  jax.distributed.initialize(f"localhost:{port}", 2, int(process))
  model = tiny_model.make_model()
  host = jax.device_get(model.init(jax.random.PRNGKey(0)))
  wrong = []
  for (data, fsdp, tensor), own, order in _MESHES:
    sizes = dict(data=data, fsdp=fsdp, sequence=1, tensor=tensor)
    mesh = sharding.make_mesh(sizes, [jax.devices()[i] for i in order])
    shardings = sharding.param_shardings(mesh, model)
    params = jax.tree.map(
        lambda x, s: jax.make_array_from_callback(x.shape, s, x.__getitem__),
        host,
        shardings,
    )
    actual = sharding.make_gather(mesh)(params)
    for leaf, expected in zip(
        jax.tree.leaves(actual), jax.tree.leaves(host), strict=True
    ):
      if not np.array_equal(np.asarray(leaf), expected):
        wrong.append(f"{sizes}: other values")
      if leaf.devices() != set(jax.local_devices()):
        wrong.append(f"{sizes}: on {leaf.devices()}")
    axes = ("data", "fsdp", "tensor")
    shape = tuple(leaf.sharding.mesh.shape[axis] for axis in axes)
    if shape != own:
      wrong.append(f"{sizes}: on a mesh of {shape}")
    kernel = actual["blocks"]["mlp"]["up"]["kernel"]
    share = kernel.addressable_data(0).size * own[1] * own[2] / kernel.size
    if share != 1:
      wrong.append(f"{sizes}: a device has {share} of its part")
  print(json.dumps(wrong), flush=True)


if __name__ == "__main__":
  main(*sys.argv[1:])
