# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Chatbot: online DPO on No Robots, as in Asynchronous RLHF.

    python -m tba_jax.main --program=sft --workdir=runs/no_robots \\
        --config=configs/no_robots.py:stage=sft,hardware=8xh100
    python -m tba_jax.main --workdir=runs/no_robots \\
        --config=configs/no_robots.py:hardware=8xh100 \\
        --config.reward_model.train=data/preferences/train.jsonl \\
        --config.reward_model.held_out=data/preferences/test.jsonl

The first command fine-tunes on answers of up to 3,584 tokens; the second trains
the reward model from the result, and then the policy.
`docs/guides/offline_data.md` describes the formats of data and pairs, and how
to compare answers with human ones (`evaluate.judge`): by a reward model or a
custom command. Arguments, after a colon and separated by commas:

- `hardware=8xh100`, as in the paper; other names are in
  `tba_jax/config/hardware.py`. On a TPU, `hardware=v5p-16`;
- `stage=rl` or `sft`: sequence lengths of that stage;
- `quick` (minutes on two cores: the same code path with a tiny model, generated
  requests and a scripted gold reward), `smoke` (seconds);
- `seed=N`.

The settings follow the paper's Llama 3.1 8B run (arXiv:2410.18252, appendix):
SFT at 5e-6 linear with 3 % warm-up, batch size 128, two epochs; reward model at
3e-6 linear, batch size 256, one epoch, 1,024 tokens; online DPO at 8e-7 linear,
beta 0.03, 256 prompts with two answers per step, 100,000 prompts, one step
off-policy. The paper does not specify the pairs of the reward model
(`reward_model.num_steps` is one epoch of 60,000) and its judge is GPT-4o. The
chat format is that used by open-instruct (`task.template=tulu`).

The paper reports eight H100s and a win rate against humans that rises from
31.8 % to 57.2 %. The full run has not been made with this code.
`docs/results/tasks.md` has results of `quick`: the sampled win rate rises while
the greedy one stays or falls, so it mostly learns lower entropy, not better
answers.
"""

import ml_collections

from tba_jax.config import hardware
from tba_jax.config import settings
from tba_jax.config import variants

STAGES = ("rl", "sft")
_NUM_CHATS = 9_500
_NUM_PAIRS = 60_000
_NUM_EPISODES = 100_000
_MODEL = "meta-llama/Llama-3.1-8B"


def get_config(arg: str = "") -> ml_collections.ConfigDict:
  """Returns the config; the module docstring lists the arguments."""
  arg = variants.parse_arg(
      arg, smoke=False, quick=False, seed=0, stage="rl", hardware=""
  )
  variants.check_choices(arg, stage=STAGES)
  c = settings.get_config()
  c.seed = arg.seed
  _set_both(c)
  if arg.quick or arg.smoke:
    _set_quick(c)
  else:
    _set_paper(c, arg.stage)
  variants.set_rounds(c, mini_batches=1, passes=1, lag_rounds=1)
  if arg.smoke:
    _make_smoke(c)
  hardware.apply(c, arg.hardware)
  return c


def _set_both(c: ml_collections.ConfigDict) -> None:
  """Sets what `quick` shares with the paper's run."""
  c.init = "sft"
  c.model.param_dtype = "float32"
  c.sft.weight_decay = 0.0
  c.sft.b2 = 0.999
  c.sft.grad_clip_norm = 0.0
  c.reward_model.init = "sft"
  c.reward_model.schedule = "linear"
  c.reward_model.grad_clip_norm = 0.0
  c.reward.backend = "model"
  c.reward.model = "reward_model"
  c.reward.batch_size = 8
  c.loss.name = "online_dpo"
  c.loss.missing_stop = "replace"
  c.loss.missing_stop_reward = -10.0
  c.optimizer.schedule = "linear"
  c.optimizer.b1, c.optimizer.b2 = 0.9, 0.999
  c.optimizer.weight_decay = 0.0
  c.train.completions_per_prompt = c.search.samples_per_prompt = 2
  c.search.num_searchers = 1
  c.evaluate.num_prompts = 128
  c.evaluate.batch_prompts = 32
  c.evaluate.greedy = True
  c.checkpoint.keep_best = True


def _set_paper(c: ml_collections.ConfigDict, stage: str) -> None:
  """Sets the paper's run: online DPO, one step off-policy."""
  c.task = ml_collections.ConfigDict(
      dict(
          name="chat",
          data="HuggingFaceH4/no_robots",
          template="tulu",
          synthetic_prompts=3000,
          synthetic_pairs=8000,
          validation_prompts=0,
          split_seed=0,
      )
  )
  c.sft.init = c.tokenizer.source = _MODEL
  c.model.max_positions = 4096
  c.sft.batch_size = 128
  c.sft.micro_batch_size = 1
  c.sft.num_steps = 2 * _NUM_CHATS // 128  # Two epochs.
  c.sft.learning_rate = 5e-6
  c.sft.schedule = "linear"
  c.sft.warmup_steps = round(0.03 * c.sft.num_steps)
  c.sft.evaluate_every_steps = c.sft.num_steps
  c.sft.checkpoint_every_steps = 50

  r = c.reward_model
  r.train = "data/preferences/train.jsonl"
  r.held_out = "data/preferences/test.jsonl"
  r.max_completion_tokens = 512  # And as many prompt tokens.
  r.batch_size = 256
  r.micro_batch_size = 1
  r.num_steps = _NUM_PAIRS // 256  # One epoch.
  r.learning_rate = 3e-6
  r.warmup_steps = 0
  r.evaluate_every_steps = r.checkpoint_every_steps = 50

  c.sampling.temperature = 0.7
  c.sampling.max_prompt_tokens = 512
  c.sampling.max_completion_tokens = 1024 if stage == "rl" else 3584
  c.sampling.num_slots = 64
  c.loss.beta = 0.03
  c.optimizer.learning_rate = 8e-7
  c.optimizer.learning_rate_final = 0.0
  c.optimizer.epsilon = 1e-5
  c.optimizer.grad_clip_norm = 0.0
  c.train.prompts_per_batch = 256
  c.train.micro_batch_prompts = 1
  c.train.num_steps = _NUM_EPISODES // 256
  c.search.prompts_per_round = c.search.prompts_per_step = 32
  c.evaluate.every_steps = c.train.num_steps // 4
  c.evaluate.final_prompts = 500
  c.evaluate.num_completions = 1
  c.checkpoint.every_steps = 50


def _set_quick(c: ml_collections.ConfigDict) -> None:
  """Sets tiny models, generated requests and pairs, and a scripted reward."""
  c.task = ml_collections.ConfigDict(
      dict(
          name="chat",
          data="synthetic",
          template="tulu",
          synthetic_prompts=3000,
          synthetic_pairs=8000,
          validation_prompts=0,
          split_seed=0,
      )
  )
  c.sft.init = "scratch"
  c.tokenizer.source = "task"
  c.model.num_layers = 2
  c.model.width = 64
  c.model.max_positions = 64
  c.sft.batch_size = c.sft.micro_batch_size = 32
  c.sft.num_steps = 400
  c.sft.learning_rate = 3e-3
  c.sft.schedule = "cosine"
  c.sft.warmup_steps = 20
  c.sft.evaluate_every_steps = 400
  c.sft.checkpoint_every_steps = 200

  r = c.reward_model
  r.train = r.held_out = r.relabel = "task"
  r.max_completion_tokens = 12
  r.batch_size = r.micro_batch_size = 32
  r.num_steps = 300
  r.learning_rate = 1e-3
  r.warmup_steps = 10
  r.evaluate_pairs = 1024
  r.evaluate_every_steps = r.checkpoint_every_steps = 100

  c.sampling.temperature = 1.0
  c.sampling.max_prompt_tokens = 40
  c.sampling.max_completion_tokens = 12
  c.sampling.num_slots = 128
  c.loss.beta = 0.1
  c.optimizer.learning_rate = 3e-4
  c.optimizer.learning_rate_final = 3e-5
  c.optimizer.grad_clip_norm = 1.0
  # Pairs carry less information than groups, so use more of them, and more KL.
  c.train.prompts_per_batch = c.train.micro_batch_prompts = 64
  c.train.num_steps = 80
  c.search.prompts_per_round = c.search.prompts_per_step = 64
  c.evaluate.every_steps = 20
  c.evaluate.final_prompts = 512
  c.evaluate.num_completions = 4
  c.evaluate.judge = "task"
  c.checkpoint.every_steps = 40


def _make_smoke(c: ml_collections.ConfigDict) -> None:
  """Shrinks all stages of `quick` to a smoke test."""
  c.task.synthetic_prompts = 100
  c.task.synthetic_pairs = 100
  variants.shrink_model(c)
  c.sft.num_steps = 20
  c.sft.warmup_steps = 5
  c.sft.batch_size = c.sft.micro_batch_size = 16
  c.sft.evaluate_every_steps = 20
  c.sft.checkpoint_every_steps = 10
  r = c.reward_model
  r.num_steps = 10
  r.warmup_steps = 2
  r.batch_size = r.micro_batch_size = 8
  r.evaluate_pairs = 16
  r.evaluate_every_steps = r.checkpoint_every_steps = 5
  c.sampling.num_slots = 32
  c.search.prompts_per_round = c.search.prompts_per_step = 8
  c.train.num_steps = 6
  c.train.prompts_per_batch = c.train.micro_batch_prompts = 8
  c.evaluate.every_steps = 3
  c.evaluate.num_prompts = 8
  c.evaluate.final_prompts = 16
  c.evaluate.num_completions = 2
  c.evaluate.batch_prompts = 8
  c.checkpoint.every_steps = 3
  c.log.samples_every_steps = 3
