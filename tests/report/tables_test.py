# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Tables of finished, running and empty runs."""

import os
import tempfile

from absl.testing import absltest

from tba_jax.report import run_reader
from tba_jax.report import tables
from tba_jax.system import jsonl
from tests.report import fake_run


class RunTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    folder = tempfile.TemporaryDirectory()
    self.addCleanup(folder.cleanup)
    self.workdir = folder.name

  def _run(self, **files):
    for name, value in files.items():
      jsonl.atomic_write_json(os.path.join(self.workdir, f"{name}.json"), value)
    return run_reader.read_run(self.workdir)

  def test_shows_state(self):
    self.assertEqual(tables.state(self._run())["name"], "stopped")
    run = self._run(status={"time": 1000.0})
    self.assertEqual(tables.state(run, now=1010.0)["name"], "running")
    stopped = tables.state(run, now=1200.0)
    self.assertEqual(stopped["name"], "stopped")
    self.assertIn("3:20 min ago", stopped["words"])

  def test_shows_state_of_fine_tuning(self):
    os.makedirs(os.path.join(self.workdir, "sft"))
    with open(os.path.join(self.workdir, "sft", "metrics.jsonl"), "w") as f:
      f.write('{"step": 10, "time": 1000.0, "train/loss": 2.5}\n')
    state = tables.state(self._run(), now=1010.0)
    self.assertEqual(state["name"], "running")
    state = tables.state(self._run(), now=1200.0)
    self.assertIn("3:20 min ago", state["words"])
    run = self._run(summary={"steps": 3})
    self.assertEqual(tables.state(run, now=9e9)["name"], "finished")

  def test_compares_before_and_after(self):
    run = self._run(
        eval={"before": {"pass_at_1": 0.29, "pass_at_1_stderr": 0.01, "k": 8}},
        summary={"after": {"pass_at_1": 0.68, "pass_at_k": 0.9}},
    )
    rows = tables.compare(*tables.evaluations(run))
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

  def _facts(self, **files):
    rows = tables.facts(tables.outcome(self._run(**files)))
    return {row["name"]: row["value"] for row in rows}

  def test_states_facts_of_running_run(self):
    for step, share in ((3, 0.5), (4, 0.25)):
      metrics = {"replay/staleness_steps": step - 1.0}
      metrics["sampler/mixed_version_share"] = share
      fake_run.write_metrics_line(self.workdir, step, **metrics)
    failures = {"deadline": 3, "nan": 1}
    facts = self._facts(
        status={"overlap_of_ideal": 0.5, "reward_failures": failures}
    )
    self.assertEqual(facts["steps"], "5")
    self.assertEqual(facts["staleness"], "2.50")
    self.assertEqual(facts["overlap of ideal"], "0.50")
    self.assertEqual(facts["ledger"], "–")
    self.assertEqual(facts["not judged"], "4 (3 deadline, 1 nan)")
    self.assertEqual(facts["several versions"], "25.0 %")

  def test_facts_of_kinds_of_searchers(self):
    amounts = dict(completions=10, tokens=3000, wall_s=90.0, cost=0.0)
    kinds = {"int8": amounts, "vllm": amounts | {"tokens": 1000, "cost": 0.5}}
    facts = self._facts(summary={"sampled_by": kinds})
    self.assertEqual(
        facts["sampled by int8"], "10 completions, 3,000 tokens (75%), 1:30 min"
    )
    self.assertEqual(
        facts["sampled by vllm"],
        "10 completions, 1,000 tokens (25%), 1:30 min, price 0.5 (500.00 for a"
        " million tokens)",
    )
    alone = self._facts(summary={"sampled_by": {"int8": amounts}})
    self.assertNotIn("sampled by int8", alone)

  def test_facts_of_finished_run(self):
    evaluation = {"pass_at_1": 0, "pass_at_k": 0, "distinct_correct": 0}
    summary = fake_run.summary(evaluation, evaluation)
    usual = {"reward_failures": {}, "mixed_version_share": 0.0}
    facts = self._facts(summary={**summary, **usual})
    self.assertEqual(facts["restarts"], "2 (1 searcher, 1 store)")
    self.assertEqual(facts["ledger"], "closed")
    self.assertEqual(facts["completions"], "164,576")
    self.assertNotIn("not judged", facts)
    self.assertNotIn("several versions", facts)
    odd = {"ledger_closed": False, "stopped_by": "guard kl", "restarts": 3}
    facts = self._facts(summary={**summary, **odd})
    self.assertEqual(facts["ledger"], "OPEN")
    self.assertNotIn("damage", facts)
    lost = {"lost": {"journal": 60, "searcher": 4}, "damage": {"journal": 1}}
    facts = self._facts(
        summary={**summary, **odd, **lost, "unknown": ["a file"]}
    )
    self.assertEqual(
        facts["ledger"],
        "OPEN, 64 lost (60 journal damaged, 4 searchers gone)"
        ", more may be lost",
    )
    self.assertEqual(facts["damage"], "1 (1 journal)")
    facts = self._facts(summary={**summary, **lost, "lost": {"journal": 64}})
    self.assertEqual(facts["ledger"], "closed, 64 lost (64 journal damaged)")
    facts = self._facts(summary={**summary, **odd})
    self.assertEqual(facts["steps"], "320 (stopped by guard kl)")
    self.assertEqual(facts["restarts"], "0")

  def test_shows_ledger(self):
    source = fake_run.ledger()
    out = tables.ledger(self._run(ledger=source))
    self.assertEqual(out["units"], ["prompts", "completions", "tokens"])
    self.assertEqual(out["generated"][0], "10,286")
    self.assertEqual(out["difference"], ["0", "0", "0"])
    rows = {row["name"]: row["counts"] for row in out["rows"]}
    self.assertEqual(rows["rejected: duplicate"][1], "288")
    self.assertEqual(rows["lost: searcher"][0], "32")
    source["queued"]["tokens"] = 5
    out = tables.ledger(self._run(ledger=source))
    self.assertEqual(out["difference"], ["0", "0", "-5"])

  def test_tolerates_missing_or_damaged_ledger(self):
    self.assertEqual(tables.ledger(self._run(ledger={"closed": True})), {})
    source = fake_run.ledger() | {"rejected": 3, "queued": {"prompts": "x"}}
    out = tables.ledger(self._run(ledger=source))
    self.assertNotIn("0", out["difference"])

  def test_rounding_error_is_shown_as_0(self):
    noisy = {"pass_at_1": 1.0, "pass_at_1_stderr": 3.2e-18}
    (row,) = tables.compare(noisy, noisy)
    self.assertEqual(row["before"], "100.0 % ± 0.0 %")
    noisy = {"mean_reward": 0.5, "mean_reward_stderr": 3.2e-18}
    (row,) = tables.compare(noisy, noisy)
    self.assertEqual(row["before"], "0.50 ± 0.00")

  def test_compares_parts_of_reward_and_further_splits(self):
    before = {
        "mean_reward": 0.25,
        "reward/words": 0.5,
        "reward/words_stderr": 0.125,
        "reward/words_interval": (0.25, 0.75),
        "new_kinds/mean_reward": 0.0,
        "new_kinds/stop_rate": 1.0,
        "new_kinds/reward/digits": 0.0,
    }
    after = before | {"reward/words": 0.75, "new_kinds/mean_reward": 0.5}
    rows = tables.compare(before, after)
    self.assertEqual(
        [(row["name"], row["before"], row["change"]) for row in rows],
        [
            ("mean reward", "0.25", "+0.00"),
            ("reward, words", "0.50 ± 0.25", "+0.25"),
            ("new kinds: mean reward", "0.00", "+0.50"),
            ("new kinds: reward, digits", "0.00", "+0.00"),
        ],
    )

  def test_flattens_config(self):
    flat = dict(tables.flat_config({"a": {"b": "\x1b", "c": {}}, "d": 1.5}))
    self.assertEqual(flat, {"a.b": "␛", "a.c": "{}", "d": "1.5"})
