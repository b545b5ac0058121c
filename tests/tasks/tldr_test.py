# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Tests of TL;DR: queries, lengths, splits, malformed rows, made-up posts."""

import json
import pathlib

from absl.testing import parameterized
import ml_collections

from tba_jax.tasks import base
from tba_jax.tasks import synthetic
from tba_jax.tasks import task_table
from tba_jax.tasks import tldr
from tests.support import fakes

_ROW = {
    "subreddit": "pets",
    "title": "My cat",
    "post": "It sleeps.\nAll day.\nReally.",
    "summary": "cat sleeps ",
}


def _task(**fields):
  return task_table.make_task(
      ml_collections.ConfigDict({"name": "tldr", **fields})
  )


class TldrTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.folder = pathlib.Path(self.create_tempdir().full_path)

  def make(self, train=(_ROW,), validation=None, **fields):
    validation = validation or [{**_ROW, "title": "My dog"}]
    for name, rows in (("train", train), ("validation", validation)):
      text = "".join(
          (r if isinstance(r, str) else json.dumps(r)) + "\n" for r in rows
      )
      (self.folder / f"{name}.jsonl").write_text(text)
    return _task(data=str(self.folder), **fields)

  def test_reads_query_and_summary(self):
    task = self.make()
    self.assertEqual(
        task.prompt("train", 0),
        "SUBREDDIT: r/pets\n\nTITLE: My cat\n\nPOST: It sleeps.\nAll"
        " day.\nReally.\n\nTL;DR:",
    )
    # A space before it, as the published responses have one.
    self.assertEqual(base.reference_text(task, "train", 0), " cat sleeps")
    self.assertFalse(task.has_reward)
    with self.assertRaisesRegex(base.RewardError, "reward.backend"):
      task.judge("train", 0, " cat")
    for ask in (
        lambda: task.pairs("train"),
        lambda: task.reward_of("a", "b"),
    ):
      with self.assertRaisesRegex(ValueError, r"config\.reward_model\."):
        ask()

  @parameterized.parameters(
      ("query", "reference_response"), ("prompt", "completion")
  )
  def test_formatted_query_is_unchanged(self, query, response):
    task = self.make(train=[{query: "Q\n\nTL;DR:", response: " short"}])
    self.assertEqual(task.prompt("train", 0), "Q\n\nTL;DR:")
    self.assertEqual(base.reference_text(task, "train", 0), " short")
    with self.assertRaisesRegex(ValueError, "every prompt"):
      task.drop_long(fakes.Characters(), 3)

  def test_wrong_rows_are_counted_with_file_and_line(self):
    task = self.make(
        train=[
            _ROW,
            "no json",
            {**_ROW, "post": " "},
            {**_ROW, "title": None},
            {**_ROW, "title": "b", "summary": " "},
            _ROW,
            {"query": "", "reference_response": "x"},
        ]
    )
    places = lambda reason: task.report.places("train", reason)
    self.assertEqual(places("malformed"), ["train.jsonl:2"])
    self.assertEqual(
        places("no_prompt"), [f"train.jsonl:{n}" for n in (3, 4, 7)]
    )
    self.assertEqual(places("no_answer"), ["train.jsonl:5"])
    self.assertEqual(places("duplicate"), ["train.jsonl:6"])
    self.assertEqual(task.num_prompts("train"), 1)

  @parameterized.parameters("", "/nowhere")
  def test_refuses_folder_without_data(self, folder):
    with self.assertRaisesRegex(
        ValueError, "config.task.data=.*no such file or folder"
    ):
      _task(data=folder)

  def test_long_post_loses_paragraphs_from_its_end(self):
    task = self.make()
    whole = len(task.prompt("train", 0))
    shorter = lambda limit: task._shortened(
        task.example("train", 0), lambda text: len(text) <= limit
    )
    self.assertIn("POST: It sleeps.\nAll day.\n\nTL;DR:", shorter(whole - 1))
    self.assertIn("POST: It sleeps.\n\nTL;DR:", shorter(whole - 9))
    # One paragraph is left: character by character.
    self.assertIn("POST: It sleep\n\nTL;DR:", shorter(whole - 19))
    fixed = whole - len(_ROW["post"])
    self.assertIn("POST: I\n\nTL;DR:", shorter(fixed + 1))
    self.assertIsNone(shorter(fixed))

  def test_policy_sees_shortened_query(self):
    task = self.make(train=[_ROW, {**_ROW, "post": "x" * 9, "title": "y" * 99}])
    whole = len(task.prompt("train", 0))
    task.drop_long(fakes.Characters(), whole - 1)
    self.assertEqual(task.num_prompts("train"), 1)
    self.assertNotIn("Really", task.prompt("train", 0))
    self.assertEqual(task.report.places("train", "too_long"), ["train.jsonl:2"])
    self.assertFalse(task.has_reward)


class SyntheticTest(parameterized.TestCase):

  QUERY = tldr.QUERY.format(
      subreddit="pets",
      title="my key",
      post="so Ann lost the key at school. thanks for reading.",
  )

  @parameterized.parameters(
      (" Ann lost key school", 1.0),
      (" Ann lost key", 0.75),
      # A repetition, a fact of another post, a filler, and no word at all.
      (" Ann Ann lost key school", 0.75),
      (" Ben lost key school", 0.5),
      (" so Ann lost key school", 0.875),
      (" Ann lost key school <unk>", 1 - 3 * 0.5 / 4),
      ("", 0.0),
  )
  def test_gold_reward_counts_facts(self, summary, reward):
    self.assertAlmostEqual(synthetic.tldr_reward(self.QUERY, summary), reward)

  def test_correct_means_better_than_reference(self):
    task = _task(data="synthetic", synthetic_prompts=50)
    self.assertTrue(task.has_reward)
    for index in range(10):
      prompt = task.prompt("held_out", index)
      reference = base.reference_text(task, "held_out", index)
      judged = task.judge("held_out", index, reference)
      self.assertIsNone(judged.key)
      self.assertEqual(judged.reward, synthetic.tldr_reward(prompt, reference))
      self.assertEqual(judged.reward, task.reward_of(prompt, reference))

  def test_pairs_are_of_splits_own_posts(self):
    task = _task(data="synthetic", synthetic_prompts=50, synthetic_pairs=200)
    again = _task(data="synthetic", synthetic_prompts=50, synthetic_pairs=200)
    for split, count in (("train", 200), ("held_out", 40)):
      pairs = task.pairs(split)
      self.assertLen(pairs, count)
      self.assertEqual(pairs, again.pairs(split))
      own = {task.prompt(split, i) for i in range(task.num_prompts(split))}
      self.assertLessEqual({prompt for prompt, _, _ in pairs}, own)
    gains = [
        synthetic.tldr_reward(p, c) - synthetic.tldr_reward(p, r)
        for p, c, r in pairs
    ]
    # The label is a person's, and often not the gold reward's.
    self.assertTrue(any(g > 0 for g in gains) and any(g < 0 for g in gains))

  def test_every_text_is_words_of_tokenizer(self):
    task = _task(data="synthetic", synthetic_prompts=100)
    self.assertLess(len(task.tokenizer_words()), 90)
    self.assertLessEqual(task.max_prompt_tokens, 40)
    self.assertLessEqual(task.max_completion_tokens, 12)
