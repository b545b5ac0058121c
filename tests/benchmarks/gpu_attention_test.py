# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""The ways of attention that are compared compute the same, and their FLOP."""

from absl.testing import parameterized
import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import gpu_attention
from tba_jax.models.kernels import kernels
from tests.support import kernels_on_cpu


class WaysTest(parameterized.TestCase):

  @parameterized.parameters((9, 16, 0), (9, 16, 6), (16, 16, 0))
  @pytest.mark.slow
  def test_mask_equals_rotation(self, Q, S, window):
    shapes = ((3, Q, 2, 3, 8), (3, S, 2, 8), (3, S, 2, 8))
    keys = jax.random.split(jax.random.key(0), len(shapes))
    inputs = [jax.random.normal(k, s) for k, s in zip(keys, shapes)]
    real = np.arange(S)[None] >= np.array([0, 3, 7])[:, None]
    counts = real[:, S - Q :, None, None, None]

    def attend(kernel):
      def loss(q, k, v):
        out = jnp.where(counts, kernel(q, k, v, real, window), 0.0)
        return jnp.sum(jnp.sin(out)), out

      return jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True)(*inputs)

    with kernels_on_cpu.patch("cudnn"):
      actual, expected = attend(gpu_attention.mask), attend(kernels.cudnn)
    chex.assert_trees_all_close(actual, expected, atol=2e-5)

  @parameterized.parameters(
      ("ours", 2, 56), ("mask", 2, 56), ("tokamax", 2, 68),
      ("ours", 0, 14), ("mask", 0, 14), ("tokamax", 0, 18),
  )  # fmt: skip
  def test_flops_of_two_queries(self, way, before, pairs):
    each = 2 * 8 * 4 * 128
    result = gpu_attention.flops(way, 3, before, 2)
    self.assertEqual(result, 3 * pairs * each)
