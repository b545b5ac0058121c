# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Kernels over a mesh: each device has its own heads, and prompts or rows."""

from unittest import mock

from absl.testing import parameterized
import chex
import jax
import jax.numpy as jnp
import numpy as np

from tba_jax.config import settings
from tba_jax.mesh import sharding
from tba_jax.models.kernels import kernels
from tba_jax.models.kernels import ragged_attention
from tba_jax.models.net import attention
from tba_jax.models.net import cache
from tba_jax.models.net import sequence
from tests.support import cpu_devices
from tests.support import kernels_on_cpu

cpu_devices.make(4)


def setUpModule():
  cpu_devices.skip_without(4)


class SplashTest(parameterized.TestCase):

  @parameterized.parameters(
      # Key-value heads are split, or copies of them, with a query of zeros.
      (2, 1, (1, 12, 1, 1, 8), dict(data=2, tensor=2)),
      (1, 2, (1, 12, 1, 1, 8), dict(data=2, tensor=2)),
      (1, 3, (1, 12, 1, 2, 8), dict(data=2, tensor=2)),
      # Tokens are split outside the kernel.
      (2, 2, (1, 12, 1, 2, 8), dict(data=2, sequence=2)),
      (2, 2, (2, 12, 1, 1, 8), dict(sequence=2, tensor=2)),
  )
  def test_equals_plain_over_mesh(self, G, M, own_shape, mesh_sizes):
    config = settings.get_config()
    config.mesh.update(mesh_sizes)
    mesh = sharding.make_mesh(config.mesh)
    axes = sharding.TOKEN_AXES
    parts = sequence.Split(mesh, *axes)
    keys = jax.random.split(jax.random.key(0), 4)
    shapes = ((2, 12, G, M, 8), (2, 20, G, 8), (2, 20, G, 8), (G, M))
    inputs = [jax.random.normal(k, s) for k, s in zip(keys, shapes)]
    mask = np.arange(20)[None] >= np.array([0, 7])[:, None]
    shapes = []

    def splash(q, *args, run=kernels.splash, **kwargs):
      shapes.append(q.shape)
      return run(q, *args, **kwargs)

    def gradients(attend):
      loss = lambda *inputs: jnp.sum(jnp.sin(attend(*inputs)))
      fn = jax.value_and_grad(loss, argnums=(0, 1, 2, 3))
      return jax.jit(fn)(*inputs)

    def plain(q, k, v, sinks):
      seen = attention.sees(8 + jnp.arange(12), jnp.arange(20), 0)
      seen = seen[None] & mask[:, None]
      return attention.attend_self(q, k, v, seen, sinks)

    with (
        kernels_on_cpu.patch("splash"),
        mock.patch.object(kernels, "splash", splash),
    ):
      result = gradients(
          lambda *qkv: kernels.attend_last(
              "splash", parts, *qkv[:3], mask, 0, qkv[3]
          )
      )
    self.assertEqual(set(shapes), {own_shape})
    chex.assert_trees_all_close(result, gradients(plain), rtol=1e-5, atol=2e-5)


class RaggedTest(parameterized.TestCase):

  @parameterized.parameters(
      # Parts of the cache's heads, which `tensor` splits or does not.
      (2, (2, 16, 8)),
      (1, (2, 16, 16)),
  )
  def test_equals_plain_over_mesh(self, num_parts, own_shape):
    R, G, M, Dh, C = 4, 2, 3, 8, 16
    devices = np.array(jax.devices()).reshape(2, 2)
    mesh = jax.sharding.Mesh(devices, ("data", "tensor"))
    keys = jax.random.split(jax.random.key(0), 8)
    shape = R, num_parts, C, G // num_parts * Dh
    layer = [
        {
            n: jax.random.normal(keys[2 * b + i], shape)
            for i, n in enumerate("kv")
        }
        for b in range(2)
    ]
    lengths = jnp.array([[3, 1], [16, 16], [1, 9], [7, 2]])
    updates = [
        cache.BlockUpdate(
            jnp.full(R, C) if b == 0 else lengths[:, b] - 1,
            jnp.arange(C)[None] < lengths[:, b, None],
        )
        for b in range(2)
    ]
    q, k, v, sinks = (
        jax.random.normal(key, shape)
        for key, shape in zip(
            keys[4:], ((R, G, M, Dh), (R, G, Dh), (R, G, Dh), (G, M))
        )
    )
    shapes = []

    def pages(q, pairs, *args, run=ragged_attention.pages, **kwargs):
      shapes.append(pairs[0][0].shape)
      return run(q, pairs, *args, **kwargs)

    fn = sequence.split_tokens(
        lambda *args: ragged_attention.attend("pages", layer, updates, *args)[
            0
        ],
        *(mesh, ("data",), (), ("tensor",)),
    )
    with mock.patch.object(ragged_attention, "pages", pages):
      actual = jax.jit(fn)(q, k, v, sinks)
    self.assertEqual(set(shapes), {own_shape})
    expected, _ = cache.attend(layer, updates, q, k, v, sinks)
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-6)
