# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""GSM8K as in both papers: exact numbers as reward.

    python -m tba_jax.main --config=configs/gsm8k.py:hardware=4xa100 \\
        --workdir=runs/gsm8k

Problems and model come from the Hugging Face hub, `openai/gsm8k` in `task.data`
and `realtreetune/rho-1b-sft-GSM8K` in `init`; local folders do as well.
Arguments, after a colon and separated by commas:

- `hardware=4xa100`, the paper's, with one device for the trainer and three for
  searchers; other names are in `tba_jax/config/hardware.py`. On a TPU,
  `hardware=v5e-16` with searchers of one chip.

- `method=tba` (arXiv:2503.18929), or, of Asynchronous RLHF (arXiv:2410.18252),
  `online_dpo`, `rloo` or `ppo`; `lag=0` of these is the synchronous baseline.
- `model=rho-1b` (the papers' run), `qwen2.5-0.5b` or `llama-3.2-1b`. The first
  is tuned already; the others are tuned on the training solutions first.
- Of `tba`: `steps=700` (Figure 1) or `steps=1000` (Table 2); `samples=20` or
  `samples=40` (Table 5), with fewer prompts a step.
- `quick` (minutes on two cores: the same code path with a tiny model and small
  generated problems in GSM8K's format), `smoke` (seconds).
- `seed=N`.

`tba` has the settings of the paper's Figure 1 run (App. B.1 and the code's
launch script): 7 prompts of 20 completions a step, 24 sampled, 700 steps; the
last number, read as their code does, counts as the answer. The other methods
have the settings of the code that Asynchronous RLHF's authors published for
GSM8K; the answer is the number after `####` (`task.answer_rule`). TBA's code
can also explore by temperature and top-p, which its launch script leaves off.
Differences: params are float32 with bfloat16 compute, since bfloat16 params
lose most updates at these learning rates to rounding; the learning rate and β
change every step, in the authors' code once a round (`train.per_round_steps`);
all searchers share one random order of the prompts, where each of TBA's goes
through its own part in the data's order; the ratios of `rloo` and `ppo` are to
the policy that sampled, where that code recomputes log-probs at the start of a
round; training begins with 500 completions, the code's target, which the
authors' searchers overshoot to 648; the number of prompts a step with 40
samples is not published (here 3).

Reported on four A100 with 80 GB or comparable GPUs, from 40.3 % greedy pass@1
on the 1,319 test problems:

| | pass@1 | minutes |
|---|---|---|
| TBA | 54.6 % (40 samples: 54.9 %) | 82 |
| online DPO, asynchronous / synchronous | 52.6 % / 52.2 % | 129 / 218 |
| RLOO, PPO, synchronous | 50.0 %, 50.3 % | 385, 865 |
| VinePPO | 53.4 % | 4,110 |

All but the first row are read off TBA's figure. VinePPO's pass@1 is the mean of
16 completions at temperature 0.35: `--program=evaluate` with
`evaluate.greedy=false`, `evaluate.num_completions=16` and
`sampling.temperature=0.35`. None of these runs has been made with this code;
`docs/tasks.md` has results of `quick`.
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
METHODS = ("tba", "online_dpo", "rloo", "ppo")


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
      steps=700,
      samples=20,
      lag=1,
  )
  variants.check_choices(
      arg,
      model=tuple(MODELS),
      method=METHODS,
      steps=(700, 1000),
      samples=(20, 40),
      lag=(0, 1),
  )
  c = settings.get_config()
  c.seed = arg.seed
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
  _set_common(c)
  if arg.method == "tba":
    _set_tba(c, arg)
  else:
    _set_async_rlhf(c, arg)
  if arg.model == "rho-1b":
    c.init = MODELS["rho-1b"]
  else:
    _set_sft(c, MODELS[arg.model])
  if arg.quick or arg.smoke:
    c.task.data = "synthetic"
    c.task.prompt_format = "plain"
    make_quick(c)
    if arg.method != "tba":
      _set_quick_rounds(c, arg)
  if arg.smoke:
    make_smoke(c)
  hardware.apply(c, arg.hardware)
  return c


def _set_common(c: ml_collections.ConfigDict) -> None:
  """Sets what both papers share."""
  c.sampling.temperature = 0.7
  c.sampling.max_prompt_tokens = 256
  c.sampling.max_completion_tokens = 512
  c.sampling.num_slots = 72
  c.model.param_dtype = "float32"
  # Length of models without a config of their own.
  c.model.max_positions = 1024
  # The tokenizer has no pad token: the papers' code masks the stop token too.
  c.loss.include_stop_token = False
  c.optimizer.learning_rate_final = 0.0
  c.optimizer.b1 = 0.9
  c.optimizer.b2 = 0.999
  c.optimizer.weight_decay = 0.0
  c.optimizer.grad_clip_norm = 0.0
  c.reference.mode = "fixed"
  _set_paper_evaluation(c)


def _set_tba(
    c: ml_collections.ConfigDict, arg: ml_collections.ConfigDict
) -> None:
  """Sets Trajectory Balance with Asynchrony (Table 2, App. B.1)."""
  c.search.num_searchers = 3
  c.search.prompts_per_round = 3
  c.search.samples_per_prompt = arg.samples * 6 // 5
  prompts = 140 // arg.samples
  # Searchers run free up to a barrier every `publish.every_steps`, and compute
  # the reference's log-probs.
  c.search.prompts_per_step = 0
  c.search.wait_for_fresh = True
  c.reference.role = "searcher"

  c.loss.name = "tb"
  c.loss.scale = "paper"
  is_figure = arg.steps == 700
  c.loss.beta = "0.014:0.004:500" if is_figure else "0.012:0.004:500"

  c.optimizer.learning_rate = 1e-5
  c.optimizer.schedule = "warmup_stable_decay"
  c.optimizer.warmup_steps = 50
  c.optimizer.stable_steps = 350 if is_figure else 450
  # The launch script's 600 end Figure 1's run at half of the peak.
  c.optimizer.decay_steps = 600 if is_figure else 500

  c.train.num_steps = arg.steps
  c.train.prompts_per_batch = prompts
  c.train.completions_per_prompt = arg.samples
  c.train.micro_batch_prompts = 1
  c.publish.every_steps = 2

  c.replay.recent_fraction = 0.95
  c.replay.recent_window_steps = 2
  c.replay.capacity_per_prompt = 100
  c.replay.capacity = 750_000  # 100 of each prompt: no bound of its own
  c.replay.selection = "uniform"
  c.replay.warm_start_completions = 500


def _set_async_rlhf(
    c: ml_collections.ConfigDict, arg: ml_collections.ConfigDict
) -> None:
  """Sets Asynchronous RLHF's runs, one round off-policy unless `lag=0`."""
  c.task.prompt_format = "sft"
  c.task.answer_rule = "hash"
  c.search.num_searchers = 1
  c.loss.correction = ""
  c.optimizer.learning_rate = 3e-6
  c.optimizer.schedule = "linear"
  c.optimizer.warmup_steps = 0
  prompts, samples, rounds, passes = {
      "online_dpo": (252, 4, 512, 1),
      "rloo": (63, 4, 2048, 1),
      "ppo": (32, 8, 512, 2),
  }[arg.method]
  if arg.method == "online_dpo":
    c.loss.name = "online_dpo"
    c.loss.beta = 0.1
  else:
    c.loss.name = "proximal_rloo" if arg.method == "rloo" else "ppo"
    c.loss.beta = 0.05
    c.loss.ratio_clip = 0.2
  if arg.method == "ppo":
    c.optimizer.grad_clip_norm = 1.0
    c.loss.value_init = "policy"
    variants.set_async_rlhf_values(c)
  c.train.prompts_per_batch = prompts
  c.train.completions_per_prompt = samples
  c.train.micro_batch_prompts = 1
  c.train.num_steps = rounds * passes
  c.search.prompts_per_round = c.search.prompts_per_step = 16
  variants.set_rounds(c, mini_batches=1, passes=passes, lag_rounds=arg.lag)


def _set_paper_evaluation(c: ml_collections.ConfigDict) -> None:
  """Sets evaluations on the whole test split, greedily, before and after.

  Those in between, which choose the best model, are of few prompts: seven of
  them sample about 7 % of what 700 steps do.
  """
  c.evaluate.every_steps = 100
  c.evaluate.num_prompts = 128
  c.evaluate.final_prompts = 1319
  c.evaluate.num_completions = 8
  c.evaluate.batch_prompts = 16
  c.evaluate.greedy = True
  c.evaluate.variants = "prompt_format=tba;prompt_format=sft"
  c.checkpoint.every_steps = 100
  c.checkpoint.keep_best = True


def _set_sft(c: ml_collections.ConfigDict, folder: str) -> None:
  """Sets the fine-tuning of the paper's start: two epochs of the solutions."""
  c.init = "sft"
  c.sft.init = folder
  c.tokenizer.source = folder
  c.sft.batch_size = 64
  c.sft.num_steps = 234  # as many examples as two epochs have
  c.sft.learning_rate = 1e-5
  c.sft.warmup_steps = 7  # 3 %
  c.sft.b2 = 0.999
  c.sft.evaluate_every_steps = 117
  c.sft.checkpoint_every_steps = 117


def _set_quick_rounds(
    c: ml_collections.ConfigDict, arg: ml_collections.ConfigDict
) -> None:
  """Keeps the method in a `quick` run, with completions enough for it."""
  c.loss.ratio_clip = 0.0 if arg.method == "online_dpo" else 0.2
  c.loss.value_learning_rate = 1e-3
  variants.set_rounds(
      c, mini_batches=1, passes=c.rounds.passes, lag_rounds=arg.lag
  )


def make_quick(c: ml_collections.ConfigDict) -> None:
  """Shrinks a run over problems: a tiny model and generated problems."""
  c.task.synthetic_prompts = 12_000
  c.task.validation_prompts = 128
  c.init = "sft"
  c.sft.init = "scratch"
  c.tokenizer.source = "task"
  c.model.param_dtype = "float32"
  c.model.num_layers = 2
  c.model.width = 64
  c.model.max_positions = 128

  # Stops early: the policy has learned how to work a problem out, and does so
  # half of the time.
  c.sft.num_steps = 300
  c.sft.batch_size = 64
  c.sft.learning_rate = 3e-3
  c.sft.warmup_steps = 50
  c.sft.evaluate_every_steps = 300
  c.sft.checkpoint_every_steps = 150

  c.sampling.temperature = 1.0
  c.sampling.max_prompt_tokens = 32
  c.sampling.max_completion_tokens = 28
  c.sampling.num_slots = 192

  c.search.num_searchers = 1
  c.search.prompts_per_round = 24
  c.search.samples_per_prompt = 10
  c.search.prompts_per_step = 24
  c.search.lead_steps = 1
  c.reference.role = "trainer"

  # Scale for large steps of a small model: see configs/countdown.py.
  c.loss.scale = "unit"
  c.loss.beta = 0.05
  c.loss.ratio_clip = 0.2
  c.loss.include_stop_token = True
  c.optimizer.learning_rate = 3e-4
  c.optimizer.learning_rate_final = 3e-5
  c.optimizer.schedule = "linear"
  c.optimizer.warmup_steps = 5
  c.optimizer.stable_steps = c.optimizer.decay_steps = 0
  c.optimizer.b2 = 0.99
  c.optimizer.grad_clip_norm = 1.0

  c.train.num_steps = 60
  c.train.prompts_per_batch = 24
  c.train.micro_batch_prompts = 24
  c.train.completions_per_prompt = 8
  c.replay.warm_start_completions = 0

  c.evaluate.every_steps = 30
  c.evaluate.num_prompts = 128
  c.evaluate.final_prompts = 512
  c.evaluate.num_completions = 4
  c.evaluate.variants = ""
  c.evaluate.batch_prompts = 64
  c.checkpoint.every_steps = 30


def make_smoke(c: ml_collections.ConfigDict) -> None:
  """Shrinks the run to a smoke test."""
  variants.make_smoke(c)
  c.task.synthetic_prompts = 200
  c.task.validation_prompts = 16
  c.optimizer.warmup_steps = 1
  c.evaluate.num_prompts = 8
  c.evaluate.final_prompts = 16
  c.evaluate.batch_prompts = 8
