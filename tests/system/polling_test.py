# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Polling interval, by a clock of its own."""

from absl.testing import absltest
from absl.testing import parameterized

from tba_jax.system import polling


class PollIntervalTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.now = 100.0
    self.pace = polling.PollInterval(
        floor_s=0.02,
        waiting_floor_s=0.004,
        share=0.25,
        cap_s=1.0,
        clock=lambda: self.now,
    )

  def questions(self, until_s: float) -> list[float]:
    """Asks for so long without news; returns when, from now on."""
    start, asked = self.now, []
    while self.now - start < until_s:
      self.now += self.pace.due_in_s()
      asked.append(self.now - start)
      self.pace.polled()
    return asked

  def test_the_first_question_is_due_at_once(self):
    self.assertEqual(self.pace.due_in_s(), 0.0)

  def test_pauses_are_a_share_of_the_time_without_change(self):
    self.pace.polled(True)
    asked = self.questions(30.0)
    self.assertAlmostEqual(asked[0], 0.02)
    for before, after in zip(asked, asked[1:]):
      pause = min(max(0.25 * before, 0.02), 1.0)
      self.assertAlmostEqual(after - before, pause)
    # The 50 a second of a fixed pause would be 1,500.
    self.assertBetween(len(asked), 30, 60)

  def test_who_waits_asks_at_once_and_hears_in_a_fiftieth_of_the_wait(self):
    self.pace.polled(True)
    self.now += 20.0
    self.pace.polled()
    self.assertTrue(self.pace.start_waiting())
    self.assertTrue(self.pace.waiting)
    self.assertEqual(self.pace.due_in_s(), 0.0)
    asked = self.questions(10.0)
    for before, after in zip(asked, asked[1:]):
      pause = max(0.02 * before, 0.004)
      self.assertAlmostEqual(after - before, pause)

  def test_to_wait_again_is_to_go_on_waiting(self):
    self.pace.start_waiting()
    self.questions(10.0)
    pause = self.pace.due_in_s()
    self.assertGreater(pause, 0.1)
    # A wait in pieces, a tenth of a second each.
    self.assertFalse(self.pace.start_waiting())
    self.assertEqual(self.pace.due_in_s(), pause)
    self.pace.stop_waiting()
    self.assertFalse(self.pace.waiting)
    self.assertTrue(self.pace.start_waiting())
    self.assertEqual(self.pace.due_in_s(), 0.0)

  @parameterized.parameters(("news", 0.02), ("done", 0.02), ("at_once", 0.0))
  def test_a_change_brings_the_next_question_near(self, what, pause):
    self.pace.polled(True)
    self.questions(30.0)
    self.assertGreater(self.pace.due_in_s(), 0.9)
    if what == "news":
      self.pace.polled(True)
    else:
      self.pace.changed(at_once=what == "at_once")
    self.assertAlmostEqual(self.pace.due_in_s(), pause)

  def test_a_change_never_puts_a_question_off(self):
    self.pace.polled(True)
    self.now += 0.015
    self.pace.changed()
    self.assertAlmostEqual(self.pace.due_in_s(), 0.005)


if __name__ == "__main__":
  absltest.main()
