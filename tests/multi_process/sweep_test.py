# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""A sweep that is killed goes on with what it has not done yet."""

import json
import os
import pathlib
import signal
import subprocess
import sys

from absl.testing import absltest

from tests.support import harness
from tests.support import waiting

_DEADLINE_S = 150.0
_NUM_RUNS = 4


class SweepTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    self.workdir = pathlib.Path(self.create_tempdir().full_path)

  def start(self, *args):
    command = [sys.executable, "-m", "tba_jax.main", "--program=sweep",
               f"--workdir={self.workdir}", *args]  # fmt: skip
    return subprocess.Popen(
        command,
        cwd=harness.ROOT,
        env=harness.environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )

  def results(self):
    return {
        path.name: (path.stat().st_mtime_ns, json.loads(path.read_text()))
        for path in (self.workdir / "runs").glob("*.json")
    }

  def test_resumes_after_kill(self):
    config = "--config=configs/staleness.py:smoke"
    sweep = self.start(config)
    waiting.wait_until(
        self.results,
        "the first run",
        _DEADLINE_S,
        is_lost=lambda: sweep.poll() is not None,
    )
    os.killpg(sweep.pid, signal.SIGKILL)
    sweep.communicate()
    before = self.results()
    self.assertLess(len(before), _NUM_RUNS)

    sweep = self.start(config)
    out, _ = sweep.communicate(timeout=_DEADLINE_S)
    self.assertEqual(sweep.returncode, 0, out)
    after = self.results()
    self.assertLen(after, _NUM_RUNS)
    for name, result in before.items():
      self.assertEqual(after[name], result, name)
    for name, (_, result) in after.items():
      lag = 2 if "-s2-" in name else 0
      self.assertEqual(
          result["versions"], [max(t - lag, 0) for t in range(6)], name
      )
    self.assertIn(f"{_NUM_RUNS}/{_NUM_RUNS} runs", out)
    for name in ("sweep.md", "sweep.png"):
      self.assertTrue((self.workdir / name).exists(), name)
