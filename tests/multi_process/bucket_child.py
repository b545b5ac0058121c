# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Restores a checkpoint: a child of `bucket_checkpoint_test.py`.

Usage: bucket_child.py DIRECTORY. Prints `restored STEP` where the newest
checkpoint is what `checkpoint_child` saves, then the steps that are there, and
a line for each that was damaged.
"""

import sys

import chex

from tba_jax.learning import checkpoint
from tests.multi_process import checkpoint_child


def main(directory: str) -> None:
  saver = checkpoint.Checkpointer(
      directory, keep=2, on_event=lambda kind, _: print("event", kind)
  )
  state, host = saver.restore(checkpoint_child.make_state(0))
  step = int(state["step"])
  chex.assert_trees_all_equal(state, checkpoint_child.make_state(step))
  chex.assert_trees_all_equal(host, checkpoint_child.make_host_state(step))
  print("restored", step)
  print("steps", *saver.complete_steps())
  saver.close()


if __name__ == "__main__":
  main(sys.argv[1])
