# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Whether a run learned, from before and after with their errors."""

from absl.testing import absltest
from absl.testing import parameterized

from tba_jax.monitor.report import verdict

# Batch rewards with the same noise, flat and rising by 0.5.
_NOISE = [0.02 * (-1) ** i for i in range(20)]
FLAT = [{"train/reward_mean": 0.4 + x} for x in _NOISE]
RISING = [{"train/reward_mean": 0.4 + x + i / 40} for i, x in enumerate(_NOISE)]


def _sides(before, after, stderr=0.01, key="pass_at_1"):
  error = {f"{key}_stderr": stderr}
  return {key: before, **error}, {key: after, **error}


class VerdictTest(parameterized.TestCase):

  # The error of a difference is sqrt(2) times 0.01; twice that is 2.8 points.
  @parameterized.parameters(
      (0.30, 0.34, FLAT, "learned"),
      (0.30, 0.32, FLAT, "nothing"),
      (0.30, 0.32, RISING, "overfitted"),
      (0.30, 0.20, RISING, "overfitted"),
      (0.30, 0.20, FLAT, "worse"),
      (0.00, 0.00, RISING, "overfitted"),
      (0.99, 0.99, FLAT, "saturated"),
      (0.80, 0.99, FLAT, "learned"),
  )
  def test_kind(self, before, after, records, kind):
    found = verdict.verdict(*_sides(before, after), records)
    self.assertEqual(found.kind, kind)

  def test_numbers_in_the_sentence(self):
    found = verdict.verdict(*_sides(0.29, 0.68), FLAT)
    for words in ("29.0 %", "68.0 %", "+39.0 ± 2.8 points"):
      self.assertIn(words, found.sentence)
    found = verdict.verdict(*_sides(0.0, 0.0), RISING)
    self.assertIn("training reward rose from 0.4", found.sentence)

  def test_metric_of_the_task(self):
    found = verdict.verdict(*_sides(0.5, 0.7, key="win_rate"), FLAT)
    self.assertIn("win-rate", found.sentence)
    found = verdict.verdict(*_sides(-1.5, 0.7, key="mean_reward"), FLAT)
    self.assertIn("from -1.50 to 0.70 (+2.20", found.sentence)

  @parameterized.parameters((0.80, True), (0.88, False), (0.95, False))
  def test_greedy_completions_that_got_worse_are_told(self, greedy, is_told):
    """The error of the difference of the greedy ones is 1.4 points."""
    sides = _sides(0.4, 0.7, key="win_rate")
    for side, value in zip(sides, (0.89, greedy)):
      side.update(greedy_win_rate=value, greedy_win_rate_stderr=0.01)
    found = verdict.verdict(*sides, FLAT)
    self.assertEqual(found.kind, "learned")
    told = "greedy completions fell from 89.0 % to 80.0 %" in found.sentence
    self.assertEqual(told, is_told)

  def test_missing_evaluation(self):
    found = verdict.verdict({"pass_at_1": 0.5}, {}, RISING)
    self.assertEqual(found.kind, "unknown")
    self.assertTrue(found.learned)

  def test_unknown_errors(self):
    found = verdict.verdict({"pass_at_1": 0.2}, {"pass_at_1": 0.3})
    self.assertEqual(found.kind, "learned")
    self.assertNotIn("±", found.sentence)


if __name__ == "__main__":
  absltest.main()
