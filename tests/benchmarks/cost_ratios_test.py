# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""The benchmark of costs: its bounds, its table and its configs."""

from absl.testing import absltest
from absl.testing import parameterized
import pytest

from benchmarks import cost_ratios
from benchmarks import delays
from tba_jax.config import validate
from tba_jax.config import variants

countdown = variants.import_config("configs/countdown.py")


class CostRatiosTest(parameterized.TestCase):

  def test_compares_steps_with_their_bounds(self):
    # At G = 4 T two searchers take 2 T a step; an ideal step is 2 T.
    multiples = {"synchronous": 5.5, "lockstep": 3.5, "asynchronous": 2.5}
    seconds = {name: m * delays.TRAIN_S for name, m in multiples.items()}
    row = cost_ratios.make_row(4.0, 2, seconds, 1.5)
    for name, bound in zip(seconds, (5.0, 3.0, 2.0), strict=True):
      self.assertAlmostEqual(row[f"{name}_bound_s"], bound * delays.TRAIN_S)
    for name, expected in (
        ("speedup", 2.2),
        ("ideal", 2.5),
        ("share", 0.8),
        ("speedup_over_lockstep", 1.4),
    ):
      self.assertAlmostEqual(row[name], expected)
    _, cells = cost_ratios.make_table([row])
    self.assertEqual(cells[:5], ["4", "2", "5.50 (5)", "3.50 (3)", "2.50 (2)"])

  @parameterized.parameters(1, 2, 4)
  @pytest.mark.slow
  def test_delays_rewards_by_the_ratio_and_gives_each_searcher_a_block(self, n):
    config = cost_ratios.with_delays(countdown.get_config(), 4.0, n)
    validate.validate(config)
    search = config.search
    completions = search.prompts_per_step * search.samples_per_prompt
    self.assertAlmostEqual(
        config.task.reward_s * completions, 4 * delays.TRAIN_S
    )
    self.assertEqual(search.prompts_per_step, n * search.prompts_per_round)


if __name__ == "__main__":
  absltest.main()
