# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Figures of completions that are not as the others; none where there are none.

Those that could not be judged, and those with tokens of several versions.
"""

from collections.abc import Mapping
from typing import Any

from tba_jax.report import load
from tba_jax.report import text

_FAILED = "reward/failed_"
_MIXED = "sampler/mixed_version_share"


def _last(run: load.Run) -> dict[str, Any]:
  """Returns the newest of each of the metrics that count over the run."""
  out: dict[str, Any] = {}
  for record in run.records:
    for name, value in record.items():
      if (name == _MIXED or name.startswith(_FAILED)) and load.is_number(value):
        out[name] = value
  return out


def not_judged(run: load.Run) -> dict[str, int]:
  """Returns how many completions have no reward of the task's, by cause."""
  found = run.summary.get("reward_failures")
  if not isinstance(found, Mapping):
    found = {
        name.removeprefix(_FAILED): value
        for name, value in _last(run).items()
        if name.startswith(_FAILED)
    }
  return {
      str(cause): int(n)
      for cause, n in found.items()
      if load.is_number(n) and n
  }


def facts(run: load.Run) -> list[dict[str, str]]:
  """Returns figures as `tables.facts` does: name, value and what it means."""
  rows = []
  failures = not_judged(run)
  if failures:
    causes = ", ".join(f"{n:,} {cause}" for cause, n in failures.items())
    note = f"by cause: {causes}; each has reward.fallback as its reward"
    rows.append(("not judged", f"{sum(failures.values()):,}", note))
  share = run.summary.get("mixed_version_share", _last(run).get(_MIXED))
  if load.is_number(share) and share:
    note = (
        "of completions have tokens of more than one version of the params"
        " (sampling.in_flight); the version shown is that of the first token"
    )
    rows.append(("several versions", f"{100 * share:.1f} %", note))
  return [
      {"name": name, "value": value, "note": text.printable(note, 400)}
      for name, value, note in rows
  ]
