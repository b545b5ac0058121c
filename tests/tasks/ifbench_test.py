# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Tests of IFBench: its prompts, its checks, and what has no check."""

import importlib
import importlib.util
import json
import pathlib
import random
from unittest import mock

from absl.testing import absltest
import ml_collections

from tba_jax.tasks import ifbench
from tba_jax.tasks import task_table

_MISSING = [
    name
    for name in ("if_verifiable", "ifbench", "nltk")
    if importlib.util.find_spec(name) is None
]
_TEXTS = (
    "It is so.",
    'IT IS\n\n* so\n* no\n\n1. "q" (a (b)) - why? 12, 3.5',
    "- \n-",
    "?\n!",
    "🐝 🐝. 日本",
)


def _row(prompt, **instructions):
  return {
      "key": prompt,
      "prompt": prompt,
      "instruction_id_list": [k.replace("__", ":") for k in instructions],
      "kwargs": [*instructions.values()],
  }


_ROWS = (
    _row(
        "Without spaces, two numbers.",
        format__no_whitespace={},
        count__numbers={"N": 2, "keyword": None},
    ),
    _row("In title case.", format__title_case={}, format__no_whitespace={}),
    _row("A verb first.", words__start_verb={}),
    _row(
        "Copy.",
        repeat__repeat_span={
            "prompt_to_repeat": "a b c d",
            "n_start": 0,
            "n_end": 2,
        },
    ),
    _row("Explain.", format__quote_unquote={}),
)


@absltest.skipIf(_MISSING, f"{', '.join(_MISSING)} not installed")
class IfBenchTest(absltest.TestCase):

  def make(self, *found):
    path = pathlib.Path(self.create_tempdir().full_path) / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in found))
    return self.task(data=str(path))

  def task(self, **fields):
    return task_table.make_task(
        ml_collections.ConfigDict({"name": "ifbench", **fields})
    )

  def test_scores_are_strict_and_loose(self):
    task = self.make(_ROWS[0])
    judge = lambda text: task.judge("held_out", 0, text)
    names = {"format:no_whitespace": 1.0, "count:numbers": 1.0}
    scores = {"strict": 1.0, "loose": 1.0, "all_loose": 1.0}
    judged = judge("12-and-34")
    self.assertEqual((judged.reward, judged.key), (1.0, "12-and-34"))
    self.assertEqual(judged.parts, names | scores)
    judged = judge("12")
    self.assertEqual((judged.reward, judged.key), (0.5, None))
    self.assertEqual(judged.parts["count:numbers"], 0.0)
    # The loose score leaves the first line out.
    judged = judge("Here it is:\n12-and-34")
    self.assertEqual((judged.reward, judged.key), (0.5, None))
    self.assertEqual(judged.parts["strict"], 0.5)
    self.assertEqual(judged.parts["all_loose"], 1.0)
    self.assertEqual(judge("").reward, 0.0)
    self.assertEqual(
        task.explain("held_out", 0, "12"), "does not follow count:numbers"
    )

  def test_instructions_without_check_are_named_and_not_counted(self):
    task = self.make(*_ROWS)
    self.assertEqual(task.num_prompts("held_out"), 3)
    self.assertEqual(task.num_prompts("train"), 0)
    lines = " ".join(task.report.lines())
    for name in ("format:title_case", "words:start_verb", "repeat:repeat_span"):
      self.assertIn(f"{name} (1)", lines)
    self.assertIn("has no instruction that can be checked", lines)
    self.assertEqual(task.judge("held_out", 1, "NoSpace").reward, 1.0)

  def test_unparsable_text_earns_no_reward(self):
    task = self.make(_ROWS[-1])
    self.assertEqual(task.judge("held_out", 0, "- \n-").reward, 0.0)

  def test_package_has_294_prompts(self):
    task = self.task()
    self.assertEqual(task.report.read["held_out"], 294)
    self.assertEqual(task.num_prompts("held_out"), 270)

  def test_checks_need_no_data_and_draw_nothing(self):
    task = self.task()
    nltk = importlib.import_module("nltk")
    refuse = mock.Mock(side_effect=AssertionError)
    with (
        mock.patch.multiple(nltk, download=refuse),
        mock.patch.multiple(nltk.data, find=refuse, load=refuse),
        mock.patch.multiple(
            random, choice=refuse, randint=refuse, sample=refuse
        ),
    ):
      for index in range(task.num_prompts("held_out")):
        for text in _TEXTS:
          task.judge("held_out", index, text)

  def test_refuses_file_of_other_rows(self):
    with self.assertRaisesRegex(ValueError, "config.task.data=.*has no answer"):
      self.make({"prompt": "Why?", "answer": "So."})


class MissingPackageTest(absltest.TestCase):

  def test_names_package_and_extra(self):
    with mock.patch.dict("sys.modules", {"nltk": None}):
      with self.assertRaisesRegex(ValueError, r"tba_jax\[ifbench\]"):
        ifbench.IfBench(data="")
