# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Tokens that are taken out of rows and put back, and their gradients."""

from absl.testing import absltest
import jax
import jax.numpy as jnp
import numpy as np

from tba_jax.models.net import unpadded as kept_lib

B, L, C = 3, 7, 5
# Places from L on are none.
PLACES = np.array([[4, 0, 6, 7, 9], [1, 2, 3, 4, 5], [7, 7, 7, 7, 7]])


class KeptTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    self.kept = kept_lib.find(jnp.asarray(PLACES), L)
    self.x = jnp.arange(1.0, B * L * 2 + 1).reshape(B, L, 2)

  def test_takes_tokens_out(self):
    found = kept_lib.take(self.x, self.kept)
    for b in range(B):
      for c, place in enumerate(PLACES[b]):
        expected = self.x[b, place] if place < L else np.zeros(2)
        np.testing.assert_array_equal(found[b, c], expected)

  def test_puts_tokens_back(self):
    back = kept_lib.put(kept_lib.take(self.x, self.kept), self.kept)
    is_kept = np.array([[p in own for p in range(L)] for own in PLACES])
    np.testing.assert_array_equal(back, self.x * is_kept[..., None])

  def test_gradients_are_those_of_an_index(self):
    weights = jax.random.normal(jax.random.key(0), (B, C, 2))
    # A row of zeros stands for none.
    index = jnp.minimum(jnp.asarray(PLACES), L)

    def plain(x):
      x = jnp.pad(x, ((0, 0), (0, 1), (0, 0)))
      return jnp.sum(weights * jnp.take_along_axis(x, index[..., None], axis=1))

    taken = lambda x: jnp.sum(weights * kept_lib.take(x, self.kept))
    np.testing.assert_allclose(jax.grad(taken)(self.x), jax.grad(plain)(self.x))
    # `put` is the transpose of `take`, and its gradient `take`.
    y = jax.random.normal(jax.random.key(1), (B, C, 2))
    put = lambda y: jnp.sum(self.x * kept_lib.put(y, self.kept))
    np.testing.assert_allclose(
        jax.grad(put)(y), kept_lib.take(self.x, self.kept)
    )
