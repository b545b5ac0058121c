# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0

import threading
import time

from absl.testing import absltest

from tba_jax.transport import byte_store
from tests.support import in_process
from tests.transport import contract


class InProcessTest(contract.TransportContract, absltest.TestCase):

  def setUp(self):
    super().setUp()
    self.store = in_process.InProcessStore()

  def make_client(self):
    return in_process.InProcessTransport(self.store)

  def lose_generation(self):
    self.store.lose()

  def test_reconnect_waits_for_store(self):
    client = self.make_client()
    self.store.lose(restart=False)
    timer = threading.Timer(0.2, self.store.restart)
    timer.start()
    self.assertEqual(client.reconnect(30.0), 2)
    timer.join()

  def test_reconnect_ends_at_its_deadline(self):
    client = self.make_client()
    self.store.lose(restart=False)
    start = time.monotonic()
    with self.assertRaisesRegex(
        byte_store.DeadlineExceededError, "after 1 within"
    ):
      client.reconnect(0.1)
    self.assertGreaterEqual(time.monotonic() - start, 0.1)
    with self.assertRaises(byte_store.DeadlineExceededError):
      in_process.InProcessTransport(self.store, deadline_s=0.0)

  def test_restart_of_live_store_does_nothing(self):
    client = self.make_client()
    client.put("a", b"x")
    self.store.restart()
    self.assertEqual(client.get("a"), b"x")
    self.assertEqual(self.store.generation, 1)


class CheckTest(absltest.TestCase):

  def test_size_of_value_is_limited(self):
    limit = byte_store.MAX_VALUE_BYTES
    self.addCleanup(setattr, byte_store, "MAX_VALUE_BYTES", limit)
    byte_store.MAX_VALUE_BYTES = 4
    byte_store.check_value("k", b"1234")
    with self.assertRaisesRegex(ValueError, "has 5 bytes; must have at most 4"):
      byte_store.check_value("k", b"12345")
