# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Tests of rewards of groups in the trainer."""

import dataclasses

from absl.testing import absltest
import ml_collections
import numpy as np

from tba_jax import types
from tba_jax.rewards import judges
from tba_jax.rewards import reward_model
from tba_jax.tasks import base
from tests.support import fakes


class _Judge(judges.Judge):
  """Rewards the number of letters, and records the requests."""

  def __init__(self):
    super().__init__()
    self.asked = []
    self.closed = False

  def _judge(self, requests):
    self.asked.append(list(requests))
    return [base.Judgement(float(len(r.completion)), None) for r in requests]

  def close(self):
    self.closed = True


def _group(prompt_id, *rows):
  tokens = np.zeros((len(rows), 4), np.int32)
  for i, row in enumerate(rows):
    tokens[i, : len(row)] = row
  S = len(rows)
  return types.Group(
      prompt_id=prompt_id,
      visit=0,
      position=prompt_id,
      prompt_tokens=np.array([2], np.int32),
      completion_tokens=tokens,
      completion_lengths=np.array([len(row) for row in rows], np.int32),
      sampled_mask=tokens > 0,
      stopped=np.array([len(row) < 4 for row in rows]),
      behavior_logprobs=np.zeros((S, 4), np.float32),
      rewards=np.zeros(S, np.float32),
      versions=np.zeros(S, np.int32),
      epoch=1,
  )


class GroupScorerTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    self.judge = _Judge()
    self.groups = [
        _group(3, [2, 3, 1], [4, 4, 4, 4]),
        _group(5, [2, 1], [3, 3]),
    ]

  def make_scorer(self, judge, rule="keep"):
    loss = {
        "reward_weight": 1.0,
        "missing_stop": rule,
        "missing_stop_reward": -1.0,
    }
    return reward_model.GroupScorer(
        judge, fakes.FakeTokenizer(), ml_collections.ConfigDict(loss)
    )

  def score(self):
    scorer = self.make_scorer(self.judge)
    self.addCleanup(scorer.close)
    return scorer.score(self.groups)

  def test_rewards_all_groups_at_once(self):
    found = self.score()
    self.assertEqual([g.rewards.tolist() for g in found], [[2, 4], [1, 2]])
    (asked,) = self.judge.asked
    self.assertEqual(
        [(r.split, r.index, r.completion, r.stopped) for r in asked],
        [
            ("train", 3, "23", True),
            ("train", 3, "4444", False),
            ("train", 5, "2", True),
            # Ended by a stop string.
            ("train", 5, "33", True),
        ],
    )
    # Nothing else of a group changes.
    for group, before in zip(found, self.groups):
      for field in dataclasses.fields(group):
        if field.name != "rewards":
          self.assertIs(getattr(group, field.name), getattr(before, field.name))

  def test_one_rule_for_completions_that_were_cut_off(self):
    for rule, first, second in (
        ("keep", [2, 4], [1, 2]),
        ("replace", [2, -1], [1, 2]),
        ("add", [2, 3], [1, 2]),
    ):
      groups = self.make_scorer(self.judge, rule).score(self.groups)
      rewards = [g.rewards.tolist() for g in groups]
      self.assertEqual(rewards, [first, second], rule)
      self.assertEqual(groups[0].rewards.dtype, np.float32)
      # Rewards of searchers are in the journal: they stay.
      again = self.make_scorer(None, rule).score(groups)
      for group, before in zip(again, groups, strict=True):
        self.assertIs(group, before)

  def test_closes_its_judge(self):
    self.score()
    self.doCleanups()
    self.assertTrue(self.judge.closed)

  def test_unscored_completions_have_no_reward(self):
    judge = reward_model.Unscored()
    found = judge.judge([judges.Request("train", 0, "x")] * 3)
    np.testing.assert_array_equal([j.reward for j in found], [np.nan] * 3)
    self.assertEqual(judge.totals()["failures"], {})


if __name__ == "__main__":
  absltest.main()
