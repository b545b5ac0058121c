# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Checkpoints in a bucket survive a kill during a save.

The bucket is `fake_gcs`; gcsfs and TensorStore are the real ones.
"""

import dataclasses
import os
import pathlib
import random
import subprocess
import sys
import time

from absl.testing import absltest

from tests.multi_process import bucket_child
from tests.multi_process import checkpoint_child
from tests.support import fake_gcs

_ROOT = pathlib.Path(checkpoint_child.__file__).parents[2]
_PLACE = "gs://bucket/run/checkpoints"


class BucketCheckpointTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    self.fake = fake_gcs.FakeGcs()
    self.addCleanup(self.fake.close)

  def start(self, module):
    return subprocess.Popen(
        [sys.executable, module.__file__, _PLACE],
        cwd=self.create_tempdir().full_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={
            **os.environ,
            **self.fake.environment(),
            "PYTHONPATH": str(_ROOT),
        },
    )

  def save_until_killed(self, seed):
    """Returns the last step that the child has saved."""
    child = self.start(checkpoint_child)
    self.addCleanup(child.kill)
    for _ in range(2):
      line = child.stdout.readline()
      self.assertStartsWith(line, "done", line or child.stderr)
      done = int(line.split()[1])
    # Somewhere within the next saves.
    time.sleep(random.Random(seed).uniform(0, 0.3))
    child.kill()
    rest, _ = child.communicate()
    return int(rest.split()[-1]) if rest.split() else done

  def restore(self):
    child = self.start(bucket_child)
    self.addCleanup(child.kill)
    out, errors = child.communicate(timeout=120)
    self.assertEqual(child.returncode, 0, errors)
    return out.splitlines()

  def last_two_steps(self):
    # A kill between a commit and the deletion of the oldest leaves three.
    return [int(step) for step in self.restore()[1].split()[-2:]]

  def names(self, part):
    return [name for name in self.fake.store.by_name if part in name]

  def test_keeps_last_whole_checkpoint_after_kill(self):
    for seed in range(2):
      done = self.save_until_killed(seed)
      lines = self.restore()
      self.assertLen(lines, 2)
      self.assertGreaterEqual(int(lines[0].removeprefix("restored ")), done)
      # The next process removes incomplete ones.
      committed = {
          name.split("/")[2] for name in self.names("/commit_success.txt")
      }
      present = {name.split("/")[2] for name in self.names("/checkpoints/")}
      self.assertEqual(present, committed)
      self.assertLessEqual(len(present), 3)

  def test_damaged_or_uncommitted_checkpoint_is_skipped(self):
    self.save_until_killed(0)
    older, newest = self.last_two_steps()
    by_name = self.fake.store.by_name
    for name in self.names(f"/{newest}/state/d/") + self.names(
        f"/{newest}/state/ocdbt.process_0/d/"
    ):
      by_name[name] = dataclasses.replace(by_name[name], data=b"no arrays")
    lines = self.restore()
    self.assertIn("event checkpoint_damaged", lines)
    self.assertIn(f"restored {older}", lines)
    self.assertNotEmpty(self.names(f"/damaged-{newest}/"))
    self.save_until_killed(1)
    older, newest = self.last_two_steps()
    del by_name[f"run/checkpoints/{newest}/commit_success.txt"]
    self.assertEqual(self.restore()[0], f"restored {older}")
