# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""What a run's numbers say about its settings, in plain sentences."""

from collections.abc import Mapping, Sequence
import math
from typing import Any

from tba_jax import metrics
from tba_jax.report import load

# A role that waits less than this share of its time is taken to be busy.
_BUSY = 0.9
_MANY_EQUAL = 0.5


def _wait_share(rows: Sequence[Mapping[str, Any]], role: str) -> float | None:
  """Returns the share of a role's time spent waiting, over its main lanes."""
  mine = [r for r in rows if r["role"] == role and not r["lane"]]
  elapsed = sum(r["elapsed_s"] for r in mine)
  waited = sum(
      s
      for r in mine
      for kind, s in r["seconds"].items()
      if metrics.is_wait(kind)
  )
  return waited / elapsed if elapsed > 0 else None


def _bound(rows: Sequence[Mapping[str, Any]]) -> list[str]:
  trainer, searcher = (_wait_share(rows, r) for r in ("trainer", "searcher"))
  if trainer is None or searcher is None:
    return []
  waits = (
      f"The trainer waited {trainer:.0%} of its time, the searchers"
      f" {searcher:.0%} of theirs"
  )
  if max(trainer, searcher) < 1 - _BUSY:
    return [f"{waits}: they are in balance."]
  count = len({r["index"] for r in rows if r["role"] == "searcher"})
  # Busy searchers a busy trainer needs: both rates scale with their work.
  balance = max(1, math.ceil(count * (1 - searcher) / max(1 - trainer, 0.01)))
  if trainer > searcher:
    return [
        f"{waits}: sampling bounds the run. At their speed {balance} searchers"
        f" instead of {count} would balance it (search.num_searchers)."
    ]
  tail = (
      f" {balance} searchers instead of {count} would do."
      if balance < count
      else " More searchers would not make it faster."
  )
  return [f"{waits}: the trainer bounds the run.{tail}"]


def _mean(run: load.Run, name: str) -> float | None:
  values = [r[name] for r in run.records if load.is_number(r.get(name))]
  return sum(values) / len(values) if values else None


def _waste(run: load.Run) -> list[str]:
  lines = []
  equal = _mean(run, "train/equal_reward_groups")
  if equal is not None:
    line = (
        f"{equal:.0%} of the groups had equal rewards throughout: they only"
        " pull the policy towards its reference."
    )
    if equal > _MANY_EQUAL:
      line += (
          " More completions a prompt (search.samples_per_prompt,"
          " train.completions_per_prompt) or other prompts would waste less."
      )
    lines.append(line)
  age = _mean(run, "replay/staleness_steps")
  if age is not None:
    lines.append(f"Data was {age:.1f} steps old on average when it was used.")
  return lines


def advice(run: load.Run, rows: Sequence[Mapping[str, Any]]) -> list[str]:
  """Returns sentences on what bounds a run and what it wastes.

  Args:
    run: what its directory holds; what is missing is not spoken of.
    rows: of `timeline.where_time_went`.
  """
  return [*_bound(rows), *_waste(run)]
