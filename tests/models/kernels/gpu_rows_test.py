# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Attention of packed rows by GPUs' kernels, interpreted on a CPU."""

from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized
import numpy as np

from tba_jax.models.kernels import gpu_rows
from tests.support import rows


class GpuRowsTest(parameterized.TestCase):

  @parameterized.parameters((0, False), (40, True))
  def test_equals_plain_attention_with_gradients(self, window, row_by_row):
    places = rows.make_places(P=100, T=150, length=400)
    most = 1 if row_by_row else gpu_rows.MAX_SIZE
    with mock.patch.object(gpu_rows, "MAX_SIZE", most):
      rows.assert_equals_plain(gpu_rows.attend, places, window)

  @parameterized.parameters(0, 40)
  def test_key_programs_visit_all_attending_queries(self, window):
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
