# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""The diagnosis of synthetic runs, sentence by sentence."""

import json
import pathlib
import re

from absl.testing import absltest
from absl.testing import parameterized

from tba_jax.report import diagnosis
from tba_jax.report import evidence
from tba_jax.report import run_reader
from tests.support import synthetic_runs

FINDINGS = json.loads(
    pathlib.Path(__file__).with_name("findings.json").read_text()
)


def _diagnosis(run):
  """Returns what is found in a run, as a value of `findings.json`."""
  verdict, collapse = diagnosis.verdict(run), diagnosis.collapse(run)
  result = {
      "verdict": [verdict.name, verdict.sentence],
      "advice": diagnosis.advice(run),
      "collapse": collapse and collapse.line,
      "incidents": [
          re.sub(r"last at \d\d(:\d\d)+", "last at TIME", sentence)
          for sentence in diagnosis.incidents(run)
      ],
  }
  return {name: value for name, value in result.items() if value}


class FindingsTest(parameterized.TestCase):

  @parameterized.parameters(*synthetic_runs.RUNS)
  def test_run_has_its_findings(self, name):
    run = run_reader.RunData(**synthetic_runs.RUNS[name])
    self.assertEqual(_diagnosis(run), FINDINGS[name])


class TrendTest(absltest.TestCase):

  def test_noise_of_steps_with_shared_data_is_not_rise(self):
    """Rewards wander, so neighbours are alike: the fifths differ by chance."""
    wandering = [
        {"train/reward_mean": 0.4 + (0.05 if i // 40 % 2 else 0.0)}
        for i in range(640)
    ]
    change = evidence.trend(wandering)
    self.assertTrue(change.is_known)
    self.assertLess(abs(change.by), change.margin)
