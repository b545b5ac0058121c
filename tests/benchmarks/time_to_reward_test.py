# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""The time-to-reward benchmark: its clock, its table and its configs."""

from absl.testing import parameterized

from benchmarks import results
from benchmarks import time_to_reward
from tba_jax.config import load
from tba_jax.config import validate
from tba_jax.config import variants
from tba_jax.replay import prompt_order
from tba_jax.tasks import base
from tba_jax.tasks import task_table as tasks_build

countdown = variants.import_config("configs/countdown.py")


def _result(name, seed, seconds):
  return {
      "name": name,
      "seed": seed,
      "steps": [0, 20, 40],
      "seconds": seconds,
      "pass_at_1": [0.3, 0.5, 0.7],
      "pass_at_k": [0.5, 0.7, 0.9],
      "distinct": [1.5, 1.4, 1.3],
      "step_s": 0.5,
      "completions_per_s": 512.0,
      "start_s": 9.0,
  }


class TimeToRewardTest(parameterized.TestCase):

  @parameterized.parameters(
      (0.3, 0.0), (0.4, 5.0), (0.5, 10.0), (0.6, 30.0), (0.8, None)
  )
  def test_reaches_target_between_two_snapshots(self, target, expected):
    # The second crossing of .5 does not count.
    curve = [0.3, 0.5, 0.45, 0.75]
    seconds = [0.0, 10.0, 20.0, 40.0]
    actual = results.at_target(seconds, curve, target)
    if expected is None:
      self.assertIsNone(actual)
    else:
      self.assertAlmostEqual(actual, expected)

  def test_tabulates_median_and_range_of_seconds(self):
    results = [
        _result("ours", seed, [0.0, 10.0 + seed, 20.0 + seed])
        for seed in (0, 1, 2)
    ]
    results.append(_result("grpo", 0, [0.0, 30.0, 60.0]) | {
        "pass_at_1": [0.3, 0.55, 0.65]
    })  # fmt: skip
    _, ours, grpo = time_to_reward.make_table(results)
    self.assertEqual(ours[1:3], ["0, 1, 2", "11 (10 to 12)"])
    self.assertEqual(grpo[2:6], ["24", "45", "never", "0.650"])

  def test_times_first_step_as_median_one(self):
    ends = [100.0 + s for s in (0.0, *range(60, 99))]
    self.assertEqual(
        time_to_reward.time_snapshots(ends),
        {"steps": [0, 20, 40], "seconds": [0.0, 79.0, 99.0], "step_s": 1.0},
    )

  @parameterized.parameters(
      ("grpo_small_kl", 0.02, 320, 8),
      ("tunix_grpo", 0.04, 320, 8),
      ("grpo_small_batch", 0.0, 640, 4),
  )
  def test_gives_peer_prompts_of_ours(self, name, beta, steps, samples):
    config = time_to_reward.make_config(countdown.get_config(), 3)
    task = tasks_build.make_task(config.task)
    settings = time_to_reward.peer_settings(config, task, name)
    self.assertEqual(settings["beta"], beta)
    self.assertEqual(settings["completions_per_prompt"], samples)
    self.assertLen(settings["prompts"], steps * 32)
    order = prompt_order.PromptOrder(task.num_prompts(base.TRAIN), seed=3)
    self.assertEqual(
        settings["prompts"][:9],
        [task.prompt(base.TRAIN, order.prompt(i)[0]) for i in range(9)],
    )

  @parameterized.parameters("", "smoke", "quick")
  def test_makes_valid_config(self, arg):
    config = time_to_reward.make_config(countdown.get_config(arg), 3)
    validate.validate(config)
    self.assertEqual(config.seed, 3)

  @parameterized.parameters(*time_to_reward.OURS)
  def test_changes_recipe_within_what_is_allowed(self, name):
    config = countdown.get_config()
    load.apply_overrides(config, time_to_reward.OURS[name])
    validate.validate(config)
    c = config.train
    self.assertEqual(c.prompts_per_batch * c.completions_per_prompt, 128)
