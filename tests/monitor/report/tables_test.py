# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Tests for report.tables and report.diversity."""

import os
import tempfile

from absl.testing import absltest
from absl.testing import parameterized

from tba_jax.monitor.report import build
from tba_jax.monitor.report import load
from tba_jax.monitor.report import tables
from tba_jax.system import jsonl
from tests.monitor.report import fake_run


class FormatTest(parameterized.TestCase):

  @parameterized.parameters(
      (None, "number", "–"),
      (0.294, "percent", "29.4 %"),
      (164576, "count", "164,576"),
      (2.2, "number", "2.20"),
      (627.2, "number", "627"),
      (3e-5, "number", "3e-05"),
      (True, "number", "yes"),
      ("\x1b[1m", "number", "␛[1m"),
  )
  def test_number(self, value, style, shown):
    self.assertEqual(tables.number(value, style), shown)

  @parameterized.parameters(
      (0.05, "50 ms"), (4.2, "4.2 s"), (200, "3:20 min"), (3720, "1:02 h"),
      (None, "–"),
  )  # fmt: skip
  def test_duration(self, value, shown):
    self.assertEqual(tables.duration(value), shown)


class RunTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    folder = tempfile.TemporaryDirectory()
    self.addCleanup(folder.cleanup)
    self.workdir = folder.name

  def _run(self, **files):
    for name, value in files.items():
      jsonl.atomic_write_json(os.path.join(self.workdir, f"{name}.json"), value)
    return load.read_run(self.workdir)

  def test_state_tells_running_from_stopped(self):
    self.assertEqual(tables.state(self._run())["name"], "stopped")
    run = self._run(status={"time": 1000.0})
    self.assertEqual(tables.state(run, now=1010.0)["name"], "running")
    stopped = tables.state(run, now=1200.0)
    self.assertEqual(stopped["name"], "stopped")
    self.assertIn("3:20 min ago", stopped["words"])

  def test_a_run_that_fine_tunes_runs(self):
    os.makedirs(os.path.join(self.workdir, "sft"))
    with open(os.path.join(self.workdir, "sft", "metrics.jsonl"), "w") as f:
      f.write('{"step": 10, "time": 1000.0, "train/loss": 2.5}\n')
    state = tables.state(self._run(), now=1010.0)
    self.assertEqual(state["name"], "running")
    state = tables.state(self._run(), now=1200.0)
    self.assertIn("3:20 min ago", state["words"])
    run = self._run(summary={"steps": 3})
    self.assertEqual(tables.state(run, now=9e9)["name"], "finished")

  def test_before_and_after_with_their_change(self):
    run = self._run(
        eval={"before": {"pass_at_1": 0.29, "pass_at_1_stderr": 0.01, "k": 8}},
        summary={"after": {"pass_at_1": 0.68, "pass_at_k": 0.9}},
    )
    rows = tables.before_after(run)
    self.assertEqual(
        rows[0],
        {
            "name": "pass@1",
            "before": "29.0 % ± 2.0 %",
            "after": "68.0 %",
            "change": "+39.0 points",
        },
    )
    self.assertEqual(rows[1]["name"], "pass@8")
    self.assertEqual((rows[1]["before"], rows[1]["change"]), ("–", ""))
    self.assertEqual(
        tables.headline(run)[0],
        {"name": "held-out pass@1", "before": "29.0 %", "after": "68.0 %"},
    )

  def test_facts_come_from_the_summary_or_what_was_measured(self):
    def facts(run, overlap=None):
      return {f["name"]: f["value"] for f in tables.facts(run, overlap)}

    fake_run.write_metrics_line(
        self.workdir, 4, **{"replay/staleness_steps": 3.0}
    )
    overlap = {"generate_s": 1, "train_s": 2, "wall_s": 4}
    live = facts(self._run(), {**overlap, "overlap_of_ideal": 0.5})
    self.assertEqual(live["steps"], "5")
    self.assertEqual(live["staleness"], "3.00")
    self.assertEqual(live["overlap of ideal"], "0.50")
    self.assertEqual(live["ledger"], "–")
    done = facts(self._run(summary={**fake_run.summary({
        "pass_at_1": 0, "pass_at_k": 0, "distinct_correct": 0,
    }, {"pass_at_1": 0, "pass_at_k": 0, "distinct_correct": 0}),
        "ledger_closed": False}))  # fmt: skip
    self.assertEqual(done["restarts"], "2")
    self.assertEqual(done["ledger"], "OPEN")
    self.assertEqual(done["completions"], "164,576")

  def test_the_ledger_has_both_sides_and_their_difference(self):
    source = fake_run.ledger()
    out = tables.ledger(self._run(ledger=source))
    self.assertEqual(out["units"], ["prompts", "completions", "tokens"])
    self.assertEqual(out["generated"][0], "10,286")
    self.assertEqual(out["closed"], [True, True, True])
    rows = {row["name"]: row["counts"] for row in out["rows"]}
    self.assertEqual(rows["rejected: duplicate"][1], "288")
    self.assertEqual(rows["lost: searcher"][0], "32")
    source["queued"]["tokens"] = 5
    out = tables.ledger(self._run(ledger=source))
    self.assertEqual(out["closed"], [True, True, False])
    self.assertEqual(out["difference"], ["0", "0", "-5"])

  def test_the_ledger_may_be_by_unit(self):
    source = {
        "completions": {
            "generated": 5,
            "trained_first_time": 3,
            "rejected": {"stale": 2},
        }
    }
    out = tables.ledger(self._run(ledger=source))
    self.assertEqual(out["units"], ["completions"])
    self.assertEqual(out["closed"], [True])
    self.assertEqual(tables.ledger(self._run(ledger={"closed": True})), {})

  def test_config_is_flat_and_printable(self):
    flat = dict(tables.flat_config({"a": {"b": "\x1b", "c": {}}, "d": 1.5}))
    self.assertEqual(flat, {"a.b": "␛", "a.c": "{}", "d": "1.5"})


class DiversityTest(absltest.TestCase):

  def test_distinct_completions_right_ones_first(self):
    before = {"samples": [{
        "prompt": "p", "completions": ["a", "b", "a"], "rewards": [0, 1, 0],
    }]}  # fmt: skip
    after = {"samples": [{"prompt": "p", "completion": "c", "reward": 1.0}]}
    (row,) = build.diversity(before, after)
    shown = [(c["text"], c["count"]) for c in row["before"]]
    self.assertEqual(shown, [("b", 1), ("a", 2)])
    self.assertEqual(row["after"][0]["reward"], 1.0)

  def test_prompts_of_both_sides_come_first(self):
    sample = lambda prompt: {"prompt": prompt, "completions": ["\u202e"]}
    out = build.diversity(
        {"samples": [sample("old"), sample("both")]},
        {"samples": [sample("both"), sample("new"), None]},
    )
    self.assertEqual([r["prompt"] for r in out], ["both", "old", "new"])
    self.assertEqual(out[0]["before"][0]["text"], "⟦U+202E⟧")
    self.assertEqual(build.diversity({}, {"samples": 3}), [])


if __name__ == "__main__":
  absltest.main()
