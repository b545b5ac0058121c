# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Tests of rewards in the role's own process, and of their failures."""

from absl.testing import absltest
from absl.testing import parameterized

from tba_jax.rewards import judges
from tba_jax.rewards import pool
from tba_jax.tasks import base
from tests.support import base_config
from tests.support import fakes


class _Task(fakes.FakeTask):

  def judge(self, split, index, completion):
    if completion == "raise":
      raise KeyError("a bug")
    if completion == "named":
      raise base.RewardError("refused", "")
    if completion == "huge":
      return base.Judgement(10**400, None)
    value = float(completion)
    return base.Judgement(value, None, {"half": value / 2})

  def explain(self, split, index, completion):
    if completion == "raise":
      raise KeyError("a bug")
    return "x" * 9999 if completion == "long" else f"{completion} is wrong"


class JudgesTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.judge = judges.InProcess(_Task({}), fallback=-1.0)

  def ask(self, *texts):
    return self.judge.judge([judges.Request("train", 0, t) for t in texts])

  @parameterized.parameters(
      ("raise", "error"),
      ("named", "refused"),
      ("nan", "nan"),
      ("-inf", "nan"),
      ("4e38", "nan"),
      ("huge", "nan"),
  )
  def test_trouble_costs_one_completion(self, text, cause):
    found = self.ask("2", text, "3")
    self.assertEqual([j.reward for j in found], [2.0, -1.0, 3.0])
    self.assertEqual([j.failure for j in found], ["", cause, ""])
    self.assertEqual(
        self.judge.totals(),
        {
            "completions": 3,
            "failures": {cause: 1},
            "sums": {"half": 2.5},
            "counts": {"half": 2},
        },
    )

  def test_serves_a_task_without_a_judge_of_its_own(self):
    judge = judges.InProcess(fakes.FakeTask({0: {"23"}}), fallback=0.0)
    found = judge.judge(
        [judges.Request("train", 0, text) for text in ("23", "4")]
    )
    self.assertEqual([(j.reward, j.key) for j in found], [(2, "23"), (0, None)])

  def test_explains_wrong_completions(self):
    asked = [judges.Request("train", 0, t) for t in ("5", "raise", "long")]
    self.assertEqual(
        self.judge.explain(asked),
        [
            "5 is wrong",
            f"(no reason: {__file__}:29: KeyError: 'a bug')",
            "x" * 500,
        ],
    )
    # Nothing was judged.
    self.assertEqual(self.judge.totals()["completions"], 0)
    self.assertEqual(self.judge.totals()["failures"], {})

  def test_the_setting_says_where(self):
    config = base_config.make()
    task = fakes.FakeTask({})
    workdir = self.create_tempdir().full_path
    made = pool.make_judge(config, workdir, task)
    self.assertIsInstance(made, judges.InProcess)
    config.reward.where = "pool"
    made = pool.make_judge(config, workdir, task)
    self.addCleanup(made.close)
    self.assertIsInstance(made, pool.Pool)


if __name__ == "__main__":
  absltest.main()
