# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Accuracy and calibration of margins, by hand."""

from absl.testing import absltest
import numpy as np

from tba_jax.programs import reward_model


def _summarize(margins, **changes):
  settings = dict(num_bins=2, resamples=100, confidence=0.9)
  return reward_model.calibration_summary(
      np.array(margins), **{**settings, **changes}
  )


class CalibrationTest(absltest.TestCase):

  def test_numbers_by_hand(self):
    # p = 3/4 twice, once right; p = 9/10 twice, both right; a tie.
    low, high = np.log(3.0), np.log(9.0)
    found = _summarize([low, -low, high, high, 0.0])
    self.assertAlmostEqual(found["accuracy"], 3.5 / 5)
    self.assertAlmostEqual(
        found["loss"],
        -np.log([3 / 4, 1 / 4, 9 / 10, 9 / 10, 1 / 2]).mean(),
    )
    # The edge .75 opens the upper bin.
    self.assertEqual([b["num_pairs"] for b in found["bins"]], [1, 4])
    self.assertAlmostEqual(found["bins"][1]["predicted"], 0.825)
    self.assertAlmostEqual(found["bins"][1]["right"], 0.75)
    self.assertAlmostEqual(found["calibration_error"], 4 / 5 * 0.075)
    self.assertEqual(found["num_pairs"], 5)
    left, right = found["accuracy_interval"]
    self.assertLess(left, found["accuracy"])
    self.assertGreater(right, found["accuracy"])

  def test_a_calibrated_model_has_no_error_to_speak_of(self):
    rng = np.random.default_rng(0)
    margins = rng.uniform(0, 3, 20_000)
    right = rng.random(20_000) < 1 / (1 + np.exp(-margins))
    signed = np.where(right, margins, -margins)
    error = _summarize(signed, num_bins=10)["calibration_error"]
    self.assertLess(error, 0.02)
    boasting = _summarize(3 * signed, num_bins=10)["calibration_error"]
    self.assertGreater(boasting, 0.1)

  def test_a_huge_margin_is_sure_and_finite(self):
    found = _summarize([1e6, 800.0])
    self.assertEqual(found["accuracy"], 1.0)
    self.assertEqual(found["loss"], 0.0)

  def test_no_pairs_and_no_numbers_are_refused(self):
    for margins in ([], [1.0, np.nan], [np.inf]):
      with self.assertRaisesRegex(ValueError, "one or more, all of them"):
        _summarize(margins)


if __name__ == "__main__":
  absltest.main()
