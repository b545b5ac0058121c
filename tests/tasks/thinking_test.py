# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Tests that rule-based rewards ignore what a completion thinks."""

import importlib.util
import json
import pathlib

from absl.testing import parameterized
import ml_collections
import numpy as np

from tba_jax.tasks import task_table

_FIELDS = {
    "arithmetic": {},
    "countdown": {},
    "gsm8k": {"data": "synthetic"},
    "ifbench": {},
    "instructions": {},
    "math": {"train": "synthetic", "test": "synthetic"},
    "custom": {"rewards": "exact"},
    "reasoning_gym": {},
}
# Their rewards are of other parts, or of letters.
_OTHERS = {"chat", "environment", "preference", "red_team", "tldr"}
_PACKAGES = {"ifbench": "if_verifiable", "reasoning_gym": "reasoning_gym"}


class ThinkingTest(parameterized.TestCase):

  def make(self, name, **fields):
    if name == "custom":
      folder = pathlib.Path(self.create_tempdir().full_path)
      for split in ("train", "test"):
        row = {"prompt": f"2+2? ({split})", "answer": "4"}
        (folder / f"{split}.jsonl").write_text(json.dumps(row) + "\n")
        fields[split] = str(folder / f"{split}.jsonl")
    fields = {"name": name, **_FIELDS[name], **fields}
    return task_table.make_task(ml_collections.ConfigDict(fields))

  def test_every_task_is_listed(self):
    names = {name.removesuffix("_sparse") for name in task_table.TASKS}
    self.assertEqual(names, {*_FIELDS, *_OTHERS})

  @parameterized.parameters(*_FIELDS)
  def test_only_answer_after_thoughts_counts(self, name):
    package = _PACKAGES.get(name)
    if package and importlib.util.find_spec(package) is None:
      self.skipTest(f"{package} is not installed")
    task = self.make(name)
    if name == "ifbench":
      index = next(
          i
          for i in range(task.num_prompts("held_out"))
          if task.reward("held_out", i, "A plain answer.") == 1
      )
      split, right = "held_out", "A plain answer."
    else:
      split, index = "train", 0
      rng = np.random.default_rng(0)
      right = task.reference_completion(split, index, rng)
    reward = lambda text: task.judge(split, index, text).reward
    self.assertEqual(reward(right), 1)
    for text in (f"<think>No.\n1</think>{right}", f"No.\n1</think>{right}"):
      self.assertEqual(reward(text), 1)
      self.assertEqual(task.explain(split, index, text), "")
    for text in (
        f"<think>{right}",
        f"<think>{right}</think>",
        f"No. <think>{right}",
    ):
      self.assertLess(reward(text), 1)
      self.assertNotEqual(task.explain(split, index, text), "")

  @parameterized.parameters("exact", "answer", "number", "contains")
  def test_built_in_rewards_of_custom_task(self, rule):
    task = self.make("custom", rewards=rule)
    self.assertEqual(task.reward("train", 0, "<think>5</think>4"), 1)
    self.assertEqual(task.reward("train", 0, "<think>4</think>5"), 0)
    self.assertEqual(task.reward("train", 0, "<think>4"), 0)
