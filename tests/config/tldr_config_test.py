# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""The TL;DR configs have what the papers' runs have."""

from absl.testing import absltest
from absl.testing import parameterized

from tba_jax.config import load
from tba_jax.config import validate
from tba_jax.config import variants

tldr = variants.import_config("configs/tldr.py")
tldr_reward_model = variants.import_config("configs/tldr_reward_model.py")
tldr_sft = variants.import_config("configs/tldr_sft.py")

# Of both papers.
_COMMON = {
    "loss.missing_stop": "replace",
    "loss.missing_stop_reward": -1.0,
    "loss.include_stop_token": True,
    "optimizer.learning_rate": 3e-6,
    "optimizer.learning_rate_final": 0.0,
    "optimizer.schedule": "linear",
    "optimizer.warmup_steps": 0,
    "optimizer.b1": 0.9,
    "optimizer.b2": 0.999,
    "optimizer.epsilon": 1e-8,
    "optimizer.weight_decay": 0.0,
    "optimizer.grad_clip_norm": 0.0,
    "sampling.temperature": 0.7,
    "sampling.top_p": 1.0,
    "sampling.top_k": 0,
    "sampling.max_prompt_tokens": 512,
    "reference.mode": "fixed",
    "reward.where": "model",
    "train.num_steps": 256,
    "train.per_round_steps": 0,  # Differs: docs of the config.
}
# Bartoldson et al. 2025 (arXiv:2503.18929), Table 3, App. B.2 and the code.
_TBA = {
    "loss.name": "tb",
    "loss.scale": "paper",
    "loss.correction": "",
    "loss.ratio_clip": 0.0,
    "loss.beta": 1.0,
    "loss.beta_final": 0.05,
    "loss.beta_decay_steps": 128,  # half of the steps
    "loss.beta_stop_steps": 32,  # an eighth: the jump to 0.05
    "sampling.max_completion_tokens": 128,
    "train.prompts_per_batch": 8,
    "train.completions_per_prompt": 20,
    "search.samples_per_prompt": 20,
    "search.num_searchers": 3,
    "publish.every_steps": 10,
    "replay.recent_fraction": 0.5,
    "replay.selection": "reward",
    "replay.reward_temperature": 1.0,
    "replay.capacity_per_prompt": 100,
    "replay.warm_start_completions": 10_000,
}
# Noukhovitch et al. 2024 (arXiv:2410.18252): the released configs, one round
# behind, N = T = 1.
_ROUNDS = {
    "sampling.max_completion_tokens": 53,
    "rounds.mini_batches": 1,
    "rounds.passes": 1,
    "rounds.lag_rounds": 1,
    "publish.every_steps": 1,
}
_ASYNC_RLHF = {
    "online_dpo": {
        "loss.name": "online_dpo",
        "loss.beta": 0.1,
        "train.prompts_per_batch": 512,
        "train.completions_per_prompt": 2,
    },
    "best_of_2": {
        "loss.name": "best_of_n",
        "train.prompts_per_batch": 512,
        "train.completions_per_prompt": 2,
    },
    "rloo": {
        "loss.name": "proximal_rloo",
        "loss.beta": 0.05,
        "loss.beta_final": 0.05,
        "loss.ratio_clip": 0.2,
        "train.prompts_per_batch": 256,  # The code counts samples.
        "train.completions_per_prompt": 2,
    },
    "ppo": {
        "loss.name": "ppo",
        "loss.beta": 0.05,
        "loss.beta_final": 0.05,
        "loss.ratio_clip": 0.2,
        "loss.value_clip": 0.2,
        "loss.value_weight": 0.1,
        "loss.value_learning_rate": 3e-6,
        "loss.gae_gamma": 1.0,
        "loss.gae_lambda": 0.95,
        "loss.whiten_advantages": True,
        "train.prompts_per_batch": 512,
        "train.completions_per_prompt": 1,
    },
}
# Of §3.3's table: (SFT batch, RM batch and its part) of the released configs.
_BATCHES = {
    "pythia-410m": (16, 64, 8),
    "pythia-1b": (32, 16, 4),
    "pythia-2.8b": (32, 16, 2),
}


class TldrConfigTest(parameterized.TestCase):

  def assert_has(self, config, *tables):
    found = load.flatten(config)
    for table in tables:
      self.assertEqual({key: found[key] for key in table}, table)

  @parameterized.parameters(*tldr_sft.MODELS)
  def test_tba(self, model):
    self.assert_has(tldr.get_config(f"model={model}"), _COMMON, _TBA)

  @parameterized.parameters(*_ASYNC_RLHF)
  def test_async_rlhf(self, method):
    config = tldr.get_config(f"method={method}")
    self.assert_has(config, _COMMON, _ROUNDS, _ASYNC_RLHF[method])

  def test_longer_runs_stretch_the_beta(self):
    c = tldr.get_config("steps=625,model=pythia-1b")
    self.assertEqual(
        (c.train.num_steps, c.loss.beta_decay_steps, c.loss.beta_stop_steps),
        (625, 312, 78),
    )
    # A prompt an iteration; the smallest model's searchers take two.
    self.assertEqual(c.search.prompts_per_round, 1)
    self.assertEqual(tldr.get_config("").search.prompts_per_round, 2)

  def test_a_poor_reward_model_is_of_the_quick_form(self):
    c = tldr.get_config("quick,overoptimize")
    self.assertLess(
        c.reward_model.num_steps,
        tldr.get_config("quick").reward_model.num_steps,
    )
    validate.validate(c)
    with self.assertRaisesRegex(ValueError, "overoptimize: allowed with quick"):
      tldr.get_config("overoptimize")

  @parameterized.parameters(*tldr_sft.MODELS)
  def test_fine_tuning_and_reward_model(self, model):
    c = tldr_reward_model.get_config(f"model={model}")
    same = ("learning_rate", "schedule", "warmup_steps", "b1", "b2",
            "weight_decay", "grad_clip_norm")  # fmt: skip
    for section in (c.sft, c.reward_model):
      self.assertEqual(
          [section[name] for name in same],
          [1e-5, "cosine", 0, 0.9, 0.999, 0.0, 1.0],
      )
    self.assertEqual(
        (
            c.sft.batch_size,
            c.reward_model.batch_size,
            c.reward_model.micro_batch_size,
        ),
        _BATCHES[model],
    )
    # One epoch each; 512 and 128 tokens are the 640 of a pair's text.
    self.assertEqual(c.sft.num_steps, 116_722 // c.sft.batch_size)
    self.assertEqual(
        c.reward_model.num_steps, 92_858 // c.reward_model.batch_size
    )
    self.assertEqual(c.reward_model.max_completion_tokens, 128)
    self.assertEqual(c.sampling.max_completion_tokens, 53)
    self.assertEqual(c.sft.init, f"models/{model}-deduped")

  def test_the_stages_agree_on_what_an_earlier_one_depends_on(self):
    for arg in ("quick", "smoke", "model=pythia-1b"):
      first = tldr_sft.get_config(arg)
      second = tldr_reward_model.get_config(arg)
      third = tldr.get_config(arg)
      for key in ("task", "tokenizer", "model", "sft", "seed"):
        self.assertEqual(first[key], second[key], key)
        self.assertEqual(first[key], third[key], key)
      self.assertEqual(second.reward_model, third.reward_model)

  @parameterized.product(
      config=("tldr", "tldr_sft", "tldr_reward_model"),
      arg=("quick", "smoke", "quick,model=pythia-2.8b,seed=3"),
  )
  def test_quick_needs_nothing_that_is_not_here(self, config, arg):
    validate.validate(load.load_config(f"configs/{config}.py:{arg}"))

  @parameterized.parameters(*_ASYNC_RLHF, "tba")
  def test_every_method_has_a_quick_form(self, method):
    arg = f"quick,method={method}"
    validate.validate(load.load_config(f"configs/tldr.py:{arg}"))

  def test_without_data_it_says_what_is_missing(self):
    config = load.load_config("configs/tldr.py")
    with self.assertRaises(ValueError) as caught:
      validate.validate(config)
    lines = str(caught.exception).splitlines()
    keys = ("task.data", "sft.init", "tokenizer.source", "reward_model.relabel")
    self.assertLen(lines, len(keys))  # Nothing else is wrong.
    for key in keys:
      self.assertIn(f"config.{key}", str(caught.exception))

  @parameterized.parameters("model=gpt-5", "method=grpo", "speed=1")
  def test_unknown_arguments(self, arg):
    with self.assertRaisesRegex(ValueError, arg.partition("=")[0]):
      tldr.get_config(arg)


if __name__ == "__main__":
  absltest.main()
