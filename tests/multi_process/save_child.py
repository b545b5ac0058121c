# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""One of two processes that save together: the child of `full_disk_test.py`.

Usage: save_child.py PROCESS ADDRESS DIRECTORY WHAT. Saves step 1; then step 2,
before which WHAT happens to it: "nothing", "full" (no file may grow large any
more), "no_folder" (none can be made), or "slow" (the host state takes longer
than the deadline). With "nowhere" none can be made from the start. With
"damaged" its part of step 2 is damaged once it is saved, and it restores the
newest step, as with "restores". Prints `saved STEP` and `restored STEP`, or
`error …` and ends.
"""

import errno
import os
import pathlib
import resource
import sys
import time
from typing import Any

import jax
import numpy as np

from tba_jax.learning import checkpoint
from tba_jax.learning import host_state
from tba_jax.mesh import cluster
from tba_jax.mesh import sharding
from tba_jax.transport.kv import jax_kv
from tests.multi_process import checkpoint_child
from tests.support import tiny_model

DEADLINE_S = 6


def make_state(step: int) -> dict[str, np.ndarray]:
  """Returns what is saved at a step, whole; each process has half of it."""
  noise = checkpoint_child.make_state(step)["noise"]
  return {"noise": np.asarray(noise).reshape(2, -1)}


def no_folder(*args: Any, **kwargs: Any) -> None:
  raise OSError(errno.ENOSPC, "No room for a folder")


def damage(directory: str, process: int) -> None:
  """Damages what a process has saved in step 2."""
  part = pathlib.Path(directory, "2", "state", f"ocdbt.process_{process}")
  for file in part.glob("d/*"):
    file.write_bytes(b"damaged")


def main(process: int, address: str, directory: str, what: str) -> None:
  jax.config.update("jax_num_cpu_devices", 1)
  jax.config.update("jax_cpu_collectives_implementation", "gloo")
  jax.distributed.initialize(
      address, 2, process, coordinator_bind_address=address
  )
  barrier = cluster.SaveBarrier(
      jax_kv.distributed_client(),
      process,
      2,
      secret=b"s" * 32,
      deadline_s=DEADLINE_S,
  )
  mesh = sharding.make_mesh({**tiny_model.make_config().mesh, "data": 2})
  if what == "nowhere":
    os.mkdir = no_folder
  try:
    saver = checkpoint.Checkpointer(directory, keep=2, barrier=barrier)
    for step in (1, 2):
      if step == 2 and what == "full":
        limit = checkpoint_child.SIZE // 2
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
      if step == 2 and what == "no_folder":
        os.mkdir = no_folder
      if step == 2 and what == "slow":
        host_state.write = lambda *_: time.sleep(4 * DEADLINE_S)
      state = make_state(step)
      if process > 0:  # It takes its half from the other.
        state = jax.eval_shape(lambda tree: tree, state)
      state = sharding.make_spread(mesh)(state)
      saver.save(step, state, checkpoint_child.make_host_state(step))
      while step not in saver.complete_steps():
        saver.check()  # As a trainer does between two steps.
        time.sleep(0.02)
      print("saved", step, flush=True)
    if what in ("damaged", "restores"):
      if what == "damaged":
        damage(directory, process)
      state, host = saver.restore(state)
      print("restored", host.get("step"), state["noise"].shape, flush=True)
  except OSError as error:
    print("error", error, flush=True)
  # Process 0 has what the other one still reads.
  jax.distributed.shutdown()
  os._exit(0)


if __name__ == "__main__":
  main(int(sys.argv[1]), *sys.argv[2:])
