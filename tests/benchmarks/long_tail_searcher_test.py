# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Tests of the benchmark of searchers with long tails, and of its targets."""

from absl.testing import parameterized

from benchmarks import long_tail_searcher
from tests.support import tiny_model


class LongTailSearcherTest(parameterized.TestCase):

  @parameterized.parameters((500, 2048), (2500, 16384), (8000, 32768))
  def test_few_slots_of_a_stream_are_idle(self, mean, longest):
    work = long_tail_searcher.Work(blocks=6)
    idle = long_tail_searcher.simulate(mean, longest, work)
    self.assertBetween(idle, 0.0001, 0.05)

  def test_simulation_agrees_with_the_sampler(self):
    work = long_tail_searcher.Work(
        rows=8,
        completions=4,
        blocks=6,
        prompt_tokens=4,
        model=tiny_model.make_model(num_layers=1).config,
    )
    out = long_tail_searcher.run(
        tiny_model.make_config(), ["9", "40"], work, False
    )
    simulated = long_tail_searcher.simulate(9, 40, work)
    self.assertGreater(simulated, 0)
    self.assertEqual(out["idle"], simulated)
    self.assertGreater(out["blocks_tokens_per_s"], 0)
    self.assertNotIn("hf_tokens_per_s", out)
