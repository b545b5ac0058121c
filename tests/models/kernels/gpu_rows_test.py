# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Attention of packed rows by GPUs' kernels, interpreted on a CPU."""

from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized
import chex
import jax
import jax.numpy as jnp
import numpy as np

from tba_jax.models.kernels import gpu_rows
from tba_jax.models.net import row_attention
from tests.support import rows


class GpuRowsTest(parameterized.TestCase):

  @parameterized.parameters((0, False), (40, True))
  def test_equals_plain_attention_with_gradients(self, window, row_by_row):
    places = rows.make_places(P=100, T=150, length=400)
    q, k, v = rows.make_inputs(places)
    sinks = rows.make_sinks(q) if window else None
    is_real = (places.group >= 0)[..., None, None, None]

    def run(attend):
      def fn(q, k, v, sinks):
        out = jnp.where(is_real, attend(q, k, v, sinks=sinks), 0)
        return jnp.sum(jnp.sin(out)), out

      grad = jax.value_and_grad(fn, (0, 1, 2, 3), has_aux=True)
      return jax.jit(grad)(q, k, v, sinks)

    expected = run(
        lambda *inputs, sinks: row_attention.attend_rows(
            *inputs, places, places, window, "cpu", sinks
        )
    )
    most = 1 if row_by_row else gpu_rows.MAX_SIZE
    with mock.patch.object(gpu_rows, "MAX_SIZE", most):
      found = run(
          lambda *inputs, sinks: gpu_rows.attend(
              *inputs, places, window=window, sinks=sinks, interpret=True
          )
      )
    chex.assert_trees_all_close(found, expected, rtol=1e-4, atol=1e-5)

  @parameterized.parameters(0, 40)
  def test_programs_of_keys_have_all_queries_that_see_one(self, window):
    places = rows.make_places(P=150, T=200, length=512)
    needed = rows.needed_blocks(places, window, gpu_rows.BLOCK)
    last = np.asarray(gpu_rows.last_seeing(gpu_rows.seen_runs(places, window)))
    queries = np.arange(needed.shape[1])[None, :, None]
    visited = (queries >= np.arange(needed.shape[2])) & (
        queries <= last[:, None]
    )
    self.assertFalse((needed & ~visited).any())
    self.assertLess(visited.sum(), 1.3 * needed.sum())


if __name__ == "__main__":
  absltest.main()
