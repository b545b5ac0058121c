# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Numbers of an evaluation by hand, with their intervals."""

import collections
import itertools

from absl.testing import absltest
import numpy as np

from tba_jax.rewards import comparers
from tba_jax.training import evaluator


def _prompt(right: int, texts: int = 4, **more):
  return {
      "num_correct": right,
      "num_distinct": min(right, 1),
      "num_texts": texts,
      "rewards": [1.0] * right + [0.0] * (4 - right),
      "lengths": np.array([2, 2, 3, 3]),
      "stopped": np.array([True, True, True, False]),
      "failures": collections.Counter(),
      **more,
  }


def _summarize(*prompts):
  return evaluator.summarize(prompts, 4, resamples=200, confidence=0.9)


class EvalSummaryTest(absltest.TestCase):

  def test_pass_at_every_power_of_two(self):
    found = _summarize(_prompt(1), _prompt(3))
    # One right of four: a pair has it with chance 1/2; three of four: 1.
    self.assertEqual(found["pass_at"], {"1": 0.5, "2": 0.75, "4": 1.0})
    self.assertEqual(list(_summarize(_prompt(0))["pass_at"]), ["1", "2", "4"])

  def test_intervals_hold_their_means(self):
    found = _summarize(*(_prompt(i % 5) for i in range(30)))
    for name in ("pass_at_1", "pass_at_k", "mean_reward"):
      low, high = found[f"{name}_interval"]
      self.assertLess(low, found[name])
      self.assertGreater(high, found[name])
    self.assertEqual(found["confidence"], 0.9)

  def test_what_is_optional(self):
    self.assertNotIn("kl", _summarize(_prompt(1)))
    self.assertNotIn("greedy_pass_at_1", _summarize(_prompt(1)))
    more = {"kl": np.full(4, 0.5), "ref_nats": np.full(4, np.log(2.0) * 2.5)}
    found = _summarize(
        _prompt(1, greedy_correct=True, **more),
        _prompt(1, greedy_correct=False, **more),
    )
    self.assertEqual(found["greedy_pass_at_1"], 0.5)
    self.assertEqual(found["kl"], 0.5)
    # Ten nats ln 2 in ten tokens.
    self.assertAlmostEqual(found["ref_perplexity"], 2.0)

  def test_win_rates(self):
    verdict = lambda win, *scores: comparers.Verdict(win, *scores)
    none = comparers.Verdict(None, failure="deadline")
    found = _summarize(
        _prompt(1, verdicts=[verdict(1.0, 3.0, 1.0), verdict(0.0, 0.0, 1.0)]),
        _prompt(1, verdicts=[verdict(1.0, 2.0, 1.5), none]),
        _prompt(1, verdicts=[none, none]),
    )
    # The third prompt has no verdict.
    self.assertEqual(found["win_rate"], 0.75)
    self.assertEqual(found["gold_reward"], (1.5 + 2.0) / 2)
    self.assertEqual(found["gold_margin"], (0.5 + 0.5) / 2)
    self.assertEqual(found["no_verdict"], {"deadline": 3})
    self.assertIn("win_rate_interval", found)
    self.assertNotIn("greedy_win_rate", found)
    # A judge that does not score.
    found = _summarize(_prompt(1, greedy_verdicts=[verdict(0.5)]))
    self.assertEqual(found["greedy_win_rate"], 0.5)
    self.assertNotIn("greedy_gold_reward", found)

  def test_share_of_distinct_texts_and_failures(self):
    failed = collections.Counter(nan=2)
    found = _summarize(_prompt(1, texts=2), _prompt(1, failures=failed))
    self.assertEqual(found["distinct_share"], 0.75)
    self.assertEqual(found["reward_failures"], {"nan": 2})

  def test_pass_at_k_is_the_mean_over_all_choices(self):
    right = [True, True, False, False, False]
    for k in range(1, 6):
      share = np.mean([any(c) for c in itertools.combinations(right, k)])
      self.assertAlmostEqual(evaluator.pass_at_k(5, 2, k), share)


if __name__ == "__main__":
  absltest.main()
