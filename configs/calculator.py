# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Countdown with a calculator as a tool, on two CPU cores.

    python -m tba_jax.main --config=configs/calculator.py \\
        --workdir=runs/calculator

Arguments, after a colon and separated by commas: `smoke` (seconds, for tests),
`quick` (some minutes on two cores), `seed=N`, `lockstep` (staleness 0 with the
same number of completions and updates).

The task is to make a number from three others. A model is fine-tuned on a
player who calculates random expressions until one yields the number; it then
learns which ones to try. The environment is `examples/calculator.py`.
"""

import pathlib

import ml_collections

from tba_jax.config import settings
from tba_jax.config import variants

_CALCULATOR = pathlib.Path(__file__).parents[1] / "examples" / "calculator.py"


def get_config(arg: str = "") -> ml_collections.ConfigDict:
  """Returns the config; the module docstring lists the arguments."""
  arg = variants.parse_arg(
      arg, smoke=False, quick=False, seed=0, lockstep=False
  )
  c = settings.get_config()
  c.seed = arg.seed
  c.task = ml_collections.ConfigDict(
      dict(
          name="environment",
          source=f"{_CALCULATOR}:Countdown",
          train_prompts=8000,
          test_prompts=500,
          max_turns=5,
          correct_threshold=1.0,
      )
  )
  c.reward.backend = "pool"
  c.reward.num_workers = 32
  c.sampling.max_prompt_tokens = 9
  # Four calls with results, 11 tokens each, and an answer of 8 tokens.
  c.sampling.max_completion_tokens = 52

  # It learns late to answer with the expression that made the number.
  c.sft.num_steps = 1000 if arg.quick else 2000
  c.sft.evaluate_every_steps = 1000
  c.sft.checkpoint_every_steps = 500

  c.loss.beta = 0.02
  c.loss.ratio_clip = 0.2
  c.optimizer.learning_rate = 5e-4
  c.optimizer.learning_rate_final = 5e-5
  c.replay.dedupe = False
  c.replay.skip_equal_rewards = True
  c.replay.recent_window_steps = 2
  c.search.samples_per_prompt = c.train.completions_per_prompt = 8
  # A fifth of the prompts replace groups with equal rewards.
  c.search.prompts_per_step = c.search.prompts_per_round = 20
  c.sampling.num_slots = 160
  c.train.prompts_per_batch = 16
  c.train.micro_batch_prompts = 8
  c.reference.role = "trainer" if arg.lockstep else "searcher"
  c.search.lockstep = arg.lockstep
  c.search.lead_steps = 0 if arg.lockstep else 2
  c.train.num_steps = 500 if arg.quick else 1000
  c.evaluate.every_steps = 0 if arg.quick else 200
  c.evaluate.num_prompts = 128
  c.evaluate.num_completions = 4
  c.evaluate.final_prompts = 256 if arg.quick else 500

  if arg.smoke:
    _make_smoke(c)
  return c


def _make_smoke(c: ml_collections.ConfigDict) -> None:
  """Shrinks the run to a smoke test."""
  variants.make_smoke(c)
  c.task.train_prompts = 100
  # With so few groups, all may have equal rewards.
  c.replay.skip_equal_rewards = False
  c.reward.num_workers = 8
  c.reference.role = "trainer"
  c.search.lead_steps = min(c.search.lead_steps, 1)
