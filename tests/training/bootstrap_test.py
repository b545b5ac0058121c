# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Bootstrap intervals: by hand, by the normal law, and how often they hold."""

from absl.testing import absltest
from absl.testing import parameterized
import numpy as np

from tba_jax.training import evaluator


def _interval(values, **changes):
  settings = dict(num_resamples=2000, confidence=0.95)
  return evaluator.mean_interval(np.array(values), **{**settings, **changes})


class BootstrapTest(parameterized.TestCase):

  def test_one_value_or_equal_values_have_no_width(self):
    self.assertEqual(_interval([3.0]), (3.0, 3.0))
    self.assertEqual(_interval([0.5] * 7), (0.5, 0.5))

  def test_two_values_by_hand(self):
    # Means 0, 1/2, 1 have the chances 1/4, 1/2, 1/4.
    self.assertEqual(_interval([0.0, 1.0]), (0.0, 1.0))
    self.assertEqual(_interval([0.0, 1.0], confidence=0.4), (0.5, 0.5))

  def test_agrees_with_the_normal_law(self):
    values = np.random.default_rng(1).normal(2.0, 3.0, size=900)
    low, high = _interval(values, num_resamples=20_000)
    half = 1.96 * values.std() / 30
    np.testing.assert_allclose(low, values.mean() - half, atol=0.02)
    np.testing.assert_allclose(high, values.mean() + half, atol=0.02)

  def test_holds_the_mean_as_often_as_it_says(self):
    rng = np.random.default_rng(2)
    held = 0
    for i in range(300):
      low, high = _interval(
          rng.random(100) < 0.3, num_resamples=400, confidence=0.9, seed=i
      )
      held += low <= 0.3 <= high
    self.assertBetween(held / 300, 0.84, 0.95)

  def test_is_a_function_of_its_seed_however_it_is_cut(self):
    values = np.arange(50.0)
    one = _interval(values, seed=3)
    with absltest.mock.patch.object(evaluator, "_PART", 500):
      self.assertEqual(_interval(values, seed=3), one)
    self.assertNotEqual(_interval(values, seed=4), one)

  @parameterized.parameters(
      ([], {}), ([1.0], {"num_resamples": 0}), ([1.0], {"confidence": 1.0})
  )
  def test_wrong_arguments(self, values, changes):
    with self.assertRaises(ValueError):
      _interval(values, **changes)


if __name__ == "__main__":
  absltest.main()
