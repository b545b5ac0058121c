# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Tests of the time-to-reward benchmark: its clock, its table, what it runs."""

import contextlib
import io
import os
import pathlib
from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized

from benchmarks import peer_grpo
from benchmarks import time_to_reward
from tba_jax.config import load
from tba_jax.config import validate
from tba_jax.config import variants
from tba_jax.replay import prompt_order

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

  def setUp(self):
    super().setUp()
    self.folder = pathlib.Path(self.create_tempdir().full_path)
    self.enter_context(
        mock.patch.object(time_to_reward, "_FOLDER", self.folder)
    )

  @parameterized.parameters(
      (0.3, 0.0), (0.4, 5.0), (0.5, 10.0), (0.6, 30.0), (0.8, None)
  )
  def test_a_target_is_reached_between_two_snapshots(self, target, expected):
    # The second crossing of .5 does not count.
    curve = [0.3, 0.5, 0.45, 0.75]
    seconds = [0.0, 10.0, 20.0, 40.0]
    found = time_to_reward.seconds_until(seconds, curve, target)
    if expected is None:
      self.assertIsNone(found)
    else:
      self.assertAlmostEqual(found, expected)

  def test_the_table_has_the_median_and_the_range_of_seconds(self):
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

  def test_the_first_step_is_timed_as_the_median_one(self):
    clock = {"step_ends": [100.0 + s for s in (0.0, *range(60, 99))]}
    with mock.patch.object(time_to_reward, "_train_ours", return_value=clock):
      result = self.measure("ours")
    self.assertEqual(result["steps"], [0, 20, 40])
    self.assertEqual(result["seconds"], [0.0, 79.0, 99.0])
    self.assertEqual(result["step_s"], 1.0)
    self.assertEqual(result["start_s"], 10.0)

  def measure(self, name):
    """Measures a run in which nothing but its clock is real."""
    evaluated = {"pass_at_1": [0.1] * 3, "pass_at_k": [0.2] * 3,
                 "distinct": [1.0] * 3}  # fmt: skip
    policy = mock.Mock()
    policy.task.num_prompts.return_value = 7
    policy.task.prompt = lambda split, i: f"{split} {i}"
    with (
        mock.patch.object(time_to_reward.sft, "run"),
        mock.patch.object(
            time_to_reward.policy_lib, "make_policy", return_value=policy
        ),
        mock.patch.object(time_to_reward, "_evaluate", return_value=evaluated),
        mock.patch.object(time_to_reward.time, "time", return_value=90.0),
    ):
      return time_to_reward._measure(countdown.get_config(), name, 3)

  @parameterized.parameters(
      ("grpo_small_kl", "trl", 0.02), ("tunix_grpo", "tunix", 0.04)
  )
  def test_a_peer_takes_the_prompts_of_ours(self, name, peer, beta):
    clock = {"step_ends": [100.0, 101.0], "versions": {peer: "1"}}
    with mock.patch.object(peer_grpo, "run", return_value=clock) as run:
      result = self.measure(name)
    asked, folder, settings = run.call_args.args
    self.assertEqual((asked, settings["beta"]), (peer, beta))
    self.assertEqual(folder, self.folder / f"{name}-seed3")
    order = prompt_order.PromptOrder(7, seed=3)
    self.assertEqual(
        settings["prompts"][:9],
        [f"train {order.prompt(i)[0]}" for i in range(9)],
    )
    self.assertEqual(result["versions"], {peer: "1"})
    self.assertLen(settings["prompts"], 320 * 32)
    # Two steps in two seconds.
    self.assertEqual(result["completions_per_s"], 2 * 32 * 8 / 2)

  def test_a_peer_may_have_sizes_of_its_own(self):
    clock = {"step_ends": [100.0, 101.0]}
    with mock.patch.object(peer_grpo, "run", return_value=clock) as run:
      result = self.measure("grpo_small_batch")
    settings = run.call_args.args[2]
    self.assertLen(settings["prompts"], 640 * 32)
    self.assertEqual(settings["completions_per_prompt"], 4)
    self.assertEqual(result["completions_per_s"], 2 * 32 * 4 / 2)

  def test_every_run_has_a_color_of_its_own(self):
    found = [_result(n, 0, [0.0, 1.0, 2.0]) for n in time_to_reward.RUNS]
    with mock.patch.object(time_to_reward.pyplot, "close") as close:
      time_to_reward._plot(found, self.folder / "plot.png")
    (axes,) = close.call_args.args[0].axes
    colors = {line.get_color() for line in axes.get_lines()}
    self.assertLen(colors, len(time_to_reward.RUNS))

  def test_results_are_kept_and_peers_that_are_missing_left_out(self):
    measured = lambda config, name, seed: _result(name, seed, [0.0, 1.0, 2.0])
    missing = {peer_grpo.variable(peer): "false" for peer in peer_grpo.PEERS}
    with (
        mock.patch.object(
            time_to_reward, "_measure", side_effect=measured
        ) as measure,
        mock.patch.object(time_to_reward.processes, "enable_compilation_cache"),
        mock.patch.dict(os.environ, missing),
        contextlib.redirect_stderr(io.StringIO()) as printed,
    ):
      for seeds in ("0", "0,1"):
        out = time_to_reward.run(
            countdown.get_config(), [seeds, "ours", "grpo", "tunix_grpo"]
        )
    self.assertEqual([c.args[1:3] for c in measure.call_args_list],
                     [("ours", 0), ("ours", 1)])  # fmt: skip
    self.assertLen(out["runs"], 2)
    self.assertEqual(out["left_out"], ["grpo", "tunix_grpo"])
    self.assertTrue((self.folder / "time_to_reward.png").exists())
    self.assertIn("ours", (self.folder / "table.md").read_text())
    lines = printed.getvalue().splitlines()
    self.assertLen([n for n in lines if "'seconds_to_0.50': 1.0" in n], 2)
    self.assertLen([n for n in lines if "cannot import tunix" in n], 2)

  def test_names_a_wrong_operand(self):
    for operands in (["x"], ["0", "verl"]):
      with self.assertRaisesRegex(ValueError, "allowed"):
        time_to_reward.run(countdown.get_config(), operands)

  @parameterized.parameters("", "smoke", "quick")
  def test_the_run_has_a_right_config(self, arg):
    config = time_to_reward.make_config(countdown.get_config(arg), 3)
    validate.validate(config)
    self.assertEqual(config.seed, 3)

  @parameterized.parameters(*time_to_reward._OURS)
  def test_every_change_of_the_recipe_is_allowed(self, name):
    config = countdown.get_config()
    load.apply_overrides(config, time_to_reward._OURS[name])
    validate.validate(config)
    c = config.train
    self.assertEqual(c.prompts_per_batch * c.completions_per_prompt, 128)


if __name__ == "__main__":
  absltest.main()
