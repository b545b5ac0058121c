# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""What the judges of searchers that come and go counted, in sum."""

from collections.abc import Mapping
from typing import Any


class RewardLog:
  """Turns totals of single searchers into metrics and into totals of a run."""

  def __init__(self):
    self._seen: dict[str, dict[str, Any]] = {}
    self._failures: dict[str, int] = {}
    self._since_take: dict[str, float] = {}
    self._judged_since_take = 0

  @property
  def failures(self) -> dict[str, int]:
    """Completions of the run that have no reward of the task's, by cause."""
    return dict(self._failures)

  def add(self, leases: Mapping[str, Mapping[str, Any]]) -> None:
    """Takes in what the leases say since the last call.

    Args:
      leases: by searcher; `stats` may have `rewards`, the totals of a judge.
    """
    for sid, lease in leases.items():
      new = lease["stats"].get("rewards")
      if not new:
        continue
      old = self._seen.get(sid, {"completions": 0, "failures": {}, "sums": {}})
      self._seen[sid] = new
      failed = 0
      for cause, count in new["failures"].items():
        more = count - old["failures"].get(cause, 0)
        failed += more
        self._failures[cause] = self._failures.get(cause, 0) + more
      for name, value in new["sums"].items():
        more = value - old["sums"].get(name, 0.0)
        self._since_take[name] = self._since_take.get(name, 0.0) + more
      judged = new["completions"] - old["completions"]
      self._judged_since_take += judged - failed

  def take(self) -> dict[str, float]:
    """Returns metrics over what came since the last call, by bare name.

    The mean of each part of the reward, and, once there were any, the
    completions that could not be judged, counted over the run.
    """
    out = {}
    if self._judged_since_take:
      out = {
          name: value / self._judged_since_take
          for name, value in self._since_take.items()
      }
    out |= {f"failed_{cause}": n for cause, n in self._failures.items()}
    self._since_take, self._judged_since_take = {}, 0
    return out

  def get_state(self) -> dict[str, Any]:
    return {"failures": dict(self._failures), "seen": dict(self._seen)}

  def set_state(self, state: Mapping[str, Any]) -> None:
    self._failures = dict(state["failures"])
    # Searchers outlive a trainer: what they said before is not counted again.
    self._seen = dict(state.get("seen", {}))  # Older checkpoints have none.
