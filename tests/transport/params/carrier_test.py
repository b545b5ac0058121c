# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""All carriers: params are complete and verified, or refused."""

import os
import pathlib
from unittest import mock

from absl.testing import parameterized
import jax
import jax.numpy as jnp
import numpy as np

from tba_jax.system import processes
from tba_jax.transport import wire
from tba_jax.transport.params import carrier
from tba_jax.transport.params import network
from tba_jax.transport.params import orbax_shards
from tba_jax.transport.params import seal as seal_lib
from tba_jax.transport.params import shared_files
from tba_jax.transport.params import store_chunks
from tba_jax.transport.params import version
from tests.support import in_process

VERSION = version.Version(1, 3)
TAG = VERSION.tag
KEYS = {"run_id": "run", "secret": b"s" * 32}


def make_leaves():
  rng = np.random.default_rng(0)
  return {
      "['a']": jnp.asarray(rng.normal(size=(3, 5)).astype(np.float32)),
      # Over one piece of 1 MiB.
      "['b']": rng.normal(size=(700, 400)).astype(np.float32),
      "['c']": jnp.asarray([1.5, 2.25, 3e5, 0.1, -7, 9], jnp.bfloat16),
      "['d']": np.zeros((0, 4), np.int32),
      "['e']": np.asarray([True, False]),
      "['f']": np.asarray(2.5, np.float32),
  }


class CarrierCase(parameterized.TestCase):
  """Base of the carriers' tests; `name` is of the carrier."""

  def setUp(self):
    super().setUp()
    folder = pathlib.Path(self.create_tempdir().full_path)
    self.path = folder / "run" / "params"
    self.transport = in_process.InProcessTransport(in_process.InProcessStore())
    self.leaves = make_leaves()
    self.specs = version.specs_of(self.leaves)

  def make(self, name, path=None, deadline_s=30.0, **settings):
    path = path or self.path
    made = {
        "store": store_chunks.StoreChunks,
        "files": lambda: shared_files.SharedFiles(path, **KEYS),
        "network": lambda: network.Network(
            lambda: "127.0.0.1:0", stall_s=deadline_s, **KEYS, **settings
        ),
        "orbax": lambda: orbax_shards.OrbaxShards(
            str(path), deadline_s=deadline_s, **KEYS, **settings
        ),
    }[name]()
    self.addCleanup(made.close)
    return made

  def publish(self, writer, number=VERSION):
    packed = writer.pack(number, self.leaves)
    writer.send(self.transport, packed)
    self.transport.put(f"p/{packed.tag}/meta", b"the manifest")
    return packed

  def drop(self, writer, packed):
    self.transport.delete(f"p/{packed.tag}")
    writer.drop(packed)
    writer.serve(self.transport, None)

  def read(self, reader, packed):
    return reader.read(self.transport, packed.tag, packed.carried, self.specs)

  def files(self):
    return sorted(path.name for path in self.path.iterdir())


class CarrierTest(CarrierCase):

  @parameterized.parameters("store", "files", "network", "orbax")
  def test_leaves_are_read_bit_for_bit_until_they_are_dropped(self, name):
    writer, reader = self.make(name), self.make(name)
    packed = self.publish(writer)
    result = self.read(reader, packed)
    self.assertEqual(list(result), list(self.leaves))
    for leaf_name, leaf in self.leaves.items():
      self.assertEqual(result[leaf_name].dtype, leaf.dtype)
      self.assertEqual(result[leaf_name].shape, leaf.shape)
      np.testing.assert_array_equal(result[leaf_name], np.asarray(leaf))
    self.drop(writer, packed)
    self.assertIsNone(self.read(reader, packed))
    self.assertEmpty(self.transport.list("x"))
    if name in ("files", "orbax"):
      self.assertEqual(self.path.stat().st_mode & 0o777, 0o700)
      self.assertEmpty(self.files())

  @parameterized.parameters(
      ("store", "digests"),
      ("files", "files"),
      ("network", "sources"),
      ("orbax", "shards"),
  )
  def test_incomplete_data_is_refused(self, name, field):
    carried = self.make(name)
    packed = self.publish(carried)
    if field == "digests":
      del packed.carried[field][-1]
    elif field == "files":
      os.truncate(self.path / f"{TAG}.params" / "0", 100)
    elif field == "sources":
      del packed.carried[field][0]["shards"][1]
    else:
      packed.carried[field]["['b']"] = [([[0, 69], [0, 40]], "")]
    with self.assertRaises(wire.WireError):
      self.read(carried, packed)

  @parameterized.parameters("files", "orbax")
  def test_missing_leaf_is_named(self, name):
    writer = self.make(name)
    packed = self.publish(writer)
    if name == "files":
      packed.carried["files"] = [
          [leaf for leaf in names if leaf != "['b']"]
          for names in packed.carried["files"]
      ]
    else:
      del packed.carried["shards"]["['b']"]
    with self.assertRaisesRegex(wire.WireError, r"leaf \['b'\] is not in"):
      self.read(writer, packed)

  @parameterized.parameters("files", "orbax")
  def test_unshared_directory_raises(self, name):
    packed = self.publish(self.make(name))
    reader = self.make(name, self.path.with_name("other"))
    with self.assertRaisesRegex(wire.WireError, "publish.directory"):
      self.read(reader, packed)

  @parameterized.parameters("files", "orbax")
  def test_full_disk_names_setting_and_leaves_no_files(self, name):
    full = OSError(28, "No space left on device")
    target = {
        "files": (shared_files, "_write_all"),
        "orbax": (orbax_shards, "write_folder"),
    }[name]
    writer = self.make(name)
    with mock.patch.object(*target, side_effect=full):
      with self.assertRaisesRegex(OSError, "config.publish.directory"):
        writer.pack(VERSION, self.leaves)
    writer.serve(self.transport, None)
    self.assertEmpty(self.files())

  @parameterized.parameters("files", "orbax")
  def test_versions_of_earlier_trainer_are_removed(self, name):
    old = self.publish(self.make(name), version.Version(1, 900))
    partial = self.path / (".00000001.0000000901.77"[name == "orbax" :])
    partial.mkdir()
    writer = self.make(name)
    new = self.publish(writer, version.Version(2, 1))
    writer.clean(new.tag)
    writer.serve(self.transport, new)
    self.assertLen(self.files(), 1)
    self.assertIsNotNone(self.read(writer, new))
    self.transport.delete(f"p/{old.tag}")
    self.assertIsNone(self.read(writer, old))


class StoreTest(CarrierCase):

  def setUp(self):
    super().setUp()
    self.carrier = self.make("store")
    self.packed = self.publish(self.carrier)

  def test_chunks_are_small(self):
    sizes = [len(v) for v in self.transport.list(f"p/{TAG}").values()]
    self.assertLen(sizes, 3)  # And the manifest.
    self.assertLessEqual(max(sizes), carrier.PIECE_BYTES)

  def test_torn_chunk_names_its_leaves(self):
    self.transport.put(f"p/{TAG}/000001", b"torn")
    with self.assertRaises(wire.WireError) as caught:
      self.read(self.carrier, self.packed)
    for name in self.leaves:
      named = name in str(caught.exception)
      self.assertEqual(named, name not in ("['a']", "['d']"), name)

  def test_missing_chunk_means_dropped_version(self):
    self.transport.delete(f"p/{TAG}/000001")
    self.assertIsNone(self.read(self.carrier, self.packed))


class FilesTest(CarrierCase):

  def setUp(self):
    super().setUp()
    self.carrier = self.make("files")
    self.packed = self.publish(self.carrier)
    self.folder = self.path / f"{TAG}.params"

  def test_file_of_remote_file_system_is_read(self):
    with mock.patch.object(shared_files, "is_local", lambda path: False):
      result = self.read(self.carrier, self.packed)
    np.testing.assert_array_equal(result["['b']"], self.leaves["['b']"])

  def test_leaves_are_aligned_read_only_views(self):
    for leaf in self.read(self.carrier, self.packed).values():
      if leaf.size:
        self.assertEqual(leaf.__array_interface__["data"][0] % 64, 0)
        self.assertFalse(leaf.flags.writeable)

  def test_mapped_leaves_outlive_their_file(self):
    result = jax.device_put(self.read(self.carrier, self.packed))
    self.drop(self.carrier, self.packed)
    self.assertFalse(self.folder.exists())
    np.testing.assert_array_equal(result["['b']"], self.leaves["['b']"])

  @parameterized.parameters(
      ("['a']", 5), ("['b']", 5), ("['b']", 1_050_000), ("['c']", 1)
  )
  def test_torn_leaf_is_named(self, name, position):
    expected = np.asarray(self.leaves[name]).tobytes()[:64]
    for path in self.folder.iterdir():
      data = bytearray(path.read_bytes())
      if (at := data.find(expected)) >= 0:
        data[at + position] ^= 1
        path.write_bytes(data)
    with self.assertRaisesRegex(
        wire.WireError, rf"leaf \{name[:-1]}\] is torn"
    ):
      self.read(self.carrier, self.packed)

  def test_every_forged_byte_is_noticed(self):
    """Of the leaves and of their tags; bytes between leaves are free."""
    for path in self.folder.iterdir():
      data = path.read_bytes()
      tail = seal_lib.TAG_BYTES
      path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
      with self.assertRaisesRegex(wire.WireError, "is torn"):
        self.read(self.carrier, self.packed)
      path.write_bytes(data[:-tail] + bytes(tail))
      with self.assertRaisesRegex(wire.WireError, "is torn"):
        self.read(self.carrier, self.packed)
      path.write_bytes(data)
    self.assertIsNotNone(self.read(self.carrier, self.packed))

  def test_files_of_another_version_are_refused(self):
    other = self.publish(self.make("files"), version.Version(1, 4))
    for path in self.folder.iterdir():
      path.write_bytes(
          (self.path / f"{other.tag}.params" / path.name).read_bytes()
      )
    with self.assertRaisesRegex(wire.WireError, "is torn"):
      self.read(self.carrier, self.packed)

  def test_leaves_are_spread_over_files(self):
    with mock.patch.object(
        processes, "available_cores", return_value=[0, 1, 2]
    ):
      writer = self.make("files", self.path.with_name("three"))
    packed = self.publish(writer)
    folder = self.path.with_name("three") / f"{TAG}.params"
    sizes = sorted(path.stat().st_size for path in folder.iterdir())
    self.assertLen(sizes, 3)
    self.assertGreater(sizes[0], 0)
    # The largest leaf has a file of its own, but for tags.
    self.assertEqual(sizes[2], 700 * 400 * 4 + 2 * seal_lib.TAG_BYTES)
    # A reader with another number of threads finds all of them.
    reader = self.make("files", self.path.with_name("three"))
    self.assertIsNotNone(self.read(reader, packed))

  def test_run_has_its_own_directories(self):
    of = lambda setting, run: shared_files.files_directory(
        setting, self.path, run
    )
    shared = str(self.path / "shared")
    self.assertEqual(of(shared, "r7"), self.path / "shared" / "params-r7")
    self.assertNotEqual(of("", "r7"), of("", "r8"))
    shards = shared_files.shards_directory
    self.assertEqual(
        shards("gs://bucket/params/", self.path, "r7"),
        "gs://bucket/params/params-r7/shards",
    )
    self.assertEqual(shards("", self.path, "r7"), f"{of('', 'r7')}/shards")

  def test_accessible_directory_is_refused(self):
    self.path.chmod(0o755)
    with self.assertRaisesRegex(ValueError, "publish.directory.*0755"):
      self.carrier.pack(VERSION, self.leaves)
