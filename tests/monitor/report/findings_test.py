# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""The diagnosis of synthetic runs, sentence by sentence."""

import json
import pathlib
import re

from absl.testing import absltest
from absl.testing import parameterized

from tba_jax.monitor import collapse
from tba_jax.monitor import incidents
from tba_jax.monitor import metrics
from tba_jax.monitor.report import advice
from tba_jax.monitor.report import load
from tba_jax.monitor.report import timeline
from tba_jax.monitor.report import verdict
from tests.support import synthetic_runs

FINDINGS = json.loads(
    pathlib.Path(__file__).with_name("findings.json").read_text()
)


def _diagnosis(lines=(), **parts):
  """Returns what is found in a run, as a value of `findings.json`."""
  run = load.Run(
      **dict.fromkeys(
          ("config", "eval", "ledger", "status", "summary", "lanes"), {}
      )
      | dict.fromkeys(("sft_records", "span_kinds", "events", "samples"), [])
      | dict.fromkeys(("workdir", "num_events", "num_samples"))
      | {"skipped": {}, "damaged": []}
      | {"records": metrics.last_per_step(lines)}
      | parts
  )
  outcome, collapsed = verdict.of_run(run), collapse.find(lines)
  found = {
      "verdict": [outcome.kind, outcome.sentence],
      "advice": advice.advice(run, timeline.where_time_went(run)),
      "collapse": collapsed and collapsed.line,
      "incidents": [
          re.sub(r"last at \d\d(:\d\d)+", "last at TIME", sentence)
          for sentence in incidents.sentences(run.events, lines)
      ],
  }
  return {name: value for name, value in found.items() if value}


class FindingsTest(parameterized.TestCase):

  @parameterized.parameters(*synthetic_runs.RUNS)
  def test_run_has_its_findings(self, name):
    self.assertEqual(_diagnosis(**synthetic_runs.RUNS[name]), FINDINGS[name])


if __name__ == "__main__":
  absltest.main()
