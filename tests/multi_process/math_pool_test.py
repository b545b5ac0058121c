# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Boxed answers are compared in workers: one without end costs itself only."""

import pathlib

from absl.testing import absltest
import numpy as np

from tba_jax.config import variants
from tba_jax.rewards import judges
from tba_jax.rewards import pool
from tba_jax.tasks import task_table

math = variants.import_config("configs/math.py")

_DATA = pathlib.Path(__file__).parent.parent / "tasks" / "math_data"
# sympy works on it for minutes at least.
_ENDLESS = r"\boxed{9^{9^{9^{9}}}}"


class MathPoolTest(absltest.TestCase):

  def test_ends_answer_without_end(self):
    config = math.get_config()
    config.task.train = f"{_DATA}/train.jsonl"
    config.task.test = f"{_DATA}/test.jsonl"
    config.reward.num_workers = 1
    task = task_table.make_task(config.task)
    judge = pool.make_judge(config, self.create_tempdir().full_path, task)
    self.addCleanup(judge.close)
    texts = (r"\boxed{0.5}", _ENDLESS, r"\boxed{\frac{2}{4}}", r"\boxed{x}", "")
    result = judge.judge(
        [judges.JudgeRequest("train", 1, text) for text in texts]
    )
    rewards = [one.reward for one in result]
    np.testing.assert_array_equal(rewards, [1.0, np.nan, 1.0, 0.0, 0.0])
    self.assertEqual(
        [one.failure for one in result], ["", "deadline", "", "", ""]
    )
    self.assertEqual(judge.totals()["failures"], {"deadline": 1})
