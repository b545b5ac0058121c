# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Tables of the page, from finished, running and empty runs."""

import os
import tempfile

from absl.testing import absltest

from tba_jax.monitor.report import load
from tba_jax.monitor.report import tables
from tba_jax.system import jsonl
from tests.monitor.report import fake_run


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
    first = tables.headline(run)[0]
    self.assertEqual(
        (first["name"], first["before"]), ("held-out pass@1", "29.0 %")
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

  def test_no_ledger_and_a_damaged_one(self):
    self.assertEqual(tables.ledger(self._run(ledger={"closed": True})), {})
    source = fake_run.ledger() | {"rejected": 3, "queued": {"prompts": "x"}}
    out = tables.ledger(self._run(ledger=source))
    self.assertEqual(out["closed"], [False] * 3)

  def test_rounding_noise_is_no_error(self):
    noisy = {"pass_at_1": 1.0, "pass_at_1_stderr": 3.2e-18}
    (row,) = tables.compare(noisy, noisy)
    self.assertEqual(row["before"], "100.0 % ± 0.0 %")
    noisy = {"mean_reward": 0.5, "mean_reward_stderr": 3.2e-18}
    (row,) = tables.compare(noisy, noisy)
    self.assertEqual(row["before"], "0.50 ± 0.00")

  def _odd(self, records=(), summary=None):
    for step, record in enumerate(records):
      fake_run.write_metrics_line(self.workdir, step, **record)
    run = self._run(summary=summary or {})
    facts = {
        f["name"]: (f["value"], f["note"]) for f in tables.facts(run, None)
    }
    return facts.get("not judged"), facts.get("several versions")

  def test_no_facts_of_odd_completions_where_there_are_none(self):
    usual = {"reward_failures": {}, "mixed_version_share": 0.0}
    self.assertEqual(self._odd([{"train/loss": 1.0}], usual), (None, None))

  def test_odd_completions_of_a_run_that_goes_on(self):
    (value, note), (share, _) = self._odd([
        {"reward/failed_deadline": 1, "sampler/mixed_version_share": 0.5},
        {"reward/failed_deadline": 3, "reward/failed_nan": 1},
        {"sampler/mixed_version_share": 0.25},
    ])  # fmt: skip
    self.assertEqual((value, share), ("4", "25.0 %"))
    self.assertIn("3 deadline, 1 nan", note)

  def test_odd_completions_of_the_summary_come_first(self):
    summary = {"reward_failures": {"exit": 7}, "mixed_version_share": 0.1}
    (value, _), (share, _) = self._odd([{"reward/failed_exit": 3}], summary)
    self.assertEqual((value, share), ("7", "10.0 %"))

  def test_config_is_flat_and_printable(self):
    flat = dict(tables.flat_config({"a": {"b": "\x1b", "c": {}}, "d": 1.5}))
    self.assertEqual(flat, {"a.b": "␛", "a.c": "{}", "d": "1.5"})


if __name__ == "__main__":
  absltest.main()
