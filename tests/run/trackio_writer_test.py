# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""The writer for trackio, with a fake of the package and, if there, the real.

What it shares with that for Weights & Biases is tested there.
"""

import importlib
import os
import pathlib
import sqlite3
import subprocess
import sys
import unittest
from unittest import mock

from absl.testing import absltest

from tba_jax.config import settings
from tba_jax.run import run_directory
from tba_jax.run import writers

_ROOT = pathlib.Path(__file__).parents[2]


class TrackioWriterTest(absltest.TestCase):

  def test_resumed_run_continues_under_its_name(self):
    package = mock.MagicMock()
    run, events = package.init.return_value, []
    config = settings.get_config()
    config.log.writers = "trackio"
    config.log.trackio_project = "p"
    workdir = pathlib.Path(self.create_tempdir("run").full_path)
    for step in (0, 1):
      with mock.patch.object(importlib, "import_module", return_value=package):
        made = writers.Writers(
            config,
            run_directory.RunInfo(workdir, "0a1b", workdir, b""),
            step,
            lambda *event: events.append(event),
        )
        made.write(step, {"train/loss": 0.5, "histogram": {"0": 1}})
        made.close()
    first, second = (call.kwargs for call in package.init.call_args_list)
    self.assertEqual(first, second)
    self.assertEqual(
        [first[key] for key in ("project", "name", "resume")],
        ["p", "run-0a1b", "allow"],
    )
    self.assertEqual(
        run.log.mock_calls,
        [mock.call({"train/loss": 0.5}, step=step) for step in (0, 1)],
    )
    self.assertEqual(run.finish.call_count, 2)
    self.assertEqual(events, [])

  @unittest.skipUnless(
      importlib.util.find_spec("trackio"),
      "trackio is not installed (its own extra)",
  )
  def test_package_keeps_both_parts_of_run(self):
    folder = pathlib.Path(self.create_tempdir().full_path)
    code = (
        "import sys\n"
        "from tba_jax.config import settings\n"
        "from tba_jax.run import writers\n"
        "config = settings.get_config()\n"
        "made = writers.TrackioWriter(config, 'run-0a1b', print)\n"
        "for step in map(int, sys.argv[1:]):\n"
        "  made.write(step, {'train/loss': 0.5 + step})\n"
        "made.close()\n"
    )
    for steps in ("01", "12"):
      subprocess.run(
          [sys.executable, "-c", code, *steps],
          cwd=_ROOT,
          env={**os.environ, "TRACKIO_DIR": str(folder), "HF_HUB_OFFLINE": "1"},
          check=True,
          timeout=60,
      )
    (path,) = folder.glob("*.db")
    with sqlite3.connect(path) as data:
      result = list(data.execute("SELECT run_name, step FROM metrics"))
    self.assertEqual(result, [("run-0a1b", step) for step in (0, 1, 1, 2)])
