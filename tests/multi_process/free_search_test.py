# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Free search without a bound: ledger, staleness, buffer."""

import pathlib
import tempfile

from absl.testing import absltest

from tba_jax.tools import verify
from tests.support import harness

_CAPACITY = 128
_OVERRIDES = {
    "init": "scratch",
    "train.num_steps": 16,
    "checkpoint.every_steps": 5,
    "evaluate.every_steps": 0,
    "publish.every_steps": 2,
    "replay.capacity": _CAPACITY,
    "replay.recent_fraction": 0.5,
    "replay.warm_start_completions": 64,
    "search.prompts_per_step": 0,
    "search.wait_for_fresh": False,
}


class FreeSearchTest(absltest.TestCase):

  def test_counts_all_data_despite_trainer_kill(self):
    folder = tempfile.TemporaryDirectory(prefix="tba_free_")
    self.addCleanup(folder.cleanup)
    run = harness.Run(pathlib.Path(folder.name) / "run", _OVERRIDES)
    self.addCleanup(run.close)
    run.wait_for_step(7)
    run.kill("trainer")
    self.assertEqual(run.wait(), 0, run.text())
    ledger = run.read("ledger.json")
    harness.check_ledger(ledger)
    # Nothing was dropped for its age or its number.
    self.assertEqual((ledger["rejected"], ledger["lost"]), ({}, {}))
    for record in run.steps():
      self.assertLessEqual(record["replay/size"], _CAPACITY)
      self.assertGreaterEqual(record["replay/staleness_steps"], 0)
    parts, _ = verify.audit(run.workdir)
    self.assertEmpty([one for part in parts for one in part.problems])
