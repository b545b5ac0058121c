# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""One process trains the steps of two processes again."""

import pathlib
import tempfile

from absl.testing import absltest
import pytest

from tests.support import harness

_CONFIG = "configs/arithmetic.py:smoke"
_OVERRIDES = {
    "init": "scratch",
    "train.num_steps": 6,
    "checkpoint.every_steps": 3,
    "checkpoint.keep_journal": True,
    "evaluate.every_steps": 0,
    "evaluate.final_prompts": 4,
    "evaluate.batch_prompts": 4,
    "mesh.fsdp": 2,
    "trainer.num_processes": 2,
    "trainer.cpu_devices": 1,
    "trainer.heartbeat_s": 1000.0,
}


class RerunTest(absltest.TestCase):

  @pytest.mark.timeout(900)
  def test_steps_of_two_processes_have_same_bits_in_one(self):
    folder = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))
    run = harness.Run(folder / "run", _OVERRIDES, _CONFIG)
    self.addCleanup(run.close)
    self.assertEqual(run.wait(800), 0, run.text())
    rerun = harness.Process(
        harness.command("rerun", run.workdir, "0"), folder / "rerun.log"
    )
    self.addCleanup(rerun.close)
    self.assertEqual(rerun.wait(800), 0, rerun.text())
    self.assertIn("steps 0 to 5 have the same bits", rerun.text())
    self.assertIn("checkpoints/3", rerun.text())
    self.assertIn("note: one process has the devices of 2", rerun.text())
