# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""GSM8K with the methods of Asynchronous RLHF.

    python -m tba_jax.main --workdir=runs/gsm8k_ppo \\
        --config=configs/gsm8k/async_rlhf.py:method=ppo,hardware=4xa100

Problems and model come from the Hugging Face hub (`task.data` is
`openai/gsm8k`, `init` is `realtreetune/rho-1b-sft-GSM8K`) or from local
folders. Arguments, after a colon and separated by commas:

- `method=online_dpo`, `rloo` or `ppo`; `lag=0` is the synchronous baseline.
- `hardware=4xa100` and other names in `tba_jax/config/hardware.py`. On a TPU,
  `hardware=v5e-16` with searchers of one chip.
- `model=rho-1b` (the paper's run), `qwen2.5-0.5b` or `llama-3.2-1b`. The first
  is already fine-tuned; the others are first fine-tuned on the training
  solutions.
- `quick` (minutes on two cores: the same code path with a tiny model and small
  generated problems in GSM8K's format), `smoke` (seconds).
- `seed=N`.

The settings follow the published GSM8K code of Asynchronous RLHF
(arXiv:2410.18252); the answer is the number after `####` (`task.answer_rule`).
Differences:

- Params are float32 with bfloat16 compute, because bfloat16 params lose most
  updates at these learning rates to rounding.
- The learning rate changes every step (theirs: once per round, see
  `train.per_round_steps`).
- The ratios of `rloo` and `ppo` use log-probs from sampling (theirs: recomputed
  at the start of a round).

Reported on four A100s with 80 GB or comparable GPUs, starting from 40.3 %
greedy pass@1 on the 1,319 test problems (read off a figure of
arXiv:2503.18929):

| | pass@1 | minutes |
|---|---|---|
| online DPO, asynchronous / synchronous | 52.6 % / 52.2 % | 129 / 218 |
| RLOO, PPO, synchronous | 50.0 %, 50.3 % | 385, 865 |

None of these runs has been made with this code.
"""

import ml_collections

from tba_jax.config import hardware
from tba_jax.config import settings
from tba_jax.config import variants

MODELS = {
    "rho-1b": "realtreetune/rho-1b-sft-GSM8K",
    "qwen2.5-0.5b": "Qwen/Qwen2.5-0.5B",
    "llama-3.2-1b": "meta-llama/Llama-3.2-1B",
}
METHODS = ("online_dpo", "rloo", "ppo")


def get_config(arg: str = "") -> ml_collections.ConfigDict:
  """Returns the config; the module docstring lists the arguments."""
  arg = variants.parse_arg(
      arg,
      smoke=False,
      quick=False,
      seed=0,
      model="rho-1b",
      hardware="",
      method=METHODS[0],
      lag=1,
  )
  variants.check_choices(arg, model=tuple(MODELS), method=METHODS, lag=(0, 1))
  c = settings.get_config()
  c.seed = arg.seed
  if arg.model != "rho-1b":
    c.sft.b2 = 0.999
  if arg.quick or arg.smoke:
    _set_quick(c, arg)
  else:
    _set_paper(c, arg)
  if arg.smoke:
    _make_smoke(c)
  hardware.apply(c, arg.hardware)
  return c


def _set_paper(
    c: ml_collections.ConfigDict, arg: ml_collections.ConfigDict
) -> None:
  """Sets the paper's runs, one round off-policy unless `lag=0`."""
  c.task = ml_collections.ConfigDict(
      dict(
          name="gsm8k",
          data="openai/gsm8k",
          synthetic_prompts=4000,
          prompt_format="sft",
          answer_rule="hash",
          validation_prompts=0,
          split_seed=0,
      )
  )
  if arg.model == "rho-1b":
    c.init = MODELS["rho-1b"]
  else:
    # Two epochs on the solutions, like the paper's initial model.
    c.init = "sft"
    c.sft.init = c.tokenizer.source = MODELS[arg.model]
    c.sft.batch_size = 64
    c.sft.num_steps = 234
    c.sft.learning_rate = 1e-5
    c.sft.warmup_steps = 7  # 3 %
    c.sft.evaluate_every_steps = 117
    c.sft.checkpoint_every_steps = 117
  c.model.param_dtype = "float32"
  # For models whose config has no maximum length.
  c.model.max_positions = 1024
  c.sampling.temperature = 0.7
  c.sampling.max_prompt_tokens = 256
  c.sampling.max_completion_tokens = 512
  c.sampling.num_slots = 72

  # As in the paper's code: the tokenizer has no pad token, so the stop token is
  # masked too.
  c.loss.include_stop_token = False
  c.reference.mode = "fixed"
  c.optimizer.learning_rate = 3e-6
  c.optimizer.learning_rate_final = 0.0
  c.optimizer.schedule = "linear"
  c.optimizer.warmup_steps = 0
  c.optimizer.b1 = 0.9
  c.optimizer.b2 = 0.999
  c.optimizer.weight_decay = 0.0
  c.optimizer.grad_clip_norm = 1.0 if arg.method == "ppo" else 0.0

  passes = 1
  if arg.method == "online_dpo":
    c.loss.name = "online_dpo"
    c.loss.beta = 0.1
    c.train.num_steps = 512
    c.train.prompts_per_batch = 252
    c.train.completions_per_prompt = 4
  elif arg.method == "rloo":
    c.loss.name = "proximal_rloo"
    c.loss.beta = 0.05
    c.loss.ratio_clip = 0.2
    c.train.num_steps = 2048
    c.train.prompts_per_batch = 63
    c.train.completions_per_prompt = 4
  else:
    passes = 2
    c.loss.name = "ppo"
    c.loss.beta = 0.05
    c.loss.ratio_clip = 0.2
    c.loss.value_init = "policy"
    c.loss.value_learning_rate = 3e-6
    c.loss.value_clip = 0.2
    c.loss.value_weight = 0.1
    c.loss.gae_gamma = 1.0
    c.loss.gae_lambda = 0.95
    c.loss.whiten_advantages = True
    c.train.num_steps = 512 * passes
    c.train.prompts_per_batch = 32
    c.train.completions_per_prompt = 8
  c.train.micro_batch_prompts = 1
  c.search.num_searchers = 1
  c.search.prompts_per_round = c.search.prompts_per_step = 16
  variants.set_rounds(c, mini_batches=1, passes=passes, lag_rounds=arg.lag)

  # Greedy on the whole test split before and after training. Evaluations in
  # between, which select the best model, use few prompts.
  c.evaluate.every_steps = 100
  c.evaluate.num_prompts = 128
  c.evaluate.final_prompts = 1319
  c.evaluate.num_completions = 8
  c.evaluate.batch_prompts = 16
  c.evaluate.greedy = True
  c.evaluate.variants = "prompt_format=tba;prompt_format=sft"
  c.checkpoint.every_steps = 100
  c.checkpoint.keep_best = True


def _set_quick(
    c: ml_collections.ConfigDict, arg: ml_collections.ConfigDict
) -> None:
  """Sets a run of a tiny model on generated problems."""
  c.task = ml_collections.ConfigDict(
      dict(
          name="gsm8k",
          data="synthetic",
          synthetic_prompts=12_000,
          prompt_format="plain",
          answer_rule="hash",
          validation_prompts=128,
          split_seed=0,
      )
  )
  c.model.num_layers = 2
  c.model.width = 64
  c.model.max_positions = 128

  # Stops early: the policy has learned how to work out a problem, and does so
  # half of the time.
  c.init = "sft"
  c.sft.init = "scratch"
  c.tokenizer.source = "task"
  c.sft.num_steps = 300
  c.sft.batch_size = 64
  c.sft.learning_rate = 3e-3
  c.sft.warmup_steps = 50
  c.sft.evaluate_every_steps = 300
  c.sft.checkpoint_every_steps = 150

  c.sampling.max_prompt_tokens = 32
  c.sampling.max_completion_tokens = 28
  c.sampling.num_slots = 192

  c.loss.name = {
      "online_dpo": "online_dpo", "rloo": "proximal_rloo", "ppo": "ppo"
  }[arg.method]  # fmt: skip
  c.loss.beta = 0.05
  c.loss.ratio_clip = 0.0 if arg.method == "online_dpo" else 0.2
  c.optimizer.learning_rate = 3e-4
  c.optimizer.learning_rate_final = 3e-5
  c.optimizer.schedule = "linear"
  c.optimizer.warmup_steps = 5
  c.train.num_steps = 60
  c.train.prompts_per_batch = c.train.micro_batch_prompts = 24
  c.train.completions_per_prompt = 8
  c.search.prompts_per_round = c.search.prompts_per_step = 24
  variants.set_rounds(
      c,
      mini_batches=1,
      passes=2 if arg.method == "ppo" else 1,
      lag_rounds=arg.lag,
  )

  c.evaluate.every_steps = 30
  c.evaluate.num_prompts = 128
  c.evaluate.final_prompts = 512
  c.evaluate.num_completions = 4
  c.evaluate.batch_prompts = 64
  c.evaluate.greedy = True
  c.checkpoint.every_steps = 30
  c.checkpoint.keep_best = True


def _make_smoke(c: ml_collections.ConfigDict) -> None:
  """Shrinks `quick` to a smoke test."""
  variants.make_smoke(c)
  c.task.synthetic_prompts = 200
  c.task.validation_prompts = 16
  c.optimizer.warmup_steps = 1
  c.evaluate.num_prompts = 8
  c.evaluate.final_prompts = 16
  c.evaluate.batch_prompts = 8
