# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Tests of shards.py and orbax_folder.py: whole, checked, safe to remove."""

import os
import pathlib
import threading
import time

from absl.testing import absltest
from absl.testing import parameterized
import jax.numpy as jnp
import numpy as np

from tba_jax.transport import carrier as carrier_lib
from tba_jax.transport import carrier_files
from tba_jax.transport import carrier_orbax
from tba_jax.transport import wire
from tests.support import in_process

TAG = "00000001.0000000003"
KEYS = {"run_id": "run", "secret": b"s" * 32}


def make_leaves():
  rng = np.random.default_rng(0)
  return {
      "['a']": jnp.asarray(rng.normal(size=(3, 5)).astype(np.float32)),
      "['b']": rng.normal(size=(70, 40)).astype(np.float32),
      "['c']": jnp.asarray(1.5, jnp.bfloat16),
      "['d']": np.zeros((0, 4), np.int32),
      "['e']": np.asarray([True, False]),
  }


class ShardsTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.path = pathlib.Path(self.create_tempdir().full_path) / "run/shards"
    self.store = in_process.InProcessStore()
    self.transport = self.connect()
    self.carrier = self.make()
    self.leaves = make_leaves()
    self.specs = carrier_lib.specs_of(self.leaves)

  def connect(self):
    return in_process.InProcessTransport(self.store)

  def make(self, deadline_s=30.0, **settings):
    carrier = carrier_orbax.OrbaxShards(
        str(self.path), deadline_s=deadline_s, **KEYS, **settings
    )
    self.addCleanup(carrier.close)
    return carrier

  def publish(self, tag=TAG):
    packed = self.carrier.pack(tag, self.leaves)
    self.transport.put(f"p/{tag}/meta", b"the manifest")
    return packed

  def drop(self, packed):
    self.transport.delete(f"p/{packed.tag}")
    self.carrier.drop(packed)

  def read(self, packed, carrier=None):
    return (carrier or self.carrier).read(
        self.transport, packed.tag, packed.carried, self.specs
    )

  def folders(self):
    return sorted(path.name for path in self.path.iterdir())

  def test_what_was_packed_is_read_bit_for_bit(self):
    found = self.read(self.publish())
    self.assertEqual(list(found), list(self.leaves))
    for name, leaf in self.leaves.items():
      self.assertEqual(found[name].dtype, leaf.dtype)
      self.assertEqual(found[name].shape, leaf.shape)
      np.testing.assert_array_equal(found[name], np.asarray(leaf))
    self.assertEqual(self.path.stat().st_mode & 0o777, 0o700)
    # Nobody reads any more.
    self.assertEqual(self.transport.list("x"), {})

  def test_two_versions_are_there_and_the_dropped_one_goes(self):
    first, second = self.publish(), self.publish("00000001.0000000004")
    self.assertLen(self.folders(), 2)
    self.assertIsNotNone(self.read(first))
    self.drop(first)
    self.carrier.serve(self.transport, second)
    self.assertEqual(self.folders(), [second.carried["folder"]])
    self.assertIsNone(self.read(first))
    self.assertIsNotNone(self.read(second))
    self.drop(second)
    self.carrier.close()
    self.assertEmpty(self.folders())

  def test_a_version_that_is_packed_again_has_a_folder_of_its_own(self):
    first = self.publish()
    again = self.publish()
    self.assertIsNotNone(self.read(first))
    self.carrier.serve(self.transport, again)
    self.assertEqual(self.folders(), [again.carried["folder"]])
    self.assertIsNotNone(self.read(again))

  def test_what_somebody_reads_stays_until_it_is_read(self):
    packed = self.publish()
    entered, go_on = threading.Event(), threading.Event()
    opening = carrier_orbax.open_array

    def wait_and_open(*args):
      entered.set()
      go_on.wait(20)
      return opening(*args)

    self.enter_context(
        absltest.mock.patch.object(carrier_orbax, "open_array", wait_and_open)
    )
    found = []
    thread = threading.Thread(
        target=lambda: found.append(self.read(packed, self.make()))
    )
    thread.start()
    self.assertTrue(entered.wait(20))
    self.drop(packed)
    self.carrier.serve(self.transport, None)
    self.assertLen(self.folders(), 1)
    go_on.set()
    thread.join()
    np.testing.assert_array_equal(found[0]["['b']"], self.leaves["['b']"])
    self.carrier.serve(self.transport, None)
    self.assertEmpty(self.folders())

  def test_a_reader_that_died_is_named_and_waited_for_no_longer(self):
    self.carrier = self.make(deadline_s=0.2)
    self.carrier._dropped = {}
    packed = self.make().pack(TAG, self.leaves)
    self.carrier._folders[TAG] = packed.carried["folder"]
    key = "x/reads/gone"
    self.transport.put(
        key,
        wire.encode_message(
            {
                "run": "run",
                "key": key,
                "folder": packed.carried["folder"],
                "who": "process 7 of h",
            },
            KEYS["secret"],
        ),
    )
    self.transport.put("x/reads/forged", b"forged")
    self.drop(packed)
    self.carrier.serve(self.transport, None)
    self.assertLen(self.folders(), 1)
    self.assertEqual(list(self.transport.list("x")), [key])
    time.sleep(0.25)
    with self.assertLogs("absl", level="WARNING") as logs:
      self.carrier.serve(self.transport, None)
    self.assertIn("process 7 of h", logs.output[0])
    self.assertEmpty(self.folders())
    self.assertEqual(self.transport.list("x"), {})

  def test_a_torn_leaf_is_named(self):
    packed = self.publish()
    wanted = np.asarray(self.leaves["['b']"]).tobytes()[400:440]
    hits = 0
    for file in self.path.rglob("d/*"):
      data = file.read_bytes()
      if (at := data.find(wanted)) >= 0:
        torn = bytes([data[at] ^ 1])
        file.write_bytes(data[:at] + torn + data[at + 1 :])
        hits += 1
    self.assertEqual(hits, 1)
    with self.assertRaisesRegex(wire.WireError, r"leaf \['b'\] is torn"):
      self.read(packed)
    self.assertEqual(self.transport.list("x"), {})

  def test_a_folder_that_lost_its_data_is_refused(self):
    packed = self.publish()
    for file in self.path.rglob("d/*"):
      file.unlink()
    with self.assertRaisesRegex(wire.WireError, "NOT_FOUND|[Nn]o such file"):
      self.read(packed)

  def test_a_missing_leaf_or_shard_is_named(self):
    packed = self.publish()
    found = packed.carried["shards"]
    held = found.pop("['b']")
    with self.assertRaisesRegex(wire.WireError, r"leaf \['b'\] is not in"):
      self.read(packed)
    found["['b']"] = [([[0, 69], [0, 40]], held[0][1])]
    with self.assertRaisesRegex(wire.WireError, r"'b'\]: .* 2760 of 2800"):
      self.read(packed)

  def test_a_leaf_of_another_dtype_is_named(self):
    packed = self.publish()
    self.specs["['e']"] = ((2,), np.dtype(np.int8))
    with self.assertRaisesRegex(wire.WireError, r"leaf \['e'\] is bool"):
      self.read(packed)

  def test_a_place_that_readers_do_not_share_is_told(self):
    packed = self.publish()
    other = carrier_orbax.OrbaxShards(
        str(self.path) + "2", deadline_s=5.0, **KEYS
    )
    self.addCleanup(other.close)
    with self.assertRaisesRegex(wire.WireError, "publish.directory"):
      self.read(packed, other)

  def test_storage_that_hangs_costs_a_deadline_not_the_reader(self):
    packed = self.publish()
    release = threading.Event()
    self.addCleanup(release.set)
    self.enter_context(
        absltest.mock.patch.object(
            carrier_orbax, "open_array", lambda *_: release.wait(20)
        )
    )
    with self.assertRaisesRegex(wire.WireError, "not done within 0 s"):
      self.read(packed, self.make(deadline_s=0.2))
    self.assertEqual(self.transport.list("x"), {})

  def test_no_room_names_the_setting_and_leaves_nothing(self):
    def full(*unused):
      raise ValueError("RESOURCE_EXHAUSTED: No space left on device")

    with absltest.mock.patch.object(carrier_orbax, "write_folder", full):
      with self.assertRaisesRegex(OSError, "No space.*publish.directory"):
        self.carrier.pack(TAG, self.leaves)
    self.carrier.serve(self.transport, None)
    self.assertEmpty(self.folders())

  def test_what_another_process_did_not_write_is_no_version(self):
    class Peers:

      def begin(self, tag, folder):
        pass

      def collect(self):
        raise OSError("process 1 of the trainer did not write its shards")

    carrier = self.make(peers=Peers())
    with self.assertRaisesRegex(OSError, "process 1 of the trainer"):
      carrier.pack(TAG, self.leaves)

  def test_an_earlier_trainer_s_folders_are_removed(self):
    old = self.publish("00000001.0000000900")
    os.mkdir(self.path / "00000001.0000000901.77")
    late = self.make()
    new = late.pack("00000002.0000000001", self.leaves)
    late.clean(new.tag)
    late.serve(self.transport, new)
    self.assertEqual(self.folders(), [new.carried["folder"]])
    with self.assertRaises(wire.WireError):
      self.read(old)

  def test_the_place_may_be_an_object_store(self):
    place = carrier_files.shards_directory(
        "gs://bucket/params/", self.path, "r7"
    )
    self.assertEqual(place, "gs://bucket/params/params-r7/shards")
    own = carrier_files.shards_directory("", self.path, "r7")
    self.assertEqual(
        own, f"{carrier_files.files_directory('', self.path, 'r7')}/shards"
    )


if __name__ == "__main__":
  absltest.main()
