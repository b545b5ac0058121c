# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Guess a number from "higher" and "lower" hints, on two CPU cores.

    python -m tba_jax.main --config=configs/guess.py --workdir=runs/guess

Arguments, after a colon and separated by commas: `smoke` (seconds, for tests),
`quick` (some minutes on two cores), `seed=N`, `lockstep` (staleness 0 with the
same number of completions and updates).

A model is fine-tuned on a player who follows the hints half of the time, and
then learns to find the number in fewer turns. The environment is
`examples/guess.py`; docs/results/agents.md has results.
"""

import pathlib

import ml_collections

from tba_jax.config import settings
from tba_jax.config import variants

_GUESS = pathlib.Path(__file__).parents[1] / "examples" / "guess.py"


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
          source=f"{_GUESS}:Guess",
          train_prompts=4000,
          test_prompts=500,
          max_turns=8,
          correct_threshold=0.0,
      )
  )
  c.reward.backend = "pool"
  c.reward.num_workers = 32
  c.sampling.max_prompt_tokens = 2
  # Eight times a guess, its stop token and a hint.
  c.sampling.max_completion_tokens = 24

  c.sft.num_steps = 300 if arg.quick else 600
  c.sft.evaluate_every_steps = 300
  c.sft.checkpoint_every_steps = 300

  c.loss.beta = 0.01
  c.loss.ratio_clip = 0.2
  c.optimizer.learning_rate = 1.5e-3
  c.optimizer.learning_rate_final = 1e-4
  c.replay.dedupe = False
  c.replay.recent_window_steps = 2
  # All completions of a prompt have the same number to guess, so luck cancels.
  c.search.samples_per_prompt = c.train.completions_per_prompt = 8
  c.search.prompts_per_step = c.search.prompts_per_round = 16
  c.sampling.num_slots = 128
  c.train.prompts_per_batch = c.train.micro_batch_prompts = 16
  c.reference.role = "trainer" if arg.lockstep else "searcher"
  c.search.lockstep = arg.lockstep
  c.search.lead_steps = 0 if arg.lockstep else 2
  c.train.num_steps = 400 if arg.quick else 600
  c.evaluate.every_steps = 200
  c.evaluate.num_prompts = 128
  c.evaluate.final_prompts = 256 if arg.quick else 500

  if arg.smoke:
    _make_smoke(c)
  return c


def _make_smoke(c: ml_collections.ConfigDict) -> None:
  """Shrinks the run to a smoke test."""
  variants.make_smoke(c)
  c.task.train_prompts = 100
  c.reward.num_workers = 8
  c.reference.role = "trainer"
  c.search.lead_steps = min(c.search.lead_steps, 1)
