# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Tests of arithmetic: prompts, splits, rewards."""

import re

from absl.testing import parameterized
import numpy as np

from tba_jax.tasks import arithmetic

SPLITS = ("train", "held_out")


def make_task(**fields):
  return arithmetic.Arithmetic(**{**arithmetic.Arithmetic.FIELDS, **fields})


def prompts(task, split):
  return [task.prompt(split, i) for i in range(task.num_prompts(split))]


class ArithmeticTest(parameterized.TestCase):

  def test_splits_hold_all_sums_once(self):
    task = make_task(max_number=12)
    both = prompts(task, "train") + prompts(task, "held_out")
    expected = {
        f"{a}{operation}{b}="
        for operation, apply in (
            ("+", lambda a, b: a + b),
            ("-", lambda a, b: a - b),
            ("*", lambda a, b: a * b),
        )
        for a in range(13)
        for b in range(13)
        if 0 <= apply(a, b) <= 99
    }
    self.assertLen(both, len(expected))
    self.assertEqual(set(both), expected)

  def test_swapped_sums_are_in_one_split(self):
    task = make_task()
    train = set(prompts(task, "train"))
    for prompt in prompts(task, "held_out"):
      for operation in "+*":
        a, result, b = prompt.rstrip("=").partition(operation)
        if result:
          self.assertNotIn(f"{b}{operation}{a}=", train)

  def test_references_are_right(self):
    task = make_task()
    rng = np.random.default_rng(0)
    for split in SPLITS:
      for index in range(task.num_prompts(split)):
        text = task.reference_completion(split, index, rng)
        self.assertEqual(task.reward(split, index, text), 1.0)
        self.assertEqual(task.solution_key(split, index, text), text)
        # Arithmetic other than the task's own.
        a, b = task.prompt(split, index), int(text)
        self.assertEqual(eval(a.rstrip("=")), b)  # pylint: disable=eval-used

  def test_explains_wrong_answers(self):
    task = make_task()
    index = prompts(task, "train").index("9+8=")
    self.assertEqual(task.explain("train", index, "17"), "")
    self.assertEqual(task.explain("train", index, "16"), "gives 16, not 17")
    self.assertIn("not a whole number", task.explain("train", index, "17 "))

  def test_wrong_or_badly_written_answers_get_nothing(self):
    task = make_task()
    index = prompts(task, "train").index("9+8=")
    self.assertEqual(task.reward("train", index, "17"), 1.0)
    for text in (
        "",
        "16",
        "017",
        "+17",
        "17 ",
        "17\n",
        "17=17",
        "9+8=17",
        "17<eos>",
        "<pad>17",
        "１７",
        "17" * 5000,
    ):
      self.assertEqual(task.reward("train", index, text), 0.0, text)
      self.assertIsNone(task.solution_key("train", index, text), text)

  def test_words_and_lengths_hold_every_text(self):
    for max_number in (9, 20):
      task = make_task(max_number=max_number)
      words = task.tokenizer_words()
      self.assertLen(set(words), len(words))
      lengths = {"prompt": set(), "completion": set()}
      for index in range(task.num_prompts("train")):
        prompt = re.findall(task.tokenizer_pattern, task.prompt("train", index))
        text = task.reference_completion("train", index, None)
        completion = re.findall(task.tokenizer_pattern, text)
        self.assertContainsSubset(prompt + completion, words)
        lengths["prompt"].add(len(prompt))
        lengths["completion"].add(len(completion) + 1)
      self.assertEqual(max(lengths["prompt"]), task.max_prompt_tokens)
      self.assertEqual(max(lengths["completion"]), task.max_completion_tokens)

  def test_same_seed_gives_same_prompts(self):
    first, second = make_task(), make_task()
    other = make_task(split_seed=1)
    self.assertEqual(prompts(first, "train"), prompts(second, "train"))
    self.assertNotEqual(
        set(prompts(first, "held_out")), set(prompts(other, "held_out"))
    )

  def test_operations_are_chosen(self):
    text = "".join(prompts(make_task(operations="+"), "train"))
    self.assertIn("+", text)
    self.assertNotIn("-", text)
    self.assertNotIn("*", text)

  @parameterized.parameters(
      ("operations", ""),
      ("operations", "++"),
      ("operations", "/"),
      ("operations", 3),
      ("max_number", -1),
      ("max_number", 100),
      ("max_number", 5.0),
      ("max_number", True),
      ("held_out_fraction", 0),
      ("held_out_fraction", 1.0),
      ("held_out_fraction", "0.5"),
  )
  def test_refuses_bad_field(self, field, value):
    with self.assertRaisesRegex(ValueError, rf"config\.task\.{field}="):
      make_task(**{field: value})

  def test_refuses_empty_split(self):
    with self.assertRaisesRegex(ValueError, "'held_out' without prompts"):
      make_task(max_number=1, held_out_fraction=0.01)

  def test_refuses_unknown_split(self):
    with self.assertRaisesRegex(ValueError, "split 'test'"):
      make_task().prompt("test", 0)
