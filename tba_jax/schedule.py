# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Schedule: which version samples which prompt, and when a step may begin.

    free        the newest version; nothing bounds its age, or a barrier does
    bounded     the newest version; admission bounds its age
    lockstep    version max(step - n, 0): an exact lag of n steps
    rounds      the params at the start of a round, or of the round before it

A position is an index of the prompt order; a step is one of the trainer's.
"""

import dataclasses
import math
import sys
from typing import Any

import ml_collections


@dataclasses.dataclass(frozen=True)
class Schedule:
  """Admission of prompts ahead of training, and the version of each.

  Admission bounds staleness. With F fresh prompts a step, a warm start of W
  prompts and a lead of n steps, searchers may have sampled at most

      W + F (step + 1 + n)

  prompts when `step` begins; with `wait_for_fresh` it begins once
  W + F (step + 1) of them have arrived. No data is dropped for its age. With
  F = 0 searchers run free: nothing bounds what they sample, and a step takes
  what has arrived. With `wait_for_fresh` there is then a barrier every k steps:
  a step divisible by k begins once all that was granted before has arrived, and
  what is granted from then on is sampled with its version or a newer one. Data
  is then at most k steps old when it arrives, as in Bartoldson et al. 2025
  (arXiv:2503.18929) §4.1.

  In lockstep the F prompts of a step are sampled with the version n steps
  before it, and arrive in the buffer at that step: the lag is exact.

  In rounds of P prompts and R steps, round q (from 0) has the positions q P to
  (q + 1) P - 1. All are sampled with the params at the start of round q - lag,
  and have arrived before round q begins.

  prompts_per_step: F.
  warm_prompts: W, prompts sampled before the first step.
  lead_steps: n.
  num_steps: steps of the run; no prompt beyond these steps is granted.
  lockstep: whether a step's data has the version of n steps before.
  wait_for_fresh: whether a step waits for its own fresh prompts.
  starvation_s: longest wait without a delivery.
  round_prompts: P; 0 for no rounds, else F, W and n are not used.
  round_steps: R.
  lag_rounds: 0 or 1.
  barrier_steps: k; 0 for no barriers.
  first_version: oldest version there is, the step that a resumed trainer starts
    from; in lockstep it samples what older ones should have.
  """

  prompts_per_step: int
  warm_prompts: int
  lead_steps: int
  num_steps: int
  lockstep: bool
  wait_for_fresh: bool
  starvation_s: float
  round_prompts: int = 0
  round_steps: int = 1
  lag_rounds: int = 0
  barrier_steps: int = 0
  first_version: int = 0

  @property
  def is_pinned(self) -> bool:
    """Whether each position must be sampled with one certain version."""
    return self.lockstep or self.round_prompts > 0

  @property
  def lag_steps(self) -> int:
    """Versions that a searcher may need before the newest, if pinned."""
    return self.lead_steps if self.lockstep else 0

  def needed(self, step: int) -> int:
    """Returns the number of prompts that must arrive before `step` begins."""
    if self.round_prompts:
      return self.round_prompts * (step // self.round_steps + 1)
    if not (self.wait_for_fresh and self.prompts_per_step):
      return max(1, self.warm_prompts)
    return self.warm_prompts + self.prompts_per_step * (step + 1)

  def has_barrier(self, step: int) -> bool:
    """Returns whether `step` waits for all that was granted before it."""
    return step > 0 and self.barrier_steps > 0 and not step % self.barrier_steps

  def admitted(self, step: int) -> int:
    """Returns the number of prompts admitted before `step` begins."""
    if self.round_prompts:
      return self.needed(step)
    if not self.prompts_per_step:
      return sys.maxsize
    last = min(step + 1 + self.lead_steps, self.num_steps)
    return self.warm_prompts + self.prompts_per_step * last

  def admitted_next(self, step: int) -> int:
    """Returns the number of prompts admitted once `step` of a round began."""
    rounds = self.num_steps // self.round_steps
    last = min(step // self.round_steps + 1 + self.lag_rounds, rounds)
    return self.round_prompts * last

  def num_sampled(self, step: int) -> int:
    """Returns the number of prompts sampled before `step` trains, if pinned.

    They are those whose version is `step` or an earlier one.
    """
    if self.round_prompts:
      return self.admitted_next(step)
    return self.admitted(step)

  def step_of(self, position: int) -> int:
    """Returns the step before which a position must arrive; 0 if not pinned."""
    if self.round_prompts:
      return position // self.round_prompts * self.round_steps
    if not self.lockstep:
      return 0
    return max(0, position - self.warm_prompts) // self.prompts_per_step

  def version_of(self, position: int) -> int:
    """Returns the version that must sample a position, -1 for the newest."""
    step = self.step_of(position)
    if self.round_prompts:
      return max(0, step - self.lag_rounds * self.round_steps)
    if not self.lockstep:
      return -1
    return max(step - self.lead_steps, self.first_version)

  def draw(
      self, buffer: Any, num_prompts: int, num_completions: int, step: int
  ) -> Any:
    """Returns a batch: drawn from replay, or the round's next mini-batch.

    Args:
      buffer: `ReplayBuffer`.
      num_prompts: B.
      num_completions: K.
      step: step that trains on it.

    Returns:
      A `Draw` of the buffer.
    """
    if not self.round_prompts:
      return buffer.sample(num_prompts, num_completions, step)
    done = step % self.round_steps
    return buffer.sample_in_order(
        num_prompts,
        num_completions,
        step,
        arrived_from=step - done,
        skip=done * num_prompts % self.round_prompts,
    )


def make_schedule(
    config: ml_collections.ConfigDict, *, first_version: int = 0
) -> Schedule:
  """Returns the schedule that a config describes."""
  search, rounds = config.search, config.rounds
  is_free = not search.prompts_per_step and not rounds.mini_batches
  return Schedule(
      prompts_per_step=search.prompts_per_step,
      warm_prompts=math.ceil(
          config.replay.warm_start_completions / search.samples_per_prompt
      ),
      lead_steps=search.lead_steps,
      num_steps=config.train.num_steps,
      lockstep=search.lockstep,
      wait_for_fresh=search.wait_for_fresh,
      starvation_s=search.starvation_s,
      round_prompts=rounds.mini_batches * config.train.prompts_per_batch,
      round_steps=max(rounds.mini_batches, 1) * rounds.passes,
      lag_rounds=rounds.lag_rounds,
      barrier_steps=(
          config.publish.every_steps if is_free and search.wait_for_fresh else 0
      ),
      first_version=first_version,
  )
