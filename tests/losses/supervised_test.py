# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Cross-entropy: known numbers, and what the mask keeps out."""

from absl.testing import absltest
import chex
import jax
import jax.numpy as jnp
import numpy as np

from tba_jax.losses import supervised


class CrossEntropyTest(chex.TestCase):

  @chex.variants(with_jit=True, without_jit=True)
  def test_known_numbers(self):
    logprobs = jnp.array([[[-1.0, -2.0, -9.0]], [[-3.0, -9.0, -9.0]]])
    mask = jnp.array([[[1.0, 1.0, 0.0]], [[1.0, 0.0, 0.0]]])
    loss, aux = self.variant(supervised.cross_entropy_loss)(logprobs, mask)
    # Over tokens, not over completions.
    np.testing.assert_allclose(loss, 2.0, rtol=1e-6)
    self.assertEqual(aux["num_tokens"], 3)

  def test_gradient_is_even_over_tokens_and_zero_elsewhere(self):
    logprobs = jnp.array([[[-1.0, -2.0, -jnp.inf]]])
    mask = jnp.array([[[1.0, 1.0, 0.0]]])
    grad = jax.grad(lambda x: supervised.cross_entropy_loss(x, mask)[0])(
        logprobs
    )
    np.testing.assert_allclose(grad, [[[-0.5, -0.5, 0.0]]], rtol=1e-6)

  def test_an_empty_mask_is_no_division_by_zero(self):
    loss, _ = supervised.cross_entropy_loss(
        jnp.zeros((1, 1, 2)), jnp.zeros((1, 1, 2))
    )
    self.assertEqual(loss, 0.0)


if __name__ == "__main__":
  absltest.main()
