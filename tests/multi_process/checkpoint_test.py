# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""A process that dies while it saves loses nothing else."""

import functools
import pathlib
import random
import subprocess
import sys
import time

from absl.testing import absltest
import chex
import numpy as np

from tba_jax.learning import checkpoint
from tests.multi_process import checkpoint_child
from tests.support import harness
from tests.support import waiting


def start_child(directory):
  return subprocess.Popen(
      [sys.executable, checkpoint_child.__file__, directory],
      stdout=subprocess.PIPE,
      stderr=subprocess.DEVNULL,
      text=True,
      env=harness.environment(),
  )


class KillTest(absltest.TestCase):

  def check_whole(self, directory, at_least):
    """Checks that the newest checkpoint is whole; returns its step."""
    events = []
    saver = checkpoint.Checkpointer(
        directory, keep=2, on_event=lambda *event: events.append(event)
    )
    state, host = saver.restore(checkpoint_child.make_state(0))
    saver.close()
    step = int(state["step"])
    chex.assert_trees_all_equal(state, checkpoint_child.make_state(step))
    self.assertEqual(host["step"], step)
    np.testing.assert_array_equal(
        host["rows"], checkpoint_child.make_host_state(step)["rows"]
    )
    # What was reported complete is there, and needed no falling back.
    self.assertGreaterEqual(step, at_least)
    self.assertEmpty(events)
    return step

  def test_keeps_last_whole_checkpoint_after_kill(self):
    directory = self.create_tempdir().full_path
    rng = random.Random(0)
    done = 0
    for _ in range(3):
      child = start_child(directory)
      for _ in range(2):
        kind, step = child.stdout.readline().split()
        self.assertEqual(kind, "done")
        done = int(step)
      # Somewhere within the saves that follow.
      time.sleep(rng.uniform(0, 0.1))
      child.kill()
      rest = child.stdout.read().split()
      child.wait()
      child.stdout.close()
      done = int(rest[-1]) if rest and rest[-1].isdigit() else done
      # What was torn is removed by whoever opens the directory next.
      done = self.check_whole(directory, at_least=done)
      torn = functools.partial(pathlib.Path(directory).glob, "*tmp*")
      waiting.wait_until(lambda: not list(torn()), "its removal")  # noqa: B023
