# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Rewards that judge the completions of a prompt together, in both backends."""

import json
import math
import pathlib

from absl.testing import parameterized

from tba_jax.config import settings
from tba_jax.rewards import judges
from tba_jax.rewards import pool
from tba_jax.system import callables
from tba_jax.tasks import task_table

_OFFSET = 10.0


def ranks(completions, level, **kwargs):
  """Ranks completions by length; fails as the row's level says."""
  del kwargs
  if level[0] == 2:
    raise LookupError("no gold")
  while level[0] == 3:
    pass
  order = sorted(completions, key=len)
  return [_OFFSET + order.index(c) for c in completions]


class GroupRewardsTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    folder = pathlib.Path(self.create_tempdir().full_path)
    rows = folder / "rows.jsonl"
    rows.write_text(
        "".join(
            json.dumps({"prompt": f"p{n}", "level": n}) + "\n" for n in range(4)
        )
    )
    loan = callables.Loan(folder)
    self.addCleanup(loan.close)
    self.config = settings.get_config()
    with self.config.unlocked():
      self.config.task = {
          "name": "custom",
          "train": str(rows),
          "test": str(rows),
          "overlap": "keep",
          "answer_kind": "none",
          "rewards": loan.add("reward", ranks),
      }
    self.config.reward.num_workers = 1
    self.config.reward.deadline_s = 2.0

  @parameterized.parameters("process", "pool")
  def test_completions_of_prompt_are_compared(self, backend):
    self.config.reward.backend = backend
    task = task_table.make_task(self.config.task)
    self.assertTrue(task.judges_groups)
    events = []
    judge = pool.make_judge(
        self.config, "", task, lambda kind, text: events.append(text)
    )
    self.addCleanup(judge.close)

    def rewards(*asked):
      requests = [judges.JudgeRequest("train", i, text) for i, text in asked]
      return [j.reward for j in judge.judge(requests)]

    self.assertEqual(
        rewards((0, "ccc"), (0, "a"), (0, "bb"), (1, "bb"), (1, "a")),
        [12.0, 10.0, 11.0, 11.0, 10.0],
    )
    self.assertTrue(all(map(math.isnan, rewards((2, "a"), (2, "b")))))
    events = [text for text in events if text.startswith("error")]
    self.assertRegex(
        events[0], "row rows.jsonl:3: .*group_rewards_test.py:.*no gold"
    )
    if backend == "pool":
      result = rewards((3, "a"), (3, "b"), (0, "a"))
      self.assertTrue(all(map(math.isnan, result[:2])))
      self.assertEqual(result[2], 10.0)
      self.assertEqual(judge.totals()["failures"]["deadline"], 2)
