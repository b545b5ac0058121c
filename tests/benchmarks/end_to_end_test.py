# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Tests of the end-to-end benchmark: what it runs, and its arithmetic."""

from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized

from benchmarks import end_to_end
from benchmarks import trial_run
from tba_jax.config import validate
from tba_jax.config import variants

countdown = variants.import_config("configs/countdown.py")


def _summary(config):
  lockstep = config.search.lockstep
  return {
      "train_wall_s": 12.0 if lockstep else 8.0,
      "generate_busy_s": 4.0,
      "train_busy_s": 8.0,
      "staleness_mean": 0.0 if lockstep else 1.5,
      "completions_per_s": 100.0,
  }


class EndToEndTest(parameterized.TestCase):

  @parameterized.parameters(True, False)
  def test_both_variants_are_right_configs(self, lockstep):
    for arg in ("", "smoke", "quick"):
      config = trial_run.make_variant(
          countdown.get_config(arg), 30, lockstep=lockstep
      )
      validate.validate(config)
      self.assertEqual(config.search.lockstep, lockstep)
      self.assertEqual(config.train.num_steps, 30)
      # Random params have equal rewards: skipped, they would leave nothing.
      self.assertFalse(config.replay.skip_equal_rewards)

  def test_the_share_is_achieved_over_ideal(self):
    with mock.patch.object(end_to_end, "_run", side_effect=_summary):
      result = end_to_end.run(countdown.get_config("smoke"), ["30", "2"])
    self.assertLen(result["repeats"], 2)
    # ideal (4 + 8) / 8 = 1.5, achieved 12 / 8 = 1.5.
    self.assertEqual(result["repeats"][0]["ideal"], 1.5)
    self.assertEqual(result["share"], 1.0)


if __name__ == "__main__":
  absltest.main()
