# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Fine-tuning before a trainer of several processes with virtual devices."""

import pathlib
import subprocess
import sys

from absl.testing import absltest

_DEADLINE_S = 240.0


class SftDevicesTest(absltest.TestCase):

  def test_one_process_has_the_devices_of_all(self):
    folder = pathlib.Path(self.create_tempdir().full_path)
    done = subprocess.run(
        [
            *(sys.executable, "-m", "tba_jax.main", "--program=sft"),
            "--config=configs/arithmetic.py:smoke",
            f"--workdir={folder}",
            "--config.mesh.data=4",
            "--config.trainer.num_processes=2",
            "--config.trainer.cpu_devices=2",
            "--config.sft.num_steps=8",
        ],
        capture_output=True,
        text=True,
        timeout=_DEADLINE_S,
        check=False,
    )
    self.assertEqual(done.returncode, 0, done.stderr[-3000:])
    self.assertTrue((folder / "sft" / "model" / "config.json").exists())


if __name__ == "__main__":
  absltest.main()
