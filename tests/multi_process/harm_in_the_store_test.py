# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""A run goes on, and loses nothing, while others do harm in its store."""

import pathlib
import subprocess
import sys
import tempfile

from absl.testing import absltest

from tba_jax.run import run_directory
from tba_jax.tools import verify
from tba_jax.transport.kv import certificates
from tests.support import harness

_OVERRIDES = {
    "init": "scratch",
    "train.num_steps": 400,
    "checkpoint.every_steps": 50,
    "evaluate.every_steps": 0,
    "replay.recent_fraction": 0.75,
    "store.address": "127.0.0.1:0",
}
# Operations a second of each who only reaches the port, and of one who also
# knows where the keys are.
_RATE, _KNOWING_RATE = 300.0, 4.0


class HarmInTheStoreTest(absltest.TestCase):

  def harm(self, run, rate, *root):
    """Starts a stranger; returns a function for its number of operations."""
    info = run_directory.open_run(
        str(run.workdir), run_directory.load_config(str(run.workdir))
    )
    path = pathlib.Path(self.folder) / f"stranger-{len(self.strangers)}"
    argv = ("-m", "tests.chaos.stranger", info.locator, rate)
    argv += (info.root,) if root else ()
    with path.open("wb") as out:
      process = subprocess.Popen(
          [sys.executable, *map(str, argv)],
          cwd=harness.ROOT,
          stdout=out,
          env=harness.environment(),
      )
    self.strangers.append(process)
    self.addCleanup(process.wait)
    self.addCleanup(process.kill)
    return lambda: int((path.read_text().split() or ["0"])[-1])

  def test_completes_run_and_loses_nothing(self):
    if certificates.is_supported():
      self.skipTest("strangers have no certificate: see strangers_test")
    self.folder = self.enterContext(tempfile.TemporaryDirectory())
    self.strangers = []
    run = harness.Run(f"{self.folder}/run", _OVERRIDES)
    self.addCleanup(run.close)
    run.wait_for_step(3)
    counts = [self.harm(run, _RATE), self.harm(run, _RATE)]
    knowing = self.harm(run, _KNOWING_RATE, "root")
    self.assertEqual(run.wait(), 0, run.text())
    self.assertGreater(min(count() for count in counts), 100)
    self.assertGreater(knowing(), 5)
    ledger = run.read("ledger.json")
    harness.check_ledger(ledger)
    self.assertEqual((ledger["lost"], ledger["closed"]), ({}, True))
    summary = run.read("summary.json")
    self.assertEqual(summary["steps"], _OVERRIDES["train.num_steps"])
    self.assertEqual(set(summary["restarts"].values()), {0})
    for kind in ("gap", "died", "store_lost"):
      self.assertEmpty(run.events(kind))
    for kind in ("refused_message", "refused_version"):
      self.assertLess(len(run.events(kind)), 30)
    parts, _ = verify.audit(run.workdir)
    self.assertEmpty([one for part in parts for one in part.problems])
