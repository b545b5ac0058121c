# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""The scale benchmark: its model and what it makes of measurements.

tests/multi_process/benchmarks_test.py runs it.
"""

import dataclasses
import random

from absl.testing import parameterized

from benchmarks import scale


class PipelineTest(parameterized.TestCase):

  @parameterized.parameters(
      # 2 / 0.4 = 5 groups/s.
      (2, 0.0, "searchers", 5.0),
      (8, 0.25, "store", 4.0),
  )
  def test_takes_rate_of_slowest_stage(self, n, serve_s, stage, rate):
    model = scale.Pipeline(n, 0.4, serve_s=serve_s)
    self.assertEqual(model.slowest(), stage)
    self.assertAlmostEqual(model.groups_per_s(), rate)

  def test_waits_for_full_store_on_both_ways(self):
    # 4 groups/s: 8 searchers with 2 granted groups each have them for 4 s. Of
    # that .4 are sampling, and half of the rest is after it: 2.2 s.
    model = scale.Pipeline(8, 0.4, serve_s=0.25, granted_rounds=2, credits=4)
    self.assertAlmostEqual(model.groups_in_flight(), 4 * 2.2)
    # Where credits bind, all that is granted was begun.
    model = dataclasses.replace(model, credits=0)
    self.assertAlmostEqual(model.groups_in_flight(), 8.0)

  def test_counts_groups_in_transfer_as_in_flight(self):
    # 5 groups/s for half a second, in steps of 3.
    model = scale.Pipeline(2, 0.4, hand_over_s=0.5, groups_per_step=3)
    self.assertAlmostEqual(model.staleness_steps(), (2 + 2.5) / 3)

  def _wait_for_a_look(self, num_searchers, seconds):
    """Simulates Poisson arrivals at a drain that looks; returns the mean wait.

    A look that finds k takes 10 + 2 (k - 1) ms, an idle round 4 ms.
    """
    rng = random.Random(0)
    now, next_at, waits, waiting = 0.0, 0.0, [], []
    rate = num_searchers / 0.4 * (1 - 1 / num_searchers)
    while now < seconds:
      result = len(waiting)
      waits += [now - at for at in waiting]
      waiting = []
      end = now + (0.01 + 0.002 * (result - 1) if result else 0.004)
      while next_at < end:
        if next_at >= now:
          waiting.append(next_at)
        next_at += rng.expovariate(rate)
      now = end
    return sum(waits) / len(waits)

  @parameterized.parameters(2, 8, 20, 40)
  def test_waits_while_drain_serves_others(self, n):
    model = scale.Pipeline(
        n, 0.4, hand_over_s=0.005, idle_s=0.004, look_s=0.01, more_s=0.002
    )
    # A single one waits for half of an idle round, which its 5 ms contain.
    wait_s = model.hand_over() - 0.005 + 0.002
    self.assertAlmostEqual(
        wait_s, self._wait_for_a_look(n, 500.0), delta=0.05 * wait_s
    )

  def test_never_waits_with_single_searcher(self):
    model = scale.Pipeline(1, 0.4, hand_over_s=0.005, look_s=0.01)
    self.assertAlmostEqual(model.hand_over(), 0.005)
