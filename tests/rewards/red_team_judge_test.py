# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""The judge with a scripted victim: rewards, successes, failures, diversity."""

import math

from absl.testing import absltest
import numpy as np

from tba_jax.rewards import judges
from tba_jax.rewards import red_team_judge

# Answers to an attack, in training and in an evaluation.
_ANSWERS = {
    "good": (["fig fig fig", "red fig fig"], ["fig fig fig", "fig fig fig"]),
    "bad": (["red blue red", "red"], ["red", ""]),
    "long": (None, None),
}


class _Victim:
  """Answers from `_ANSWERS`; records the attacks."""

  def __init__(self):
    self.asked = []

  def answer(self, attacks, *, visit):
    self.asked.append((list(attacks), visit))
    return [_ANSWERS[attack][visit] for attack in attacks]


def _request(completion, split="train"):
  return judges.JudgeRequest(split, 0, completion)


class JudgeTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    self.victim, self.events = _Victim(), []
    self.judge = red_team_judge.RedTeamJudge(
        self.victim,
        red_team_judge.word_share_classifier(["fig"]),
        red_team_judge.word_embeddings,
        success_threshold=0.5,
        on_event=lambda *event: self.events.append(event),
    )

  def test_judges_rewards_and_successes(self):
    good, bad = self.judge.judge([_request("good"), _request("bad")])
    # (hits + 1/2) / (words + 1) of each answer.
    shares = [3.5 / 4, 2.5 / 4]
    self.assertAlmostEqual(good.reward, np.mean(np.log(shares)), places=6)
    self.assertAlmostEqual(good.parts["harm"], np.mean(shares), places=6)
    self.assertEqual((good.key, bad.key), ("good", None))
    expected = np.mean(np.log([0.5 / 4, 0.5 / 2]))
    self.assertAlmostEqual(bad.reward, expected, places=6)

  def test_equal_attacks_are_judged_once_per_split(self):
    some = [_request("good"), _request("bad", "held_out"), _request("good")]
    first, other, again = self.judge.judge(some)
    self.assertEqual(self.victim.asked, [(["good"], 0), (["bad"], 1)])
    self.assertEqual(first, again)
    expected = np.mean([math.log(0.5 / 2), math.log(0.5 / 1)])
    self.assertAlmostEqual(other.reward, expected, places=6)

  def test_overlong_attack_fails(self):
    long, good = self.judge.judge([_request("long"), _request("good")])
    np.testing.assert_equal((long.reward, long.failure), (np.nan, "too_long"))
    self.assertEqual(good.failure, "")
    self.assertEqual(self.judge.totals()["failures"], {"too_long": 1})
    self.assertEqual(self.events[0][0], "reward_failed")

  def test_measures_diversity_of_all_and_of_successes(self):
    prompt = lambda texts, right: {
        "samples": [{"completion": text} for text in texts],
        "right": right,
    }
    result = self.judge.set_metrics(
        [
            prompt(["red fig", "red fig"], [True, True]),
            prompt(["blue sky"], [False]),
        ]
    )
    # One of three pairs is equal, two share no word.
    self.assertAlmostEqual(result["cosine_distance"], 2 / 3, places=5)
    self.assertAlmostEqual(result["cosine_distance_right"], 0.0, places=5)
    self.assertEqual(result["distinct_attacks"], 1)
    self.assertEqual(result["unique_attacks"], 1)


class CosineDistanceTest(absltest.TestCase):

  def test_equals_mean_over_all_pairs(self):
    rng = np.random.default_rng(0)
    e = rng.normal(size=(7, 5))
    e = (e / np.linalg.norm(e, axis=1, keepdims=True)).astype(np.float32)
    pairs = [1 - e[i] @ e[j] for i in range(7) for j in range(7) if i != j]
    self.assertAlmostEqual(
        red_team_judge.cosine_distance(e), np.mean(pairs), places=5
    )

  def test_is_0_of_fewer_than_two(self):
    self.assertEqual(red_team_judge.cosine_distance(np.zeros((1, 3))), 0.0)
    self.assertEqual(red_team_judge.cosine_distance(np.zeros((0, 3))), 0.0)


class NumClustersTest(absltest.TestCase):

  def test_counts_attacks_unlike_all_founders(self):
    angles = np.radians([0, 40, 50, 100, 140])
    e = np.stack([np.cos(angles), np.sin(angles)], axis=1)
    count = lambda limit: red_team_judge.num_clusters(
        e, math.cos(math.radians(limit))
    )
    # Founders 0, 50, 100 (140 is near 100); 0 and 100; 0.
    self.assertEqual([count(45), count(90), count(150)], [3, 2, 1])
    self.assertEqual(red_team_judge.num_clusters(e[:0], 0.7), 0)
