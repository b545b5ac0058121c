# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Adaptive polling interval, with a fake clock."""

from absl.testing import parameterized

from tba_jax.system import polling


class PollIntervalTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.now = 100.0
    self.polling = polling.PollInterval(
        floor_s=0.02,
        waiting_floor_s=0.004,
        share=0.25,
        cap_s=1.0,
        clock=lambda: self.now,
    )

  def polls(self, until_s: float) -> list[float]:
    """Polls without a change for `until_s`; returns the times."""
    start, times = self.now, []
    while self.now - start < until_s:
      self.now += self.polling.due_in_s()
      times.append(self.now - start)
      self.polling.polled()
    return times

  def test_first_poll_is_due(self):
    self.assertEqual(self.polling.due_in_s(), 0.0)

  def test_interval_is_share_of_time_without_change(self):
    self.polling.polled(True)
    times = self.polls(30.0)
    self.assertAlmostEqual(times[0], 0.02)
    for before, after in zip(times, times[1:]):
      pause = min(max(0.25 * before, 0.02), 1.0)
      self.assertAlmostEqual(after - before, pause)
    # A fixed interval of 20 ms would be 1,500 polls.
    self.assertBetween(len(times), 30, 60)

  def test_interval_grows_with_wait_of_caller(self):
    self.polling.polled(True)
    self.now += 20.0
    self.polling.polled()
    self.assertTrue(self.polling.start_waiting())
    self.assertTrue(self.polling.waiting)
    self.assertEqual(self.polling.due_in_s(), 0.0)
    times = self.polls(10.0)
    for before, after in zip(times, times[1:]):
      pause = max(0.02 * before, 0.004)
      self.assertAlmostEqual(after - before, pause)

  def test_waits_in_pieces(self):
    self.polling.start_waiting()
    self.polls(10.0)
    pause = self.polling.due_in_s()
    self.assertGreater(pause, 0.1)
    self.assertFalse(self.polling.start_waiting())
    self.assertEqual(self.polling.due_in_s(), pause)
    self.polling.stop_waiting()
    self.assertFalse(self.polling.waiting)
    self.assertTrue(self.polling.start_waiting())
    self.assertEqual(self.polling.due_in_s(), 0.0)

  @parameterized.parameters(
      ("polled", 0.02), ("changed", 0.02), ("at_once", 0.0)
  )
  def test_change_shortens_interval(self, what, pause):
    self.polling.polled(True)
    self.polls(30.0)
    self.assertGreater(self.polling.due_in_s(), 0.9)
    if what == "polled":
      self.polling.polled(True)
    else:
      self.polling.changed(at_once=what == "at_once")
    self.assertAlmostEqual(self.polling.due_in_s(), pause)

  def test_change_never_delays_poll(self):
    self.polling.polled(True)
    self.now += 0.015
    self.polling.changed()
    self.assertAlmostEqual(self.polling.due_in_s(), 0.005)
