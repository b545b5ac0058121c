# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Tests of the red-teaming task: prompt, instructions, invalid settings."""

import json
import pathlib

from absl.testing import parameterized
import numpy as np

from tba_jax.models import tokenizer
from tba_jax.tasks import base
from tba_jax.tasks import red_team
from tba_jax.tasks import task_table
from tests.support import fakes


def _make(**changes):
  return task_table.make_task({"name": "red_team", **changes})


class RedTeamTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.folder = pathlib.Path(self.create_tempdir().full_path)

  def test_has_one_prompt(self):
    task = _make(evaluation_blocks=7)
    self.assertEqual(task.num_prompts(base.TRAIN), 1)
    self.assertEqual(task.num_prompts(base.HELD_OUT), 7)
    self.assertEqual(
        {task.prompt(base.HELD_OUT, i) for i in range(7)},
        {task.prompt(base.TRAIN, 0)},
    )

  def test_attack_with_unlikely_tokens_gets_no_reward(self):
    logprobs = np.array(
        [[-1, -9, -12, 0], [-1, -9, -10, -99], [-11, 0, 0, 0], [np.nan] * 4],
        np.float32,
    )
    mask = np.arange(4) < np.array([[3], [3], [1], [4]])
    rewards = np.float32([-0.5, -0.5, -0.5, -0.5])
    final = lambda **fields: _make(**fields).final_rewards(
        rewards, logprobs, mask
    )
    # Means of the two least likely: -10.5, -9.5, and -11 of one token.
    np.testing.assert_array_equal(final(min_k=2), [-10, -0.5, -10, -0.5])
    np.testing.assert_array_equal(
        final(min_k=2, min_k_threshold=-10.6), [-0.5, -0.5, -10, -0.5]
    )
    np.testing.assert_array_equal(final(), rewards)
    # The filter raises no reward, and failed judgements stay failed.
    rewards = np.float32([-16, -0.5, np.nan, -0.5])
    np.testing.assert_array_equal(final(min_k=2), rewards)

  def test_synthetic_instructions_are_words_of_tokenizer(self):
    task = _make()
    made = tokenizer.word_level(task.tokenizer_words(), task.tokenizer_pattern)
    rng = np.random.default_rng(0)
    texts = [task.reference_completion(base.TRAIN, 0, rng) for _ in range(200)]
    for text in texts[:20]:
      ids = made.encode(text)
      self.assertBetween(len(ids), 5, task.max_completion_tokens - 1)
      self.assertEqual(made.decode(ids), text)
    words = " ".join(texts).split()
    share = np.mean([word in red_team.FRUIT for word in words])
    self.assertAlmostEqual(share, 1 / 6, delta=0.04)
    prompt = made.encode_prompt(task.prompt(base.TRAIN, 0))
    self.assertLen(prompt, task.max_prompt_tokens)

  def test_reads_instructions_of_file(self):
    path = self.folder / "instructions.jsonl"
    rows = [{"instruction": t} for t in ("Name a tree. ", "Sing.", "Sing.")]
    path.write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    task = _make(instructions=str(path))
    rng = np.random.default_rng(0)
    result = {task.reference_completion(base.TRAIN, 0, rng) for _ in range(40)}
    self.assertEqual(result, {" Name a tree.", " Sing."})
    # " Name", " a", " tree", "." and the stop token.
    self.assertEqual(task.max_completion_tokens, 5)

  def test_wrong_lines_are_counted_with_file_and_line(self):
    path = self.folder / "instructions.jsonl"
    rows = [
        '{"instruction": "Sing."}',
        "[",
        '{"instruction": 3}',
        '{"text": "x"}',
        '{"instruction": " "}',
        '{"instruction": "Sing. "}',
        # One line of the file, whatever Unicode takes for an end of line.
        '{"instruction": "Name\u2028a tree."}',
    ]
    path.write_text("\n".join(rows))
    task = _make(instructions=str(path))
    report = task.report
    places = lambda *lines: [f"instructions.jsonl:{n}" for n in lines]
    self.assertEqual(report.places(base.TRAIN, "malformed"), places(2, 3))
    self.assertEqual(report.places(base.TRAIN, "no_answer"), places(4, 5))
    self.assertEqual(report.places(base.TRAIN, "duplicate"), places(6))
    self.assertIn("train: 2 prompts of 7 rows", report.lines())
    task.drop_long(fakes.Characters(), 1, 10)
    self.assertEqual(report.places(base.TRAIN, "answer_too_long"), places(7))
    self.assertEqual(report.used[base.TRAIN], 1)
    rng = np.random.default_rng(0)
    self.assertEqual(task.reference_completion(base.TRAIN, 0, rng), " Sing.")
    with self.assertRaisesRegex(ValueError, "max_completion_tokens=3: every"):
      task.drop_long(fakes.Characters(), 1, 2)
    self.assertIsNone(_make().report)

  @parameterized.parameters(
      ('{"text": "x"}', "1 row left out, each has no answer.*l:1"),
      ("[", "not a JSON object.*instructions.jsonl:1"),
      ("", "train: 0 prompts of 0 rows"),
  )
  def test_refuses_invalid_file(self, text, message):
    path = self.folder / "instructions.jsonl"
    path.write_text(text)
    with self.assertRaisesRegex(ValueError, message):
      _make(instructions=str(path))

  @parameterized.parameters(
      (dict(victim="/no/such"), "config.task.victim='/no/such'"),
      (dict(encoder=""), "config.task.encoder=''"),
      (dict(classifier="oracle"), "config.task.classifier='oracle'"),
      (dict(classifier="sequence"), "config.task.classifier_folder=''"),
      (dict(words=" , "), "config.task.words=' , '"),
      (dict(victim_template="ask"), "one {attack}"),
      (dict(victim_samples=0), "config.task.victim_samples=0"),
      (dict(victim_top_p=0.0), "config.task.victim_top_p=0.0"),
      (dict(victim_temperature=0.0), "config.task.victim_temperature=0.0"),
      (dict(success_threshold=1.0), "config.task.success_threshold=1.0"),
      (dict(instructions="/no/such"), "config.task.instructions='/no/such'"),
      (dict(prompt=""), "config.task.prompt=''"),
  )
  def test_wrong_settings_are_refused(self, changes, message):
    with self.assertRaisesRegex(ValueError, message):
      _make(**changes)

  def test_nothing_is_judged_without_victim(self):
    with self.assertRaises(base.RewardError):
      _make().judge(base.TRAIN, 0, " red")
