# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Tests for report.odd_completions."""

import json
import os

from absl.testing import absltest

from tba_jax.monitor.report import build
from tba_jax.monitor.report import compare
from tba_jax.monitor.report import load
from tba_jax.system import jsonl
from tests.monitor.report import fake_run


class OddCompletionsTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    self.workdir = self.create_tempdir().full_path

  def _facts(self, records=(), summary=None):
    with open(os.path.join(self.workdir, "metrics.jsonl"), "w") as f:
      for step, record in enumerate(records):
        f.write(json.dumps({"step": step, **record}) + "\n")
    if summary is not None:
      path = os.path.join(self.workdir, "summary.json")
      jsonl.atomic_write_json(path, summary)
    facts = build.odd_completion_facts(load.read_run(self.workdir))
    return {fact["name"]: (fact["value"], fact["note"]) for fact in facts}

  def test_nothing_where_all_is_as_usual(self):
    self.assertEqual(self._facts([{"train/loss": 1.0}]), {})
    usual = {"reward_failures": {}, "mixed_version_share": 0.0}
    self.assertEqual(self._facts(summary=usual), {})

  def test_a_run_that_goes_on_has_them_in_its_metrics(self):
    records = [
        {"reward/failed_deadline": 1, "sampler/mixed_version_share": 0.5},
        {"reward/failed_deadline": 3, "reward/failed_nan": 1},
        {"sampler/mixed_version_share": 0.25},
    ]
    facts = self._facts(records)
    value, note = facts["not judged"]
    self.assertEqual(value, "4")
    self.assertIn("3 deadline, 1 nan", note)
    self.assertEqual(facts["several versions"][0], "25.0 %")

  def test_the_summary_has_the_last_word(self):
    summary = {"reward_failures": {"exit": 7}, "mixed_version_share": 0.1}
    facts = self._facts([{"reward/failed_exit": 3}], summary)
    self.assertEqual(facts["not judged"][0], "7")
    self.assertEqual(facts["several versions"][0], "10.0 %")

  def test_both_pages_show_them(self):
    fake_run.make_run(self.workdir, num_steps=8, finished=False)
    fake_run.write_metrics_line(self.workdir, 8, **{"reward/failed_nan": 5})
    page = build.write_report(self.workdir).read_text()
    self.assertIn("by cause: 5 nan", page)
    out = os.path.join(self.workdir, "compare.html")
    page = compare.write_comparison([self.workdir] * 2, out).read_text()
    self.assertIn("not judged", page)


if __name__ == "__main__":
  absltest.main()
