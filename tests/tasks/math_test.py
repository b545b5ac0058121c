# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Tests of MATH: formats, answers, splits, rows left out, made-up problems."""

import json
import pathlib
import shutil

from absl.testing import parameterized
import ml_collections

from tba_jax.tasks import task_table
from tests.support import fakes

# Written by hand for these tests, in the fields of the published files.
_DATA = pathlib.Path(__file__).parent / "math_data"


def _task(**fields):
  fields = {"train": f"{_DATA}/train.jsonl", "test": f"{_DATA}/test.jsonl"} | (
      fields
  )
  return task_table.make_task(
      ml_collections.ConfigDict({"name": "math", **fields})
  )


class MathTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.folder = pathlib.Path(self.create_tempdir().full_path)

  def rows(self, name, *problems):
    path = self.folder / name
    path.write_text(
        "".join(
            json.dumps({"problem": p, "solution": r"\boxed{1}"}) + "\n"
            for p in problems
        )
    )
    return str(path)

  def test_prompts_have_their_formats(self):
    problem = "A square has side $7$. What is its area?"
    for name, prompt in (
        ("bare", f"{problem}\n"),
        (
            "plain",
            f"Problem:\n{problem}\nPlease reason step by step, and put your"
            " final answer within \\boxed{}.\n\nSolution:\n",
        ),
        (
            "qwen",
            "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
            f"<|im_start|>user\n{problem}\nPlease reason step by step, and put"
            " your final answer within \\boxed{}.<|im_end|>\n"
            "<|im_start|>assistant\n",
        ),
    ):
      task = _task(prompt_format=name)
      self.assertEqual(task.prompt("train", 0), prompt)
      self.assertEqual(
          task.reference_completion("train", 0, None),
          "The area is $7^2=49$, so the answer is $\\boxed{49}$.",
      )

  def test_every_reference_is_right(self):
    task = _task()
    answers = {
        "train": ["49", r"\frac{1}{2}", "x^2+2x+1", "3,-3", "3"],
        "held_out": [r"2\sqrt{3}", r"\text{Ann}"],
    }
    for split, result in answers.items():
      self.assertEqual(task.num_prompts(split), len(result))
      for i, answer in enumerate(result):
        self.assertEqual(task.example(split, i).answer, answer)
        solution = task.reference_completion(split, i, None)
        self.assertEqual(task.reward(split, i, solution), 1.0)
        self.assertEqual(task.reward(split, i, r"\boxed{-17}"), 0.0)

  @parameterized.parameters(
      (r"\boxed{0.5}", 1.0),
      (r"\boxed{\frac{2}{4}}", 1.0),
      (r"\boxed{3} No: \boxed{1/2}", 1.0),
      (r"\boxed{1/2} No: \boxed{3}", 0.0),
      (r"\boxed{1/2", 0.0),
      ("1/2", 0.0),
      ("", 0.0),
  )
  def test_reward_is_of_last_box(self, completion, reward):
    task = _task()
    self.assertEqual(task.reward("train", 1, completion), reward)
    key = task.solution_key("train", 1, completion)
    self.assertEqual(key is not None, reward == 1.0)

  @parameterized.parameters(
      (r"\boxed{49}", ""),
      (r"\boxed{48}", "boxes 48, not 49"),
      ("49", r"has no closed \boxed{} with an answer in it"),
      # Only math-verify knows, which may take for ever.
      (r"\boxed{\frac{98}{2}}", ""),
  )
  def test_explains_error(self, completion, why):
    self.assertEqual(_task().explain("train", 0, completion), why)

  def test_reports_unusable_rows(self):
    task = _task(prompt_format="bare")
    task.drop_long(fakes.Characters(), 200)
    self.assertEqual(task.report.read, {"train": 12, "held_out": 2})
    self.assertEqual(task.report.used, {"train": 4, "held_out": 2})
    for reason, lines in (
        ("malformed", [3, 10]),
        ("no_box", [4, 5]),
        ("no_prompt", [6]),
        ("duplicate", [7]),
        ("no_answer", [11]),
        ("too_long", [12]),
    ):
      self.assertEqual(
          task.report.places("train", reason),
          [f"train.jsonl:{n}" for n in lines],
      )
    self.assertIn(
        "train: 2 rows left out, each has a solution without a boxed answer:"
        " train.jsonl:4, train.jsonl:5",
        task.report.lines(),
    )

  def test_answer_may_be_number(self):
    path = self.folder / "numbers.jsonl"
    path.write_text(
        "".join(
            json.dumps({"problem": f"{a}?", "solution": "so.", "answer": a})
            + "\n"
            for a in (204, 0.5, True, None)
        )
    )
    task = _task(train=str(path))
    self.assertEqual(
        task.report.places("train", "no_answer"), ["numbers.jsonl:3"]
    )
    self.assertEqual(task.report.places("train", "no_box"), ["numbers.jsonl:4"])
    self.assertEqual(task.reward("train", 0, r"\boxed{204}"), 1.0)
    self.assertEqual(task.reward("train", 1, r"\boxed{\frac{1}{2}}"), 1.0)

  def test_overlap_with_test_split(self):
    train = self.rows("train.jsonl", "Ours?", "Theirs?", "Both of us?")
    test = self.rows("test.jsonl", "Others?", "both  of US?", "theirs? ")
    with self.assertRaisesRegex(
        ValueError,
        "2 prompts of the split 'train' are in the test split too:"
        " train.jsonl:2 = test.jsonl:3, train.jsonl:3 = test.jsonl:2",
    ):
      _task(train=train, test=test)
    task = _task(train=train, test=test, overlap="leave_out")
    self.assertEqual(task.report.used, {"train": 1, "held_out": 3})
    self.assertEqual(
        task.report.places("train", "in_test"),
        ["train.jsonl:2", "train.jsonl:3"],
    )
    with self.assertRaisesRegex(ValueError, "task.train=.*every prompt"):
      _task(train=test, test=test, overlap="leave_out")

  def test_reads_folder_of_parquet_files(self):
    # The hub has a folder for each subject.
    import pyarrow
    from pyarrow import parquet

    for i, subject in enumerate(("algebra", "geometry")):
      (self.folder / "sets" / subject).mkdir(parents=True)
      rows = [{"problem": f"{subject}?", "solution": rf"\boxed{{{i}}}"}]
      parquet.write_table(
          pyarrow.Table.from_pylist(rows),
          self.folder / "sets" / subject / "train-00000-of-00001.parquet",
      )
    task = _task(train=f"{self.folder}/sets/*[train]")
    self.assertEqual(
        [task.example("train", i).answer for i in range(2)], ["0", "1"]
    )

  def test_refuses_rows_of_other_fields(self):
    train = self.folder / "train.jsonl"
    train.write_text('{"question": "a?", "solution": "1"}\n')
    with self.assertRaisesRegex(ValueError, "no row of .* field 'problem'"):
      _task(train=str(train))

  @parameterized.parameters(
      ({"prompt_format": "x"}, "config.task.prompt_format='x'.*qwen"),
      ({"overlap": "x"}, "config.task.overlap='x'.*leave_out"),
      ({"train": "/nowhere"}, "config.task.train='/nowhere'"),
      ({"test": ""}, "config.task.test=''"),
      ({"train": "synthetic"}, "config.task.train='synthetic'.*for both"),
      ({"synthetic_prompts": 7000}, "synthetic_prompts=7000.* to 5000"),
      ({"validation_prompts": 5}, "validation_prompts=5.*at most 4"),
  )
  def test_refuses_wrong_settings(self, fields, message):
    shutil.copy(_DATA / "test.jsonl", self.folder)
    with self.assertRaisesRegex(ValueError, message):
      _task(**fields)

  def test_synthetic_problems(self):
    fields = dict(train="synthetic", test="synthetic", synthetic_prompts=400)
    task, again = _task(**fields), _task(**fields)
    for split, size in (("train", 320), ("held_out", 80)):
      self.assertEqual(task.num_prompts(split), size)
      for i in range(size):
        self.assertEqual(again.prompt(split, i), task.prompt(split, i))
        example = task.example(split, i)
        self.assertEqual(task.reward(split, i, example.fields["solution"]), 1.0)
        problem = example.fields["problem"]
        if "frac" not in problem:
          _, given, _, sum_, _ = problem.split("$")
          name, value = given.split("=")
          right = eval(sum_, {name: int(value)})
          self.assertEqual(right, int(example.answer))
    texts = [task.prompt("train", i) for i in range(320)]
    share = sum("frac" in text for text in texts) / len(texts)
    self.assertBetween(share, 0.03, 0.2)
