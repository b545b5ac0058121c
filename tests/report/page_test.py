# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""The page of any run: complete, safe and small."""

import contextlib
import io
import json
import os
import pathlib
import re
import tempfile

from absl.testing import absltest
import numpy as np
import pytest

from tba_jax.report import page as page_writer
from tba_jax.report import run_reader
from tba_jax.tools import report as programs_report
from tests.report import fake_run
from tests.report import page as page_lib


class BuildTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    folder = tempfile.TemporaryDirectory()
    self.addCleanup(folder.cleanup)
    self.workdir = os.path.join(folder.name, "run")

  def _append(self, name, record):
    with open(os.path.join(self.workdir, name), "a") as f:
      f.write(json.dumps(record) + "\n")

  def test_page_is_self_contained(self):
    fake_run.make_run(self.workdir, num_steps=30)
    path = page_writer.write_report(self.workdir)
    self.assertEqual(str(path), os.path.join(self.workdir, "report.html"))
    page = page_lib.Page(path)
    for url in page.urls:
      self.assertRegex(url, r"^(#|data:,)")
    source = page.source
    self.assertIn("default-src 'none'", source)
    asks = re.search(r"@import|url\((?!#)|\bfetch\(|XMLHttpRequest", source)
    self.assertIsNone(asks)
    data = page.data
    titles = [chart["title"] for chart in data["charts"]]
    for title in ("Reward", "Held-out pass@1", "KL to the reference", "log Z"):
      self.assertIn(title, titles)
    self.assertEqual(sum(n for _, n in data["staleness"]), 30 * 256)

  def test_counterfactuals_join_curves_of_metrics(self):
    fake_run.make_run(self.workdir, num_steps=6)
    lines = pathlib.Path(self.workdir, "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    folder = pathlib.Path(self.workdir, run_reader.COUNTERFACTUALS)
    folder.mkdir()
    steps = [
        {
            "step": step,
            "train/loss": 0.5,
            "train/kl": records[step]["train/kl"],
        }
        for step in (3, 4)
    ]
    (folder / "a.json").write_text(
        json.dumps({"label": "loss.beta=0.1 <b>", "steps": steps})
    )
    (folder / "b.json").write_text(json.dumps({"label": 3}))
    with contextlib.redirect_stderr(io.StringIO()) as err:
      page = page_lib.Page(page_writer.write_report(self.workdir))
    charts = {chart["title"]: chart["series"] for chart in page.data["charts"]}
    self.assertEqual(
        [series["label"] for series in charts["Loss"]],
        ["loss", "loss.beta=0.1 <b>"],
    )
    added = charts["Loss"][1]
    self.assertEqual((added["step"], added["mean"]), ([3, 4], [0.5, 0.5]))
    self.assertEqual(added["time"], charts["Loss"][0]["time"][3:5])
    # Its KL is the run's.
    self.assertLen(charts["KL to the reference"], 1)
    self.assertNotIn("loss.beta=0.1 <b>", page.source)
    self.assertRegex(err.getvalue(), "b.json: damaged: 'label'")

  def test_changed_settings_are_on_page(self):
    fake_run.make_run(self.workdir, num_steps=30)
    changes = {"loss.beta": [0.02, "0.1:0.05:9"], "log.writers": ["", "<b>"]}
    event = {"kind": "settings_changed", "step": 12, "changes": changes}
    self._append("events.jsonl", {"time": 1.0, "message": "x", **event})
    page = page_lib.Page(page_writer.write_report(self.workdir))
    lines = ["loss.beta: 0.02 → 0.1:0.05:9", "log.writers:  → <b>"]
    self.assertEqual(page.data["changes"], [{"step": 12, "settings": lines}])
    self.assertRegex(page.source, "from step 12</th>.*loss.beta: 0.02 →")
    self.assertNotIn("→ <b>", page.source)

  def test_makes_page_of_unfinished_run(self):
    fake_run.make_run(self.workdir, num_steps=10, finished=False)
    with open(os.path.join(self.workdir, "metrics.jsonl"), "a") as f:
      f.write('{"step": 10, "tr')
    source = page_writer.write_report(self.workdir).read_text()
    self.assertIn("no summary; last sign of life", source)
    self.assertIn("Unreadable lines left out", source)

  def test_evaluation_between_two_steps_is_not_incident(self):
    os.makedirs(self.workdir)
    for step in range(20):
      record = {"step": step, "time": step + 100.0 * (step > 9)}
      self._append("metrics.jsonl", record | {"train/loss": 1.0})
      if step == 9:
        record = {"step": step, "time": 50.0, "eval/pass_at_1": 0.5}
        self._append("metrics.jsonl", record)
    source = page_writer.write_report(self.workdir).read_text()
    self.assertNotIn("Training paused", source)

  def test_damaged_files_are_named(self):
    fake_run.make_run(self.workdir, num_steps=3)
    for name, value in (
        ("eval.json", {"history": 5}),
        ("ledger.json", []),
        ("summary.json", {"before": "<b>"}),
    ):
      pathlib.Path(self.workdir, name).write_text(json.dumps(value))
    with contextlib.redirect_stderr(io.StringIO()) as err:
      source = page_writer.write_report(self.workdir).read_text()
    for name in ("eval.json", "ledger.json", "summary.json"):
      self.assertRegex(source, f"Left out: .*{name}: damaged")
      self.assertRegex(err.getvalue(), f"warning: .*{name}: damaged")

  def test_page_of_run_killed_at_any_byte(self):
    rng = np.random.default_rng(0)
    for seed in range(8):
      folder = pathlib.Path(self.workdir, str(seed))
      fake_run.make_run(str(folder), num_steps=6, num_samples=3, seed=seed)
      for path in folder.rglob("*.json*"):
        if rng.random() < 0.8:
          data = path.read_bytes()
          path.write_bytes(data[: rng.integers(len(data) + 1)])
        elif rng.random() < 0.5:
          path.unlink()
      self.assertNotEmpty(page_lib.Page(page_writer.write_report(folder)).data)

  def test_makes_page_of_empty_directory(self):
    os.makedirs(self.workdir)
    source = page_writer.write_report(self.workdir).read_text()
    self.assertIn("nothing measured yet", source)

  def test_text_of_model_is_escaped(self):
    fake_run.make_run(self.workdir, num_steps=3, num_samples=0)
    clean = page_lib.Page(page_writer.write_report(self.workdir))
    self._append(
        "samples.jsonl",
        {
            "step": 1,
            "prompt": page_lib.HOSTILE,
            "completion": page_lib.HOSTILE,
            "reward": 0,
            "tokens": [page_lib.HOSTILE],
            "logprobs": [-1.0],
        },
    )
    self._append(
        "events.jsonl", {"kind": page_lib.HOSTILE, "message": page_lib.HOSTILE}
    )
    example = {
        "prompt": page_lib.HOSTILE,
        "completion": page_lib.HOSTILE,
        "reward": 1,
    }
    evaluation = {
        "before": {"samples": [example]},
        "after": {page_lib.HOSTILE: page_lib.HOSTILE},
    }
    for name, value in (
        ("eval", evaluation),
        (
            "config",
            {
                page_lib.HOSTILE: page_lib.HOSTILE,
                "task": {"name": page_lib.HOSTILE},
            },
        ),
        (
            "summary",
            {
                page_lib.HOSTILE: page_lib.HOSTILE,
                "restarts": {page_lib.HOSTILE: 1},
            },
        ),
    ):
      with open(os.path.join(self.workdir, f"{name}.json"), "w") as f:
        json.dump(value, f)
    page = page_lib.Page(page_writer.write_report(self.workdir))
    self.assertEqual(page.tags.count("script"), clean.tags.count("script"))
    self.assertNotIn("img", page.tags)
    acts = re.search("[\x00-\x08\x0b-\x1f\u202e\u2028]", page.source)
    self.assertIsNone(acts)
    (sample,) = page.data["samples"]
    self.assertTrue(sample["completion"].startswith("</script><script>"))
    self.assertIn("⟦U+202E⟧", sample["completion"])

  @pytest.mark.slow
  def test_bounds_size_of_long_run(self):
    fake_run.make_run(self.workdir, num_steps=3000, num_samples=300)
    long = {"step": 1, "completion": "<" * 100_000, "prompt": "é" * 100_000}
    for _ in range(30):
      self._append("samples.jsonl", long)
    path = page_writer.write_report(self.workdir)
    # 100,000 steps take the same space as these.
    self.assertLess(path.stat().length, 5_000_000)

  def test_names_missing_directory(self):
    with self.assertRaisesRegex(ValueError, "no run directory at"):
      page_writer.write_report(self.workdir)

  def test_writes_to_path_given(self):
    os.makedirs(self.workdir)
    out = os.path.join(self.workdir, "sub", "page.html")
    self.assertEqual(str(page_writer.write_report(self.workdir, out)), out)
    self.assertCountEqual(
        os.listdir(os.path.dirname(out)), ["page.html", "trace.json"]
    )

  def test_puts_first_and_last_checkpoint_side_by_side(self):
    os.makedirs(self.workdir)
    sample = lambda completion, reward: {
        "prompt": "1,2>3",
        "completion": completion,
        "reward": reward,
        "tokens": [completion],
        "logprobs": [-0.5],
    }
    evaluations = {
        "before": {"samples": [sample("1+1=2", 0.0), sample("2+1=4", 0.0)]},
        "after": {"samples": [sample("2+1=3", 1.0), "odd", {"prompt": "9"}]},
    }
    with open(os.path.join(self.workdir, "eval.json"), "w") as f:
      json.dump(evaluations, f)
    data = page_lib.Page(page_writer.write_report(self.workdir)).data
    (row,) = data["held_out"]
    self.assertEqual(row["prompt"], "1,2>3")
    self.assertLen(row["before"], 2)
    self.assertEqual(row["after"][0]["completion"], "2+1=3")
    self.assertEqual(row["after"][0]["logprobs"], [-0.5])

  def test_concludes_with_verdict_and_advice(self):
    fake_run.make_run(self.workdir, num_steps=20, num_samples=2)
    path, verdict, sentences = page_writer.conclude(self.workdir)
    self.assertEqual(verdict.name, "learned")
    self.assertRegex(sentences[0], r"The trainer waited \d+% of its time")
    body = path.read_text().partition("<body>")[2]
    self.assertIn(verdict.sentence, body.partition("<nav")[0])
    self.assertIn(sentences[0], body)
    # Sentence about its guard's event.
    self.assertIn("trainer-0: a guard fired, once", body)

  def test_program_takes_run_as_operand_or_workdir(self):
    os.makedirs(self.workdir)
    self.assertEqual(programs_report.run(None, self.workdir, []), 0)
    self.assertEqual(programs_report.run(None, None, [self.workdir]), 0)
    self.assertEqual(programs_report.run(None, None, []), 2)
    self.assertEqual(programs_report.run(None, None, [self.workdir, "b"]), 2)


class DiversityTest(absltest.TestCase):

  def test_counts_distinct_completions(self):
    sample = lambda completion, reward: {
        "prompt": "p", "completion": completion, "reward": reward,
    }  # fmt: skip
    before = {"samples": [sample("a", 0), sample("b", 1), sample("a", 0)]}
    after = {"samples": [sample("c", 1.0)]}
    (row,) = page_writer.diversity(before, after)
    shown = [(c["text"], c["count"]) for c in row["before"]]
    self.assertEqual(shown, [("b", 1), ("a", 2)])
    self.assertEqual(row["after"][0]["reward"], 1.0)

  def test_orders_prompts(self):
    sample = lambda prompt: {"prompt": prompt, "completion": "\u202e"}
    out = page_writer.diversity(
        {"samples": [sample("old"), sample("both")]},
        {"samples": [sample("both"), sample("new"), None]},
    )
    self.assertEqual([r["prompt"] for r in out], ["both", "old", "new"])
    self.assertEqual(out[0]["before"][0]["text"], "⟦U+202E⟧")
    self.assertEqual(page_writer.diversity({}, {"samples": 3}), [])

  def test_prompts_of_one_text_stay_apart(self):
    sample = lambda i: {"prompt": "p", "prompt_id": i, "completion": str(i)}
    evaluation = {"samples": [sample(i) for i in range(2)]}
    for make in (page_writer.diversity, page_writer.held_out_side_by_side):
      out = make(evaluation, evaluation)
      self.assertEqual([row["prompt"] for row in out], ["p", "p"])
      self.assertEqual([len(row["before"]) for row in out], [1, 1])
