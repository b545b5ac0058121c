# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""`configs/red_team.py` has what the papers' runs have."""

from absl.testing import absltest
from absl.testing import parameterized

from tba_jax.config import load
from tba_jax.config import validate
from tba_jax.config import variants
from tba_jax.training import schedules

red_team = variants.import_config("configs/red_team.py")

# Bartoldson et al. 2025 (arXiv:2503.18929) §5.1, B.3, on Lee et al. 2025
# (arXiv:2405.18540) and the code that these released.
_BOTH = {
    "init": "sft",
    "reference.mode": "fixed",
    "loss.name": "tb_learned_z",
    "loss.scale": "paper",
    "loss.beta": 0.05,
    "loss.beta_final": 0.05,
    "loss.ratio_clip": 0.0,
    "loss.correction": "",
    "tempering.tau": 2.0,
    "tempering.tau_final": 1.0,
    "tempering.gamma": 1.0,
    "train.num_steps": 5000,
    "optimizer.learning_rate": 1e-4,
    "optimizer.schedule": "linear",
    "optimizer.warmup_steps": 100,
    "optimizer.b1": 0.9,
    "optimizer.b2": 0.999,
    "optimizer.weight_decay": 0.01,
    "optimizer.grad_clip_norm": 1.0,
    "sampling.temperature": 1.0,
    "explore.fraction": 0.5,
    "explore.max_temperature": 2.0,
    "explore.min_tokens": 5,
    "sampling.max_completion_tokens": 20,
    "publish.every_steps": 10,
    "replay.recent_fraction": 0.5,
    "replay.selection": "reward",
    "replay.reward_temperature": 1.0,
    "replay.warm_start_completions": 10 * 128,
    "replay_filter.evict": "oldest",
    "replay_filter.duplicates": "oldest",
    "task.victim_samples": 5,
    "task.success_threshold": 0.5,
    "sft.num_steps": 100,
    "sft.learning_rate": 3e-5,
}
_GPT2 = {
    "tempering.tau_decay_steps": 500,
    "tempering.gamma_final": 1.0,
    "explore.min_temperature": 0.5,
    "replay.capacity": 100_000,
    "replay_filter.freeze_step": 4000,
    "replay_filter.similarity": "edit",
    "replay_filter.similarity_limit": 0.25,
    "task.classifier": "sequence",
    "task.victim_temperature": 0.7,
    "task.victim_top_p": 0.92,
    "task.victim_max_tokens": 30,
    "search.num_searchers": 2,
    "sft.batch_size": 1024,
}
_LLAMA = {
    "tempering.tau_decay_steps": 1000,
    "tempering.gamma_final": 1.2,
    "tempering.gamma_decay_steps": 2000,
    "explore.min_temperature": 0.7,
    "replay.capacity": 150_000,
    "replay_filter.freeze_step": 0,
    "replay_filter.similarity": "cosine",
    "replay_filter.similarity_limit": 0.4,
    "task.classifier": "first_token",
    "task.classifier_token": "unsafe",
    "task.victim_temperature": 0.1,
    "task.victim_top_p": 0.9,
    "task.victim_max_tokens": 64,
    "search.num_searchers": 6,
}


class RedTeamConfigTest(parameterized.TestCase):

  @parameterized.parameters(("gpt2", _GPT2), ("llama", _LLAMA))
  def test_the_papers_settings(self, model, own):
    found = load.flatten(red_team.get_config(f"model={model}"))
    expected = {**_BOTH, **own}
    self.assertEqual({key: found[key] for key in expected}, expected)
    # 128 attacks a step, in micro-batches of 16, of one flat buffer.
    batch = found["train.prompts_per_batch"]
    self.assertEqual(batch * found["train.completions_per_prompt"], 128)
    self.assertEqual(found["train.micro_batch_prompts"], 1)
    self.assertEqual(
        found["replay.capacity_per_prompt"], found["replay.capacity"]
    )
    # 1024 attacks are evaluated.
    blocks = found["evaluate.final_prompts"]
    self.assertEqual(blocks * found["evaluate.num_completions"], 1024)

  def test_the_learning_rate_falls_as_theirs(self):
    c = red_team.get_config()
    rate = schedules.learning_rate(
        c.optimizer, num_steps=c.train.num_steps, per_round_steps=0
    )
    self.assertAlmostEqual(float(rate(99)), 1e-4, places=9)
    # Theirs: a line from step 100 to 0 at step 40,000.
    for step in (2500, 4999):
      theirs = 1e-4 * (40_000 - step) / (40_000 - 100)
      self.assertAlmostEqual(float(rate(step)), theirs, delta=2e-7)

  @parameterized.parameters("quick", "smoke", "quick,model=llama,seed=3")
  def test_quick_needs_nothing_that_is_not_here(self, arg):
    validate.validate(load.load_config(f"configs/red_team.py:{arg}"))

  def test_without_the_models_it_says_what_is_missing(self):
    with self.assertRaises(ValueError) as caught:
      validate.validate(load.load_config("configs/red_team.py"))
    lines = str(caught.exception).splitlines()
    for key in ("config.task.victim", "config.sft.init"):
      self.assertTrue(any(line.startswith(key) for line in lines), lines)

  def test_an_unknown_model(self):
    with self.assertRaisesRegex(ValueError, "model='gpt-5'.*gpt2, llama"):
      red_team.get_config("model=gpt-5")


if __name__ == "__main__":
  absltest.main()
