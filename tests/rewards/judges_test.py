# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Tests of rewards in the role's own process, and of their failures."""

import decimal
import fractions

from absl.testing import absltest
from absl.testing import parameterized
import jax.numpy as jnp
import ml_collections
import numpy as np

from tba_jax.rewards import judges
from tba_jax.rewards import pool
from tba_jax.tasks import base
from tests.support import base_config
from tests.support import fakes

# Text of a completion -> what the task gives as its reward.
_VALUES = {
    "huge": 10**400,
    "none": None,
    "text": "1",
    "bytes": b"1",
    "list": [1.0],
    "two": np.ones(2),
    "complex": 1j,
}


class _Task(fakes.FakeTask):

  def judge(self, split, index, completion):
    if completion == "raise":
      raise KeyError("a bug")
    if completion == "named":
      raise base.RewardError("refused", "")
    if completion in _VALUES:
      return base.Judgement(_VALUES[completion], None)
    if completion == "bad part":
      return base.Judgement(1.0, None, {"half": "0.5"})
    value = float(completion)
    return base.Judgement(value, None, {"half": value / 2})

  def explain(self, split, index, completion):
    if completion == "raise":
      raise KeyError("a bug")
    return "x" * 9999 if completion == "long" else f"{completion} is wrong"


class JudgesTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.judge = judges.InProcess(_Task({}))

  def ask(self, *texts):
    return self.judge.judge([judges.JudgeRequest("train", 0, t) for t in texts])

  @parameterized.parameters(
      ("raise", "error"),
      ("named", "refused"),
      ("nan", "nan"),
      ("-inf", "nan"),
      ("4e38", "nan"),
      *((text, "nan") for text in _VALUES),
      ("bad part", "nan"),
  )
  def test_trouble_costs_one_completion(self, text, cause):
    result = self.ask("2", text, "3")
    np.testing.assert_array_equal(
        [j.reward for j in result], [2.0, np.nan, 3.0]
    )
    self.assertEqual([j.failure for j in result], ["", cause, ""])
    self.assertEqual(
        self.judge.totals(),
        {
            "completions": 3,
            "failures": {cause: 1},
            "sums": {"half": 2.5},
            "counts": {"half": 2},
        },
    )

  def test_numbers_of_any_library_are_rewards(self):
    for value in (
        *(2, 2.0, fractions.Fraction(2), decimal.Decimal(2)),
        *(np.float16(2), np.int64(2), np.array(2.0), np.array([[2]])),
        jnp.float32(2),
    ):
      result = base.number(value, "f")
      self.assertEqual((result, type(result)), (2.0, float))
    for value in (True, np.True_, np.array([True])):
      result = base.number(value, "f")
      self.assertEqual((result, type(result)), (1.0, float))

  def test_serves_task_without_judge_of_its_own(self):
    judge = judges.InProcess(fakes.FakeTask({0: {"23"}}))
    result = judge.judge(
        [judges.JudgeRequest("train", 0, text) for text in ("23", "4")]
    )
    self.assertEqual(
        [(j.reward, j.key) for j in result], [(2, "23"), (0, None)]
    )

  def test_explains_wrong_completions(self):
    asked = [judges.JudgeRequest("train", 0, t) for t in ("5", "raise", "long")]
    self.assertEqual(
        self.judge.explain(asked),
        [
            "5 is wrong",
            f"(no reason: {__file__}:48: KeyError: 'a bug')",
            "x" * 500,
        ],
    )
    # Nothing was judged.
    self.assertEqual(self.judge.totals()["completions"], 0)
    self.assertEqual(self.judge.totals()["failures"], {})

  def test_backend_setting_selects_judge(self):
    config = base_config.make()
    task = fakes.FakeTask({})
    workdir = self.create_tempdir().full_path
    made = pool.make_judge(config, workdir, task)
    self.assertIsInstance(made, judges.InProcess)
    config.reward.backend = "pool"
    made = pool.make_judge(config, workdir, task)
    self.addCleanup(made.close)
    self.assertIsInstance(made, pool.Pool)


def _judged(*values, **more):
  """Returns judgements with the parts a and b, the reward 2 a + b."""
  return [
      base.Judgement(2 * a + b, None, parts={"a": a, "b": b}, **more)
      for a, b in values
  ]


class RewardsByTurnTest(absltest.TestCase):

  def test_each_is_at_last_token_of_its_turn(self):
    sampled = np.array([[1, 1, 0, 1, 1, 0], [1, 1, 1, 0, 0, 0]], bool)
    outcomes = [
        judges.EpisodeOutcome(1.25, True, 0.0, (0.5, 0.75), (2, 5)),
        # Its second turn was cut off.
        judges.EpisodeOutcome(0.5, False, 0.0, (0.5,), (1,)),
    ]
    rewards = np.array([2.5, 0.0], np.float32)  # The latter lost 1.
    np.testing.assert_array_equal(
        judges.rewards_by_turn(outcomes, rewards, sampled, 2.0),
        np.array([[0, 1, 0, 0, 1.5, 0], [1, 0, -1, 0, 0, 0]], np.float32),
        strict=True,
    )

  def test_turns_before_failure_have_none(self):
    sampled = np.array([[1, 1, 0, 1, 1, 0]], bool)
    for outcome in (
        judges.EpisodeOutcome(0.5, False, 0.0, (0.5,), (2, 5), failure="crash"),
        judges.EpisodeOutcome(0.0, False, 0.0, (1e39, -1e39), (2, 5)),
    ):
      for reward in (-1, np.nan):
        result = judges.rewards_by_turn(
            [outcome], np.float32([reward]), sampled
        )
        np.testing.assert_array_equal(result, [[0, 0, 0, 0, reward, 0]])

  def test_reward_without_turns_is_at_end(self):
    sampled = np.array([[1, 1, 0], [1, 1, 1]], bool)
    rewards = np.array([3.0, -1.0], np.float32)
    np.testing.assert_array_equal(
        judges.rewards_by_turn([], rewards, sampled),
        [[0, 3, 0], [0, 0, -1]],
    )


class FinalRewardsTest(absltest.TestCase):

  def final(self, judged, weights=None, **changes):
    loss = {"reward_weight": 1.0, "missing_stop": "keep",
            "missing_stop_reward": -1.0, **changes}  # fmt: skip
    return judges.final_rewards(
        ml_collections.ConfigDict(loss), judged, [True] * len(judged), weights
    )

  def test_parts_are_normalized_before_they_are_summed(self):
    # a has mean 2 and standard deviation 1, b 40 and 30.
    judged = _judged((1.0, 10.0), (3.0, 70.0), (1.0, 70.0), (3.0, 10.0))
    result = self.final(judged, {"a": 2.0, "b": 1.0})
    np.testing.assert_allclose(result, [-3, 3, -1, 1], rtol=1e-6)
    self.assertEqual(result.dtype, np.float32)
    # As they are, b hides a.
    np.testing.assert_array_equal(self.final(judged), [12, 76, 72, 16])

  def test_scale_and_shift_of_part_change_nothing(self):
    values = np.random.default_rng(0).normal(size=(6, 2))
    weights = {"a": 0.5, "b": 3.0}
    result = self.final(_judged(*values), weights)
    moved = self.final(_judged(*(values * [7.0, 0.01] + [-3.0, 5.0])), weights)
    np.testing.assert_allclose(result, moved, rtol=1e-4)
    np.testing.assert_allclose(result.sum(), 0, atol=1e-5)

  def test_equal_part_adds_nothing(self):
    third = 1 / 3  # The mean of three of them is another float.
    result = self.final(
        _judged((0.0, third), (1.0, third), (1.0, third)), {"a": 1.0, "b": 1e9}
    )
    np.testing.assert_allclose(result, [-(2**0.5), 2**-0.5, 2**-0.5], rtol=1e-6)

  def test_missing_part_adds_nothing(self):
    lacking = base.Judgement(2.0, None, {"a": 2.0})
    judged = [*_judged((1.0, 10.0), (3.0, 70.0)), lacking]
    only_a = self.final(judged, {"a": 1.0})
    result = self.final(judged, {"a": 1.0, "b": 1.0})
    np.testing.assert_allclose(result - only_a, [-1, 1, 0], atol=1e-6)

  def test_cancelling_parts_give_equal_rewards(self):
    for n in range(1, 8):
      parts = np.eye(2)[[0] * n + [1] * (8 - n)]
      result = self.final(_judged(*parts), {"a": 1.0, "b": 1.0})
      np.testing.assert_array_equal(result, np.zeros(8))

  def test_unjudged_completion_has_no_reward_and_is_in_no_mean(self):
    nan = np.nan
    failed = base.Judgement(nan, None, failure="crash")
    judged = [*_judged((1.0, 0.0), (3.0, 0.0)), failed]
    result = self.final(judged, {"a": 1.0, "b": 1.0})
    np.testing.assert_allclose(result, [-1, 1, nan])
    np.testing.assert_array_equal(self.final(judged), [2, 6, nan])
    np.testing.assert_array_equal(
        self.final([failed, failed], {"a": 1.0}), [nan, nan]
    )

  def test_weight_applies_to_missing_stop(self):
    judged = _judged((1.0, 0.0))
    self.assertEqual(self.final(judged, reward_weight=0.25).tolist(), [0.5])
    for weight, rule, reward in (
        (0.25, "add", 0.25), (0.0, "add", 0.0), (0.25, "mask", 0.5)
    ):  # fmt: skip
      loss = {"reward_weight": weight, "missing_stop": rule,
              "missing_stop_reward": -1.0}  # fmt: skip
      result = judges.final_rewards(
          ml_collections.ConfigDict(loss), judged, [False]
      )
      self.assertEqual(result.tolist(), [reward])
