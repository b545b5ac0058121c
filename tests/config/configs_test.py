# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Every config of `configs/` is right, and has what its paper's run has."""

import math
import pathlib
from unittest import mock

from absl.testing import parameterized
import pytest

from tba_jax.config import load
from tba_jax.config import validate
from tba_jax.config import variants
from tba_jax.learning import schedules
from tba_jax.policy import prompt_preview
from tba_jax.tasks import task_table
from tests.support import hub_cache

_ROOT = pathlib.Path(__file__).parents[2]
_FOLDER = _ROOT / "configs"
_CONFIGS = {
    str(path.relative_to(_FOLDER).with_suffix("")): variants.import_config(
        str(path)
    )
    for path in sorted(_FOLDER.rglob("*.py"))
}
# Files of the hub that a machine without a network lacks: the only problems.
_MISSING = {
    "gsm8k/tba": ("task.data", "init"),
    "gsm8k/async_rlhf": ("task.data", "init"),
    "gsm8k/calculator": ("sft.init", "tokenizer.source"),
    "math": ("task.train", "init", "tokenizer.source"),
    "no_robots": ("task.data", "sft.init", "tokenizer.source"),
    "red_team": ("task.victim", "sft.init", "tokenizer.source"),
    **dict.fromkeys(("tldr/tba", "tldr/async_rlhf"), (
        "task.data", "sft.init", "tokenizer.source", "reward_model.relabel",
    )),
}  # fmt: skip
# Their model, of nine heads, is fetched by the first run.
_REAL = ("instructions", "pretrained_turns")
_MORE = (
    *(f"{name}:{size}lockstep" for name in ("countdown", "countdown_sparse")
      for size in ("", "quick,", "smoke,")),
    "gsm8k/tba:quick,model=llama-3.2-1b,seed=3",
    "no_robots:quick,stage=sft",
    "red_team:quick,model=llama",
    "tldr/tba:quick,model=pythia-2.8b",
    "tldr/async_rlhf:quick,method=online_dpo",
    "tldr/async_rlhf:quick,method=best_of_2",
    "tldr/async_rlhf:quick,method=rloo",
    "tldr/async_rlhf:quick,method=ppo",
    "tldr/tba:quick,overoptimize",
    *(f"{name}/async_rlhf:{size},lag=0" for name in ("tldr", "gsm8k")
      for size in ("quick", "smoke")),
    "tldr/async_rlhf:quick,method=ppo,mini_batches=4,passes=2,lag=0",
    "gsm8k/async_rlhf:quick,method=rloo",
    "gsm8k/async_rlhf:quick,method=ppo",
)  # fmt: skip

# The Figure 1 run of Bartoldson et al. 2025 (arXiv:2503.18929): Table 2, App.
# B.1 and the launch script of the authors' code; β as it moves per step.
_GSM8K = {
    "reference.mode": "fixed",
    "loss.name": "tb",
    "loss.scale": "paper",
    "loss.correction": "",
    "loss.ratio_clip": 0.0,
    "loss.include_stop_token": False,
    "loss.missing_stop": "keep",
    "loss.beta": "0.014:0.004:500",
    "train.prompts_per_batch": 7,
    "train.completions_per_prompt": 20,
    "train.micro_batch_prompts": 1,
    "search.samples_per_prompt": 24,
    "search.num_searchers": 3,
    "search.prompts_per_round": 3,
    "search.prompts_per_step": 0,  # Searchers run free.
    "search.wait_for_fresh": True,  # Up to a barrier every k steps.
    "reference.role": "searcher",
    "train.num_steps": 700,
    "train.per_round_steps": 0,  # Differs: docs of the config.
    "optimizer.learning_rate": 1e-5,
    "optimizer.learning_rate_final": 0.0,
    "optimizer.schedule": "warmup_stable_decay",
    "optimizer.warmup_steps": 50,
    "optimizer.stable_steps": 350,
    "optimizer.decay_steps": 600,
    "optimizer.b1": 0.9,
    "optimizer.b2": 0.999,
    "optimizer.epsilon": 1e-8,
    "optimizer.weight_decay": 0.0,
    "optimizer.grad_clip_norm": 0.0,
    "sampling.temperature": 0.7,
    "sampling.top_p": 1.0,
    "sampling.top_k": 0,
    "explore.fraction": 0.0,
    "sampling.max_prompt_tokens": 256,
    "sampling.max_completion_tokens": 512,
    "model.param_dtype": "float32",
    "publish.every_steps": 2,
    "replay.recent_fraction": 0.95,
    "replay.recent_window_steps": 2,
    "replay.selection": "uniform",
    "replay.capacity_per_prompt": 100,
    "replay.dedupe": True,
    "replay_filter.evict": "oldest",
    "replay.warm_start_completions": 500,
    "task.prompt_format": "tba",
    "task.answer_rule": "tba",
    "evaluate.greedy": True,
    "evaluate.final_prompts": 1319,
}
# The same, Table 2, and Table 5's 40 samples.
_GSM8K_TABLE_2 = _GSM8K | {
    "loss.beta": "0.012:0.004:500",
    "train.num_steps": 1000,
    "optimizer.stable_steps": 450,
    "optimizer.decay_steps": 500,
}
_GSM8K_40 = _GSM8K | {
    "train.completions_per_prompt": 40,
    "train.prompts_per_batch": 3,
    "search.samples_per_prompt": 48,
}
# Noukhovitch et al. 2024 (arXiv:2410.18252) on GSM8K: the configs of the dev
# branch of the authors' code.
_GSM8K_ROUNDS = {
    "task.prompt_format": "sft",
    "task.answer_rule": "hash",
    "loss.missing_stop": "keep",
    "optimizer.learning_rate": 3e-6,
    "optimizer.learning_rate_final": 0.0,
    "optimizer.schedule": "linear",
    "optimizer.warmup_steps": 0,
    "optimizer.b1": 0.9,
    "optimizer.b2": 0.999,
    "optimizer.epsilon": 1e-8,
    "optimizer.weight_decay": 0.0,
    "reference.mode": "fixed",
    "loss.include_stop_token": False,
    "loss.correction": "",
    "search.num_searchers": 1,
    "train.per_round_steps": 0,  # Differs: docs of the config.
    "model.param_dtype": "float32",  # Differs too.
    "sampling.temperature": 0.7,
    "sampling.top_p": 1.0,
    "sampling.max_completion_tokens": 512,
    "rounds.mini_batches": 1,
    "rounds.lag_rounds": 1,
    "evaluate.greedy": True,
    "evaluate.final_prompts": 1319,
}
_GSM8K_METHODS = {
    "online_dpo": {
        "loss.name": "online_dpo",
        "loss.beta": 0.1,
        "train.completions_per_prompt": 4,  # best and worst
        "train.prompts_per_batch": 252,
        "train.num_steps": 512,
        "rounds.passes": 1,
        "optimizer.grad_clip_norm": 0.0,
    },
    "rloo": {
        "loss.name": "proximal_rloo",
        "loss.beta": 0.05,
        "loss.ratio_clip": 0.2,
        "train.completions_per_prompt": 4,
        "train.prompts_per_batch": 63,
        "train.num_steps": 2048,
        "rounds.passes": 1,
        "optimizer.grad_clip_norm": 0.0,
    },
    "ppo": {
        "loss.name": "ppo",
        "loss.beta": 0.05,
        "loss.value_init": "policy",
        "loss.value_clip": 0.2,
        "loss.value_weight": 0.1,
        "loss.gae_gamma": 1.0,
        "loss.gae_lambda": 0.95,
        "loss.whiten_advantages": True,
        "train.completions_per_prompt": 8,
        "train.prompts_per_batch": 32,  # 256 completions of 131,072 a round
        "train.num_steps": 2 * 512,
        "rounds.passes": 2,
        "optimizer.grad_clip_norm": 1.0,
    },
}
# TBA' on MATH, the same paper: Table 4 and the authors' config files.
_MATH = {
    "init": "Qwen/Qwen2.5-7B",
    "task.prompt_format": "qwen",
    "reference.mode": "reset",
    "reference.every_steps": 50,
    "loss.name": "tba_prime",
    "loss.length_norm": "",
    "loss.correction": "",
    "loss.ratio_clip": 0.0,
    "loss.ratio_cap": 8.0,
    "loss.beta": 0.005,
    "train.prompts_per_batch": 32,
    "train.completions_per_prompt": 16,
    "train.num_steps": 400,
    "search.samples_per_prompt": 16,
    "search.prompts_per_step": 32,
    "search.num_searchers": 4,
    "search.prompts_per_round": 8,
    "search.wait_for_fresh": True,
    "optimizer.learning_rate": 1e-6,
    "optimizer.learning_rate_final": 1e-6,
    "optimizer.schedule": "constant",
    "optimizer.warmup_steps": 0,
    "optimizer.b1": 0.9,
    "optimizer.b2": 0.99,
    "optimizer.weight_decay": 0.01,
    "optimizer.grad_clip_norm": 1.0,
    "sampling.temperature": 1.0,
    "sampling.top_p": 1.0,
    "sampling.max_prompt_tokens": 1024,
    "sampling.max_completion_tokens": 3072 - 1024,
    "model.param_dtype": "float32",
    "model.compute_dtype": "auto",
    "replay.recent_fraction": 1.0,
    "replay.recent_window_steps": 1,
    "replay.warm_start_completions": 0,
    "evaluate.final_prompts": 500,
    "evaluate.greedy": True,
    "reward.backend": "pool",
}
# Noukhovitch et al. 2024 (arXiv:2410.18252), appendix tables of the 8B run;
# optimizer's epsilon and accounting of open-instruct's command.
_NO_ROBOTS = {
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
    "loss.missing_stop": "replace",
    "loss.missing_stop_reward": -10.0,
    "optimizer.learning_rate": 8e-7,
    "optimizer.learning_rate_final": 0.0,
    "optimizer.schedule": "linear",
    "optimizer.epsilon": 1e-5,
    "optimizer.b1": 0.9,
    "optimizer.b2": 0.999,
    "optimizer.weight_decay": 0.0,
    "search.num_searchers": 1,
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
    "reward.backend": "model",
}
# Bartoldson et al. 2025 (arXiv:2503.18929) §5.1, B.3, on Lee et al. 2025
# (arXiv:2405.18540) and the code that these released.
_RED_TEAM = {
    "init": "sft",
    "reference.mode": "fixed",
    "loss.name": "tb_learned_z",
    "loss.scale": "paper",
    "loss.beta": 0.05,
    "loss.ratio_clip": 0.0,
    "loss.correction": "",
    "search.prompts_per_step": 0,  # Searchers run free.
    "search.wait_for_fresh": True,
    "train.num_steps": 5000,
    "lora.rank": 32,
    "lora.alpha": 16.0,
    "reference.role": "searcher",
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
    # 5 to 20 tokens, and a stop token after the 20th.
    "explore.min_tokens": 4,
    "explore.max_tokens": 20,
    "sampling.max_completion_tokens": 21,
    "publish.every_steps": 10,
    "replay.recent_fraction": 0.5,
    "replay.selection": "reward",
    "replay.reward_temperature": 1.0,
    "replay.warm_start_completions": 10 * 128,
    "replay_filter.evict": "oldest",
    "replay_filter.duplicates": "oldest",
    "replay_filter.similarity_by": "log_reward",
    "task.victim_samples": 5,
    "task.success_threshold": 0.5,
    "sft.num_steps": 100,
    "sft.learning_rate": 3e-5,
}
_GPT2 = {
    "lora.targets": "q,k,v",  # `c_attn`
    "tempering.tau": "2.0:1.0:500",
    "tempering.gamma": 1.0,
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
    "lora.targets": "q,v",
    "tempering.tau": "2.0:1.0:1000",
    "tempering.gamma": "1.0:1.2:2000",
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
# TL;DR, of both papers.
_TLDR = {
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
    "reward.backend": "model",
    "train.num_steps": 256,
    "train.per_round_steps": 0,  # Differs: docs of the config.
}
# Bartoldson et al. 2025 (arXiv:2503.18929), Table 3, App. B.2 and the code.
_TBA = {
    "loss.name": "tb",
    "loss.scale": "paper",
    "loss.correction": "",
    "loss.ratio_clip": 0.0,
    # Half of the steps, and a jump after an eighth of them.
    "loss.beta": "1.0:0.05:128:32",
    "sampling.max_completion_tokens": 128,
    "train.prompts_per_batch": 8,
    "train.completions_per_prompt": 20,
    "search.samples_per_prompt": 20,
    "search.num_searchers": 3,
    "search.prompts_per_step": 0,  # Searchers run free.
    "search.wait_for_fresh": True,
    "reference.role": "searcher",
    "explore.fraction": 0.0,
    "publish.every_steps": 10,
    "replay.recent_fraction": 0.5,
    "replay.recent_window_steps": 10,
    "replay.selection": "reward",
    "replay.reward_temperature": 1.0,
    "replay.dedupe": True,
    "replay_filter.evict": "oldest",
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
    "search.num_searchers": 1,
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
        "loss.ratio_clip": 0.2,
        "train.prompts_per_batch": 256,  # The code counts samples.
        "train.completions_per_prompt": 2,
    },
    "ppo": {
        "loss.name": "ppo",
        "loss.beta": 0.05,
        "loss.ratio_clip": 0.2,
        "loss.value_init": "reward_model",
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
# Batches of §3.3's table: (SFT batch, RM batch and its part) of the released
# configs.
_BATCHES = {
    "pythia-410m": (16, 64, 8),
    "pythia-1b": (32, 16, 4),
    "pythia-2.8b": (32, 16, 2),
}


def _config(spec):
  """Returns the config of "NAME:ARG", not yet complete."""
  name, _, arg = spec.partition(":")
  return _CONFIGS[name].get_config(arg)


class PaperTest(parameterized.TestCase):

  @parameterized.parameters(
      *((f"gsm8k/tba:model={m}", _GSM8K) for m in _CONFIGS["gsm8k/tba"].MODELS),
      ("gsm8k/tba", {"init": "realtreetune/rho-1b-sft-GSM8K"}),
      ("gsm8k/tba:steps=1000", _GSM8K_TABLE_2),
      ("gsm8k/tba:samples=40", _GSM8K_40),
      *(
          (f"gsm8k/async_rlhf:method={m}", _GSM8K_ROUNDS, t)
          for m, t in _GSM8K_METHODS.items()
      ),
      ("math", _MATH, {"search.lead_steps": 2}),
      ("math:lag=10", _MATH, {"search.lead_steps": 10}),
      ("no_robots", _NO_ROBOTS),
      ("red_team:model=gpt2,learned_z", _RED_TEAM, _GPT2),
      ("red_team:model=llama,learned_z", _RED_TEAM, _LLAMA),
      *(
          (f"tldr/tba:model={m}", _TLDR, _TBA)
          for m in _CONFIGS["tldr/sft"].MODELS
      ),
      *(
          (f"tldr/async_rlhf:method={m}", _TLDR, _ROUNDS, t)
          for m, t in _ASYNC_RLHF.items()
      ),
  )
  def test_has_settings_of_paper(self, spec, *tables):
    result = load.flatten(_config(spec))
    for table in tables:
      self.assertEqual({key: result[key] for key in table}, table)

  @parameterized.parameters(
      *_MISSING,
      *(f"gsm8k/async_rlhf:method={method}" for method in _GSM8K_METHODS),
      *(f"tldr/async_rlhf:method={method}" for method in _ASYNC_RLHF),
      "red_team:model=llama",
  )
  def test_best_model_is_kept(self, spec):
    config = _config(spec)
    self.assertTrue(config.checkpoint.keep_best)
    # Some evaluations choose it.
    num = config.train.num_steps / (config.evaluate.every_steps or math.inf)
    self.assertBetween(num, 3, 100)

  def test_gsm8k_fine_tunes_as_start_of_paper_was(self):
    c = _config("gsm8k/tba:model=qwen2.5-0.5b")
    self.assertEqual(c.init, "sft")
    # Two epochs at batch 64, 3 % of them warm-up, as VinePPO's model had.
    self.assertEqual(c.sft.num_steps, round(2 * 7473 / 64))
    self.assertEqual(c.sft.warmup_steps, round(0.03 * c.sft.num_steps))
    self.assertEqual((c.sft.batch_size, c.sft.learning_rate), (64, 1e-5))

  @parameterized.parameters("gpt2", "llama")
  def test_red_team_counts_attacks(self, model):
    c = _config(f"red_team:model={model}")
    # 128 attacks a step, in micro-batches of 16, of one flat buffer.
    self.assertEqual(
        c.train.prompts_per_batch * c.train.completions_per_prompt, 128
    )
    self.assertEqual(c.train.micro_batch_prompts, 1)
    self.assertEqual(c.replay.capacity_per_prompt, c.replay.capacity)
    self.assertEqual(
        c.evaluate.final_prompts * c.evaluate.num_completions, 1024
    )

  def test_red_team_lowers_learning_rate(self):
    c = _config("red_team")
    rate = schedules.learning_rate(
        c.optimizer, num_steps=c.train.num_steps, per_round_steps=0
    )
    self.assertAlmostEqual(float(rate(99)), 1e-4, places=9)
    # Theirs: a line from step 100 to 0 at step 40,000.
    for step in (2500, 4999):
      theirs = 1e-4 * (40_000 - step) / (40_000 - 100)
      self.assertAlmostEqual(float(rate(step)), theirs, delta=2e-7)

  def test_longer_runs_stretch_beta(self):
    c = _config("tldr/tba:steps=625,model=pythia-1b")
    self.assertEqual((c.train.num_steps, c.loss.beta), (625, "1.0:0.05:312:78"))
    # A prompt an iteration; the smallest model's searchers take two.
    self.assertEqual(c.search.prompts_per_round, 1)
    self.assertEqual(_config("tldr/tba").search.prompts_per_round, 2)

  def test_regimes_of_async_rlhf_have_their_rounds_and_groups(self):
    """The same number of prompts, in other rounds."""
    c = _config("tldr/async_rlhf:method=online_dpo,mini_batches=16,lag=0")
    rounds = (c.rounds.mini_batches, c.rounds.lag_rounds, c.rounds.passes)
    self.assertEqual((rounds, c.train.num_steps), ((16, 0, 1), 256))
    self.assertEqual(c.publish.every_steps, 16)
    c = _config("tldr/async_rlhf:method=online_dpo,passes=2")
    self.assertEqual((c.rounds.passes, c.train.num_steps), (2, 512))
    c = _config("tldr/async_rlhf:method=online_dpo,samples=4")
    self.assertEqual(c.search.samples_per_prompt, 4)
    self.assertEqual(c.train.prompts_per_batch, 512)
    # Its batch counts samples.
    c = _config("tldr/async_rlhf:method=rloo,samples=4")
    self.assertEqual(c.train.prompts_per_batch, 128)

  def test_rounds_fit_config_with_replay_filter(self):
    c = _config("countdown:quick")
    self.assertTrue(c.replay.skip_equal_rewards)
    c.search.wait_for_fresh = False
    c.replay_filter.evict = "redundant"
    c.replay_filter.similarity = "edit"
    variants.set_rounds(c, mini_batches=2)
    validate.validate(c)

  @parameterized.parameters(*_BATCHES)
  def test_fine_tuning_and_reward_model_match_paper(self, model):
    c = _config(f"tldr/reward_model:model={model}")
    # tests/learning/offline_test.py checks the optimizer's constants.
    same = ("learning_rate", "schedule", "warmup_steps", "grad_clip_norm")
    for section in (c.sft, c.reward_model):
      self.assertEqual(
          [section[name] for name in same], [1e-5, "cosine", 0, 1.0]
      )
    self.assertEqual((c.sft.b2, c.sft.weight_decay), (0.999, 0.0))
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
    self.assertEqual(c.sft.init, f"EleutherAI/{model}-deduped")


class StagesTest(parameterized.TestCase):

  @parameterized.parameters(
      ("tldr/sft:quick", "tldr/tba:quick"),
      ("tldr/sft:model=pythia-1b", "tldr/tba:model=pythia-1b"),
      ("tldr/reward_model:smoke", "tldr/tba:smoke"),
      ("no_robots:stage=sft", "no_robots"),
      (
          "tldr/sft:hardware=v5e-16",
          "tldr/async_rlhf:hardware=v5e-16,method=ppo",
      ),
      ("tldr/sft:hardware=8xh100", "tldr/tba:hardware=8xh100"),
  )
  def test_stages_share_settings_of_earlier_stage(self, first, second):
    first, second = _config(first), _config(second)
    for key in ("task", "tokenizer", "model", "sft", "seed"):
      self.assertEqual(first[key], second[key], key)

  def test_reward_models_agree(self):
    for arg in ("quick", "smoke", "model=pythia-1b"):
      self.assertEqual(
          _config(f"tldr/reward_model:{arg}").reward_model,
          _config(f"tldr/tba:{arg}").reward_model,
      )

  def test_no_robots_fine_tunes_on_longer_answers(self):
    c = _config("no_robots:stage=sft").sampling
    self.assertEqual(c.max_prompt_tokens + c.max_completion_tokens, 4096)


class RightTest(parameterized.TestCase):

  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    # Many configs have the same task; making its data takes a second.
    made = {}
    make = task_table.make_task

    def make_once(config_task):
      key = repr(sorted(dict(config_task).items()))
      if key not in made:
        made[key] = make(config_task)
      return made[key]

    cls.enterClassContext(mock.patch.object(task_table, "make_task", make_once))

  @parameterized.parameters(
      *(name for name in _CONFIGS
        if name not in (
            *_MISSING, *_REAL, "serve", "tldr/sft", "tldr/reward_model"
        )),
      *(f"{name}:quick" for name in _CONFIGS if name not in (*_REAL, "serve")),
      *(f"{name}:smoke" for name in _CONFIGS),
      *_MORE,
  )  # fmt: skip
  @pytest.mark.slow
  def test_every_config_validates(self, spec):
    name, _, arg = spec.partition(":")
    config = load.load_config(f"configs/{name}.py:{arg}")
    validate.validate(config)
    if config.task.name:
      prompt_preview.print_data(config)  # A run does that first.

  @parameterized.product(
      spec=(
          *(name for name in _CONFIGS
            if name not in (*_REAL, "generate", "serve")),
          *(f"{name}:model={m}" for m in _CONFIGS["tldr/sft"].MODELS
            for name in ("tldr/tba", "tldr/reward_model")),
      ),
      # What divides by 8 divides by 2.
      mesh=({"fsdp": 4, "tensor": 2}, {"fsdp": 8}),
  )  # fmt: skip
  def test_splits_over_meshes(self, spec, mesh):
    hub_cache.make(self)  # Nothing is downloaded.
    config = _config(spec)
    config.mesh.update(mesh)
    for program in ("train", "reward_model"):
      try:
        validate.validate(config, program=program, elsewhere=True)
      except validate.ConfigError as error:
        # Other problems are those of `test_right`.
        for line in str(error).splitlines():
          self.assertNotRegex(line, r"config\.mesh|batch|shard")

  @parameterized.parameters(*_MISSING.items())
  def test_only_hub_files_are_missing(self, name, keys):
    hub_cache.make(self)
    with self.assertRaises(ValueError) as caught:
      validate.validate(load.load_config(f"configs/{name}.py"))
    lines = str(caught.exception).splitlines()
    for line in lines:
      self.assertTrue(any(f"config.{key}" in line for key in keys), line)
      self.assertIn("; fetch it with  hf download ", line)

  @parameterized.parameters(
      "gsm8k/tba:model=gpt-5", "gsm8k/tba:samples=30",
      "gsm8k/async_rlhf:method=grpo", "gsm8k/async_rlhf:steps=1000",
      "no_robots:stage=dpo", "red_team:model=gpt-5",
      "tldr/tba:model=gpt-5", "tldr/tba:lag=0", "tldr/async_rlhf:method=grpo",
      "tldr/tba:overoptimize", "countdown:model=big",
      "gsm8k/calculator:model=gpt-5", "pretrained_turns:task=chess",
  )  # fmt: skip
  def test_refuses_unknown_arguments(self, spec):
    name = spec.partition(":")[2].partition("=")[0]
    with self.assertRaisesRegex(ValueError, name):
      _config(spec)
