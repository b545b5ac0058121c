# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Splash attention of packed rows, interpreted on a CPU."""

from absl.testing import absltest
from absl.testing import parameterized
import chex
import jax
import jax.numpy as jnp
import numpy as np

from tba_jax.models.kernels import splash_rows
from tba_jax.models.net import row_attention
from tests.support import rows

_BLOCK = 128


class SplashRowsTest(parameterized.TestCase):

  @parameterized.parameters(0, 40)
  def test_equals_plain_attention_with_gradients(self, window):
    places = rows.make_places(P=150, T=200, length=512)
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
    found = run(
        lambda *inputs, sinks: splash_rows.attend(
            *(*inputs, places),
            window=window,
            block=_BLOCK,
            sinks=sinks,
            interpret=True,
        )
    )
    chex.assert_trees_all_close(found, expected, rtol=1e-4, atol=1e-5)

  @parameterized.parameters(0, 40)
  def test_computes_all_blocks_with_a_key_and_few_others(self, window):
    places = rows.make_places(P=150, T=200, length=512)
    needed = rows.needed_blocks(places, window, _BLOCK)
    own, prompt = splash_rows.computed_blocks(places, window, _BLOCK)
    self.assertFalse((needed & ~np.asarray(own | prompt)).any())
    self.assertLess(np.sum(own | prompt), 1.2 * needed.sum())


if __name__ == "__main__":
  absltest.main()
