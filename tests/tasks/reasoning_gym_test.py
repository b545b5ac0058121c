# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Tests of reasoning_gym: all of its data sets, arguments, and tags."""

import importlib
import importlib.util
import json

from absl.testing import absltest
from absl.testing import parameterized
import ml_collections

from tba_jax.tasks import base
from tba_jax.tasks import task_table

# Data sets that know how to score, but no solution.
_WITHOUT_ANSWER = {
    "boxnet",
    "graph_color",
    "propositional_logic",
    "rubiks_cube",
    "rush_hour",
}
# Data sets that take a text without "True" for "False".
_ANY_TEXT = {"game_of_life_halting"}


def _task(**fields):
  fields = {"train_prompts": 3, "held_out_prompts": 2, **fields}
  return task_table.make_task(
      ml_collections.ConfigDict({"name": "reasoning_gym", **fields})
  )


@absltest.skipUnless(
    importlib.util.find_spec("reasoning_gym"), "reasoning_gym is not installed"
)
class ReasoningGymTest(parameterized.TestCase):

  def test_every_data_set_makes_problems_and_scores_their_solutions(self):
    names = set(importlib.import_module("reasoning_gym.factory").DATASETS)
    self.assertGreater(len(names), 100)
    for name in sorted(names - {"composite"}):
      with self.subTest(name):
        # The slowest take a second for each problem.
        task = _task(source=name, train_prompts=1, held_out_prompts=1)
        for split in task.splits:
          self.assertNotEmpty(task.prompt(split, 0))
          right = base.reference_text(task, split, 0)
          self.assertEqual(right == "", name in _WITHOUT_ANSWER)
          judged = task.judge(split, 0, right)
          self.assertEqual(judged.reward, float(right != ""))
          self.assertEqual(judged.key is None, right == "")
          guess = task.judge(split, 0, "no idea").reward
          self.assertLess(guess, 1.1 if name in _ANY_TEXT else 0.5)

  def test_problems_are_function_of_seed_and_differ_between_splits(self):
    task, again = (_task(train_prompts=50) for _ in range(2))
    other = _task(train_prompts=50, split_seed=1)
    prompts = lambda task, split: [
        task.prompt(split, i) for i in range(task.num_prompts(split))
    ]
    train, held_out = prompts(task, "train"), prompts(task, "held_out")
    self.assertLen({*train, *held_out}, 52)
    self.assertEqual(train, prompts(again, "train"))
    self.assertEqual(held_out, prompts(again, "held_out"))
    self.assertEmpty({*train} & {*prompts(other, "train")})

  def test_few_different_problems_are_left_out_of_training(self):
    arguments = {"min_terms": 2, "max_terms": 2, "max_digits": 1}
    task = _task(
        arguments=json.dumps(arguments), train_prompts=400, held_out_prompts=40
    )
    self.assertLess(task.num_prompts("train"), 400)
    self.assertIn("test split", "".join(task.report.lines()))

  def test_takes_arguments_of_data_set(self):
    task = _task(
        source="reasoning_gym:chain_sum",
        arguments='{"min_terms": 2, "max_terms": 2}',
    )
    fields = task.example("train", 0).fields
    self.assertLen(fields["metadata"]["source_dataset"], len("chain_sum"))
    self.assertLen(fields["metadata"]["expression"].split(), 3)
    mixed = _task(
        source="composite",
        arguments=json.dumps(
            {
                "datasets": [
                    {"name": "gcd", "weight": 1, "config": {}},
                    {"name": "lcm", "weight": 1, "config": {}},
                ]
            }
        ),
        train_prompts=12,
    )
    names = {
        mixed.example("train", i).fields["metadata"]["source_dataset"]
        for i in range(12)
    }
    self.assertEqual(names, {"gcd", "lcm"})
    right = base.reference_text(mixed, "held_out", 0)
    self.assertEqual(mixed.judge("held_out", 0, right).reward, 1.0)

  def test_reads_answer_between_tags(self):
    task = _task(tags=True)
    system, user = task.prompt("train", 0)
    self.assertEqual((system["role"], user["role"]), ("system", "user"))
    self.assertIn("<answer>", system["content"])
    right = base.reference_text(task, "train", 0)
    number = task.example("train", 0).answer
    self.assertEqual(right, f"<answer>{number}</answer>")
    reward = lambda text: task.judge("train", 0, text).reward
    self.assertEqual(reward(f"So it is <answer> {number} </answer>."), 1.0)
    self.assertEqual(reward(number), 0.0)
    self.assertLess(reward(f"<answer>{number}</answer><answer>x</answer>"), 1.0)

  def test_explains_error(self):
    task = _task()
    right = task.example("train", 0).answer
    self.assertEqual(task.explain("train", 0, "x"), f'wanted "{right}"')
    self.assertEqual(task.explain("train", 0, right), "")

  @parameterized.parameters(
      (
          {"source": "chain_product"},
          "config.task.source='chain_product'",
      ),
      ({"arguments": "min_terms=2"}, "config.task.arguments=.*a JSON object"),
      ({"arguments": "[2]"}, "config.task.arguments=.*a JSON object"),
      ({"arguments": '{"terms": 2}'}, "arguments of chain_sum: min_terms"),
      ({"arguments": '{"min_terms": 0}'}, "config.task.arguments="),
      ({"train_prompts": 0}, "config.task.train_prompts=0"),
  )
  def test_refuses_wrong_settings(self, fields, message):
    with self.assertRaisesRegex(ValueError, message):
      _task(**fields)


class MissingPackageTest(absltest.TestCase):

  def test_names_package_and_extra(self):
    with absltest.mock.patch.dict("sys.modules", {"reasoning_gym": None}):
      with self.assertRaisesRegex(ValueError, r"tba_jax\[reasoning_gym\]"):
        _task()
