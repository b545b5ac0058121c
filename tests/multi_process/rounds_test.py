# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Rounds train in the order of Cleanba, interrupted or not."""

import signal
import tempfile

from absl.testing import absltest
import numpy as np

from tests.support import harness

_STEPS, _ROUND = 16, 4
_OVERRIDES = {
    "init": "scratch",
    # No answer is right, but rewards differ.
    "loss.missing_stop": "replace",
    "loss.missing_stop_reward": -1.0,
    "rounds.mini_batches": 2,
    "rounds.passes": 2,
    "publish.every_steps": _ROUND,
    # Its log-probs come with the groups, and must outlive a restart.
    "reference.role": "searcher",
    "replay.dedupe": "false",
    "replay.recent_fraction": 1.0,
    "train.num_steps": _STEPS,
    "checkpoint.every_steps": 3,
    "evaluate.every_steps": 0,
}


class RoundsTest(absltest.TestCase):

  def assert_cleanba(self, run):
    """Round r (from 1) trains on what θ of round r-2 sampled, and no other."""
    self.assertEqual({r["step"] for r in run.steps()}, set(range(_STEPS)))
    for record in run.steps():
      step = record["step"]
      version = max(0, step // _ROUND - 1) * _ROUND
      self.assertEqual(
          list(record["replay/staleness_histogram"]), [str(step - version)]
      )

  def test_keeps_order_and_bits_over_interruption(self):
    with tempfile.TemporaryDirectory() as folder:
      whole = harness.Run(f"{folder}/whole", _OVERRIDES)
      self.addCleanup(whole.close)
      self.assertEqual(whole.wait(), 0, whole.text())
      self.assert_cleanba(whole)
      # The first step's policy is the reference.
      self.assertAlmostEqual(whole.steps()[0]["train/kl"], 0.0, places=4)
      kls = [record["train/kl"] for record in whole.steps()]
      self.assertGreater(max(kls), 1e-3)
      cut = harness.Run(f"{folder}/cut", _OVERRIDES)
      self.addCleanup(cut.close)
      cut.wait_for_step(5)
      cut.process.send_signal(signal.SIGTERM)
      self.assertEqual(cut.wait(60), 128 + signal.SIGTERM, cut.text())
      again = harness.Run(f"{folder}/cut", _OVERRIDES)
      self.addCleanup(again.close)
      self.assertEqual(again.wait(), 0, again.text())
      self.assert_cleanba(again)
      expected = harness.params_of(whole.workdir, _STEPS)
      actual = harness.params_of(again.workdir, _STEPS)
      for name, leaf in expected.items():
        np.testing.assert_array_equal(actual[name], leaf, err_msg=name)
