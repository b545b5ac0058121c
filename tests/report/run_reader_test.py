# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Reading a complete or damaged run directory."""

import json
import os
import tempfile

from absl.testing import absltest

from tba_jax.report import run_reader
from tests.report import fake_run


def _write(workdir, name, *records):
  path = os.path.join(workdir, name)
  os.makedirs(os.path.dirname(path), exist_ok=True)
  with open(path, "a") as f:
    for record in records:
      f.write(record if isinstance(record, str) else json.dumps(record) + "\n")


class ColumnTest(absltest.TestCase):

  def test_column_drops_non_numbers(self):
    records = [
        {"step": 0, "a": 1.5},
        {"step": 1, "a": None},
        {"step": 2, "a": True},
        {"step": 4, "a": 2},
    ]
    steps, values = run_reader.column(records, "a")
    self.assertEqual((steps.tolist(), values.tolist()), ([0, 4], [1.5, 2.0]))
    self.assertEqual([len(x) for x in run_reader.column(records, "b")], [0, 0])


class ReadRunTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    folder = tempfile.TemporaryDirectory()
    self.addCleanup(folder.cleanup)
    self.workdir = folder.name

  def test_reads_run(self):
    fake_run.make_run(self.workdir, num_steps=20, num_samples=7)
    run = run_reader.read_run(self.workdir)
    self.assertEqual([r["step"] for r in run.records], list(range(20)))
    self.assertLen(run.samples, 7)
    self.assertIn(("trainer", 0, ""), run.lanes)
    self.assertIn(("trainer", 0, "publish"), run.lanes)
    self.assertIn(("searcher", 1, ""), run.lanes)
    self.assertEqual(run.skipped, {})

  def test_torn_lines_are_counted(self):
    fake_run.make_run(self.workdir, num_steps=5)
    _write(self.workdir, "metrics.jsonl", '{"step": 5, "train')
    _write(self.workdir, "spans/trainer-0.jsonl", "garbage\n", {"kind": "x"})
    with open(os.path.join(self.workdir, "summary.json"), "w") as f:
      f.write('{"before"')
    run = run_reader.read_run(self.workdir)
    self.assertLen(run.records, 5)
    self.assertEqual(
        run.skipped, {"metrics.jsonl": 1, "spans/trainer-0.jsonl": 2}
    )
    self.assertEqual(run.summary, {})

  def test_samples_are_thinned_evenly(self):
    _write(
        self.workdir,
        "samples.jsonl",
        *({"step": i, "completion": "x"} for i in range(9000)),
    )
    run = run_reader.read_run(self.workdir)
    steps = [s["step"] for s in run.samples]
    self.assertEqual(run.num_samples, 9000)
    self.assertLessEqual(len(steps), run_reader.MAX_SAMPLES)
    self.assertGreater(len(steps), run_reader.MAX_SAMPLES // 2)
    self.assertEqual(steps, list(range(0, 9000, steps[1] - steps[0])))

  def test_samples_are_printable(self):
    _write(
        self.workdir,
        "samples.jsonl",
        {
            "step": 1,
            "prompt": "\x1b[2J",
            "completion": "y" * 100_000,
            "reward": None,
            "reason": "\x1b" + "z" * 9999,
            "tokens": ["\u202e"] + ["t"] * 999,
            "logprobs": [-0.5] * 1000,
        },
        {"step": "one", "tokens": "no list", "reward": float("nan")},
    )
    first, second = run_reader.read_run(self.workdir).samples
    self.assertEqual(first["prompt"], "␛[2J")
    self.assertLess(
        len(first["completion"]), run_reader.MAX_COMPLETION_CHARS + 50
    )
    self.assertStartsWith(first["reason"], "␛z")
    self.assertLess(len(first["reason"]), run_reader.MAX_REASON_CHARS + 50)
    self.assertEqual(first["tokens"][0], "⟦U+202E⟧")
    self.assertLen(first["tokens"], run_reader.MAX_TOKENS)
    self.assertEqual(first["hidden_tokens"], 1000 - run_reader.MAX_TOKENS)
    self.assertIsNone(second["step"])
    self.assertEqual((second["tokens"], second["reason"]), ([], ""))
