# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Tests for pipeline."""

import dataclasses
import random

from absl.testing import absltest
from absl.testing import parameterized

from tba_jax.programs import plan


def _make(**changes):
  base = plan.Pipeline(
      num_searchers=2,
      sample_s=0.4,
      train_s=0.1,
      groups_per_step=32,
      ahead_groups=64,
      round_groups=32,
      credits=4,
  )
  return dataclasses.replace(base, **changes)


class PipelineTest(parameterized.TestCase):

  @parameterized.parameters(
      # 2 / 0.4 = 5 groups/s against 10 of the trainer.
      (2, 0.0, "searchers", 5.0, {"searchers": 1.0, "trainer": 0.5}),
      (8, 0.0, "trainer", 10.0, {"searchers": 0.5, "trainer": 1.0}),
      (8, 0.25, "store", 4.0, {"searchers": 0.2, "store": 1.0, "trainer": 0.4}),
  )
  def test_the_slowest_stage_sets_the_rate(self, n, serve_s, stage, rate, busy):
    model = _make(num_searchers=n, serve_s=serve_s)
    self.assertEqual(model.slowest(), stage)
    self.assertAlmostEqual(model.groups_per_s(), rate)
    self.assertAlmostEqual(model.step_s(), 32 / rate)
    shares = model.busy_shares()
    for name, share in busy.items():
      self.assertAlmostEqual(shares[name], share)

  def test_gain_is_that_of_overlap(self):
    # Searchers 0.2 s a group, trainer 0.1 s: (0.2 + 0.1) / 0.2.
    self.assertAlmostEqual(_make().gain(), 1.5)
    self.assertAlmostEqual(_make(num_searchers=4).gain(), 2.0)
    self.assertLess(_make(train_s=1e-3).gain(), 1.01)

  @parameterized.parameters((0.4, 0.1, 4), (0.41, 0.1, 5), (0.01, 0.1, 1))
  def test_balance(self, sample_s, train_s, count):
    model = _make(sample_s=sample_s, train_s=train_s)
    self.assertEqual(model.balancing_searchers(), count)
    # That many are enough, one fewer is not.
    enough = dataclasses.replace(model, num_searchers=count)
    self.assertAlmostEqual(enough.groups_per_s(), 1 / train_s)

  def test_balance_with_nothing_is_refused(self):
    with self.assertRaisesRegex(ValueError, "train_s = 0"):
      _make(train_s=0.0).balancing_searchers()

  @parameterized.parameters(
      # One searcher's round of 32 is under way, of 32 a step.
      (1, 64, 1, 1.0),
      # Two rounds are, and no more are granted.
      (2, 64, 1, 2.0),
      (3, 64, 1, 2.0),
      # A version in four steps is 1.5 steps old when it is taken.
      (1, 64, 4, 2.5),
      # The trainer is the slowest: all that is granted waits.
      (8, 128, 1, 4.0),
  )
  def test_staleness_is_what_is_under_way(self, n, ahead, period, steps):
    model = _make(num_searchers=n, ahead_groups=ahead, publish_steps=period)
    self.assertAlmostEqual(model.staleness_steps(), steps)

  def test_a_slow_store_is_waited_for_on_both_ways(self):
    # 4 groups/s: 8 searchers with 2 granted groups each have them for 4 s. Of
    # that .4 are sampling, and half of the rest is after it: 2.2 s.
    model = _make(
        num_searchers=8,
        serve_s=0.25,
        round_groups=1,
        granted_rounds=2,
        ahead_groups=1000,
    )
    self.assertAlmostEqual(model.groups_under_way(), 4 * 2.2)
    # Where credits bind, all that is granted was begun.
    model = dataclasses.replace(model, credits=0)
    self.assertAlmostEqual(model.groups_under_way(), 8.0)

  def test_what_is_handed_over_is_under_way_too(self):
    # 5 groups/s for half a second.
    model = _make(num_searchers=2, round_groups=1, hand_over_s=0.5)
    self.assertAlmostEqual(model.groups_under_way(), 2 + 2.5)

  def _wait_for_a_look(self, num_searchers, seconds):
    """Simulates Poisson arrivals at a drain that looks; returns the mean wait.

    A look that finds k takes 10 + 2 (k - 1) ms, an idle round 4 ms.
    """
    rng = random.Random(0)
    now, next_at, waits, waiting = 0.0, 0.0, [], []
    rate = num_searchers / 0.4 * (1 - 1 / num_searchers)
    while now < seconds:
      found = len(waiting)
      waits += [now - at for at in waiting]
      waiting = []
      end = now + (0.01 + 0.002 * (found - 1) if found else 0.004)
      while next_at < end:
        if next_at >= now:
          waiting.append(next_at)
        next_at += rng.expovariate(rate)
      now = end
    return sum(waits) / len(waits)

  @parameterized.parameters(2, 8, 20, 40)
  def test_a_group_waits_for_what_the_drain_does_for_others(self, n):
    model = _make(
        num_searchers=n,
        train_s=0.0,
        round_groups=1,
        hand_over_s=0.005,
        idle_s=0.004,
        look_s=0.01,
        more_s=0.002,
    )
    # A single one waits for half of an idle round, which its 5 ms contain.
    wait_s = model.hand_over() - 0.005 + 0.002
    self.assertAlmostEqual(
        wait_s, self._wait_for_a_look(n, 500.0), delta=0.05 * wait_s
    )

  def test_a_single_searcher_waits_for_nobody(self):
    model = _make(num_searchers=1, hand_over_s=0.005, look_s=0.01)
    self.assertAlmostEqual(model.hand_over(), 0.005)

  def test_credits_bound_what_waits(self):
    model = _make(num_searchers=8, credits=2, round_groups=1, ahead_groups=1e9)
    # One in the making and two sent, of eight searchers.
    self.assertEqual(model.groups_under_way(), 8 * 3)
    model = dataclasses.replace(model, granted_rounds=2)
    self.assertEqual(model.groups_under_way(), 8 * 2)


if __name__ == "__main__":
  absltest.main()
