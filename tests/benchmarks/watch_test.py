# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Tests of the benchmark of watching: what it runs, and its arithmetic."""

from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized

from configs import countdown
from tba_jax import validate
from tba_jax.benchmarks import watch


class WatchTest(parameterized.TestCase):

  @parameterized.parameters(True, False)
  def test_both_variants_are_right_configs(self, watched):
    for arg in ("", "smoke", "quick"):
      config = watch._variant(countdown.get_config(arg), 30, watched=watched)
      validate.validate(config)
      self.assertEqual(config.log.every_steps, 1 if watched else 30)
      self.assertEqual(config.log.samples_every_steps > 0, watched)

  def test_shares_by_hand(self):
    busy = iter([10.0, 8.0, 10.0, 10.0, 9.0, 10.0])
    found = lambda config: {
        "busy_s": next(busy),
        "record_s": 0.1 if config.log.every_steps == 1 else 0.02,
    }
    with mock.patch.object(watch, "_run", side_effect=found):
      result = watch.run(countdown.get_config("smoke"), ["50", "3"])
    self.assertEqual([p["step_ms_on"] for p in result["pairs"]][0], 200.0)
    self.assertAlmostEqual(result["record_share"], 0.01)
    self.assertAlmostEqual(result["more_busy"], 0.0)
    self.assertAlmostEqual(result["pairs"][0]["more_busy"], 0.25)


if __name__ == "__main__":
  absltest.main()
