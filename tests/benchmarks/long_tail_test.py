# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Lengths with a long tail, and what the trainer computes of them."""

import json

from absl.testing import absltest
from absl.testing import parameterized
import numpy as np

from benchmarks import long_tail
from benchmarks import slices
from tba_jax.models.hf import hf_config


class LongTailTest(parameterized.TestCase):

  @parameterized.parameters(*long_tail.LENGTHS)
  def test_lengths_have_the_mean_and_the_most(self, mean, longest):
    lengths = long_tail.lognormal_lengths(mean, longest, (40, 1000), 7)
    self.assertAlmostEqual(lengths.mean() / mean, 1, delta=0.02)
    self.assertEqual(lengths.max(), longest)
    self.assertGreaterEqual(lengths.min(), 1)
    # Most are short.
    self.assertLess(np.median(lengths), 0.8 * mean)
    again = long_tail.lognormal_lengths(mean, longest, (40, 1000), 7)
    np.testing.assert_array_equal(lengths, again)

  @parameterized.parameters("cpu", "tpu")
  def test_a_step_computes_little_more_than_is_needed(self, backend):
    shapes = json.loads(slices.SHAPES.read_text())
    shape = hf_config.from_hf(shapes["Qwen/Qwen2.5-0.5B"])
    batch = long_tail.make_batch(300, 1024, 4)
    found = long_tail.count(shape, batch, backend, 4)
    self.assertBetween(found["flops"], 1.0, 1.15)


if __name__ == "__main__":
  absltest.main()
