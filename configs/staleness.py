# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Quality against staleness, by objective, on a controlled task.

    python -m tba_jax.main --program=sweep --config=configs/staleness.py \\
        --workdir=runs/staleness

trains each objective of `sweep.objectives` at each staleness and seed from the
same fine-tuned policy, and writes a table and a plot. Each run is one file, so
the same command resumes the sweep.

Arguments, after a colon and separated by commas: `smoke` (seconds, for tests),
`quick` (TB, TB with a ratio clip and RLOO at staleness 0 and 4, one seed;
minutes), `tune` (the learning rates from which the settings below were chosen),
`seed=N` (of SFT).

`docs/results/staleness.md` has time and results of the full sweep.
"""

import re

import ml_collections

from tba_jax.config import settings
from tba_jax.config import variants

# Settings of each objective, in addition to _CHOSEN.
_OBJECTIVES = {
    "tb": "loss.name=tb",
    "tb_clip": "loss.name=tb loss.ratio_clip=0.2",
    "online_dpo": "loss.name=online_dpo",
    "ppo": "loss.name=ppo loss.ratio_clip=0.2",
    "proximal_rloo": "loss.name=proximal_rloo loss.ratio_clip=0.2",
    "rloo": "loss.name=rloo",
    "best_of_2": (
        "loss.name=best_of_n train.completions_per_prompt=2"
        " train.prompts_per_batch=32 train.micro_batch_prompts=32"
    ),
}
# Selection rule, fixed before the study: the learning rate (for online DPO,
# whose beta does not weight the KL, the pair of rate and beta) with the highest
# mean of reward - _BETA · KL at staleness 0 over _TUNE_SEEDS, which the study
# does not use. `tune` makes these runs.
_BETA = 0.02
_LEARNING_RATES = ("1e-3", "3e-3", "1e-2")
_DPO_BETAS = ("0.1", "0.3", "1.0")
_TUNE_SEEDS = "100,101"
_CHOSEN = {
    "tb": ("3e-3", ""),
    "tb_clip": ("3e-3", ""),
    "online_dpo": ("1e-3", "0.3"),
    "ppo": ("3e-3", ""),
    "proximal_rloo": ("3e-3", ""),
    "rloo": ("3e-3", ""),
    "best_of_2": ("1e-3", ""),
}
_QUICK = ("tb", "tb_clip", "rloo")


def get_config(arg: str = "") -> ml_collections.ConfigDict:
  """Returns the config; the module docstring lists the arguments."""
  arg = variants.parse_arg(arg, smoke=False, quick=False, tune=False, seed=0)
  c = settings.get_config()
  c.seed = arg.seed
  c.task = ml_collections.ConfigDict(
      dict(
          name="preference",
          num_letters=16,
          max_letters=10,
          held_out_fraction=0.15,
          split_seed=0,
      )
  )
  c.model.num_layers = 2
  c.model.max_positions = 16

  c.sft.num_steps = 400
  c.sft.warmup_steps = 40
  c.sft.evaluate_every_steps = 400

  c.sampling.max_prompt_tokens = 3
  c.sampling.max_completion_tokens = 11
  c.sampling.num_slots = 64

  c.loss.beta = _BETA
  c.optimizer.learning_rate_final = 0.0
  c.train.num_steps = 160
  c.train.prompts_per_batch = c.train.micro_batch_prompts = 16
  c.train.completions_per_prompt = 4
  c.evaluate.every_steps = 40
  c.evaluate.num_prompts = 32
  c.evaluate.final_prompts = 32
  c.evaluate.num_completions = 16
  c.evaluate.batch_prompts = 32

  if arg.tune:
    c.sweep.objectives = _recipes(_grid())
    c.sweep.staleness_steps = "0"
    c.sweep.mini_batches = ""
    c.sweep.seeds = _TUNE_SEEDS
  elif arg.quick:
    c.sweep.objectives = _recipes({n: _recipe(n, *_CHOSEN[n]) for n in _QUICK})
    c.sweep.staleness_steps = "0,4"
    c.sweep.mini_batches = ""
    c.sweep.seeds = "0"
  else:
    c.sweep.objectives = _recipes({n: _recipe(n, *_CHOSEN[n]) for n in _CHOSEN})
  if arg.smoke:
    _make_smoke(c)
  return c


def _recipe(name: str, learning_rate: str, beta: str) -> str:
  """Returns the settings of an objective; "" keeps the common beta."""
  own_beta = f" loss.beta={beta}" if beta else ""
  return (
      f"{_OBJECTIVES[name]} optimizer.learning_rate={learning_rate}{own_beta}"
  )


def _grid() -> dict[str, str]:
  """Returns the settings that `tune` compares, by name."""
  grid = {}
  for name in _OBJECTIVES:
    for beta in _DPO_BETAS if name == "online_dpo" else ("",):
      for rate in _LEARNING_RATES:
        label = f"{name}_lr{rate}" + (f"_beta{beta}" if beta else "")
        grid[re.sub(r"[.-]", "_", label)] = _recipe(name, rate, beta)
  return grid


def _recipes(recipes: dict[str, str]) -> str:
  return ";\n".join(f"{name}: {text}" for name, text in recipes.items())


def _make_smoke(c: ml_collections.ConfigDict) -> None:
  """Shrinks the run to a smoke test."""
  c.task.num_letters = 6
  c.task.max_letters = 4
  c.model.num_layers = 1
  c.model.width = 16
  c.model.num_heads = c.model.num_kv_heads = 2
  c.model.head_dim = 8
  c.model.mlp_width = 32
  c.sft.num_steps = 20
  c.sft.warmup_steps = 5
  c.sft.batch_size = 16
  c.sft.evaluate_every_steps = 20
  c.sampling.max_completion_tokens = 5
  c.sampling.num_slots = 16
  c.train.num_steps = 6
  c.train.prompts_per_batch = c.train.micro_batch_prompts = 4
  c.evaluate.every_steps = 3
  c.evaluate.num_prompts = c.evaluate.final_prompts = 4
  c.evaluate.num_completions = 4
  c.evaluate.batch_prompts = 4
  c.sweep.objectives = (
      "tb: loss.name=tb;"
      " best_of_2: loss.name=best_of_n train.completions_per_prompt=2"
      " train.prompts_per_batch=8 train.micro_batch_prompts=8"
  )
  c.sweep.staleness_steps = "0,2"
  c.sweep.mini_batches = ""
  c.sweep.seeds = "0"
