# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""GSM8K: formats, rewards, splits, and every answer of the published data.

The tests of the real data skip where TBA_JAX_DATA names no folder with `gsm8k`.
"""

import json
import os
import pathlib

from absl.testing import absltest
from absl.testing import parameterized
import ml_collections
import pyarrow
from pyarrow import parquet

from tba_jax.tasks import answers
from tba_jax.tasks import task_table

_REAL = pathlib.Path(os.environ.get("TBA_JAX_DATA", "")) / "gsm8k"


def _task(**fields):
  return task_table.make_task(
      ml_collections.ConfigDict({"name": "gsm8k", **fields})
  )


class Gsm8kTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.folder = pathlib.Path(self.create_tempdir().full_path)

  def write(self, **splits):
    for split, result in splits.items():
      text = "".join(
          json.dumps({"question": q, "answer": a}) + "\n" for q, a in result
      )
      (self.folder / f"{split}.jsonl").write_text(text)
    return str(self.folder)

  def make(self, **fields):
    data = self.write(
        train=[
            ("How many?", "Two <<1+1=2>>2.\n#### 2"),
            ("Why?", "#### 1,000"),
        ],
        test=[("Who?", "#### -3")],
    )
    return _task(data=data, **fields)

  def test_prompts_have_their_formats(self):
    task = self.make()
    self.assertEqual(
        task.prompt("train", 0),
        "[MATH TASK] Problem:\nHow many?\n\nSolution:\n",
    )
    self.assertEqual(
        task.reference_completion("train", 0, None), "Two 2.\n#### 2"
    )
    task = self.make(prompt_format="sft")
    self.assertEqual(
        task.prompt("train", 0), "[MATH_TASK] Problem:\nHow many?\n\nSolution:"
    )
    self.assertEqual(
        task.reference_completion("train", 0, None), "\nTwo 2.\n#### 2"
    )

  def test_braces_in_question_are_text(self):
    data = self.write(train=[("{question} {x}?", "1")], test=[("a?", "1")])
    task = _task(data=data, prompt_format="plain")
    self.assertEqual(task.prompt("train", 0), "{question} {x}?\n")

  @parameterized.parameters(
      ("last_number", "It is 2", 1.0),
      ("last_number", "#### 3 or 2.0", 1.0),
      ("last_number", "2 or 3", 0.0),
      ("last_number", "", 0.0),
      ("last_number", "4-2", 1.0),
      ("tba", "4-2", 0.0),
      ("tba", "0, so 0,2.", 1.0),
      ("last_number", "-2", 0.0),
      ("hash", "It is 2", 0.0),
      ("answer", "So.\n#### 2 apples\n\nQuestion: 3", 1.0),
      ("hash", "So.\n#### 2", 1.0),
      ("hash", "#### 2\n#### 3", 0.0),
  )
  def test_reward_follows_answer_rule(self, rule, completion, reward):
    task = self.make(answer_rule=rule)
    self.assertEqual(task.reward("train", 0, completion), reward)
    key = task.solution_key("train", 0, completion)
    self.assertEqual(key is not None, reward == 1.0)

  @parameterized.parameters(
      ("last_number", "It is 2", ""),
      ("last_number", "2, or 12.5", "read 12.5, wanted 2"),
      ("last_number", "I do not know.", "no number found"),
      ("hash", "It is 2", "no number found"),
      ("hash", "#### 1,080,000", "read 1080000, wanted 2"),
  )
  def test_reason_follows_answer_rule(self, rule, completion, reason):
    task = self.make(answer_rule=rule)
    self.assertEqual(task.explain("train", 0, completion), reason)

  def test_reads_parquet_files_of_hub(self):
    for split, question in (("train", "a?"), ("test", "b?")):
      for name in ("main", "socratic"):
        path = self.folder / name / f"{split}-00000-of-00001.parquet"
        path.parent.mkdir(exist_ok=True)
        row = {"question": f"{name} {question}", "answer": "#### 1"}
        parquet.write_table(pyarrow.Table.from_pylist([row]), path)
    task = _task(data=str(self.folder), prompt_format="plain")
    self.assertEqual(task.num_prompts("train"), 1)
    self.assertEqual(task.prompt("train", 0), "main a?\n")

  def test_white_space_does_not_make_new_solution(self):
    task = self.make()
    keys = {
        task.solution_key("train", 0, text)
        for text in ("1+1\n= 2", " 1+1  = 2 ", "1+1\t=\n2")
    }
    self.assertEqual(keys, {"1+1 = 2"})

  def test_reports_unusable_rows(self):
    data = self.write(
        train=[
            ("a?", "#### 1"),
            ("", "#### 1"),
            ("b?", " "),
            ("c?", "no number"),
            ("a?", "#### 1"),
            (5, "#### 2"),
        ],
        test=[("z?", "#### 1")],
    )
    report = _task(data=data).report
    self.assertEqual(report.used, {"train": 1, "held_out": 1})
    for reason, lines in (
        ("no_prompt", [2, 6]),
        ("no_answer", [3]),
        ("no_number", [4]),
        ("duplicate", [5]),
    ):
      self.assertEqual(
          report.places("train", reason), [f"train.jsonl:{n}" for n in lines]
      )

  @parameterized.parameters(
      ({"prompt_format": "x"}, "config.task.prompt_format='x'.*sft"),
      ({"answer_rule": "x"}, "config.task.answer_rule='x'.*hash"),
      ({"validation_prompts": 2}, "validation_prompts=2.*at most 1"),
      # There are some 36,000 different ones.
      ({"synthetic_prompts": 36_000}, "synthetic_prompts=36000.* to 20000"),
      ({"data": ""}, "config.task.data='.train.': there is no such"),
      ({"data": "/nowhere"}, "config.task.data='/nowhere.train.'"),
  )
  def test_refuses_wrong_settings(self, fields, message):
    data = self.write(train=[("a?", "1"), ("b?", "1")], test=[("c?", "#### 1")])
    with self.assertRaisesRegex(ValueError, message):
      _task(**{"data": data, **fields})

  def test_refuses_rows_of_other_fields(self):
    data = self.write(test=[("c?", "#### 1")])
    (self.folder / "train.jsonl").write_text('{"query": "a?"}\n')
    with self.assertRaisesRegex(
        ValueError,
        r"^no row of config.task.data='.*' has the field 'question'; its fields"
        r" are \['query'\]$",
    ):
      _task(data=data)

  def test_synthetic_problems(self):
    task = _task(data="synthetic", synthetic_prompts=200, split_seed=3)
    again = _task(data="synthetic", synthetic_prompts=200, split_seed=3)
    terse = 0
    for split, size in (("train", 160), ("held_out", 40)):
      self.assertEqual(task.num_prompts(split), size)
      for i in range(size):
        solution = task.reference_completion(split, i, None)
        self.assertEqual(task.reward(split, i, solution), 1.0)
        self.assertEqual(again.prompt(split, i), task.prompt(split, i))
        for line in solution.split("\n")[:-1]:
          sum_, _, result = line.partition("=")
          self.assertEqual(eval(sum_), int(result))
        terse += "\n" not in solution
    self.assertBetween(terse, 70, 130)  # Half of them.


@absltest.skipUnless(_REAL.is_dir(), "TBA_JAX_DATA has no gsm8k")
class RealDataTest(absltest.TestCase):

  def test_every_answer_is_read_by_both_rules(self):
    task = _task(data=str(_REAL))
    self.assertEqual(task.num_prompts("train"), 7473)
    self.assertEqual(task.num_prompts("held_out"), 1319)
    self.assertLen(task.report.lines(), 2)  # Nothing was left out.
    for split in task.splits:
      for i in range(task.num_prompts(split)):
        answer = task.example(split, i).fields["answer"]
        solution = task.reference_completion(split, i, None)
        self.assertNotIn("<<", solution)
        # Written by hand, once more: what follows the marks.
        right = float(answer.rpartition("#### ")[2].replace(",", ""))
        self.assertEqual(answers.last_number(answer), right)
        self.assertEqual(answers.tba_last_number(answer), right)
        self.assertEqual(answers.final_answer(answer), right)
        self.assertEqual(task.reward(split, i, solution), 1.0)
        self.assertEqual(answers.number_after_hashes(solution), right)
        wrong = f"{solution}0"
        self.assertEqual(task.reward(split, i, wrong), float(right == 0))
