# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Tests of the ring: what is to be sent, sent again, and let go of."""

import math

from absl.testing import absltest

from tba_jax.replay import queue_client


class RingTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    self.now = 50.0
    self.ring = queue_client.Ring(2.0, clock=lambda: self.now)
    for data in (b"a", b"b", b"c"):
      self.ring.add(data)

  def send(self):
    for message in self.ring.unsent():
      self.ring.sent(message)

  def test_each_is_sent_once_in_order(self):
    self.assertEqual(
        [(m.sequence, m.data) for m in self.ring.unsent()],
        [(0, b"a"), (1, b"b"), (2, b"c")],
    )
    self.assertEqual(self.ring.overdue_in_s(), math.inf)
    self.send()
    self.assertEmpty(self.ring.unsent())
    self.assertEmpty(self.ring.overdue())

  def test_what_is_not_acknowledged_is_offered_again(self):
    self.send()
    self.now += 1.5
    self.assertEqual(self.ring.overdue_in_s(), 0.5)
    self.ring.acknowledge(2)
    self.now += 0.5
    (overdue,) = self.ring.overdue()
    self.assertEqual(overdue.sequence, 2)
    self.ring.sent(overdue)
    self.assertEmpty(self.ring.overdue())
    self.assertEqual(self.ring.overdue_in_s(), 2.0)

  def test_numbers_go_on_after_an_acknowledgement(self):
    self.ring.acknowledge(3)
    self.assertEmpty(self.ring)
    self.ring.add(b"d")
    self.assertEqual([m.sequence for m in self.ring.unsent()], [3])

  def test_a_lost_store_has_none_of_them(self):
    self.send()
    self.ring.acknowledge(1)
    self.ring.forget_sent()
    self.assertEqual([m.data for m in self.ring.unsent()], [b"b", b"c"])


if __name__ == "__main__":
  absltest.main()
