# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Tests of chunks.py: params in the store, whole or refused."""

from absl.testing import absltest
import numpy as np

from tba_jax.transport import carrier
from tba_jax.transport import carrier_store
from tba_jax.transport import wire
from tests.support import in_process


class ChunksTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    self.transport = in_process.InProcessTransport(in_process.InProcessStore())
    self.carrier = carrier_store.Chunks()
    rng = np.random.default_rng(0)
    self.leaves = {
        "a": np.float32(2.0),
        "b": rng.normal(size=(600, 500)),
        "c": np.zeros((0,), np.int8),
        "d": np.arange(3, dtype=np.int8),
    }
    self.packed = self.carrier.pack("t", self.leaves)
    self.carrier.send(self.transport, self.packed)

  def read(self):
    specs = carrier.specs_of(self.leaves)
    return self.carrier.read(self.transport, "t", self.packed.carried, specs)

  def test_what_was_sent_is_read_bit_for_bit(self):
    for name, leaf in self.read().items():
      self.assertEqual(leaf.dtype, self.leaves[name].dtype)
      np.testing.assert_array_equal(leaf, self.leaves[name])
    sizes = [len(v) for v in self.transport.list("p/t").values()]
    self.assertLen(sizes, 3)
    self.assertLessEqual(max(sizes), carrier.PIECE_BYTES)

  def test_a_torn_chunk_names_its_leaves_and_no_others(self):
    self.transport.put("p/t/000002", b"torn")
    with self.assertRaisesRegex(wire.WireError, r"leaves \['b', 'd'\]"):
      self.read()

  def test_a_chunk_that_is_gone_means_a_dropped_version(self):
    self.transport.delete("p/t/000001")
    self.assertIsNone(self.read())

  def test_chunks_that_do_not_fill_the_leaves_are_refused(self):
    del self.packed.carried["digests"][-1]
    with self.assertRaisesRegex(wire.WireError, "expected"):
      self.read()


if __name__ == "__main__":
  absltest.main()
