# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Countdown with rare correct completions, which search has to find.

    python -m tba_jax.main --config=configs/countdown_sparse.py \\
        --workdir=runs/countdown_sparse

Targets have at most two solutions, and SFT is so short that few completions are
correct. Half of each batch is replayed, weighted by reward, so that rare
successes are trained on repeatedly. Arguments as in `configs/countdown.py`:
`smoke`, `quick`, `seed=N`, `lockstep`.

`docs/results/tasks.md` has results of `quick`, which uses three numbers instead
of four. Time and result of the full run have not been measured.
"""

import ml_collections

from tba_jax.config import settings
from tba_jax.config import variants


def get_config(arg: str = "") -> ml_collections.ConfigDict:
  """Returns the config; the module docstring lists the arguments."""
  arg = variants.parse_arg(
      arg, smoke=False, quick=False, seed=0, lockstep=False
  )
  c = settings.get_config()
  c.seed = arg.seed
  c.task = ml_collections.ConfigDict(
      dict(
          name="countdown_sparse",
          # Three numbers, so that a minute of search finds enough to learn
          # from.
          numbers=3 if arg.quick else 4,
          max_number=12,
          max_target=99,
          max_solutions=2,
          held_out_fraction=0.15,
          split_seed=0,
      )
  )
  c.sft.num_steps = 300 if arg.quick else 1000
  c.sft.evaluate_every_steps = 300 if arg.quick else 500
  c.sft.checkpoint_every_steps = 250

  c.sampling.max_prompt_tokens = 9
  c.sampling.max_completion_tokens = 18
  c.sampling.num_slots = 256
  c.loss.beta = 0.05
  c.loss.ratio_clip = 0.2
  c.optimizer.learning_rate = 6e-4
  c.optimizer.learning_rate_final = 6e-5
  c.replay.recent_window_steps = 4
  c.replay.recent_fraction = 0.5
  c.replay.selection = "reward"
  c.replay.reward_temperature = 0.25
  c.search.samples_per_prompt = 16
  c.search.prompts_per_round = c.search.prompts_per_step = 16
  c.search.lockstep = arg.lockstep
  c.search.lead_steps = 0 if arg.lockstep else 1
  c.train.num_steps = 300 if arg.quick else 400
  c.train.prompts_per_batch = c.train.micro_batch_prompts = 32
  c.train.completions_per_prompt = 8
  c.evaluate.every_steps = 50 if arg.quick else 80
  c.evaluate.num_prompts = 128 if arg.quick else 256
  c.evaluate.final_prompts = 256 if arg.quick else 1000
  c.evaluate.num_completions = 16

  if arg.smoke:
    _make_smoke(c)
  return c


def _make_smoke(c: ml_collections.ConfigDict) -> None:
  """Shrinks the run to a smoke test."""
  variants.make_smoke(c)
  c.task.numbers = 3
  c.task.max_number = 9
  c.sampling.max_prompt_tokens = 7
  c.sampling.max_completion_tokens = 12
