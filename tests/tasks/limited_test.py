# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Prompts above the limit go, and indices lead back to the task's own."""

from absl.testing import absltest

from tba_jax.tasks import base
from tba_jax.tasks import rows
from tba_jax.tasks import rows_task


class _Task(rows_task.RowsTask):
  name = "letters"

  def judge(self, split, index, completion):
    return base.Judgement(float(index), completion, {"index": index})

  def explain(self, split, index, completion):
    return f"{index} {completion}"


def _task(**splits: str) -> _Task:
  made = {
      split: [
          rows.Example(f"{split}:{i}", prompt, f"answer {i}", {})
          for i, prompt in enumerate(prompts.split())
      ]
      for split, prompts in splits.items()
  }
  return _Task(made, rows.Report())


class LimitedTest(absltest.TestCase):

  def make(self, limit: int) -> rows_task.Limited:
    return rows_task.Limited(
        _task(train="aaa b cc dddd e", held_out="x yyyy"),
        num_tokens=len,
        max_prompt_tokens=limit,
    )

  def test_what_fits_stays_under_new_indices(self):
    task = self.make(2)
    prompts = [
        task.prompt("train", i) for i in range(task.num_prompts("train"))
    ]
    self.assertEqual(prompts, ["b", "cc", "e"])
    self.assertEqual(
        [task.source_index("train", i) for i in range(3)], [1, 2, 4]
    )
    self.assertEqual(task.judge("train", 2, "x").reward, 4.0)
    self.assertEqual(task.reward("train", 1, "x"), 2.0)
    self.assertEqual(task.explain("train", 2, "x"), "4 x")
    self.assertEqual(task.solution_key("train", 1, "x"), "x")
    self.assertEqual(task.reference_completion("train", 0, None), "answer 1")
    self.assertEqual(task.num_prompts("validation"), 0)
    self.assertEqual(
        task.report.places("train", "too_long"), ["train:0", "train:3"]
    )
    self.assertEqual(task.report.used, {"train": 3, "held_out": 1})

  def test_a_task_may_shorten_what_does_not_fit(self):
    inner = _task(train="aaa b", held_out="xxx")
    inner.shortened = lambda split, index, fits: next(
        (t for t in ("aa", "a") if fits(t)), None
    )
    task = rows_task.Limited(inner, num_tokens=len, max_prompt_tokens=1)
    self.assertEqual(task.prompt("train", 0), "a")
    self.assertEqual(task.prompt("train", 1), "b")
    self.assertEqual(task.prompt("held_out", 0), "a")
    self.assertEqual(task.report.count("train", "too_long"), 0)

  def test_long_answers_of_training_prompts(self):
    splits = {"train": [("a", "12"), ("b", "1")], "held_out": [("c", "123")]}
    made = {
        split: [
            rows.Example(f"{split}:{i}", prompt, answer, {})
            for i, (prompt, answer) in enumerate(found)
        ]
        for split, found in splits.items()
    }
    task = rows_task.Limited(
        _Task(made, rows.Report()),
        num_tokens=len,
        max_prompt_tokens=1,
        max_answer_tokens=1,
    )
    self.assertEqual(task.prompt("train", 0), "b")
    self.assertEqual(task.num_prompts("held_out"), 1)
    self.assertEqual(
        task.report.places("train", "answer_too_long"), ["train:0"]
    )

  def test_the_report_of_a_task_with_a_validation_split(self):
    task = rows_task.Limited(
        _task(train="a b", held_out="c", validation="dd e"),
        num_tokens=len,
        max_prompt_tokens=1,
    )
    self.assertIn("validation: 1 prompts", task.report.lines())
    self.assertEqual(task.splits, ("train", "held_out", "validation"))

  def test_a_split_without_prompts(self):
    with self.assertRaisesRegex(
        ValueError, "config.sampling.max_prompt_tokens=0.*'train'"
    ):
      self.make(0)


if __name__ == "__main__":
  absltest.main()
