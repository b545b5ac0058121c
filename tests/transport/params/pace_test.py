# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Deadlines by bytes and rate."""

from absl.testing import absltest

from tba_jax.transport.params import pace


class PaceTest(absltest.TestCase):

  def test_small_transfer_gets_floor(self):
    self.assertAlmostEqual(pace.Pace(60.0).deadline_s(1000), 60.0, places=3)

  def test_large_transfer_gets_time_for_its_bytes(self):
    self.assertEqual(pace.Pace(60.0).deadline_s(140e9), 60.0 + 28_000.0)

  def test_deadline_follows_rate_seen(self):
    rate = pace.Pace(60.0)
    rate.done(1e9, 10.0)
    self.assertEqual(rate.deadline_s(1e9), 60.0 + 40.0)
    rate.done(1000, 10.0)  # A latency.
    self.assertEqual(rate.deadline_s(1e9), 60.0 + 40.0)

  def test_late_transfer_doubles_time_of_next(self):
    rate = pace.Pace(0.0)
    before = rate.deadline_s(1e9)
    rate.missed()
    self.assertEqual(rate.deadline_s(1e9), 2 * before)

  def test_transfer_counts_as_moving_until_it_is_late(self):
    rate = pace.Pace(60.0)
    with rate.moving(1e9):
      self.assertTrue(rate.is_moving())
    self.assertFalse(rate.is_moving())
    rate = pace.Pace(0.0)
    with rate.moving(0):
      self.assertFalse(rate.is_moving())


if __name__ == "__main__":
  absltest.main()
