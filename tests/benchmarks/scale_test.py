# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Tests for what the scale benchmark makes of its measurements.

tests/multi_process/scale_test.py runs it.
"""

import json
import pathlib
import subprocess
import sys

from absl.testing import absltest
from absl.testing import parameterized

from benchmarks import replay_memory
from benchmarks import scale
from tests.support import tiny_model

_ROOT = pathlib.Path(__file__).parents[2]


class ScaleTest(parameterized.TestCase):

  def test_rate_staleness_and_hand_over(self):
    # One searcher, a group a second, each there half a second after its end.
    log = [("a", i, i + 1.5) for i in range(100)]
    times = {"a": [[float(i), i + 1.0] for i in range(100)]}
    row = scale.analyse(log, times, 32.0, 97.0)
    self.assertAlmostEqual(row["groups_per_s"], 65 / 65)
    self.assertAlmostEqual(row["hand_over_ms"], 500.0)
    # Group i was begun when i - 1 had come: one came between, of 32 a step.
    self.assertAlmostEqual(row["staleness_steps"], 1 / 32)

  def test_nothing_measured_is_an_error(self):
    with self.assertRaisesRegex(RuntimeError, "no block came"):
      scale.analyse([("a", 0, 1.0)], {"a": [[0.0, 0.5]]}, 5.0, 6.0)

  def test_the_model_is_calibrated_by_two_runs(self):
    one = {
        "groups_per_s": 8.0,
        "hand_over_ms": 25.0,
        "idle_ms": 4.0,
        "look_ms": 4.0,
    }
    full = {"groups_per_s": 200.0, "look_ms": 22.0, "groups_per_look": 10.0}
    model_of = scale.calibrate(one, full, 4)
    self.assertAlmostEqual(model_of(1).hand_over_s, 0.025)
    # (22 - 4) / (10 - 1) ms for each further group.
    self.assertAlmostEqual(model_of(1).more_s, 0.002)
    self.assertAlmostEqual(model_of(16).groups_per_s(), 128.0)
    self.assertAlmostEqual(model_of(64).groups_per_s(), 200.0)
    # 16 that sample, and what is on its way for .025 s and the wait for a look
    # that has found others. 64 with two rounds each, which take .64 s: .125 of
    # sampling, and half of the rest after it.
    hand_over_s = model_of(16).hand_over()
    self.assertBetween(hand_over_s, 0.025, 0.03)
    self.assertAlmostEqual(
        model_of(16).staleness_steps(), (16 + 128 * hand_over_s) / 32
    )
    self.assertAlmostEqual(model_of(64).staleness_steps(), 76.5 / 32)

  @parameterized.parameters(["0"], ["1", "x"], ["1", "1", "1", "2,0"])
  def test_operands_are_checked(self, *operands):
    with self.assertRaises(ValueError):
      scale.run(tiny_model.make_config(), operands)


class ReplayMemoryTest(absltest.TestCase):

  def test_it_counts_what_is_stored(self):
    # As a program of its own: memory that earlier tests gave back to the
    # allocator would be used again, and not counted.
    arguments = ["--program=benchmark", "--config=configs/arithmetic.py:smoke"]
    done = subprocess.run(
        [sys.executable, "-m", "tba_jax.main", *arguments]
        + ["replay_memory", "20000"],
        cwd=_ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    self.assertEqual(done.returncode, 0, done.stderr)
    out = json.loads(done.stdout)
    self.assertEqual(out["stored_completions"], 20000)
    # 64 tokens with log-probs are 512 bytes already.
    self.assertGreater(out["bytes_per_completion"], 512)
    self.assertLess(out["bytes_per_completion"], 5000)
    self.assertAlmostEqual(
        out["gb_of_ten_million"], out["bytes_per_completion"] / 100
    )

  def test_too_few_are_refused(self):
    with self.assertRaises(ValueError):
      replay_memory.run(tiny_model.make_config(), ["1"])


if __name__ == "__main__":
  absltest.main()
