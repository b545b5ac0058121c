# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""What searchers that come and go have done, in sum."""

from collections.abc import Mapping
from typing import Any


class LeaseTotals:
  """Turns totals of single searchers into what they did since the last look."""

  def __init__(self):
    self._seen: dict[str, dict[str, float]] = {}

  def added(self, leases: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    """Returns the sums over searchers since the last call.

    busy_s: seconds in which they did not wait.
    completions: that they handed over.
    mixed_completions: of these, with tokens of more than one version.

    Args:
      leases: by searcher, with `totals` and `stats`.
    """
    out = dict.fromkeys(("busy_s", "completions", "mixed_completions"), 0.0)
    for sid, lease in leases.items():
      new = {
          "busy_s": float(lease["stats"].get("busy_s", 0.0)),
          "completions": lease["totals"]["completions"],
          "mixed_completions": lease["stats"].get("mixed_completions", 0),
      }
      old = self._seen.get(sid, {})
      for name, value in new.items():
        out[name] += max(0.0, value - old.get(name, 0.0))
      self._seen[sid] = new
    return out
