# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""The last completions go on in fewer rows where that changes no bit."""

import functools
import logging
from unittest import mock

from absl.testing import absltest
import jax
import numpy as np
import pytest

from tba_jax.sampling import decode
from tba_jax.sampling import requests as requests_lib
from tba_jax.sampling import slots as slots_lib
from tests.support import fakes
from tests.support import sampler_case
from tests.support import tiny_model

_ROWS = 128


_settings = functools.partial(
    sampler_case.make_settings,
    max_prompt_tokens=4,
    max_completion_tokens=40,
    num_rows=_ROWS,
    chunk_steps=5,
    seed=3,
)


class _RowCountModel(fakes.FakeModel):
  """Its last bits are those of a kernel chosen by the number of rows."""

  def decode_step(self, params, tokens, *inputs):
    logits, cache = super().decode_step(params, tokens, *inputs)
    return logits * (1 + 1e-6 * (len(tokens) < 64)), cache


class ShrinkTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    self.taken = []
    take = slots_lib.take
    self.addCleanup(lambda: setattr(slots_lib, "take", take))

    def counted(state, rows):
      self.taken.append(len(rows))  # Called while it is traced.
      return take(state, rows)

    slots_lib.take = counted

  def assert_same_alone(self, sampler, params, requests):
    """Alone, completions are in fewer rows from the start."""
    found = sampler.sample(params, requests, version=0)
    for request, together in zip(requests, found):
      self.assertGreater(together.lengths.max(), together.lengths.min() + 9)
      (alone,) = sampler.sample(params, [request], version=0)
      jax.tree.map(np.testing.assert_array_equal, vars(alone), vars(together))

  def test_the_rows_in_use_are_kept(self):
    request = decode.Request(np.array([2]), 0, 0, num_completions=6)
    slots = requests_lib.Slots({0: request}, _settings(num_rows=6))
    slots.enqueue([0])
    slots.refill({0: 0})
    slots.release([0, 2, 3, 5])
    rows = slots.keep(3)
    self.assertEqual(rows[:2].tolist(), [1, 4])
    self.assertIn(rows[2], (0, 2, 3, 5))
    self.assertEqual(slots.owners, {0: (0, 1), 1: (0, 4)})
    self.assertEqual(slots.num_rows, 3)

  @pytest.mark.slow
  def test_rows_are_dropped_as_far_as_no_bit_changes(self):
    # Sums of few terms in one order have the same bits in any number of rows.
    for model, counts in (
        (fakes.FakeModel(24, 44), {64, 32}),
        (_RowCountModel(24, 44), {64}),
    ):
      params = jax.tree.map(lambda x: 0.3 * x, model.init(jax.random.key(0)))
      sampler = decode.JaxSampler(model, _settings())
      sampler.warm_up(params)
      programs = sampler.programs(params)
      kept = {n for n, same in programs.known_same_bits.items() if same}
      self.assertEqual(kept, counts)
      requests = [
          decode.Request(np.array([3, 4 + n]), n, 0, 40) for n in range(4)
      ]
      self.assert_same_alone(sampler, params, requests)

  @pytest.mark.slow
  def test_nothing_is_compiled_when_rows_are_dropped(self):
    model = tiny_model.make_model(max_positions=64)
    params = jax.tree.map(lambda x: 2 * x, tiny_model.init_params(model))
    sampler = decode.JaxSampler(model, _settings())
    sampler.warm_up(params)
    requests = [
        decode.Request(np.array([3, 4 + n]), n, 0, num_completions=40)
        for n in range(4)
    ]
    with self.assertLogs("jax", logging.WARNING) as logs:
      jax.config.update("jax_log_compiles", True)
      try:
        jax.jit(lambda x: x + 1)(np.zeros(3))  # Log of a compilation.
        before = len(logs.output)
        self.assert_same_alone(sampler, params, requests)
      finally:
        jax.config.update("jax_log_compiles", False)
    self.assertEqual(logs.output[before:], [])

  @pytest.mark.slow
  def test_nothing_is_compiled_when_requests_join_after_rows_are_dropped(self):
    model = tiny_model.make_model(max_positions=64)
    params = jax.tree.map(lambda x: 2 * x, tiny_model.init_params(model))
    sampler = decode.JaxSampler(model, _settings())
    sampler.warm_up(params)
    programs = sampler.programs(params)
    make = lambda id, count: decode.Request(np.array([3, 4]), id, 0, count)
    left = [make(1, 4), make(0, 40)]

    def more():
      # The second request joins once rows were dropped.
      if not left:
        return None
      return [left.pop()] if len(left) == 2 or take.called else []

    take = self.enter_context(
        mock.patch.object(programs, "take", wraps=programs.take)
    )
    with self.assertLogs("jax", logging.WARNING) as logs:
      jax.config.update("jax_log_compiles", True)
      try:
        jax.jit(lambda x: x + 1)(np.zeros(3))  # Log of a compilation.
        before = len(logs.output)
        over = [*sampler.stream(params, more, version=0)]
      finally:
        jax.config.update("jax_log_compiles", False)
    self.assertEqual(logs.output[before:], [])
    self.assertLen(sum(over, []), 2)
