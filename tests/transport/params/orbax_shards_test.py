# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Shards of params in folders: readers, and peers of one trainer."""

import threading
from unittest import mock

import numpy as np

from tba_jax.transport import wire
from tba_jax.transport.params import orbax_shards
from tba_jax.transport.params import pace
from tba_jax.transport.params import peers as peers_lib
from tba_jax.transport.params import version
from tests.transport.params import carrier_test


class OrbaxTest(carrier_test.CarrierCase):

  def setUp(self):
    super().setUp()
    self.carrier = self.make("orbax")

  def add_reader(self, packed, key="x/reads/gone"):
    message = {
        "run": "run",
        "key": key,
        "folder": packed.carried["folder"],
        "who": "process 7 of h",
    }
    data = wire.encode_message(message, carrier_test.KEYS["secret"])
    self.transport.put(key, data)
    return key

  def test_dropped_version_is_removed(self):
    first = self.publish(self.carrier)
    second = self.publish(self.carrier, version.Version(1, 4))
    self.assertLen(self.files(), 2)
    self.drop(self.carrier, first)
    self.assertEqual(self.files(), [second.carried["folder"]])
    self.assertIsNotNone(self.read(self.carrier, second))
    self.transport.delete(f"p/{second.tag}")
    self.carrier.drop(second)
    self.carrier.close()
    self.assertEmpty(self.files())

  def test_version_packed_again_has_another_folder(self):
    first, again = self.publish(self.carrier), self.publish(self.carrier)
    self.assertIsNotNone(self.read(self.carrier, first))
    self.carrier.serve(self.transport, again)
    self.assertEqual(self.files(), [again.carried["folder"]])
    self.assertIsNotNone(self.read(self.carrier, again))

  def test_dropped_version_is_kept_while_it_is_read(self):
    packed = self.publish(self.carrier)
    entered, go_on = threading.Event(), threading.Event()
    opening = orbax_shards.open_array

    def wait_and_open(*args):
      entered.set()
      go_on.wait(20)
      return opening(*args)

    self.enter_context(
        mock.patch.object(orbax_shards, "open_array", wait_and_open)
    )
    result = []
    reader = self.make("orbax")
    thread = threading.Thread(
        target=lambda: result.append(self.read(reader, packed))
    )
    thread.start()
    self.assertTrue(entered.wait(20))
    self.drop(self.carrier, packed)
    self.assertLen(self.files(), 1)
    go_on.set()
    thread.join()
    np.testing.assert_array_equal(result[0]["['b']"], self.leaves["['b']"])
    self.carrier.serve(self.transport, None)
    self.assertEmpty(self.files())

  def test_dead_reader_is_named_at_deadline(self):
    writer = self.make("orbax", deadline_s=30.0)
    packed = self.publish(writer)
    key = self.add_reader(packed)
    self.transport.put("x/reads/forged", b"forged")
    self.drop(writer, packed)
    self.assertLen(self.files(), 1)
    self.assertEqual(list(self.transport.list("x")), [key])
    writer._reading = pace.Pace(0.0)
    writer._num_bytes = 0
    with self.assertLogs("absl", level="WARNING") as logs:
      writer.serve(self.transport, None)
    self.assertIn("process 7 of h", logs.output[0])
    self.assertEmpty(self.files())
    self.assertEmpty(self.transport.list("x"))

  def test_torn_leaf_is_named(self):
    packed = self.publish(self.carrier)
    expected = self.leaves["['b']"].tobytes()[400:440]
    hits = 0
    for file in self.path.rglob("d/*"):
      data = file.read_bytes()
      if (at := data.find(expected)) >= 0:
        file.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        hits += 1
    self.assertEqual(hits, 1)
    with self.assertRaisesRegex(wire.WireError, r"leaf \['b'\] is torn"):
      self.read(self.carrier, packed)
    self.assertEmpty(self.transport.list("x"))

  def test_folder_without_data_is_refused(self):
    packed = self.publish(self.carrier)
    for file in self.path.rglob("d/*"):
      file.unlink()
    with self.assertRaisesRegex(wire.WireError, "NOT_FOUND|[Nn]o such file"):
      self.read(self.carrier, packed)

  def test_leaf_of_another_dtype_is_named(self):
    packed = self.publish(self.carrier)
    self.specs["['e']"] = ((2,), np.dtype(np.int8))
    with self.assertRaisesRegex(wire.WireError, r"leaf \['e'\] is bool"):
      self.read(self.carrier, packed)

  def test_read_from_hanging_storage_ends_at_deadline(self):
    packed = self.publish(self.carrier)
    release = threading.Event()
    self.addCleanup(release.set)
    self.enter_context(
        mock.patch.object(
            orbax_shards, "open_array", lambda *_: release.wait(20)
        )
    )
    with self.assertRaisesRegex(wire.WireError, "not done within 0 s"):
      self.read(self.make("orbax", deadline_s=0.2), packed)
    self.assertEmpty(self.transport.list("x"))

  def test_version_without_peers_shards_fails(self):
    peers = mock.create_autospec(peers_lib.Leader, instance=True)
    peers.collect.side_effect = OSError("process 1 of the trainer")
    writer = self.make("orbax", peers=peers)
    with self.assertRaisesRegex(OSError, "process 1 of the trainer"):
      writer.pack(carrier_test.VERSION, self.leaves)
