# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""How much and how often the trainer does what it does."""

import dataclasses

import ml_collections

from tba_jax.tasks import base as tasks_base
from tba_jax.training import train_step


@dataclasses.dataclass(frozen=True)
class Periods:
  """How much and how often, all in optimizer steps where not said otherwise.

  num_steps: of the run.
  num_prompts, num_completions: B and K of a batch.
  publish_late: rounds with a lag publish once all data of the round is here.
  publish_every, checkpoint_every, evaluate_every: periods; 0 = never.
  checkpoint_every_s: seconds after which a checkpoint is due all the same.
  evaluate_prompts: held-out prompts while training.
  final_prompts: held-out prompts before and after.
  wall_clock_limit_s: of this process, 0 = none.
  """

  num_steps: int
  num_prompts: int
  num_completions: int
  publish_every: int
  checkpoint_every: int
  evaluate_every: int
  evaluate_prompts: int
  final_prompts: int
  wall_clock_limit_s: float
  publish_late: bool = False
  checkpoint_every_s: float = 0.0


def make_periods(
    config: ml_collections.ConfigDict, task: tasks_base.Task
) -> Periods:
  """Returns how much and how often, as a config says and the task has."""
  while_training = task.num_prompts(tasks_base.split_while_training(task))
  return Periods(
      num_steps=config.train.num_steps,
      num_prompts=config.train.prompts_per_batch,
      num_completions=config.train.completions_per_prompt,
      publish_every=config.publish.every_steps,
      checkpoint_every=config.checkpoint.every_steps,
      evaluate_every=config.evaluate.every_steps,
      evaluate_prompts=min(config.evaluate.num_prompts, while_training),
      final_prompts=min(
          config.evaluate.final_prompts, task.num_prompts(tasks_base.HELD_OUT)
      ),
      wall_clock_limit_s=config.train.wall_clock_limit_s,
      publish_late=train_step.keeps_params(config),
      checkpoint_every_s=config.checkpoint.every_s,
  )
