# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Assignments, and unacknowledged blocks."""

import math

from absl.testing import absltest

from tba_jax.transport import ports
from tba_jax.transport.groups import queue_client


def _message(epoch, count, *blocks):
  blocks = [
      {"number": block, "version": -1, "prompts": [[block, 7, 0]]}
      for block in blocks
  ]
  return {"epoch": epoch, "count": count, "blocks": blocks}


class GrantedAssignmentsTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    self.work = queue_client.GrantedAssignments()

  def pending(self):
    return [(a.epoch, a.number) for a in self.work.pending]

  def test_assignment_is_added_once(self):
    self.assertEqual(self.work.epoch, -1)
    self.assertTrue(self.work.update(_message(1, 1, 4, 5)))
    assignment = self.work.pending.pop(0)
    self.assertEqual(assignment, ports.Assignment(1, 4, -1, ((4, 7, 0),)))
    # An assignment in work is listed until it is delivered.
    self.assertTrue(self.work.update(_message(1, 2, 4, 5, 6)))
    self.assertEqual(self.pending(), [(1, 5), (1, 6)])

  def test_old_messages_are_ignored(self):
    self.work.update(_message(2, 3, 4))
    for message in (_message(2, 3, 9), _message(2, 2, 9), _message(1, 8, 9)):
      self.assertFalse(self.work.update(message))
    self.assertEqual(self.pending(), [(2, 4)])

  def test_unlisted_assignments_are_dropped(self):
    self.work.update(_message(1, 1, 4, 5))
    self.work.update(_message(1, 2, 5))
    self.assertEqual(self.pending(), [(1, 5)])

  def test_a_new_trainer_counts_anew(self):
    self.work.update(_message(1, 50, 40, 41))
    self.work.update(_message(2, 1, 0))
    self.assertEqual(self.pending(), [(2, 0)])
    self.assertEqual(self.work.epoch, 2)


class UnackedBlocksTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    self.now = 50.0
    self.unacked = queue_client.UnackedBlocks(2.0, clock=lambda: self.now)
    for data in (b"a", b"b", b"c"):
      self.unacked.add(data, {"prompts": len(self.unacked) + 1})

  def send(self):
    for block in self.unacked.unsent():
      self.unacked.sent(block)

  def test_each_is_sent_once_in_order(self):
    self.assertEqual(
        [(m.sequence, m.data) for m in self.unacked.unsent()],
        [(0, b"a"), (1, b"b"), (2, b"c")],
    )
    self.assertEqual(self.unacked.overdue_in_s(), math.inf)
    self.send()
    self.assertEmpty(self.unacked.unsent())
    self.assertEmpty(self.unacked.overdue())

  def test_unacknowledged_blocks_become_overdue(self):
    self.send()
    self.now += 1.5
    self.assertEqual(self.unacked.overdue_in_s(), 0.5)
    self.unacked.acknowledge(2)
    self.now += 0.5
    (overdue,) = self.unacked.overdue()
    self.assertEqual(overdue.sequence, 2)
    self.unacked.seen(overdue)
    self.assertEmpty(self.unacked.overdue())
    # It is there: each time the pause doubles.
    self.assertEqual(self.unacked.overdue_in_s(), 4.0)
    for _ in range(10):
      self.unacked.seen(overdue)
    self.assertEqual(self.unacked.overdue_in_s(), 8.0)
    self.unacked.forget_sent()
    self.unacked.sent(overdue)
    self.assertEqual(self.unacked.overdue_in_s(), 2.0)

  def test_requested_block_is_resent(self):
    self.send()
    self.unacked.send_again(-1)
    self.assertEmpty(self.unacked.unsent())
    self.unacked.send_again(1)
    self.assertEqual([m.sequence for m in self.unacked.unsent()], [1])

  def test_acknowledged_positions_never_fall(self):
    self.assertEqual(
        (self.unacked.first, self.unacked.acked["prompts"]), (0, 0)
    )
    self.unacked.acknowledge(2)
    self.assertEqual(
        (self.unacked.first, self.unacked.acked["prompts"]), (2, 2)
    )
    self.unacked.acknowledge(1)
    self.assertEqual(self.unacked.first, 2)
    self.unacked.acknowledge(3)
    self.assertEqual(
        (self.unacked.first, self.unacked.acked["prompts"]), (3, 3)
    )

  def test_numbers_go_on_after_an_acknowledgement(self):
    self.unacked.acknowledge(3)
    self.assertEmpty(self.unacked)
    self.unacked.add(b"d", {})
    self.assertEqual([m.sequence for m in self.unacked.unsent()], [3])

  def test_all_are_unsent_after_the_store_was_lost(self):
    self.send()
    self.unacked.acknowledge(1)
    self.unacked.forget_sent()
    self.assertEqual([m.data for m in self.unacked.unsent()], [b"b", b"c"])
