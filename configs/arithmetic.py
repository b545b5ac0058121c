# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Arithmetic on two CPU cores: the smallest run that learns something.

    python -m tba_jax.main --config=configs/arithmetic.py \\
        --workdir=runs/arithmetic

Arguments, after a colon and separated by commas: `smoke` (seconds, for tests),
`quick` (at most three minutes on two cores), `seed=N`, `lockstep` (staleness 0
with the same number of completions and updates), `rounds=N` (rounds of N
mini-batches, one-step off-policy) with `passes=T` and `lag_rounds=0` or 1.

The full run takes at most three minutes on two cores. The mean reward of fresh
completions rises from the level after a short SFT to 1; on held-out sums it
rises less, because there are few sums to generalize from.
"""

import ml_collections

from tba_jax.config import settings
from tba_jax.config import variants


def get_config(arg: str = "") -> ml_collections.ConfigDict:
  """Returns the config; the module docstring lists the arguments."""
  arg = variants.parse_arg(
      arg,
      smoke=False,
      quick=False,
      seed=0,
      lockstep=False,
      rounds=0,
      passes=1,
      lag_rounds=1,
  )
  c = settings.get_config()
  c.seed = arg.seed
  c.task = ml_collections.ConfigDict(
      dict(
          name="arithmetic",
          operations="+-*",
          max_number=20,
          held_out_fraction=0.15,
          split_seed=0,
      )
  )
  c.model.num_layers = 2

  c.sft.num_steps = 100
  c.sft.warmup_steps = 20
  c.sft.evaluate_every_steps = 100
  c.sft.checkpoint_every_steps = 50
  c.sft.log_every_steps = 25

  c.sampling.max_prompt_tokens = 6
  c.sampling.max_completion_tokens = 3

  # Corrects for staleness: `loss.correction` is clip_token then.
  c.loss.ratio_clip = 0.2
  c.optimizer.learning_rate = 6e-4
  c.optimizer.learning_rate_final = 6e-5
  # Whole rounds, if any.
  round_steps = arg.rounds * arg.passes or 1
  num_steps = 100 if arg.quick else 200
  c.train.num_steps = max(num_steps // round_steps, 1) * round_steps
  c.search.lockstep = arg.lockstep
  c.search.lead_steps = 0 if arg.lockstep else 1
  c.evaluate.every_steps = 50
  c.evaluate.num_prompts = 128
  c.evaluate.final_prompts = 141  # All held-out sums.

  if arg.rounds:
    variants.set_rounds(
        c,
        mini_batches=arg.rounds,
        passes=arg.passes,
        lag_rounds=arg.lag_rounds,
    )
  if arg.smoke:
    _make_smoke(c, round_steps)
  return c


def _make_smoke(c: ml_collections.ConfigDict, round_steps: int) -> None:
  """Shrinks the run to a smoke test, with whole rounds."""
  variants.make_smoke(c)
  c.train.num_steps = max(6 // round_steps, 1) * round_steps
  c.task.max_number = 9
  c.sampling.max_prompt_tokens = 4
  c.evaluate.num_prompts = 8
  c.evaluate.final_prompts = 16
  c.evaluate.batch_prompts = 8
