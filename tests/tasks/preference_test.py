# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Tests of the preference task: its language, reward and splits."""

import collections

from absl.testing import absltest
import numpy as np

from tba_jax.tasks import preference

SPLITS = ("train", "held_out")


def make_task(**fields):
  return preference.Preference(**{**preference.Preference.FIELDS, **fields})


class PreferenceTest(absltest.TestCase):

  def test_splits_hold_all_prompts_once(self):
    task = make_task(num_letters=5)
    prompts = [
        task.prompt(s, i) for s in SPLITS for i in range(task.num_prompts(s))
    ]
    self.assertCountEqual(
        prompts, [f"{a}{b}:" for a in "abcde" for b in "abcde"]
    )
    self.assertEqual(task.num_prompts("held_out"), 4)

  def test_reward_is_sum_of_scores(self):
    task = make_task(num_letters=4, max_letters=8, held_out_fraction=0.5)
    where = {
        task.prompt(s, i): (s, i)
        for s in SPLITS
        for i in range(task.num_prompts(s))
    }
    # The scores of a letter are those of the prompt with it twice.
    scores = {
        a: {b: 8 * task.reward(*where[f"{a}{a}:"], b) for b in "abcd"}
        for a in "abcd"
    }
    for of_one in scores.values():
      self.assertLess(max(map(abs, of_one.values())), 1.0)
    self.assertGreater(
        len({round(v, 6) for one in scores.values() for v in one.values()}), 15
    )
    expected = sum((scores["a"][c] + scores["c"][c]) / 2 for c in "abbd") / 8
    for text in ("abbd", "dbba"):
      self.assertAlmostEqual(
          task.reward(*where["ac:"], text), expected, places=6
      )
    self.assertEqual(task.reward(*where["ac:"], ""), 0.0)
    # No letter: not liked at all.
    self.assertAlmostEqual(
        task.reward(*where["ac:"], "abbd:"), expected - 1 / 8, places=6
    )

  def test_best_letter_repeated_is_best(self):
    task = make_task(num_letters=6, max_letters=3)
    for index in range(task.num_prompts("train")):
      best = task.best_reward("train", index)
      rewards = [
          task.reward("train", index, x + y + z)
          for x in "abcdef"
          for y in "abcdef"
          for z in "abcdef"
      ]
      self.assertAlmostEqual(best, max(*rewards, 0.0), places=6)

  def test_half_of_best_is_right(self):
    task = make_task(num_letters=6, max_letters=4)
    rng = np.random.default_rng(0)
    seen = set()
    for index in range(task.num_prompts("train")):
      for _ in range(20):
        text = "".join(rng.choice(list("abcdef"), size=4))
        is_right = task.reward("train", index, text) >= (
            0.5 * task.best_reward("train", index)
        )
        key = task.solution_key("train", index, text)
        self.assertEqual(key, text if is_right else None)
        reason = task.explain("train", index, text)
        self.assertEqual(reason == "", is_right)
        seen.add(is_right)
    self.assertEqual(seen, {True, False})

  def test_language_is_markov_chain_from_prompt(self):
    task = make_task(num_letters=5, max_letters=6)
    rng = np.random.default_rng(1)
    after = collections.defaultdict(collections.Counter)
    lengths = collections.Counter()
    for index in range(task.num_prompts("train")):
      letter = task.prompt("train", index)[1]
      for _ in range(50):
        text = task.reference_completion("train", index, rng)
        lengths[len(text)] += 1
        for before, now in zip(letter + text, text):
          after[before][now] += 1
    self.assertBetween(min(lengths), 1, 1)
    self.assertBetween(max(lengths), 6, 6)
    self.assertGreater(lengths[6], lengths[1])
    # Shares are not uniform: the likeliest of five followers has more than a
    # fifth.
    shares = [max(c.values()) / c.total() for c in after.values()]
    self.assertGreater(np.mean(shares), 0.3)
    # The same seed makes the same language.
    again = make_task(num_letters=5, max_letters=6)
    self.assertEqual(
        again.reference_completion("train", 0, np.random.default_rng(2)),
        task.reference_completion("train", 0, np.random.default_rng(2)),
    )

  def test_texts_fit_declared_lengths(self):
    task = make_task()
    words = set(task.tokenizer_words())
    rng = np.random.default_rng(0)
    for index in range(50):
      prompt = task.prompt("held_out", index % task.num_prompts("held_out"))
      text = task.reference_completion("train", index, rng)
      self.assertLen(prompt, task.max_prompt_tokens)
      self.assertLess(len(text), task.max_completion_tokens)
      self.assertLessEqual(set(prompt + text), words)

  def test_refuses_wrong_fields(self):
    for fields in (
        dict(num_letters=1),
        dict(num_letters=27),
        dict(max_letters=0),
        dict(held_out_fraction=1.0),
        dict(num_letters=2, held_out_fraction=0.01),
    ):
      name = sorted(fields)[0]
      with self.assertRaisesRegex(ValueError, rf"config\.task\.{name}="):
        make_task(**fields)
