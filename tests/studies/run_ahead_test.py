# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Tests of the study's runs in the asynchronous program."""

from absl.testing import absltest

from studies.run_ahead import run_ahead
from studies.staleness import staleness


class RunAheadTest(absltest.TestCase):

  def test_settings_match_study_without_its_lag(self):
    common = staleness.make_config("preference")
    for steps in (1, 16, 64):
      own = run_ahead.make_config(common, "tb", steps, 3e-3, seed=4)
      self.assertFalse(own.search.lockstep)
      self.assertEqual(own.publish.every_steps, steps)
      self.assertEqual((own.seed, own.optimizer.learning_rate), (4, 3e-3))
      self.assertEqual(own.train.num_steps, common.train.num_steps)
      self.assertEqual(own.search.prompts_per_step, 16)
      self.assertEqual(own.loss.correction, common.loss.correction)
    own = run_ahead.make_config(common, "tb_bounded_token", 16, 3e-3, seed=4)
    self.assertEqual(own.loss.correction, "bounded_token")
