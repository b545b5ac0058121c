# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""One run of a sweep, and which params sample what it trains on."""

import dataclasses

import ml_collections


@dataclasses.dataclass(frozen=True)
class Lag:
  """Which params sample the batch of a step.

  staleness_steps: s; the batch of step t is sampled with version t - s, or 0.
  mini_batches: N; with 2 or more, with the version that began the round of N
    steps: t - t mod N.
  """

  staleness_steps: int = 0
  mini_batches: int = 1

  @property
  def label(self) -> str:
    if self.mini_batches > 1:
      return f"N={self.mini_batches}"
    return f"s={self.staleness_steps}"

  def version_of(self, step: int) -> int:
    """Returns the version that samples what `step` trains on."""
    if self.mini_batches > 1:
      return step - step % self.mini_batches
    return max(step - self.staleness_steps, 0)


@dataclasses.dataclass(frozen=True)
class Run:
  """One run of a sweep.

  objective: its name in `config.sweep.objectives`.
  lag: of its samples.
  seed: of its prompts and samples.
  config: of the run, complete.
  """

  objective: str
  lag: Lag
  seed: int
  config: ml_collections.ConfigDict

  @property
  def name(self) -> str:
    lag = self.lag.label.replace("=", "")
    return f"{self.objective}-{lag}-seed{self.seed}"
