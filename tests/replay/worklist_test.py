# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Tests of the work list: each block once, of the newest trainer."""

from absl.testing import absltest

from tba_jax.replay import queue_client


def _message(epoch, count, *blocks):
  blocks = [[block, -1, [[block, 7, 0]]] for block in blocks]
  return {"epoch": epoch, "count": count, "blocks": blocks}


class WorkListTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    self.work = queue_client.WorkList()

  def blocks(self):
    return [(b.epoch, b.block) for b in self.work.blocks]

  def test_a_block_is_listed_once_however_often_it_is_heard(self):
    self.assertEqual(self.work.epoch, -1)
    self.assertTrue(self.work.hear(_message(1, 1, 4, 5)))
    block = self.work.blocks.pop(0)
    self.assertEqual(block, queue_client.Block(1, 4, -1, ((4, 7, 0),)))
    # It is being sampled: it stands in the message until it is delivered.
    self.assertTrue(self.work.hear(_message(1, 2, 4, 5, 6)))
    self.assertEqual(self.blocks(), [(1, 5), (1, 6)])

  def test_no_news(self):
    self.work.hear(_message(2, 3, 4))
    for message in (_message(2, 3, 9), _message(2, 2, 9), _message(1, 8, 9)):
      self.assertFalse(self.work.hear(message))
    self.assertEqual(self.blocks(), [(2, 4)])

  def test_what_is_not_listed_any_more_goes(self):
    self.work.hear(_message(1, 1, 4, 5))
    self.work.hear(_message(1, 2, 5))
    self.assertEqual(self.blocks(), [(1, 5)])

  def test_a_new_trainer_counts_anew(self):
    self.work.hear(_message(1, 50, 40, 41))
    self.work.hear(_message(2, 1, 0))
    self.assertEqual(self.blocks(), [(2, 0)])
    self.assertEqual(self.work.epoch, 2)


if __name__ == "__main__":
  absltest.main()
