# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""The real Weights & Biases package, offline; it starts a process."""

import importlib.util
import os
import pathlib
import unittest
from unittest import mock

from absl.testing import absltest

from tba_jax.config import settings
from tba_jax.run import writers
from tests.support import waiting


@unittest.skipUnless(
    importlib.util.find_spec("wandb"), "wandb is not installed (its own extra)"
)
class WandbTest(absltest.TestCase):

  def test_writes_offline_run(self):
    workdir = pathlib.Path(self.create_tempdir().full_path) / "run"
    workdir.mkdir()
    events = []
    folders = {
        f"WANDB_{name}_DIR": str(workdir / name.lower())
        for name in ("CACHE", "CONFIG", "DATA")
    }
    config = settings.get_config()
    config.log.wandb_project = "tba_jax"
    config.log.wandb_mode = "offline"
    with mock.patch.dict(os.environ, {**folders, "HOME": str(workdir)}):
      writer = writers.WandbWriter(
          config,
          workdir,
          on_event=lambda *event: events.append(event),
      )
      for step in (0, 1, 1):  # The last one done again.
        writer.write(step, {"train/loss": 0.5 - 0.1 * step})
      writer.close()
    self.assertEqual(events, [])
    (path,) = (workdir / "wandb").glob("offline-run-*/*.wandb")
    # Its process writes the file, and may do so after it has answered.
    waiting.wait_until(lambda: b"0.4" in path.read_bytes(), "the last value")
    self.assertIn(b"train/loss", path.read_bytes())
