# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Tests for step_record."""

import dataclasses

from absl.testing import absltest
import numpy as np

from tba_jax.monitor import recorder
from tba_jax.replay import ledger
from tests.replay import fake_groups


def _record(versions, rewards, step=4):
  buffer = fake_groups.make_buffer(capacity=40)
  for i in range(2):
    buffer.insert(fake_groups.make_group(i, [[2, 0], [3, 0]]), 0)
  draw = dataclasses.replace(
      buffer.sample(2, 2, 0),
      step=step,
      versions=np.array(versions, np.int32),
      rewards=np.array(rewards, np.float32),
  )
  return recorder.step_record(
      step,
      {"loss": 0.5},
      draw,
      seconds={"step": 0.25, "wait_fresh": 0.125},
      buffer={"size": 4},
      generated=ledger.Amount(3, 12, 90),
  )


class StepRecordTest(absltest.TestCase):

  def test_by_hand(self):
    record = _record([[4, 4], [3, 1]], [[1.0, 0.5], [0.0, 0.25]])
    self.assertEqual(
        record["replay/staleness_histogram"], {"0": 2, "1": 1, "3": 1}
    )
    self.assertEqual(record["replay/staleness_steps"], 1.0)
    # At the mean age, 1, a completion still counts as young.
    self.assertEqual(record["replay/reward_young"], 0.5)
    self.assertEqual(record["replay/reward_old"], 0.25)
    self.assertEqual(record["replay/size"], 4)
    self.assertEqual(record["train/loss"], 0.5)
    self.assertEqual(record["time/step_s"], 0.25)
    self.assertEqual(record["time/wait_s"], 0.125)
    self.assertEqual(record["time/draw_s"], 0.0)
    self.assertEqual(record["total/completions"], 12)
    self.assertEqual(record["total/tokens"], 90)

  def test_data_of_one_age_has_no_young_and_old(self):
    record = _record([[2, 2], [2, 2]], [[1.0, 0.5], [0.0, 0.25]])
    self.assertNotIn("replay/reward_young", record)
    self.assertNotIn("replay/reward_old", record)

  def test_versions_of_a_step_to_come_are_not_stale(self):
    record = _record([[5, 5], [5, 5]], [[1.0, 0.5], [0.0, 0.25]])
    self.assertEqual(record["replay/staleness_histogram"], {"0": 4})


if __name__ == "__main__":
  absltest.main()
