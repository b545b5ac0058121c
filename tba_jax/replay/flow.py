# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""How many prompts may be sampled ahead of training, and with which version.

Staleness is bounded by admission. With F fresh prompts a step, a warm start of
W prompts and a lead of n steps, searchers may have sampled at most

    W + F (step + 1 + n)

prompts when `step` begins, and with `wait_for_fresh` step begins once
W + F (step + 1) of them are here. Nothing is thrown away for its age.

In rounds of P prompts and R = N T steps, those of round q (from 0) are the
positions q P to (q + 1) P - 1. All are sampled with the params that began round
q - lag, and all are here before the round begins.
"""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Flow:
  """How data is admitted.

  prompts_per_step: F.
  warm_prompts: W, prompts sampled before the first step.
  lead_steps: n.
  num_steps: of the run; no prompt is granted beyond what they need.
  lockstep: data of a step is sampled with the version of that step.
  wait_for_fresh: a step waits for its own fresh prompts.
  starvation_s: patience with searchers that deliver nothing.
  round_prompts: P; 0 = no rounds. With them F, W, n play no part.
  round_steps: R.
  lag_rounds: 0 or 1.
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

  @property
  def is_pinned(self) -> bool:
    """True where each position has one version that must sample it."""
    return self.lockstep or self.round_prompts > 0

  def needed(self, step: int) -> int:
    """Prompts that must be here before `step` begins."""
    if self.round_prompts:
      return self.round_prompts * (step // self.round_steps + 1)
    if not self.wait_for_fresh:
      return max(1, self.warm_prompts)
    return self.warm_prompts + self.prompts_per_step * (step + 1)

  def admitted(self, step: int) -> int:
    """Prompts that may be granted while `step` is the next one."""
    if self.round_prompts:
      return self.needed(step)
    lead = 0 if self.lockstep else self.lead_steps
    last = min(step + 1 + lead, self.num_steps)
    return self.warm_prompts + self.prompts_per_step * last

  def admitted_next(self, step: int) -> int:
    """Prompts that may be granted once `step` of a round has begun."""
    rounds = self.num_steps // self.round_steps
    last = min(step // self.round_steps + 1 + self.lag_rounds, rounds)
    return self.round_prompts * last

  def version_of(self, position: int) -> int:
    """The version that must sample a position, -1 = the newest."""
    if self.round_prompts:
      begun = max(0, position // self.round_prompts - self.lag_rounds)
      return begun * self.round_steps
    if not self.lockstep:
      return -1
    return max(0, position - self.warm_prompts) // self.prompts_per_step
