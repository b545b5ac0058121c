# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Tests of files.py and directory.py: whole, checked, and safe to remove."""

import os
import pathlib

from absl.testing import absltest
from absl.testing import parameterized
import jax
import jax.numpy as jnp
import numpy as np

from tba_jax.transport import carrier
from tba_jax.transport import carrier_files
from tba_jax.transport import wire
from tests.support import in_process

TAG = "00000001.0000000003"


def make_leaves():
  rng = np.random.default_rng(0)
  return {
      "['a']": jnp.asarray(rng.normal(size=(3, 5)).astype(np.float32)),
      # Over one piece of 1 MiB.
      "['b']": rng.normal(size=(700, 400)).astype(np.float32),
      "['c']": jnp.asarray(1.5, jnp.bfloat16),
      "['d']": np.zeros((0, 4), np.int32),
      "['e']": np.asarray([True, False]),
  }


class FilesTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    # Not in create_tempdir, which may be on another file system.
    self.path = pathlib.Path(self.create_tempdir().full_path) / "params"
    self.carrier = carrier_files.Files(self.path)
    self.addCleanup(self.carrier.close)
    self.transport = in_process.InProcessTransport(in_process.InProcessStore())
    self.leaves = make_leaves()
    self.specs = carrier.specs_of(self.leaves)
    self.file = self.path / f"{TAG}.params"

  def read(self, packed):
    return self.carrier.read(
        self.transport, packed.tag, packed.carried, self.specs
    )

  @parameterized.parameters(True, False)
  def test_what_was_packed_is_read_bit_for_bit(self, local):
    if not local:
      self.enter_context_of_another_machine()
    packed = self.carrier.pack(TAG, self.leaves)
    found = self.read(packed)
    self.assertEqual(list(found), list(self.leaves))
    for name, leaf in self.leaves.items():
      self.assertEqual(found[name].dtype, leaf.dtype)
      np.testing.assert_array_equal(found[name], np.asarray(leaf))
    self.assertEqual(self.path.stat().st_mode & 0o777, 0o700)
    self.assertEqual([p.name for p in self.path.iterdir()], [self.file.name])

  def enter_context_of_another_machine(self):
    is_local, carrier_files.is_local = (
        carrier_files.is_local,
        lambda path: False,
    )
    self.addCleanup(setattr, carrier_files, "is_local", is_local)

  def test_leaves_may_be_used_in_place(self):
    found = self.read(self.carrier.pack(TAG, self.leaves))
    for leaf in found.values():
      if leaf.size:
        self.assertEqual(leaf.__array_interface__["data"][0] % 64, 0)
        self.assertFalse(leaf.flags.writeable)

  def test_who_has_mapped_a_version_keeps_it(self):
    packed = self.carrier.pack(TAG, self.leaves)
    found = jax.device_put(self.read(packed))
    self.carrier.drop(packed)
    self.assertFalse(self.file.exists())
    np.testing.assert_array_equal(found["['b']"], self.leaves["['b']"])
    # Its manifest is gone too, as the publisher has removed that first.
    self.assertIsNone(self.read(packed))

  @parameterized.parameters(("['a']", 5), ("['b']", 1_050_000), ("['e']", -1))
  def test_a_torn_leaf_is_named(self, name, position):
    packed = self.carrier.pack(TAG, self.leaves)
    data = bytearray(self.file.read_bytes())
    data[position] ^= 1
    self.file.write_bytes(data)
    with self.assertRaisesRegex(
        wire.WireError, rf"leaf \{name[:-1]}\] is torn"
    ):
      self.read(packed)

  def test_a_missing_leaf_is_named(self):
    packed = self.carrier.pack(TAG, self.leaves)
    del packed.carried["digests"]["['b']"]
    with self.assertRaisesRegex(wire.WireError, r"leaf \['b'\] is not in"):
      self.read(packed)

  def test_a_short_file_is_refused(self):
    packed = self.carrier.pack(TAG, self.leaves)
    os.truncate(self.file, 100)
    with self.assertRaisesRegex(wire.WireError, "has 100 bytes of"):
      self.read(packed)

  def test_a_directory_that_readers_do_not_share_is_told(self):
    packed = self.carrier.pack(TAG, self.leaves)
    self.carrier.drop(packed)
    self.transport.put(f"p/{TAG}/meta", b"still announced")
    with self.assertRaisesRegex(wire.WireError, "publish.directory"):
      self.read(packed)

  def test_no_room_names_the_setting_and_leaves_nothing(self):
    class Full:
      shape, dtype = (2,), np.dtype(np.float32)

      def __array__(self, *unused, **unused_too):
        raise OSError(28, "No space left on device")

    with self.assertRaisesRegex(OSError, "config.publish.directory"):
      self.carrier.pack(TAG, {"['a']": Full()})
    self.assertEmpty(list(self.path.iterdir()))

  def test_an_earlier_trainer_s_files_are_removed(self):
    old = self.carrier.pack("00000001.0000000900", self.leaves)
    half = self.path / ".00000001.0000000901.77"
    half.write_bytes(b"half")
    new = self.carrier.pack("00000002.0000000001", self.leaves)
    self.carrier.clean(new.tag)
    self.assertIsNone(self.read(old))
    self.assertIsNotNone(self.read(new))
    self.assertFalse(half.exists())


class DirectoryTest(absltest.TestCase):

  def test_it_is_named_by_the_run(self):
    workdir = pathlib.Path(self.create_tempdir().full_path)
    path = carrier_files.files_directory(
        str(workdir / "shared"), workdir, "run7"
    )
    self.assertEqual(path, workdir / "shared" / "params-run7")
    own = carrier_files.files_directory("", workdir, "run7")
    self.assertNotEqual(own, carrier_files.files_directory("", workdir, "run8"))

  def test_one_that_others_may_enter_is_refused(self):
    folder = pathlib.Path(self.create_tempdir().full_path) / "params"
    folder.mkdir(mode=0o755)
    folder.chmod(0o755)
    with self.assertRaisesRegex(ValueError, "publish.directory.*0755"):
      carrier_files.prepare_directory(folder)
    folder.chmod(0o700)
    carrier_files.prepare_directory(folder)
    link = folder.parent / "link"
    link.symlink_to(folder)
    with self.assertRaisesRegex(ValueError, "publish.directory"):
      carrier_files.prepare_directory(link)


if __name__ == "__main__":
  absltest.main()
