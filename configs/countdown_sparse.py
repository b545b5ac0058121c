# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Countdown with rare correct completions: can search find them?

    python -m tba_jax.main --config=configs/countdown_sparse.py \\
        --workdir=runs/countdown_sparse

Targets have at most two solutions, and fine-tuning is so short that few
completions are correct. Half of each batch is replayed, weighted by reward, so
that rare successes are trained on again. Arguments as in
`configs/countdown.py`: `smoke`, `quick`, `seed=N`, `lockstep`.

`docs/tasks.md` has results of `quick`, which has three numbers instead of four.
Time and result of the full run have not been measured.
"""

import ml_collections

from tba_jax.config import variants

countdown = variants.import_config("countdown.py", beside=__file__)


def get_config(arg: str = "") -> ml_collections.ConfigDict:
  """Returns the config; the module docstring lists the arguments."""
  c = countdown.get_config(arg)
  arg = variants.parse_arg(
      arg, smoke=False, quick=False, seed=0, lockstep=False
  )
  c.task = ml_collections.ConfigDict(
      dict(
          name="countdown_sparse",
          numbers=4,
          max_number=12,
          max_target=99,
          max_solutions=2,
          held_out_fraction=0.15,
          split_seed=0,
      )
  )
  c.loss.beta = 0.05
  c.optimizer.learning_rate = 6e-4
  c.optimizer.learning_rate_final = 6e-5
  c.replay.dedupe = True
  c.replay.skip_equal_rewards = False
  c.replay.recent_window_steps = 4
  c.replay.recent_fraction = 0.5
  c.replay.selection = "reward"
  c.replay.reward_temperature = 0.25
  c.reference.role = "trainer"
  if not arg.lockstep:
    c.search.lead_steps = 1
  c.search.samples_per_prompt = 16
  c.search.prompts_per_round = c.search.prompts_per_step = 16
  c.train.completions_per_prompt = 8
  c.evaluate.num_completions = 16
  if arg.quick:
    # Three numbers, so that a minute of search finds enough to learn from.
    c.task.numbers = 3
    c.sft.num_steps = 300
    c.sft.evaluate_every_steps = 300
    c.evaluate.every_steps = 50
  if arg.smoke:
    c.task.numbers = 3
    c.task.max_number = 9
    c.search.samples_per_prompt = 4
    c.search.prompts_per_round = c.search.prompts_per_step = 8
    c.train.completions_per_prompt = 4
    c.evaluate.num_completions = 4
  else:
    c.sampling.num_slots = 256
    c.train.prompts_per_batch = c.train.micro_batch_prompts = 32
    c.train.num_steps = 300 if arg.quick else 400
  return c
