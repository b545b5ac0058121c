# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Tests of the benchmark of costs: its bounds, its runs and its delays."""

import inspect
from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized
import chex
import jax
import jax.numpy as jnp

from benchmarks import cost_ratios
from benchmarks import delays
from benchmarks import trial_run
from tba_jax.config import validate
from tba_jax.config import variants
from tba_jax.losses import build as losses_build
from tba_jax.losses import tb
from tba_jax.tasks import base
from tba_jax.tasks import build as tasks_build
from tests.support import loss_case

countdown = variants.import_config("configs/countdown.py")


class CostRatiosTest(parameterized.TestCase):

  def test_a_row_compares_steps_with_their_bounds(self):
    # T = 2: at G = 8 two searchers take 4 s a step, an ideal step is 4 s.
    self.enter_context(mock.patch.object(delays, "TRAIN_S", 2.0))
    seconds = {"synchronous": 11.0, "lockstep": 7.0, "asynchronous": 5.0}
    row = cost_ratios.make_row(4.0, 2, seconds, 1.5)
    bounds = {name: row[f"{name}_bound_s"] for name in seconds}
    self.assertEqual(
        bounds, {"synchronous": 10.0, "lockstep": 6.0, "asynchronous": 4.0}
    )
    self.assertEqual(row["speedup"], 2.2)
    self.assertEqual(row["ideal"], 2.5)
    self.assertEqual(row["share"], 0.8)
    self.assertEqual(row["speedup_over_lockstep"], 1.4)
    _, cells = cost_ratios.make_table([row])
    self.assertEqual(cells[:5], ["4", "2", "5.50 (5)", "3.50 (3)", "2.50 (2)"])

  def test_a_ratio_has_one_synchronous_run(self):
    roles = mock.Mock(return_value=(0.5, 1.0))
    loop = mock.Mock(return_value=0.9)
    self.enter_context(
        mock.patch.multiple(trial_run, time_roles=roles, time_loop=loop)
    )
    self.enter_context(
        mock.patch.object(cost_ratios.processes, "enable_compilation_cache")
    )
    rows = cost_ratios.run(countdown.get_config(), ["4x1", "4x2"])["rows"]
    self.assertLen(rows, 2)
    self.assertEqual(loop.call_count, 1)
    self.assertEqual(
        [call.kwargs["lockstep"] for call in roles.call_args_list],
        [True, False] * 2,
    )

  @parameterized.parameters(1, 2, 4)
  def test_a_step_waits_for_its_ratio_and_every_searcher_has_a_block(self, n):
    config = cost_ratios._with_delays(countdown.get_config(), 4.0, n)
    validate.validate(config)
    search = config.search
    completions = search.prompts_per_step * search.samples_per_prompt
    self.assertAlmostEqual(
        config.task.reward_s * completions, 4 * delays.TRAIN_S
    )
    self.assertEqual(search.prompts_per_step, n * search.prompts_per_round)

  @parameterized.parameters("", "4", "0x1", "x2", "1x0", "infx1", "1x1.5")
  def test_names_a_wrong_case(self, operand):
    with self.assertRaisesRegex(ValueError, "RATIOxSEARCHERS"):
      cost_ratios.run(countdown.get_config(), [operand])

  def test_rewards_wait_in_training_alone(self):
    config = cost_ratios._with_delays(countdown.get_config(), 4.0, 1)
    task = tasks_build.make_task(config.task)
    with mock.patch.object(delays.time, "sleep") as sleep:
      task.judge(base.HELD_OUT, 0, "")
      sleep.assert_not_called()
      task.judge(base.TRAIN, 0, "")
      sleep.assert_called_once_with(config.task.reward_s)

  def test_the_loss_waits_and_is_that_of_tb(self):
    config = cost_ratios._with_delays(countdown.get_config(), 1.0, 1)
    slow_tb = losses_build.find(config.loss.name).loss
    run = lambda seq, loss_fn: loss_case.run_sequences(
        loss_fn, seq, [[-1.5, -1.0]], [[1.0, 0.0]], beta=0.5
    )[0]
    grad_fn = jax.jit(jax.value_and_grad(run), static_argnums=1)
    seq = jnp.array([[-1.0, -2.0]])
    expected = grad_fn(seq, tb.tb_loss)
    # The file is a module of its own.
    with mock.patch.dict(
        inspect.unwrap(slow_tb).__globals__, time=mock.Mock()
    ) as module:
      chex.assert_trees_all_equal(grad_fn(seq, slow_tb), expected)
      module["time"].sleep.assert_called_once_with(delays.TRAIN_S)


if __name__ == "__main__":
  absltest.main()
