# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Splash attention of packed rows, interpreted on a CPU."""

from absl.testing import absltest
from absl.testing import parameterized
import numpy as np

from tba_jax.models.kernels import splash_rows
from tests.support import rows

_BLOCK = 128


class SplashRowsTest(parameterized.TestCase):

  @parameterized.parameters(0, 40)
  def test_equals_plain_attention_with_gradients(self, window):
    places = rows.make_places(P=150, T=200, length=512)
    rows.assert_equals_plain(splash_rows.attend, places, window, block=_BLOCK)

  @parameterized.parameters(0, 40)
  def test_computes_all_blocks_with_a_key_and_few_others(self, window):
    places = rows.make_places(P=150, T=200, length=512)
    needed = rows.needed_blocks(places, window, _BLOCK)
    own, prompt = splash_rows.computed_blocks(places, window, _BLOCK)
    self.assertFalse((needed & ~np.asarray(own | prompt)).any())
    self.assertLess(np.sum(own | prompt), 1.2 * needed.sum())


if __name__ == "__main__":
  absltest.main()
