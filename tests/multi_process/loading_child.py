# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Loads a folder and tells what memory that took: child of `loading_test.py`.

Usage: loading_child.py FOLDER DTYPE NUM_PROCESSES PROCESS PORT. The processes
share eight CPU devices. Prints one JSON object of bytes and of a checksum.
"""

import json
import os
import sys

_NUM_DEVICES = 8


def _status(name: str) -> int:
  """Returns a figure of memory of this process, in bytes."""
  with open("/proc/self/status", encoding="utf-8") as file:
    (line,) = (line for line in file if line.startswith(name + ":"))
  return int(line.split()[1]) * 1024


def main(
    folder: str, dtype: str, num_processes: str, process: str, port: str
) -> None:
  count = _NUM_DEVICES // int(num_processes)
  os.environ["JAX_PLATFORMS"] = "cpu"
  os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={count}"

  import jax
  import numpy as np

  from tba_jax.mesh import sharding
  from tba_jax.models.hf import hf
  from tba_jax.models.hf import hf_config
  from tba_jax.models.net import transformer

  if int(num_processes) > 1:
    jax.distributed.initialize(
        f"localhost:{port}", int(num_processes), int(process)
    )
  # The first axis of the devices is that of the processes.
  mesh = sharding.make_mesh({"data": 1, "fsdp": 2, "sequence": 1, "tensor": 4})
  model = transformer.make_model(hf_config.read(folder, dtype=dtype))
  shardings = sharding.param_shardings(mesh, model)
  jax.block_until_ready(jax.device_put(np.zeros(8), jax.local_devices()[0]))

  before = _status("VmRSS")
  with open("/proc/self/clear_refs", "w", encoding="utf-8") as file:
    file.write("5")  # The peak starts anew.
  _, params = hf.load(folder, dtype=dtype, shardings=shardings)
  jax.block_until_ready(params)
  peak = _status("VmHWM") - before

  shards = [s for x in jax.tree.leaves(params) for s in x.addressable_shards]
  print(
      json.dumps(
          {
              "peak": peak,
              "owned": sum(shard.data.nbytes for shard in shards),
              "devices": len({shard.device for shard in shards}),
              "head": _corner(params["head"]["kernel"]),
          }
      ),
      flush=True,
  )


def _corner(array) -> float:
  """Returns the last entry of the first shard: tells what was read."""
  return float(array.addressable_shards[0].data[-1, -1])


if __name__ == "__main__":
  main(*sys.argv[1:])
