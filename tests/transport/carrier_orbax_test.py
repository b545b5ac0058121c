# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Shards of params: boxes, folders, readers, and the peers of one trainer."""

import os
import pathlib
import threading
import time
from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized
from etils import epath
import jax.numpy as jnp
import numpy as np

from tba_jax.transport import carrier as carrier_lib
from tba_jax.transport import carrier_files
from tba_jax.transport import carrier_orbax
from tba_jax.transport import wire
from tests.support import in_process
from tests.training import cluster_test

WHOLE = np.arange(24).reshape(4, 6)
# Together they are all of it, in unequal parts.
PARTS = [[[0, 1], [0, 6]], [[1, 4], [0, 2]], [[1, 4], [2, 6]]]


class BoxesTest(parameterized.TestCase):

  @parameterized.parameters(
      ((), (2, 3), [[0, 2], [0, 3]]),
      ((slice(1, None),), (2, 3), [[1, 2], [0, 3]]),
      ((slice(None), slice(0, 2)), (2, 3), [[0, 2], [0, 2]]),
      ((), (), []),
  )
  def test_of_an_index(self, index, shape, wanted):
    self.assertEqual(carrier_orbax.box_of(index, shape), wanted)

  @parameterized.parameters(
      ([[0, 4], [0, 6]],),
      ([[0, 1], [2, 3]],),
      ([[1, 3], [1, 5]],),
      ([[2, 4], [2, 6]],),
      ([[0, 0], [0, 6]],),
  )
  def test_any_part_is_cut_from_others(self, box):
    pieces = [(part, WHOLE[carrier_orbax.box_slices(part)]) for part in PARTS]
    found = carrier_orbax.cut_box(box, WHOLE.dtype, pieces)
    np.testing.assert_array_equal(found, WHOLE[carrier_orbax.box_slices(box)])

  def test_of_one_piece_it_is_a_view(self):
    found = carrier_orbax.cut_box(
        [[1, 2], [0, 6]], WHOLE.dtype, [([[0, 4], [0, 6]], WHOLE)]
    )
    self.assertTrue(np.shares_memory(found, WHOLE))

  def test_an_array_without_axes_stays_one(self):
    found = carrier_orbax.cut_box(
        [], np.dtype(np.float32), [([], np.asarray(2.0))]
    )
    self.assertIsInstance(found, np.ndarray)
    self.assertEqual(found.shape, ())

  @parameterized.parameters(
      ([[0, 2], [0, 3]], [[1, 3], [2, 4]], True),
      ([[0, 2], [0, 3]], [[2, 3], [0, 3]], False),
      ([[0, 0], [0, 3]], [[0, 2], [0, 3]], False),
      ([], [], True),
  )
  def test_meet(self, box, other, wanted):
    self.assertEqual(carrier_orbax.intersect(box, other), wanted)

  def test_filled(self):
    self.assertEqual(carrier_orbax.filled_from((4, 6), PARTS), 24)
    self.assertEqual(carrier_orbax.filled_from((4, 6), PARTS[1:]), 18)
    self.assertEqual(carrier_orbax.filled_from((3, 6), PARTS), -1)
    self.assertEqual(carrier_orbax.filled_from((4, 6), [[[0, 4]]]), -1)
    self.assertEqual(carrier_orbax.filled_from((), [[]]), 1)


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


_SECRET = b"s" * 32


def tag(version):
  return f"00000001.{version:010d}"


class ShardPeersTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    self.client = cluster_test.FakeClient()
    self.written = []
    self.enter_context(mock.patch.object(carrier_orbax, "_POLL_S", 0.1))
    # What Orbax does with several processes is for tests/multi_process.
    self.enter_context(
        mock.patch.object(carrier_orbax, "write_folder", side_effect=self.write)
    )

  def write(self, path, leaves):
    (value,) = leaves.values()
    if value < 0:
      raise ValueError("RESOURCE_EXHAUSTED: no space left")
    self.written.append((path, value))
    return {"w": [[[[0, 2]], f"digest {value}"]]}

  def make_leader(self, num_processes=2, deadline_s=20.0):
    return carrier_orbax.Leader(
        self.client, num_processes, secret=_SECRET, deadline_s=deadline_s
    )

  def make_helper(self, process=1, deadline_s=20.0):
    helper = carrier_orbax.Helper(
        self.client,
        process,
        lambda params: {"w": np.asarray(params)},
        secret=_SECRET,
        deadline_s=deadline_s,
    )
    self.addCleanup(helper.close)
    return helper

  def test_what_is_asked_for_is_written_and_answered(self):
    leader, helper = self.make_leader(), self.make_helper()
    for version in (3, 4, 6):
      helper.submit(version, version)
    # Process 0 has left one out, which it tells.
    helper.forget(4)
    for version in (3, 6):
      leader.begin(tag(version), f"gs://b/{version}")
      found = leader.collect()
      self.assertEqual(found, [{"w": [[[[0, 2]], f"digest {version}"]]}])
    self.assertEqual(
        self.written, [(epath.Path("gs://b/3"), 3), (epath.Path("gs://b/6"), 6)]
    )
    self.assertEmpty(helper._held)
    deadline = time.monotonic() + 20
    while self.client.values:
      self.assertLess(time.monotonic(), deadline)
      time.sleep(0.01)

  def test_of_one_version_that_came_twice_the_older_goes_first(self):
    leader, helper = self.make_leader(), self.make_helper()
    helper.submit(3, 10)
    helper.submit(3, 20)
    helper.forget(3)
    leader.begin(tag(3), "/f")
    leader.collect()
    self.assertEqual(self.written, [(epath.Path("/f"), 20)])

  def test_a_version_may_come_after_it_was_asked_for(self):
    leader, helper = self.make_leader(), self.make_helper()
    leader.begin(tag(3), "/f")
    helper.submit(3, 10)
    self.assertLen(leader.collect(), 1)

  def test_who_could_not_write_is_named_with_the_cause(self):
    leader = self.make_leader(num_processes=3)
    good, bad = self.make_helper(1), self.make_helper(2)
    good.submit(3, 1)
    bad.submit(3, -1)
    leader.begin(tag(3), "/f")
    with self.assertRaisesRegex(OSError, "process 2 .*no space left"):
      leader.collect()
    # The next version has an answer of its own.
    for helper in (good, bad):
      helper.submit(4, 1)
    leader.begin(tag(4), "/f")
    self.assertLen(leader.collect(), 2)

  def test_who_does_not_answer_in_time_is_named(self):
    leader = self.make_leader(deadline_s=0.1)
    leader.begin(tag(3), "/f")
    with self.assertRaisesRegex(OSError, f"process 1 .*{tag(3)} within 0 s"):
      leader.collect()

  def test_a_version_that_never_comes_is_told(self):
    leader, _ = self.make_leader(), self.make_helper(deadline_s=0.1)
    leader.begin(tag(3), "/f")
    with self.assertRaisesRegex(OSError, "version 3 was not submitted"):
      leader.collect()

  def test_no_death_of_the_thread_goes_unseen(self):
    helper = self.make_helper()
    helper.submit(3, 1)
    leader = self.make_leader()
    with mock.patch.object(
        self.client, "key_value_delete", side_effect=TypeError("no such call")
    ):
      leader.begin(tag(3), "/f")
      until = time.monotonic() + 20
      while helper._worker.is_alive():
        self.assertLess(time.monotonic(), until)
        time.sleep(0.01)
    with self.assertRaisesRegex(TypeError, "no such call"):
      helper.submit(4, 1)
    with self.assertRaisesRegex(TypeError, "no such call"):
      helper.close()
    helper._worker._error = None  # For the clean-up.

  def test_what_others_ask_is_not_written(self):
    leader = carrier_orbax.Leader(
        self.client, 2, secret=b"x" * 32, deadline_s=20.0
    )
    self.make_helper().submit(3, 1)
    leader.begin(tag(3), "/f")
    with self.assertRaises(OSError):
      leader.collect()
    self.assertEmpty(self.written)


if __name__ == "__main__":
  absltest.main()
