# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Tests of dropping rows where few completions are left."""

import logging

from absl.testing import absltest
from absl.testing import parameterized
import jax
import numpy as np

from tba_jax.models import layers
from tba_jax.sampling import decode
from tba_jax.sampling import requests as requests_lib
from tba_jax.sampling import rows as rows_lib
from tests.support import tiny_model

_ROWS = 32


class ShrinkTest(parameterized.TestCase):

  @parameterized.parameters(
      (8, (8,)),
      (16, (16,)),
      (32, (32, 16)),
      (48, (48,)),
      (64, (64, 32, 16)),
      (256, (256, 128, 64)),
  )
  def test_counts_are_halves_in_whole_sixteens(self, num_rows, expected):
    place = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    self.assertEqual(rows_lib.row_counts(place, num_rows), expected)

  @parameterized.parameters(((96, 64),), ((64, 96),), ((250, 128),))
  def test_a_row_of_a_product_has_the_same_bits_in_fewer(self, shape):
    rng = np.random.default_rng(0)
    x_RxD = rng.standard_normal((64, shape[1])).astype(np.float32)
    kernel_FxD = rng.standard_normal(shape).astype(np.float32)
    product = jax.jit(layers.product)
    whole_RxF = product(x_RxD, kernel_FxD)
    for rows in (32, 16):
      part_RxF = product(x_RxD[-rows:], kernel_FxD)
      np.testing.assert_array_equal(part_RxF, whole_RxF[-rows:])

  def test_rows_in_use_are_kept_and_numbered_anew(self):
    request = decode.Request(np.array([2]), 0, 0, num_completions=6)
    assigned = requests_lib.Assignment(
        [request], order=[0], num_rows=6, max_completion_tokens=9, seed=0
    )
    assigned.place({0: 0})
    assigned.release(np.array([True, False, True, True, False, True]))
    rows = assigned.keep(3)
    self.assertEqual(rows[:2].tolist(), [1, 4])
    self.assertIn(rows[2], (0, 2, 3, 5))
    self.assertEqual(assigned.owners, {0: (0, 1), 1: (0, 4)})
    self.assertEqual(assigned.num_rows, 3)

  def test_same_bits_in_fewer_rows_and_nothing_compiled(self):
    taken = []
    take = rows_lib.take_rows
    self.addCleanup(lambda: setattr(rows_lib, "take", take))

    def counted(state, rows):
      jax.debug.callback(lambda rows: taken.append(len(rows)), rows)
      return take(state, rows)

    rows_lib.take_rows = counted
    model = tiny_model.make_model(max_positions=64)
    params = jax.tree.map(lambda x: 2 * x, tiny_model.init_params(model))
    sampler = decode.Sampler(
        model,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        max_prompt_tokens=4,
        max_completion_tokens=40,
        num_rows=_ROWS,
        chunk_steps=5,
        eos_id=1,
        pad_id=0,
        seed=3,
    )
    sampler.warm_up(params)
    requests = [
        decode.Request(np.array([3, 4 + index]), index, 0, num_completions=14)
        for index in range(4)
    ]
    seen = len(taken)
    with self.assertLogs("jax", logging.WARNING) as logs:
      jax.config.update("jax_log_compiles", True)
      try:
        jax.jit(lambda x: x + 1)(np.zeros(3))  # What a compilation looks like.
        before = len(logs.output)
        found = sampler.sample(params, requests, version=0)
        jax.effects_barrier()
        # The last completions of many end in fewer rows than the first.
        self.assertEqual(taken[seen:], [16])
        for request, together in zip(requests, found):
          self.assertGreater(together.lengths.max(), together.lengths.min() + 9)
          # Alone, they are in fewer rows from the start.
          (alone,) = sampler.sample(params, [request], version=0)
          jax.tree.map(
              np.testing.assert_array_equal, vars(alone), vars(together)
          )
      finally:
        jax.config.update("jax_log_compiles", False)
    self.assertEqual(logs.output[before:], [])


if __name__ == "__main__":
  absltest.main()
