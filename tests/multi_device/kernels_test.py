# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Splash attention over a mesh: each device has its own heads and prompts."""

import os
from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized
import chex
import jax
import jax.numpy as jnp
import numpy as np

from tba_jax.config import settings
from tba_jax.models import attention
from tba_jax.models import kernels
from tba_jax.models import sequence
from tba_jax.policy import sharding
from tests.support import kernels_on_cpu

# JAX makes its devices once, so this file runs in its own process.
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "")
    + " --xla_force_host_platform_device_count=4"
)


def setUpModule():
  if jax.device_count() != 4:
    raise absltest.SkipTest(
        "jax was started without four devices: run this file alone"
    )


class SplashTest(parameterized.TestCase):

  @parameterized.parameters(
      # Key-value heads are split, copies of them, or none.
      (2, 1, (1, 12, 1, 1, 8), dict(data=2, tensor=2)),
      (1, 2, (1, 12, 1, 1, 8), dict(data=2, tensor=2)),
      (1, 3, (1, 12, 1, 3, 8), dict(data=2, tensor=2)),
      # Tokens are split outside the kernel.
      (2, 2, (1, 12, 1, 2, 8), dict(data=2, sequence=2)),
      (2, 2, (2, 12, 1, 1, 8), dict(sequence=2, tensor=2)),
  )
  def test_equals_plain_over_a_mesh(self, G, M, own_shape, mesh_sizes):
    config = settings.get_config()
    config.mesh.update(mesh_sizes)
    mesh = sharding.make_mesh(config.mesh)
    axes = sharding.token_axes(config.sharding)
    parts = sequence.Split(mesh, *axes)
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = ((2, 12, G, M, 8), (2, 20, G, 8), (2, 20, G, 8))
    q, k, v = (jax.random.normal(k, s) for k, s in zip(keys, shapes))
    mask = np.arange(20)[None] >= np.array([0, 7])[:, None]
    shapes = []

    def splash(q, *args, run=kernels.splash, **kwargs):
      shapes.append(q.shape)
      return run(q, *args, **kwargs)

    def gradients(attend):
      loss = lambda q, k, v: jnp.sum(jnp.sin(attend(q, k, v)))
      fn = jax.value_and_grad(loss, argnums=(0, 1, 2))
      return jax.jit(fn)(q, k, v)

    def plain(q, k, v):
      seen = attention.sees(8 + jnp.arange(12), jnp.arange(20), 0)
      return attention.attend_self(q, k, v, seen[None] & mask[:, None])

    with (
        kernels_on_cpu.patch("splash"),
        mock.patch.object(kernels, "splash", splash),
    ):
      found = gradients(
          lambda *qkv: kernels._attend_last("splash", parts, *qkv, mask, 0)
      )
    self.assertEqual(set(shapes), {own_shape})
    chex.assert_trees_all_close(found, gradients(plain), rtol=1e-5, atol=2e-5)


if __name__ == "__main__":
  absltest.main()
