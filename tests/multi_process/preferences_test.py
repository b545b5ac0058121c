# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""From posts to a tuned policy and its win-rate, by the commands of a user."""

import json
import math
import tempfile

from absl.testing import absltest

from tests.support import harness


class PreferencesTest(absltest.TestCase):

  def run_smoke(self, folder, config, overrides):
    run = harness.Run(f"{folder}/run", overrides, config)
    self.addCleanup(run.close)
    self.assertEqual(run.wait(), 0, run.text())
    for model, head in (
        ("sft", "CausalLM"),
        ("reward_model", "Classification"),
    ):
      shape = run.read(f"{model}/model/config.json")
      self.assertEndsWith(shape["architectures"][0], head)
    return run

  def test_makes_all_stages_by_one_command_and_judges_by_another(self):
    with tempfile.TemporaryDirectory() as folder:
      run = self.run_smoke(folder, "configs/tldr/tba.py:smoke", {})
      after = run.read("eval.json")["after"]
      for name in ("win_rate", "gold_reward", "gold_margin", "mean_reward"):
        self.assertIn(f"{name}_interval", after)
      self.assertEqual(after["no_verdict"], {})
      judge = run.workdir / "reward_model" / "model"
      evaluate = harness.Process(
          harness.command(
              "evaluate", run.workdir, overrides={"evaluate.judge": judge}
          ),
          run.workdir / "evaluate.txt",
      )
      self.addCleanup(evaluate.close)
      self.assertEqual(evaluate.wait(), 0, evaluate.text())
      (result,) = run.read("eval.json")["evaluate"].values()
      # The judge is the reward model itself: what it prefers is right.
      self.assertEqual(result["win_rate"], result["pass_at_1"])
      self.assertAlmostEqual(result["gold_reward"], result["mean_reward"])
      self.assertGreater(result["diluted_perplexity"], 1.0)
      self.assertLess(result["diluted_perplexity"], result["ref_perplexity"])
      self.assertTrue(math.isfinite(result["kl"]))
      shown = (run.workdir / "evaluate.txt").read_text()
      self.assertIn("the papers' perplexity", shown)

  def test_demonstrations_alone(self):
    with tempfile.TemporaryDirectory() as folder:
      run = self.run_smoke(folder, "configs/no_robots.py:smoke", {})
      rewards = [record["train/reward_mean"] for record in run.steps()]
      self.assertTrue(all(reward != 0 for reward in rewards), rewards)
      self.assertEqual(run.read("result.json")["reward_failures"], {})
      pairs = (run.workdir / "reward_model/pairs/train.jsonl").read_text()
      self.assertStartsWith(json.loads(pairs.splitlines()[0])["prompt"], "<|")
