# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""The soak's rule for what grows, on series whose growth is known."""

from absl.testing import parameterized
import numpy as np

from tests.chaos import soak

N = 300
STEPS = np.arange(N) * 40.0
MB = 1 << 20


def noise(seed, sigma=0.3 * MB):
  return np.random.default_rng(seed).normal(size=N) * sigma


def verdict(values, least=MB, by_step=False):
  result = soak.trend(STEPS, values)
  return soak.verdict(result, least, by_step=by_step)


class SoakTest(parameterized.TestCase):

  def test_finds_growth_above_noise(self):
    result = [
        verdict(400 * MB + noise(seed) + 6 * MB * STEPS / STEPS[-1])
        for seed in range(50)
    ]
    self.assertEqual(set(result), {"grows"})

  def test_detects_one_leaked_descriptor_per_thousand_steps(self):
    self.assertEqual(verdict(30 + STEPS // 1000, least=1.0), "grows")

  def test_noise_is_flat(self):
    result = [verdict(400 * MB + noise(seed, 3 * MB)) for seed in range(300)]
    self.assertLess(result.count("grows"), 6)

  @parameterized.named_parameters(
      ("constant", np.full(N, 7.0 * MB)),
      # Segments of a journal, which a checkpoint lets go.
      ("sawtooth", 8 * MB * (STEPS / 700 % 1)),
      ("slow_wave", 20 * MB * np.sin(STEPS / 900)),
      ("warm_up", 50 * MB * np.minimum(STEPS / STEPS[N // 3], 1.0)),
      ("late_compilation", 50 * MB * (STEPS > STEPS[N // 2])),
      ("falls", -50 * MB * STEPS / STEPS[-1]),
  )
  def test_is_flat(self, values):
    self.assertEqual(verdict(values + noise(0)), "flat")

  def test_one_line_per_step_is_growth_only_in_other_files(self):
    lines = 900.0 * STEPS
    self.assertEqual(verdict(lines, by_step=True), "by step")
    self.assertEqual(verdict(lines), "grows")
    longer = 900.0 * STEPS**2 / STEPS[-1]
    self.assertEqual(verdict(longer, by_step=True), "grows")

  def test_reports_growing_resource(self):
    samples = [
        {
            "step": int(step),
            "processes": {
                name: {"memory": 300.0 * MB, "descriptors": 20, "threads": 9}
                for name in ("trainer-0", "searcher-1")
            },
            "bytes": {"metrics.jsonl": 500 * int(step), "logs": 9000},
        }
        for step in STEPS
    ]
    for i, sample in enumerate(samples):
      sample["processes"]["searcher-1"]["memory"] += 9000.0 * i * i
    rows = soak.judge(samples)
    self.assertLen(rows, 8)
    verdicts = {row["what"]: row["verdict"] for row in rows}
    self.assertEqual(verdicts.pop("searcher-1 memory"), "grows")
    self.assertEqual(verdicts.pop("metrics.jsonl bytes"), "by step")
    self.assertEqual(set(verdicts.values()), {"flat"})

  def test_asks_for_samples_and_for_steps(self):
    with self.assertRaisesRegex(ValueError, "must be 36 or more"):
      soak.trend(STEPS[:30], STEPS[:30])
    with self.assertRaisesRegex(ValueError, "with steps"):
      soak.trend(np.zeros(N), STEPS)

  @parameterized.parameters("1", "soon", "5 /tmp/x -1", "nan")
  def test_refuses(self, operands):
    with self.assertRaisesRegex(ValueError, "^soak "):
      soak.run(None, operands.split())
