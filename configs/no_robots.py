# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Chatbot: online DPO on No Robots, as in Asynchronous RLHF.

    python -m tba_jax.main --program=sft --workdir=runs/no_robots \\
        --config=configs/no_robots.py:stage=sft,hardware=8xh100
    python -m tba_jax.main --workdir=runs/no_robots \\
        --config=configs/no_robots.py:hardware=8xh100 \\
        --config.reward_model.train=data/preferences/train.jsonl \\
        --config.reward_model.held_out=data/preferences/test.jsonl

The first fine-tunes on answers of up to 3,584 tokens; the second trains the
reward model from that model, and then the policy. `docs/preferences.md` has the
formats of data and pairs, and the ways to compare answers with people's
(`evaluate.judge`): a reward model or a command of your own. Arguments, after a
colon and separated by commas:

- `hardware=8xh100`, the paper's; other names are in
  `tba_jax/config/hardware.py`. On a TPU, `hardware=v5p-16`;
- `stage=rl` or `sft`: the lengths of that stage;
- `quick` (minutes on two cores: the same code path with a tiny model, generated
  requests and a scripted gold reward), `smoke` (seconds);
- `seed=N`.

The settings are those of the paper's Llama 3.1 8B run (arXiv:2410.18252,
appendix): fine-tuning at 5e-6 linear with 3 % warm-up, batch 128, two epochs;
reward model at 3e-6 linear, batch 256, one epoch, 1,024 tokens; online DPO at
8e-7 linear, beta 0.03, 256 prompts of two answers a step, 100,000 prompts, one
step off-policy. Our own choices, where the paper says nothing: the pairs of the
reward model (`reward_model.num_steps` is one epoch of 60,000) and the judge
(GPT-4o in the paper). The chat format is open-instruct's
(`task.template=tulu`).

The paper reports eight H100 and a win-rate against people from 31.8 % to
57.2 %. The full run has not been made with this code. `docs/tasks.md` has
results of `quick`: its sampled win-rate rises while the greedy one stays or
falls, so what it learns is mostly lower entropy, not better answers.
"""

import ml_collections

from tba_jax.config import hardware
from tba_jax.config import settings
from tba_jax.config import variants

tldr = variants.import_config("tldr.py", beside=__file__)
tldr_reward_model = variants.import_config(
    "tldr_reward_model.py", beside=__file__
)
tldr_sft = variants.import_config("tldr_sft.py", beside=__file__)

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
  _set_models(c)
  _set_training(c)
  c.sampling.max_completion_tokens = 1024 if arg.stage == "rl" else 3584
  if arg.quick or arg.smoke:
    _make_quick(c)
  if arg.smoke:
    tldr_sft.make_smoke(c)
    tldr_reward_model.make_smoke(c)
    tldr.make_smoke(c)
  hardware.apply(c, arg.hardware)
  return c


def _set_models(c: ml_collections.ConfigDict) -> None:
  """Sets fine-tuning and reward model."""
  c.init = "sft"
  c.tokenizer.source = _MODEL
  c.model.max_positions = 4096
  c.model.param_dtype = "float32"
  s = c.sft
  s.init = _MODEL
  s.batch_size = 128
  s.micro_batch_size = 1
  s.num_steps = 2 * _NUM_CHATS // s.batch_size  # two epochs
  s.learning_rate = 5e-6
  s.schedule = "linear"
  s.warmup_steps = round(0.03 * s.num_steps)
  s.weight_decay = 0.0
  s.b2 = 0.999
  s.grad_clip_norm = 0.0
  s.evaluate_every_steps = s.num_steps
  s.checkpoint_every_steps = 50

  r = c.reward_model
  r.train = "data/preferences/train.jsonl"
  r.held_out = "data/preferences/test.jsonl"
  r.init = "sft"
  r.max_completion_tokens = 512  # and as many of the prompt
  r.batch_size = 256
  r.micro_batch_size = 1
  r.num_steps = _NUM_PAIRS // r.batch_size  # one epoch
  r.learning_rate = 3e-6
  r.schedule = "linear"
  r.warmup_steps = 0
  r.grad_clip_norm = 0.0
  r.evaluate_every_steps = r.checkpoint_every_steps = 50


def _set_training(c: ml_collections.ConfigDict) -> None:
  """Sets online DPO, one step off-policy."""
  c.reward.backend = "model"
  c.reward.model = "reward_model"
  c.reward.batch_size = 8
  c.sampling.temperature = 0.7
  c.sampling.max_prompt_tokens = 512
  c.sampling.num_slots = 64
  c.loss.name = "online_dpo"
  c.loss.beta = 0.03
  c.loss.missing_stop = "replace"
  c.loss.missing_stop_reward = -10.0
  c.optimizer.learning_rate = 8e-7
  c.optimizer.learning_rate_final = 0.0
  c.optimizer.schedule = "linear"
  c.optimizer.b1, c.optimizer.b2 = 0.9, 0.999
  c.optimizer.epsilon = 1e-5
  c.optimizer.weight_decay = 0.0
  c.optimizer.grad_clip_norm = 0.0
  c.train.prompts_per_batch = 256
  c.train.completions_per_prompt = 2
  c.train.micro_batch_prompts = 1
  c.train.num_steps = _NUM_EPISODES // c.train.prompts_per_batch
  c.search.num_searchers = 1
  c.search.samples_per_prompt = 2
  c.search.prompts_per_round = c.search.prompts_per_step = 32
  variants.set_rounds(c, mini_batches=1, passes=1, lag_rounds=1)
  c.evaluate.every_steps = c.train.num_steps // 4
  c.evaluate.num_prompts = 128
  c.evaluate.final_prompts = 500
  c.evaluate.num_completions = 1
  c.evaluate.batch_prompts = 32
  c.evaluate.greedy = True
  c.checkpoint.every_steps = 50
  c.checkpoint.keep_best = True


def _make_quick(c: ml_collections.ConfigDict) -> None:
  """Shrinks all stages like TL;DR's `quick`."""
  tldr_sft.make_quick(c)
  tldr_reward_model.make_quick(c)
  tldr.make_quick(c)
  c.sft.schedule = "cosine"
  c.model.param_dtype = "float32"
  c.optimizer.epsilon = 1e-8
  # Pairs carry less information than groups: more of them, and more KL.
  c.train.prompts_per_batch = c.train.micro_batch_prompts = 64
  c.search.prompts_per_round = c.search.prompts_per_step = 64
  c.loss.beta = 0.1
  c.optimizer.learning_rate = 3e-4
  c.optimizer.learning_rate_final = 3e-5
