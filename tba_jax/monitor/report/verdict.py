# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Tells whether a run learned, in one sentence."""

from collections.abc import Mapping, Sequence
import dataclasses
import math
from typing import Any

from tba_jax.monitor import text
from tba_jax.monitor.report import load
from tba_jax.monitor.report import tables

# A difference of more standard errors than this is taken as real.
CLEAR = 2.0
# The first metric that both evaluations have decides.
_KEYS = ("pass_at_1", "win_rate", "mean_reward")
# Held-out share above which hardly anything is left to learn.
_SATURATED = 0.98


@dataclasses.dataclass(frozen=True)
class Verdict:
  """Outcome of a run.

  kind: "learned", "overfitted", "worse", "saturated", "nothing", "unknown".
  sentence: the outcome and the numbers it rests on.
  """

  kind: str
  sentence: str

  @property
  def learned(self) -> bool:
    return self.kind in ("learned", "saturated", "unknown")


def training_reward(
    records: Sequence[Mapping[str, Any]],
) -> tuple[float, float, float] | None:
  """Returns mean batch rewards of the first and last fifth, and the error.

  The error is the standard error of their difference; None for fewer than ten
  steps.
  """
  values = [
      r["train/reward_mean"]
      for r in records
      if text.is_number(r.get("train/reward_mean"))
  ]
  n = len(values) // 5
  if n < 2:
    return None
  first, last = values[:n], values[-n:]
  means = [sum(part) / n for part in (first, last)]
  variance = sum(
      sum((x - mean) ** 2 for x in part) / (n - 1)
      for part, mean in zip((first, last), means, strict=True)
  )
  return means[0], means[1], math.sqrt(variance / n)


def of_run(run: load.Run) -> Verdict:
  """Returns whether a run learned."""
  return verdict(*tables.evaluations(run), run.records)


def _error(before: Mapping[str, Any], after: Mapping[str, Any], key: str):
  """Returns the standard error of the difference of two evaluations."""
  errors = [e.get(f"{key}_stderr") for e in (before, after)]
  return math.hypot(*(e if text.is_number(e) else 0.0 for e in errors))


def _greedy(before: Mapping[str, Any], after: Mapping[str, Any], key: str):
  """Returns a remark where samples got better and greedy completions worse."""
  key = f"greedy_{key}"
  old, new = before.get(key), after.get(key)
  if not (text.is_number(old) and text.is_number(new)):
    return ""
  if new - old >= -CLEAR * _error(before, after, key):
    return ""
  old, new = text.number(old, "percent"), text.number(new, "percent")
  return (
      f"; that of greedy completions fell from {old} to {new}: samples became"
      " less random, not better"
  )


def verdict(
    before: Mapping[str, Any],
    after: Mapping[str, Any],
    records: Sequence[Mapping[str, Any]] = (),
) -> Verdict:
  """Returns whether a run learned.

  Args:
    before, after: held-out evaluations, with `<key>_stderr` if known.
    records: metrics of the steps, with `train/reward_mean`.
  """
  key = next(
      (
          key
          for key in _KEYS
          if text.is_number(before.get(key)) and text.is_number(after.get(key))
      ),
      None,
  )
  if key is None:
    return Verdict(
        "unknown", "Not known yet: no evaluation before and after training."
    )
  name, style = tables.EVALUATIONS[key]
  change = after[key] - before[key]
  error = CLEAR * _error(before, after, key)
  old, new = (text.number(side[key], style) for side in (before, after))
  by = tables.signed(change, style)
  if error:
    by = f"{by.removesuffix(' points')} ± {tables.error_text(error, style)}"
    by = by.replace(" %", " points")
  moved = f"held-out {name} went from {old} to {new} ({by})"
  if change > error:
    full = style == "percent" and after[key] >= _SATURATED
    more = ": there is hardly anything left to learn" if full else ""
    more += _greedy(before, after, key)
    return Verdict("learned", f"Learned: {moved}{more}.")
  reward = training_reward(records)
  trained = ""
  if reward and reward[1] - reward[0] > CLEAR * reward[2]:
    trained = (
        f"training reward rose from {text.number(reward[0])} to"
        f" {text.number(reward[1])}"
    )
  if trained:
    return Verdict("overfitted", f"Overfitted: {trained}, but {moved}.")
  if change < -error:
    return Verdict("worse", f"Got worse: {moved}.")
  if style == "percent" and before[key] >= _SATURATED:
    return Verdict(
        "saturated",
        f"Saturated: held-out {name} was {old} before training, and is {new}.",
    )
  return Verdict(
      "nothing",
      f"Learned nothing that can be measured: {moved}, and the training reward"
      " did not rise.",
  )
