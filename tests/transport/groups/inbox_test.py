# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Tests of the inbox: order, no loss between threads, waits that end."""

import threading

from absl.testing import absltest

from tba_jax.transport.groups import inbox as inbox_lib


def _record(offset):
  return inbox_lib.Record(offset, {"kind": "gone", "sid": "a"})


class InboxTest(absltest.TestCase):

  def test_hands_over_each_record_once_in_order(self):
    inbox = inbox_lib.Inbox()

    def put():
      for offset in range(1000):
        inbox.put(_record(offset))

    thread = threading.Thread(target=put)
    thread.start()
    taken = []
    while len(taken) < 1000 and inbox.wait(20.0):
      taken += [record.offset for record in inbox.take()]
    thread.join()
    self.assertEqual(taken, list(range(1000)))
    self.assertEmpty(inbox.take())

  def test_wait_ends_without_record(self):
    inbox = inbox_lib.Inbox()
    self.assertFalse(inbox.wait(0.01))
    inbox.put(_record(1))
    self.assertTrue(inbox.wait(0.0))
    # It is still there.
    self.assertEqual([r.offset for r in inbox.take()], [1])

  def test_record_ends_wait(self):
    inbox, woken = inbox_lib.Inbox(), threading.Event()

    def wait():
      inbox.wait(20.0)
      woken.set()

    thread = threading.Thread(target=wait)
    thread.start()
    self.assertFalse(woken.wait(0.05))
    inbox.put(_record(1))
    self.assertTrue(woken.wait(20.0))
    thread.join()

  def test_block_has_sequence(self):
    self.assertEqual(_record(1).kind, "gone")
    header = {"sid": "a", "sequence": 3}
    self.assertEqual(inbox_lib.Record(1, header, []).kind, "block")
