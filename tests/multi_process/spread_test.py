# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""The benchmark of batches, whose processes check the rows that come."""

from absl.testing import parameterized

from benchmarks import spread
from tests.support import base_config


class SpreadTest(parameterized.TestCase):

  @parameterized.parameters(1, 2)
  def test_gives_each_process_its_rows(self, num_processes):
    result = spread.run(base_config.make(), [str(num_processes), "64", "10"])
    # Four arrays of 64 times 10 numbers, two of 64; of 4 bytes each.
    self.assertEqual(result["mb"], 4 * (4 * 640 + 2 * 64) / 1e6)
    self.assertEqual(result["processes"], num_processes)
    self.assertAlmostEqual(
        result["mb_per_s"], result["mb"] / result["spread_s"]
    )
