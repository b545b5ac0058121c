# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Params sharded over eight devices, read to the host."""

from absl.testing import absltest
import jax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec
import numpy as np

from tba_jax.mesh import sharding
from tba_jax.transport.params import orbax_shards
from tba_jax.transport.params import version
from tests.support import cpu_devices
from tests.support import in_process

cpu_devices.make(8)

VERSION = version.Version(1, 3)
KEYS = {"run_id": "run", "secret": b"s" * 32, "deadline_s": 60.0}
SHAPES = {"w": (16, 8), "v": (8, 4), "b": (8,), "log_z": ()}
# The sharded axes of each leaf; the scalar and `b` are on every device.
AXES = {"w": ("fsdp", "tensor"), "v": ("tensor",), "b": (), "log_z": ()}


def setUpModule():
  cpu_devices.skip_without(8)


def make_shardings(devices=None, **sizes):
  mesh = sharding.make_mesh(
      {"data": 1, "fsdp": 1, "sequence": 1, "tensor": 1, **sizes}, devices
  )
  return {
      name: NamedSharding(mesh, PartitionSpec(*axes))
      for name, axes in AXES.items()
  }


class ShardsTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    self.transport = in_process.InProcessTransport(in_process.InProcessStore())
    self.transport.put(f"p/{VERSION.tag}/meta", b"the manifest")
    self.path = self.create_tempdir().full_path + "/run/shards"
    rng = np.random.default_rng(0)
    self.host = {
        name: rng.normal(size=shape).astype(np.float32)
        for name, shape in SHAPES.items()
    }
    leaves = jax.device_put(self.host, make_shardings(data=2, fsdp=2, tensor=2))
    self.specs = version.specs_of(leaves)
    writer = self.make()
    self.packed = writer.pack(VERSION, leaves)
    self.found = self.packed.carried["shards"]

  def make(self):
    carrier = orbax_shards.OrbaxShards(self.path, **KEYS)
    self.addCleanup(carrier.close)
    return carrier

  def test_replicas_are_stored_once(self):
    counts = {name: len(result) for name, result in self.found.items()}
    self.assertEqual(counts, {"w": 4, "v": 2, "b": 1, "log_z": 1})

  def test_leaf_is_put_together_on_host(self):
    result = self.make().read(
        self.transport, VERSION.tag, self.packed.carried, self.specs
    )
    for name, leaf in result.items():
      self.assertIsInstance(leaf, np.ndarray)
      np.testing.assert_array_equal(leaf, self.host[name])
