# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Schedules: which version samples which prompt, and when a step may begin.

A position is an index in the prompt order, a step is a trainer step. Data is
never dropped for its age. Admission bounds the number of outstanding prompts:
in lockstep and in rounds the age of their data is exact, otherwise a slow
completion may be older than `lead_steps`.
"""

import dataclasses
import math
import sys
from typing import Protocol

import ml_collections


class Schedule(Protocol):
  """Admission of prompts ahead of training, and the version of each.

  num_steps: steps of the run; no prompt beyond them is admitted.
  round_steps: number of steps that train on the same prompts' data.
  lag_steps: number of versions before the newest that searchers may still need;
    0 if they need only the newest.
  is_pinned: whether each position must be sampled with a specific version.
  is_late: whether a version is published only once its step has begun.
  takes_newer: whether a version newer than a required one is acceptable.
  """

  num_steps: int
  round_steps: int
  lag_steps: int
  is_pinned: bool
  is_late: bool
  takes_newer: bool

  def admitted(self, step: int) -> int:
    """Returns the number of prompts admitted before `step` begins."""

  def admitted_after(self, step: int) -> int:
    """Returns the number of prompts admitted once `step` has begun.

    If versions are pinned, none of these prompts needs a version after `step`.
    """

  def needed(self, step: int) -> int:
    """Returns the number of prompts that must arrive before `step` begins."""

  def has_barrier(self, step: int) -> bool:
    """Returns whether `step` waits for everything granted before it."""

  def may_run_ahead(self, step: int) -> bool:
    """Returns whether `step` may begin while the previous one is computed."""

  def step_of(self, position: int) -> int:
    """Returns the step before which a position must arrive; 0 if not pinned."""

  def version_of(self, position: int) -> int:
    """Returns the version that must sample a position; -1 for the newest."""


@dataclasses.dataclass(frozen=True)
class Steps:
  """Each step has its own fresh prompts.

  With F fresh prompts per step, W warm-start prompts and a lead of n steps:

  admits before step t: W + F (t + 1 + n) prompts.
  needs before step t: W + F (t + 1) with `wait_for_fresh`, else max(W, 1).
  version of a position: the newest; in lockstep max(t - n, 0) for the prompts
    of step t, an exact lag of n steps.

  With F = 0, searchers run freely: nothing bounds how much they sample, and a
  step uses what has arrived. With `wait_for_fresh`, there is then a barrier
  every k steps: a step divisible by k begins once everything granted before it
  has arrived, and everything granted later is sampled with that step's version
  or a newer one. Data is then at most k steps old on arrival, as in Bartoldson
  et al. 2025 (arXiv:2503.18929) §4.1.

  prompts_per_step: F.
  warm_prompts: W, prompts sampled before the first step.
  lead_steps: n.
  barrier_steps: k; 0 for no barriers.
  first_version: oldest available version, the step that a resumed trainer
    starts from; in lockstep it replaces older ones.
  """

  prompts_per_step: int
  warm_prompts: int
  lead_steps: int
  num_steps: int
  lockstep: bool
  wait_for_fresh: bool
  barrier_steps: int = 0
  first_version: int = 0
  is_late = False
  round_steps = 1

  @property
  def is_pinned(self) -> bool:
    return self.lockstep

  @property
  def takes_newer(self) -> bool:
    return self.barrier_steps > 0

  @property
  def lag_steps(self) -> int:
    return self.lead_steps if self.lockstep else 0

  def admitted(self, step: int) -> int:
    if not self.prompts_per_step:
      return sys.maxsize
    last = min(step + 1 + self.lead_steps, self.num_steps)
    return self.warm_prompts + self.prompts_per_step * last

  def admitted_after(self, step: int) -> int:
    return self.admitted(step)

  def needed(self, step: int) -> int:
    if not (self.wait_for_fresh and self.prompts_per_step):
      return max(1, self.warm_prompts)
    return self.warm_prompts + self.prompts_per_step * (step + 1)

  def has_barrier(self, step: int) -> bool:
    return step > 0 and self.barrier_steps > 0 and not step % self.barrier_steps

  def may_run_ahead(self, step: int) -> bool:
    del step
    return not self.lockstep

  def step_of(self, position: int) -> int:
    if not self.lockstep:
      return 0
    return max(0, position - self.warm_prompts) // self.prompts_per_step

  def version_of(self, position: int) -> int:
    if not self.lockstep:
      return -1
    return max(self.step_of(position) - self.lead_steps, self.first_version)


@dataclasses.dataclass(frozen=True)
class Rounds:
  """Prompts come in rounds, each of which is trained on for several steps.

  With rounds of P prompts and R steps, round q (from 0) has positions q P to
  (q + 1) P - 1.

  admits before step t: the prompts of its round; once step t has begun, also
    the next `lag_rounds` rounds.
  needs before step t: the prompts of its round.
  version of a position: the step at which round q - lag_rounds starts, or 0.

  Source: Asynchronous RLHF, Noukhovitch et al. 2024 (arXiv:2410.18252).

  num_prompts: P.
  round_steps: R.
  lag_rounds: 0 or 1.
  """

  num_prompts: int
  round_steps: int
  lag_rounds: int
  num_steps: int
  is_pinned = True
  takes_newer = False
  lag_steps = 0

  @property
  def is_late(self) -> bool:
    return self.lag_rounds > 0

  def admitted(self, step: int) -> int:
    return self.needed(step)

  def admitted_after(self, step: int) -> int:
    num_rounds = self.num_steps // self.round_steps
    last = min(step // self.round_steps + 1 + self.lag_rounds, num_rounds)
    return self.num_prompts * last

  def needed(self, step: int) -> int:
    return self.num_prompts * (step // self.round_steps + 1)

  def has_barrier(self, step: int) -> bool:
    del step
    return False

  def may_run_ahead(self, step: int) -> bool:
    return step % self.round_steps > 0

  def step_of(self, position: int) -> int:
    return position // self.num_prompts * self.round_steps

  def version_of(self, position: int) -> int:
    lag_steps = self.lag_rounds * self.round_steps
    return max(0, self.step_of(position) - lag_steps)


def make_schedule(
    config: ml_collections.ConfigDict, *, first_version: int = 0
) -> Schedule:
  """Returns the schedule that a config describes."""
  search, rounds = config.search, config.rounds
  if rounds.mini_batches:
    return Rounds(
        num_prompts=rounds.mini_batches * config.train.prompts_per_batch,
        round_steps=rounds.mini_batches * rounds.passes,
        lag_rounds=rounds.lag_rounds,
        num_steps=config.train.num_steps,
    )
  has_barriers = not search.prompts_per_step and search.wait_for_fresh
  return Steps(
      prompts_per_step=search.prompts_per_step,
      warm_prompts=math.ceil(
          config.replay.warm_start_completions / search.samples_per_prompt
      ),
      lead_steps=search.lead_steps,
      num_steps=config.train.num_steps,
      lockstep=search.lockstep,
      wait_for_fresh=search.wait_for_fresh,
      barrier_steps=config.publish.every_steps if has_barriers else 0,
      first_version=first_version,
  )
