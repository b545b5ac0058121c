# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Tests of the reader of leases: each once, none that is not the run's."""

from unittest import mock

from absl.testing import absltest

from tba_jax.replay import queue_server
from tba_jax.transport import wire
from tests.support import in_process

_SECRET = b"s" * 32


class LeaseReaderTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    self.now = 10.0
    self.refused = []
    store = in_process.InProcessStore()
    self.client = in_process.InProcessTransport(store)
    self.reader = queue_server.LeaseReader(
        run_id="run",
        secret=_SECRET,
        refuse=self.refused.append,
        clock=lambda: self.now,
    )

  def put(self, sid, beat, run="run", place=None):
    lease = wire.encode_message({"run": run, "sid": sid, "beat": beat}, _SECRET)
    self.client.put(f"live/{place or sid}", lease)

  def read(self):
    return {s: le["beat"] for s, le in self.reader.read(self.client).items()}

  def test_what_has_not_changed_is_not_read_again(self):
    self.put("a", 1)
    self.put("b", 1)
    self.assertEqual(self.read(), {"a": 1, "b": 1})
    self.put("a", 2)
    with mock.patch.object(
        wire, "decode_message", side_effect=wire.decode_message
    ) as decode:
      self.assertEqual(self.read(), {"a": 2})
    decode.assert_called_once()
    self.assertEqual(self.read(), {})

  def test_what_is_no_lease_is_refused_and_removed(self):
    self.put("a", 1)
    self.put("b", 1, run="other")
    self.put("c", 1, place="d")
    self.client.put("live/e", b"forged")
    self.assertEqual(self.read(), {"a": 1})
    self.assertLen(self.refused, 1)
    self.assertIsNone(self.client.get("live/e"))

  def test_looks_take_a_twentieth_of_the_time_at_most(self):
    self.assertTrue(self.reader.is_due())
    self.read()
    self.now += 0.2
    self.assertFalse(self.reader.is_due())
    self.now += 0.1
    self.assertTrue(self.reader.is_due())
    slow = self.client.list

    def list_slowly(directory):
      self.now += 0.1
      return slow(directory)

    with mock.patch.object(self.client, "list", list_slowly):
      self.read()
    self.now += 1.8
    self.assertFalse(self.reader.is_due())
    self.now += 0.2
    self.assertTrue(self.reader.is_due())


if __name__ == "__main__":
  absltest.main()
