# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Share of training completions that could not be judged, and whether it rises.

A policy that gains by breaking its judge, or that drifts to texts that the
judge cannot read, shows in this share alone: such completions are in no mean.

The first N₀ groups of a run, sampled by the initial policy, are compared with
the newest N₁, after every N₁/4 groups:

    z = (m₁ - m₀) / √(s² (1/N₀ + 1/N₁))

where m are means of the groups' shares and s² is the variance of all shares.
Completions of a group are not independent, but the shares of groups are. The
k-th look at a run counts a rise as real if z exceeds the upper normal quantile
of level α/(k (k + 1)). These levels sum to α over all looks, which bounds the
chance that a constant share is ever taken for a rise. A policy may lose its way
for a while, early in training for example, and recover: N₁ is large, and a rise
does not count once half of it is gone in the newest quarter.
"""

from collections.abc import Mapping, Sequence
import math
import statistics
from typing import Any

_FIRST = 64  # N₀
_BLOCK, _NUM_BLOCKS = 256, 4  # N₁ is their product.
_FALSE_ALARM = 1e-3  # α


class FailureShare:
  """Follows the share over a run.

  first: mean of the first groups; None before any.
  newest: mean of the newest whole blocks; `first` until there is one.
  is_rising: whether the newest are clearly above the first.
  """

  def __init__(self, state: Mapping[str, Any] | None = None):
    """Continues from `state`, a result of `get_state`, if given."""
    state = state or {}
    # Count, sum and sum of squares of the first groups, of the newest blocks,
    # and of the block that is being filled.
    self._first = list(state.get("first", (0, 0.0, 0.0)))
    self._blocks = [list(block) for block in state.get("blocks", ())]
    self._filling = list(state.get("filling", (0, 0.0, 0.0)))
    self._num_looks = state.get("num_looks", 0)
    self.is_rising = state.get("is_rising", False)
    self._since = [0, 0.0]

  @property
  def first(self) -> float | None:
    return _mean(self._first)

  @property
  def newest(self) -> float | None:
    return _mean(_total(self._blocks)) if self._blocks else self.first

  def add(self, shares: Sequence[float], *, compare: bool = True) -> None:
    """Adds groups, in order.

    Args:
      shares: share of each group's completions that could not be judged.
      compare: whether the groups enter the comparison; False for prompts chosen
        by their earlier answers, which do not represent all prompts.
    """
    for share in map(float, shares):
      self._since[0] += 1
      self._since[1] += share
      if not compare:
        continue
      is_first = self._first[0] < _FIRST
      block = self._first if is_first else self._filling
      for i, value in enumerate((1, share, share * share)):
        block[i] += value
      if not is_first and block[0] == _BLOCK:
        self._blocks = [*self._blocks, block][-_NUM_BLOCKS:]
        self._filling = [0, 0.0, 0.0]
        self._look()

  def take(self) -> float | None:
    """Returns the mean of the groups since the last call, None without any."""
    mean, self._since = _mean(self._since), [0, 0.0]
    return mean

  def get_state(self) -> dict[str, Any]:
    return {
        "first": self._first,
        "blocks": self._blocks,
        "filling": self._filling,
        "num_looks": self._num_looks,
        "is_rising": self.is_rising,
    }

  def _look(self) -> None:
    if len(self._blocks) < _NUM_BLOCKS:
      return
    self._num_looks = k = self._num_looks + 1
    least = -statistics.NormalDist().inv_cdf(_FALSE_ALARM / (k * (k + 1)))
    newest = _total(self._blocks)
    count, total, squares = _total([self._first, newest])
    variance = (squares - total * total / count) / (count - 1)
    error = math.sqrt(max(variance, 0.0) * (1 / self._first[0] + 1 / newest[0]))
    rise, last = self.newest - self.first, _mean(self._blocks[-1]) - self.first
    self.is_rising = rise > least * error and last > rise / 2


def _mean(block: Sequence[float]) -> float | None:
  return block[1] / block[0] if block[0] else None


def _total(blocks: Sequence[Sequence[float]]) -> list[float]:
  return [sum(values) for values in zip(*blocks)]
