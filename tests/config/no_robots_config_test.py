# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""The chatbot's config has what the paper's 8B run has."""

from absl.testing import absltest
from absl.testing import parameterized

from tba_jax.config import load
from tba_jax.config import validate
from tba_jax.config import variants

no_robots = variants.import_config("configs/no_robots.py")

# Noukhovitch et al. 2024 (arXiv:2410.18252), appendix tables of the 8B run;
# optimizer's epsilon and accounting of open-instruct's command.
_PAPER = {
    "sft.batch_size": 128,
    "sft.num_steps": 148,  # two epochs of 9,500
    "sft.learning_rate": 5e-6,
    "sft.schedule": "linear",
    "sft.warmup_steps": 4,  # 3 %
    "sft.weight_decay": 0.0,
    "reward_model.batch_size": 256,
    "reward_model.learning_rate": 3e-6,
    "reward_model.schedule": "linear",
    "reward_model.max_completion_tokens": 512,  # of 1,024 with the prompt
    "loss.name": "online_dpo",
    "loss.beta": 0.03,
    "loss.beta_final": 0.03,
    "loss.missing_stop": "replace",
    "loss.missing_stop_reward": -10.0,
    "optimizer.learning_rate": 8e-7,
    "optimizer.learning_rate_final": 0.0,
    "optimizer.schedule": "linear",
    "optimizer.epsilon": 1e-5,
    "train.prompts_per_batch": 256,
    "train.completions_per_prompt": 2,
    "train.num_steps": 390,  # 100,000 prompts
    "sampling.temperature": 0.7,
    "sampling.top_p": 1.0,
    "sampling.max_prompt_tokens": 512,
    "sampling.max_completion_tokens": 1024,
    "rounds.mini_batches": 1,
    "rounds.passes": 1,
    "rounds.lag_rounds": 1,
    "reward.where": "model",
}


class NoRobotsConfigTest(parameterized.TestCase):

  def test_the_papers_settings(self):
    found = load.flatten(no_robots.get_config())
    self.assertEqual({key: found[key] for key in _PAPER}, _PAPER)

  def test_fine_tuning_sees_longer_answers_and_is_the_same_stage(self):
    first, second = no_robots.get_config("stage=sft"), no_robots.get_config()
    self.assertEqual(
        first.sampling.max_prompt_tokens + first.sampling.max_completion_tokens,
        4096,
    )
    for key in ("task", "tokenizer", "model", "sft", "seed"):
      self.assertEqual(first[key], second[key], key)

  @parameterized.parameters("quick", "smoke", "quick,seed=3,stage=sft")
  def test_quick_needs_nothing_that_is_not_here(self, arg):
    validate.validate(load.load_config(f"configs/no_robots.py:{arg}"))

  def test_without_data_it_says_what_is_missing(self):
    config = load.load_config("configs/no_robots.py")
    with self.assertRaises(ValueError) as caught:
      validate.validate(config)
    lines = str(caught.exception).splitlines()
    keys = ("task.data", "sft.init", "tokenizer.source")
    self.assertLen(lines, len(keys))  # Nothing else is wrong.
    for key in keys:
      self.assertIn(f"config.{key}", str(caught.exception))

  def test_unknown_stages(self):
    with self.assertRaisesRegex(ValueError, "stage='dpo': allowed rl, sft"):
      no_robots.get_config("stage=dpo")


if __name__ == "__main__":
  absltest.main()
