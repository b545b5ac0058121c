# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Rewards and failures of searchers that come, go and start again."""

from absl.testing import absltest

from tba_jax.monitor import recorder


def _lease(completions, sums, **failures):
  totals = {"completions": completions, "sums": sums, "failures": failures}
  return {"stats": {"rewards": totals}}


class RewardLogTest(absltest.TestCase):

  def test_means_since_the_last_call(self):
    log = recorder.RewardLog()
    log.add({"a": _lease(4, {"x": 2.0}), "b": _lease(6, {"x": 4.0})})
    self.assertEqual(log.take(), {"x": 0.6})
    log.add({"a": _lease(8, {"x": 2.0}), "b": _lease(6, {"x": 4.0})})
    self.assertEqual(log.take(), {"x": 0.0})
    self.assertEqual(log.take(), {})

  def test_failures_are_no_part_of_a_mean(self):
    log = recorder.RewardLog()
    log.add({"a": _lease(4, {"x": 2.0}, deadline=2, nan=1)})
    self.assertEqual(
        log.take(), {"x": 2.0, "failed_deadline": 2, "failed_nan": 1}
    )

  def test_failures_are_counted_over_the_run(self):
    log = recorder.RewardLog()
    log.add({"a": _lease(4, {}, crash=1)})
    # It died; its successor counts from nothing, the old lease stays a while.
    log.add({"a": _lease(4, {}, crash=1), "b": _lease(2, {}, crash=2)})
    self.assertEqual(log.failures, {"crash": 3})
    restored = recorder.RewardLog()
    restored.set_state(log.get_state())
    restored.add({"c": _lease(2, {}, crash=1)})
    self.assertEqual(restored.failures, {"crash": 4})
    # A searcher that outlived the trainer tells its totals, not news.
    restored.add({"b": _lease(4, {}, crash=3)})
    self.assertEqual(restored.failures, {"crash": 5})
    restored.set_state({"failures": {"crash": 1}})  # Of an older version.
    self.assertEqual(restored.failures, {"crash": 1})

  def test_a_lease_without_rewards(self):
    log = recorder.RewardLog()
    log.add({"a": {"stats": {}}})
    self.assertEqual(log.take(), {})


if __name__ == "__main__":
  absltest.main()
