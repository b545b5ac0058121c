# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""GSM8K with trajectory balance, rewarded for the exact number.

    python -m tba_jax.main --config=configs/gsm8k/tba.py:hardware=4xa100 \\
        --workdir=runs/gsm8k

Problems and model come from the Hugging Face hub (`task.data` is
`openai/gsm8k`, `init` is `realtreetune/rho-1b-sft-GSM8K`) or from local
folders. Arguments, after a colon and separated by commas:

- `hardware=4xa100`, as in the paper, with one device for the trainer and three
  for searchers; other names are in `tba_jax/config/hardware.py`. On a TPU,
  `hardware=v5e-16` with searchers of one chip.
- `model=rho-1b` (the paper's run), `qwen2.5-0.5b` or `llama-3.2-1b`. The first
  is already fine-tuned; the others are first fine-tuned on the training
  solutions.
- `steps=700` (Figure 1) or `steps=1000` (Table 2); `samples=20` or `samples=40`
  (Table 5), with fewer prompts per step.
- `quick` (minutes on two cores: the same code path with a tiny model and small
  generated problems in GSM8K's format), `smoke` (seconds).
- `seed=N`.

The settings follow the Figure 1 run of Trajectory Balance with Asynchrony
(arXiv:2503.18929, App. B.1 and the launch script of its code): 7 prompts with
20 of 24 sampled completions per step, 700 steps; the answer is the last number,
parsed as in their code. Their code can also explore with temperature and top-p,
which its launch script does not use. Differences:

- Params are float32 with bfloat16 compute, because bfloat16 params lose most
  updates at these learning rates to rounding.
- The learning rate and β change every step (theirs: once per round, see
  `train.per_round_steps`).
- All searchers share one random order of the prompts (theirs: each goes through
  its own part of the data in order).
- Training begins with 500 completions, their code's target, which their
  searchers overshoot to 648.
- The number of prompts per step with 40 samples is 3 (theirs is not published).

Reported on four A100s with 80 GB or comparable GPUs, starting from 40.3 %
greedy pass@1 on the 1,319 test problems:

| | pass@1 | minutes |
|---|---|---|
| TBA | 54.6 % (40 samples: 54.9 %) | 82 |
| VinePPO | 53.4 % | 4,110 |

The second row is read off the TBA paper's figure. VinePPO's pass@1 is the mean
over 16 completions at temperature 0.35: `--program=evaluate` with
`evaluate.greedy=false`, `evaluate.num_completions=16` and
`sampling.temperature=0.35`. The run has not been made with this code;
`docs/results/tasks.md` has results of `quick`. The other methods are in
`configs/gsm8k/async_rlhf.py`.
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


def get_config(arg: str = "") -> ml_collections.ConfigDict:
  """Returns the config; the module docstring lists the arguments."""
  arg = variants.parse_arg(
      arg,
      smoke=False,
      quick=False,
      seed=0,
      model="rho-1b",
      hardware="",
      steps=700,
      samples=20,
  )
  variants.check_choices(
      arg, model=tuple(MODELS), steps=(700, 1000), samples=(20, 40)
  )
  c = settings.get_config()
  c.seed = arg.seed
  if arg.model != "rho-1b":
    c.sft.b2 = 0.999
  if arg.quick or arg.smoke:
    _set_quick(c)
  else:
    _set_paper(c, arg)
  if arg.smoke:
    _make_smoke(c)
  hardware.apply(c, arg.hardware)
  return c


def _set_paper(
    c: ml_collections.ConfigDict, arg: ml_collections.ConfigDict
) -> None:
  """Sets the paper's run (Table 2, App. B.1)."""
  c.task = ml_collections.ConfigDict(
      dict(
          name="gsm8k",
          data="openai/gsm8k",
          synthetic_prompts=4000,
          prompt_format="tba",
          answer_rule="tba",
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

  # Searchers run freely between barriers every `publish.every_steps` steps, and
  # compute the reference log-probs.
  c.search.num_searchers = 3
  c.search.prompts_per_round = 3
  c.search.samples_per_prompt = arg.samples * 6 // 5
  c.search.prompts_per_step = 0
  c.search.wait_for_fresh = True
  c.publish.every_steps = 2
  c.reference.role = "searcher"
  c.reference.mode = "fixed"

  is_figure = arg.steps == 700
  c.loss.name = "tb"
  c.loss.scale = "paper"
  c.loss.beta = "0.014:0.004:500" if is_figure else "0.012:0.004:500"
  # As in the paper's code: the tokenizer has no pad token, so the stop token is
  # masked too.
  c.loss.include_stop_token = False

  c.optimizer.learning_rate = 1e-5
  c.optimizer.learning_rate_final = 0.0
  c.optimizer.schedule = "warmup_stable_decay"
  c.optimizer.warmup_steps = 50
  c.optimizer.stable_steps = 350 if is_figure else 450
  # With the launch script's 600 steps, the Figure 1 run ends at half the peak.
  c.optimizer.decay_steps = 600 if is_figure else 500
  c.optimizer.b1 = 0.9
  c.optimizer.b2 = 0.999
  c.optimizer.weight_decay = 0.0
  c.optimizer.grad_clip_norm = 0.0

  c.train.num_steps = arg.steps
  c.train.prompts_per_batch = 140 // arg.samples
  c.train.completions_per_prompt = arg.samples
  c.train.micro_batch_prompts = 1

  c.replay.recent_fraction = 0.95
  c.replay.recent_window_steps = 2
  c.replay.capacity_per_prompt = 100
  c.replay.capacity = 750_000  # 100 per prompt, so no additional limit.
  c.replay.selection = "uniform"
  c.replay.warm_start_completions = 500

  # Greedy on the whole test split before and after training. Evaluations in
  # between, which select the best model, use few prompts: seven of them sample
  # about 7 % as much as 700 steps.
  c.evaluate.every_steps = 100
  c.evaluate.num_prompts = 128
  c.evaluate.final_prompts = 1319
  c.evaluate.num_completions = 8
  c.evaluate.batch_prompts = 16
  c.evaluate.greedy = True
  c.evaluate.variants = "prompt_format=tba;prompt_format=sft"
  c.checkpoint.every_steps = 100
  c.checkpoint.keep_best = True


def _set_quick(c: ml_collections.ConfigDict) -> None:
  """Sets a run of a tiny model on generated problems."""
  c.task = ml_collections.ConfigDict(
      dict(
          name="gsm8k",
          data="synthetic",
          synthetic_prompts=12_000,
          prompt_format="plain",
          answer_rule="tba",
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
  c.search.prompts_per_round = c.search.prompts_per_step = 24
  c.search.samples_per_prompt = 10
  c.search.lead_steps = 1
  c.publish.every_steps = 2

  # Unit scale, for the large steps of a small model; see configs/countdown.py.
  c.loss.name = "tb"
  c.loss.scale = "unit"
  c.loss.beta = 0.05
  c.loss.ratio_clip = 0.2
  c.optimizer.learning_rate = 3e-4
  c.optimizer.learning_rate_final = 3e-5
  c.optimizer.schedule = "linear"
  c.optimizer.warmup_steps = 5

  c.train.num_steps = 60
  c.train.prompts_per_batch = c.train.micro_batch_prompts = 24
  c.train.completions_per_prompt = 8
  c.replay.recent_fraction = 0.95
  c.replay.recent_window_steps = 2
  c.replay.capacity = 750_000

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
