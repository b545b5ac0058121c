# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Tests of how often both sides of the queue ask the store."""

import time
from unittest import mock

from absl.testing import absltest

from tests.replay import queue_case
from tests.support import in_process

wait_until = queue_case.wait_until


class QuestionsTest(queue_case.QueueTestCase):

  def count(self, method, key, seconds):
    """Returns how often the store was asked for a key in so many seconds."""
    asked, ask = [], getattr(in_process.InProcessStore, method)

    def record(store, generation, name):
      asked.append(name)
      return ask(store, generation, name)

    with mock.patch.object(in_process.InProcessStore, method, record):
      time.sleep(seconds)
    return asked.count(key)

  def test_a_searcher_at_work_asks_rarely_and_one_that_waits_often(self):
    client = self.searcher("a", works=False).client
    time.sleep(0.5)
    # A pause is a quarter of the time so far, and half of what it will be.
    self.assertLess(self.count("get", "work/a", 0.3), 4)
    # It has had nothing to do all the time, but has not said so.
    self.assertIsNone(client.next_block(0.0))
    # 4 ms each at best.
    self.assertGreater(self.count("get", "work/a", 0.2), 8)

  def test_a_full_ring_asks_often(self):
    searcher = self.searcher("a", credits=1, works=False)
    searcher.submit(0)
    time.sleep(0.5)
    self.assertLess(self.count("get", "work/a", 0.3), 4)
    self.assertFalse(searcher.client.submit([self.group(1)], lambda: True))
    self.assertGreater(self.count("get", "work/a", 0.2), 8)

  def test_the_drain_looks_often_while_somebody_waits(self):
    trainer = self.trainer()
    time.sleep(0.6)
    self.assertLess(self.count("list", "new/0", 0.3), 12)
    trainer.server.urgent = True
    self.assertGreater(self.count("list", "new/0", 0.2), 12)

  def test_what_is_admitted_is_granted_at_once(self):
    trainer = self.trainer()
    self.lease("a")
    wait_until(lambda: "a" in trainer.living(), "its lease")
    with mock.patch.object(trainer.server._interval, "due_in_s", lambda: 60.0):
      # It is asleep for a minute from its next look on.
      time.sleep(0.2)
      trainer.service.open(0)
      wait_until(lambda: self.client().get("work/a"), "a grant", wait_s=5.0)


if __name__ == "__main__":
  absltest.main()
