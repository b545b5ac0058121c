# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""The scale benchmark: its model and what it makes of measurements.

tests/multi_process/benchmarks_test.py runs it.
"""

import collections
import contextlib
import dataclasses
import json
import os
import pathlib
import random
from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized

from benchmarks import scale


class ScaleTest(parameterized.TestCase):

  def test_reads_rate_staleness_and_hand_over_off_a_log(self):
    # One searcher, a group a second, each there half a second after its end.
    log = [("a", i, i + 1.5) for i in range(100)]
    times = {"a": [[float(i), i + 1.0] for i in range(100)]}
    row = scale.analyse(log, times, 32.0, 97.0)
    self.assertAlmostEqual(row["groups_per_s"], 65 / 65)
    self.assertAlmostEqual(row["hand_over_ms"], 500.0)
    # Group i was begun when i - 1 had come: one came between, of 32 a step.
    self.assertAlmostEqual(row["staleness_steps"], 1 / 32)

  def test_calibrates_the_model_by_two_runs(self):
    one = {
        "groups_per_s": 8.0,
        "hand_over_ms": 25.0,
        "idle_ms": 4.0,
        "look_ms": 4.0,
    }
    full = {"groups_per_s": 200.0, "look_ms": 22.0, "groups_per_look": 10.0}
    model_of = scale.calibrate(one, full, 4)
    self.assertAlmostEqual(model_of(1).hand_over_s, 0.025)
    # (22 - 4) / (10 - 1) ms for each further group.
    self.assertAlmostEqual(model_of(1).more_s, 0.002)
    self.assertAlmostEqual(model_of(16).groups_per_s(), 128.0)
    self.assertAlmostEqual(model_of(64).groups_per_s(), 200.0)
    # 16 that sample, and what is on its way for .025 s and the wait for a look
    # that has found others. 64 with two rounds each, which take .64 s: .125 of
    # sampling, and half of the rest after it.
    hand_over_s = model_of(16).hand_over()
    self.assertBetween(hand_over_s, 0.025, 0.03)
    self.assertAlmostEqual(
        model_of(16).staleness_steps(), (16 + 128 * hand_over_s) / 32
    )
    self.assertAlmostEqual(model_of(64).staleness_steps(), 76.5 / 32)


class _FakeQueue:
  """Searchers of which a block comes at given times."""

  service_pid = os.getpid()

  def __init__(self, folder, *came):
    self.folder = folder
    self.now, self._came = 0.0, list(came)

  def say(self, line):
    command, *words = line.split()
    if command == "stop":
      times = [[at - 0.2, at - 0.1] for *_, at in self.log]
      said = {"times": {"a": times}, "busy_share": 0.5, "asks_per_s": 2.0}
      pathlib.Path(words[0]).write_text(json.dumps(said))

  @contextlib.contextmanager
  def draining(self):
    yield self

  def receive_for(self, seconds):
    self.now += seconds
    while self._came and self._came[0] <= self.now:
      self.log.append(("a", len(self.log), self._came.pop(0)))

  def poll_stats(self):
    return collections.Counter(busy_s=self.now, blocks=len(self.log))


class MeasureTest(absltest.TestCase):

  def measure(self, *came):
    queue = _FakeQueue(pathlib.Path(self.create_tempdir().full_path), *came)
    with mock.patch.object(scale.time, "monotonic", lambda: queue.now):
      return scale._measure(queue, "r0n1", 1, 0.1, 1.0)

  def test_measures_until_a_block_has_come(self):
    self.assertAlmostEqual(self.measure(0.01, 1.5)["groups_per_s"], 1.0)
    # It begins after 1.05 s.
    self.assertAlmostEqual(
        self.measure(0.01, 4.04)["groups_per_s"], 1 / 3.0, places=2
    )

  def test_searchers_that_bring_nothing_more_are_an_error(self):
    with self.assertRaisesRegex(RuntimeError, "1 searchers hand over nothing"):
      self.measure(0.01)


class PipelineTest(parameterized.TestCase):

  @parameterized.parameters(
      # 2 / 0.4 = 5 groups/s.
      (2, 0.0, "searchers", 5.0),
      (8, 0.25, "store", 4.0),
  )
  def test_takes_the_rate_of_the_slowest_stage(self, n, serve_s, stage, rate):
    model = scale.Pipeline(n, 0.4, serve_s=serve_s)
    self.assertEqual(model.slowest(), stage)
    self.assertAlmostEqual(model.groups_per_s(), rate)

  def test_waits_for_a_full_store_on_both_ways(self):
    # 4 groups/s: 8 searchers with 2 granted groups each have them for 4 s. Of
    # that .4 are sampling, and half of the rest is after it: 2.2 s.
    model = scale.Pipeline(8, 0.4, serve_s=0.25, granted_rounds=2, credits=4)
    self.assertAlmostEqual(model.groups_under_way(), 4 * 2.2)
    # Where credits bind, all that is granted was begun.
    model = dataclasses.replace(model, credits=0)
    self.assertAlmostEqual(model.groups_under_way(), 8.0)

  def test_counts_groups_that_are_handed_over_as_under_way(self):
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
  def test_waits_while_the_drain_serves_others(self, n):
    model = scale.Pipeline(
        n, 0.4, hand_over_s=0.005, idle_s=0.004, look_s=0.01, more_s=0.002
    )
    # A single one waits for half of an idle round, which its 5 ms contain.
    wait_s = model.hand_over() - 0.005 + 0.002
    self.assertAlmostEqual(
        wait_s, self._wait_for_a_look(n, 500.0), delta=0.05 * wait_s
    )

  def test_never_waits_with_a_single_searcher(self):
    model = scale.Pipeline(1, 0.4, hand_over_s=0.005, look_s=0.01)
    self.assertAlmostEqual(model.hand_over(), 0.005)


if __name__ == "__main__":
  absltest.main()
