# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Saves checkpoints until it is killed: the child of `checkpoint_test.py`.

Usage: checkpoint_child.py DIRECTORY. Prints `done STEP` after each save that is
complete.
"""

import sys

import jax.numpy as jnp
import numpy as np

from tba_jax.learning import checkpoint

SIZE = 300_000


def make_state(step: int) -> dict[str, jnp.ndarray]:
  # Not compressible, so that the files have their full length.
  noise = np.random.default_rng(step).normal(size=SIZE)
  return {"noise": jnp.asarray(noise, jnp.float32), "step": jnp.int32(step)}


def make_host_state(step: int) -> dict[str, object]:
  return {"step": step, "rows": np.full(SIZE, step)}


def main(directory: str) -> None:
  saver = checkpoint.Checkpointer(directory, keep=2)
  step = saver.latest_step() or 0
  while True:
    step += 1
    saver.save(step, make_state(step), make_host_state(step))
    saver.wait()
    print("done", step, flush=True)


if __name__ == "__main__":
  main(*sys.argv[1:])
