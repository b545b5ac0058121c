# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Tests of transfer.py: two ends in one process, with an honest clock."""

import threading

from absl.testing import absltest
import jax
import jax.numpy as jnp
import numpy as np

from tba_jax.carriers import base
from tba_jax.carriers import transfer
from tba_jax.transport import in_process
from tba_jax.transport import wire

KEYS = {"run_id": "run", "secret": b"s" * 32}


class TransferTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    store = in_process.InProcessStore()
    self.connect = lambda: in_process.InProcessTransport(store)
    self.transport = self.connect()
    self.leaves = {
        "['a']": jnp.arange(300_000, dtype=jnp.float32),
        "['b']": jnp.asarray([1.5, 2.5], jnp.bfloat16),
        "['c']": jnp.asarray(3, jnp.int32),
    }
    self.specs = base.specs_of(self.leaves)
    self.writer = self.make()

  def make(self, deadline_s=30.0):
    carrier = transfer.Transfer(
        find_host=lambda: transfer.own_address("127.0.0.1"),
        deadline_s=deadline_s,
        **KEYS,
    )
    self.addCleanup(carrier.close)
    return carrier

  def serve(self, packed):
    """Serves from a thread as the publisher does."""
    stop = threading.Event()
    transport = self.connect()

    def run():
      while not stop.wait(0.01):
        self.writer.serve(transport, packed)

    thread = threading.Thread(target=run)
    thread.start()
    self.addCleanup(thread.join)
    self.addCleanup(stop.set)

  def test_what_was_offered_is_pulled_as_often_as_asked(self):
    packed = self.writer.pack("t1", self.leaves)
    self.serve(packed)
    reader = self.make()
    for _ in range(2):
      found = reader.read(self.transport, "t1", packed.carried, self.specs)
      self.assertEqual(list(found), list(self.leaves))
      for name, leaf in self.leaves.items():
        self.assertIsInstance(found[name], jax.Array)
        self.assertEqual(found[name].dtype, leaf.dtype)
        np.testing.assert_array_equal(found[name], leaf)
    self.assertEqual(self.transport.list("x"), {})
    # A version that is not the newest any more.
    self.assertIsNone(
        reader.read(self.transport, "t0", packed.carried, self.specs)
    )
    # The leaves of another version do not have the manifest's digests.
    packed.carried["digests"]["['b']"] = ["0" * 32]
    with self.assertRaisesRegex(wire.WireError, r"leaf \['b'\] is torn"):
      reader.read(self.transport, "t1", packed.carried, self.specs)

  def test_a_trainer_that_is_away_costs_a_deadline(self):
    reader = self.make(deadline_s=0.2)
    with self.assertRaisesRegex(wire.WireError, "no offer of version t1"):
      reader.read(self.transport, "t1", {}, self.specs)

  def test_a_pull_that_hangs_is_given_up(self):
    packed = self.writer.pack("t1", self.leaves)
    reader = self.make(deadline_s=1.0)
    reader._start()
    nobody = {"uuid": 5, "address": self.writer._server.address()}
    sharding = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    wanted = [jax.ShapeDtypeStruct((2,), jnp.float32, sharding=sharding)]
    with self.assertRaisesRegex(wire.WireError, "pull from 127.0.0.1"):
      reader._pull(nobody, wanted)
    del packed

  def test_what_others_ask_is_not_answered(self):
    packed = self.writer.pack("t1", self.leaves)
    forged = {"run": "run", "key": "x/want/r", "tag": "t1", "nonce": "n"}
    self.transport.put("x/want/r", wire.encode_message(forged, b"x" * 32))
    self.writer.serve(self.transport, packed)
    self.assertEqual(self.transport.list("x"), {})


if __name__ == "__main__":
  absltest.main()
