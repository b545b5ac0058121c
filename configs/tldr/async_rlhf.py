# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""TL;DR, third stage: methods of Asynchronous RLHF against the reward model.

    python -m tba_jax.main --workdir=runs/tldr_dpo \\
        --config=configs/tldr/async_rlhf.py:method=online_dpo,hardware=4xa100

Starts from the models of the first two stages in the same `--workdir`
(`configs/tldr/sft.py`, `configs/tldr/reward_model.py`), and trains them if they
are missing. The authors' models can be used instead:
`--config.init=mnoukhov/pythia410m-sft-tldr` and
`--config.reward.model=mnoukhov/pythia410m-rm-tldr6.9b`, which `ppo` also needs
as `loss.value_init`. Training summaries have up to 53 tokens; the command in
`configs/tldr/tba.py` computes the gold win rate with up to 128. Arguments,
after a colon and separated by commas:

- `method=online_dpo`, `best_of_2`, `rloo` or `ppo`, one step off-policy;
- `lag=0`, the synchronous baseline;
- `mini_batches=N`: number of batches sampled with one version (the paper's
  study of staleness uses 1 to 64, with `lag=0`);
- `passes=T` over each batch, if sampling is the bottleneck;
- `samples=K` per prompt, if training is the bottleneck (`online_dpo` uses the
  best and the worst);
- `hardware=4xa100`, as in the paper; other names are in
  `tba_jax/config/hardware.py`. On a TPU, `hardware=v5e-16` with searchers of
  one chip;
- `model=pythia-410m`, `pythia-1b` or `pythia-2.8b`;
- `quick` (three minutes on two cores: the same code path with a tiny model,
  small generated posts and a scripted gold reward), `smoke` (seconds);
- `overoptimize`, with `quick`: a reward model trained on few pairs and a weakly
  regularized policy;
- `seed=N`, `steps=N`.

The settings follow Asynchronous RLHF (arXiv:2410.18252), except that the
learning rate changes every step (theirs: once per round) and that compute is
bfloat16 with float32 params.

For the three sizes, on four A100s with 80 GB, arXiv:2503.18929 reports gold win
rates of 0.85, 0.90 and 0.96 after 99, 122 and 244 minutes of `online_dpo`.
These runs have not been made with this code.
"""

import ml_collections

from tba_jax.config import hardware
from tba_jax.config import settings
from tba_jax.config import variants

reward_model = variants.import_config("reward_model.py", relative_to=__file__)
sft = variants.import_config("sft.py", relative_to=__file__)

METHODS = ("online_dpo", "best_of_2", "rloo", "ppo")


def get_config(arg: str = "") -> ml_collections.ConfigDict:
  """Returns the config; the module docstring lists the arguments."""
  arg = variants.parse_arg(
      arg,
      smoke=False,
      quick=False,
      seed=0,
      steps=256,
      hardware="",
      model=sft.MODELS[0],
      method=METHODS[0],
      lag=1,
      mini_batches=1,
      passes=1,
      samples=2,
      overoptimize=False,
  )
  variants.check_choices(arg, method=METHODS, lag=(0, 1))
  if arg.overoptimize and not arg.quick:
    raise ValueError("config argument overoptimize: must come with quick")
  c = settings.get_config()
  sft.set_sft(c, arg)
  reward_model.set_reward_model(
      c, arg, quick_steps=30 if arg.overoptimize else 300
  )
  _set_method(c, arg)
  if arg.quick or arg.smoke:
    _set_quick(c, arg)
  else:
    _set_paper(c, arg)
  variants.set_rounds(
      c,
      mini_batches=arg.mini_batches,
      passes=arg.passes,
      lag_rounds=arg.lag,
  )
  if arg.smoke:
    _make_smoke(c)
  hardware.apply(c, arg.hardware)
  return c


def _set_method(
    c: ml_collections.ConfigDict, arg: ml_collections.ConfigDict
) -> None:
  """Sets the method, and what `quick` shares with the paper's runs."""
  is_quick = arg.quick or arg.smoke
  if arg.method == "online_dpo":
    c.loss.name = "online_dpo"
    c.loss.beta = 0.02 if arg.overoptimize else 0.1
  elif arg.method == "best_of_2":
    c.loss.name = "best_of_n"
    c.loss.beta = 0.02 if arg.overoptimize else 0.05
  else:
    c.loss.name = "proximal_rloo" if arg.method == "rloo" else "ppo"
    c.loss.beta = 0.02 if arg.overoptimize else 0.05
    c.loss.ratio_clip = 0.2
  if arg.method == "ppo":
    # In the released code, the value model starts from the reward model.
    c.loss.value_init = "reward_model"
    c.loss.value_learning_rate = 1e-3 if is_quick else 3e-6
    c.loss.value_clip = 0.2
    c.loss.value_weight = 0.1
    c.loss.gae_gamma = 1.0
    c.loss.gae_lambda = 0.95
    c.loss.whiten_advantages = True
  samples = 1 if arg.method == "ppo" else arg.samples
  c.train.completions_per_prompt = c.search.samples_per_prompt = samples
  c.reward.backend = "model"
  c.reward.model = "reward_model"
  c.loss.missing_stop = "replace"
  c.loss.missing_stop_reward = -1.0
  c.reference.mode = "fixed"
  c.sampling.num_slots = 128
  c.search.num_searchers = 1
  c.optimizer.schedule = "linear"
  c.optimizer.warmup_steps = 0
  c.optimizer.b1 = 0.9
  c.optimizer.b2 = 0.999
  c.optimizer.epsilon = 1e-8
  c.optimizer.weight_decay = 0.0
  c.evaluate.final_prompts = 512
  c.evaluate.batch_prompts = 64
  c.evaluate.greedy = True
  c.checkpoint.keep_best = True


def _set_paper(
    c: ml_collections.ConfigDict, arg: ml_collections.ConfigDict
) -> None:
  """Sets the paper's runs: rounds of one batch, one step off-policy."""
  c.sampling.max_completion_tokens = 53
  c.search.prompts_per_round = c.search.prompts_per_step = 64
  c.optimizer.learning_rate = 3e-6
  c.optimizer.learning_rate_final = 0.0
  c.optimizer.grad_clip_norm = 0.0
  # The number of prompts does not depend on the number of passes.
  round_steps = arg.mini_batches * arg.passes
  c.train.num_steps = max(arg.steps // arg.mini_batches, 1) * round_steps
  # RLOO counts samples, the other methods prompts.
  prompts = 512 // arg.samples if arg.method == "rloo" else 512
  c.train.prompts_per_batch = prompts
  c.train.micro_batch_prompts = 16
  c.replay.capacity = max(
      200_000, 2 * arg.mini_batches * prompts * c.train.completions_per_prompt
  )
  c.evaluate.every_steps = arg.steps // 4
  c.evaluate.num_prompts = 512
  c.evaluate.num_completions = 1
  c.checkpoint.every_steps = 64


def _set_quick(
    c: ml_collections.ConfigDict, arg: ml_collections.ConfigDict
) -> None:
  """Sets a run with the tiny models of the earlier stages' `quick`."""
  c.sampling.max_completion_tokens = 12
  c.search.prompts_per_round = c.search.prompts_per_step = 16
  c.optimizer.learning_rate = 1e-3 if arg.overoptimize else 6e-4
  c.optimizer.learning_rate_final = 6e-5
  c.optimizer.grad_clip_norm = 1.0
  round_steps = arg.mini_batches * arg.passes
  num_steps = 200 if arg.overoptimize else 80
  c.train.num_steps = max(num_steps // round_steps, 1) * round_steps
  c.train.prompts_per_batch = c.train.micro_batch_prompts = 16
  c.evaluate.every_steps = 20
  c.evaluate.num_prompts = 128
  c.evaluate.num_completions = 4
  c.evaluate.judge = "task"
  c.checkpoint.every_steps = 40


def _make_smoke(c: ml_collections.ConfigDict) -> None:
  """Shrinks all stages of `quick` to a smoke test."""
  reward_model.make_smoke(c)
  c.sampling.num_slots = 32
  c.search.prompts_per_round = c.search.prompts_per_step = 8
  c.train.num_steps = 6
  c.train.prompts_per_batch = c.train.micro_batch_prompts = 8
  c.evaluate.every_steps = 3
  c.evaluate.num_completions = 2
  c.checkpoint.every_steps = 3
  c.log.samples_every_steps = 3
