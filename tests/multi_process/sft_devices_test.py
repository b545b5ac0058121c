# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Fine-tuning before a trainer of several processes with virtual devices."""

import pathlib

from absl.testing import absltest

from tests.support import harness


class SftDevicesTest(absltest.TestCase):

  def test_gives_one_process_devices_of_all(self):
    folder = pathlib.Path(self.create_tempdir().full_path)
    sft = harness.Process(
        harness.command(
            "sft",
            folder,
            config="configs/arithmetic.py:smoke",
            overrides={
                "mesh.data": 4,
                "trainer.num_processes": 2,
                "trainer.cpu_devices": 2,
                "sft.num_steps": 8,
            },
        ),
        folder / "out.txt",
    )
    self.addCleanup(sft.close)
    self.assertEqual(sft.wait(240), 0, sft.text())
    self.assertTrue((folder / "sft" / "model" / "config.json").exists())
