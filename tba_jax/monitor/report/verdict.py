# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Tells whether a run learned, in one sentence."""

from collections.abc import Mapping, Sequence
import dataclasses
import math
from typing import Any

import numpy as np

from tba_jax.monitor import metrics
from tba_jax.monitor import text
from tba_jax.monitor.report import load
from tba_jax.monitor.report import tables

# A difference of more standard errors than this is taken as real.
CLEAR = 2.0
# Share of correct completions, or of wins, above which little is left to learn.
_SATURATED = 0.98
# Blocks of steps in a fifth of a run.
_NUM_BLOCKS = 8


@dataclasses.dataclass(frozen=True)
class Verdict:
  """Outcome of a run.

  kind: "learned", "overfitted", "worse", "saturated", "unclear", "nothing",
    "unjudged", "unknown".
  sentence: the outcome and the numbers it rests on.
  """

  kind: str
  sentence: str

  @property
  def learned(self) -> bool:
    return self.kind in ("learned", "saturated", "unclear", "unknown")


def trend(
    records: Sequence[Mapping[str, Any]], name: str = "train/reward_mean"
) -> tuple[float, float, float] | None:
  """Returns means of a metric in the first and last fifth, and the error.

  The error is the standard error of their difference, from means of blocks of
  steps, since steps that share data are not independent. None for fewer than
  ten steps.
  """
  values = [r[name] for r in records if text.is_number(r.get(name))]
  n = len(values) // 5
  if n < 2:
    return None
  means, variance = [], 0.0
  for fifth in (values[:n], values[-n:]):
    means.append(sum(fifth) / n)
    blocks = [
        block.mean() for block in np.array_split(fifth, min(n, _NUM_BLOCKS))
    ]
    variance += float(np.var(blocks, ddof=1)) / len(blocks)
  return means[0], means[1], math.sqrt(variance)


def of_run(run: load.Run) -> Verdict:
  """Returns whether a run learned."""
  # Batches drawn by reward get better while the buffer grows, whatever the
  # policy does.
  by_reward = run.setting("replay", "recent_fraction") not in (None, 1, 1.0)
  records = () if by_reward else run.records
  evaluations = tables.evaluations(run)
  return with_failures(
      verdict(*evaluations, records), *evaluations, run.records
  )


def with_failures(
    outcome: Verdict,
    before: Mapping[str, Any],
    after: Mapping[str, Any],
    records: Sequence[Mapping[str, Any]],
) -> Verdict:
  """Returns a verdict that takes note of what could not be judged.

  Such completions are in no mean: where their share has clearly risen, held-out
  or in training, better means do not show that the policy is better.

  Args:
    outcome: verdict on the judged completions.
    before, after: held-out evaluations.
    records: metrics of the steps, with `reward/failure_share`.
  """
  shares = []
  if all(text.is_number(e.get("failure_share")) for e in (before, after)):
    change = _change(before, after, "failure_share")
    shares.append(("held-out", change.before, change.after, change.error))
  if training := trend(records, "reward/failure_share"):
    first, last, error = training
    shares.append(("training", first, last, CLEAR * error))
  percent = lambda value: text.number(value, "percent")
  words = " and ".join(
      f"{percent(old)} to {percent(new)} of {what} completions"
      for what, old, new, _ in shares
      if old or new
  )
  if not words:
    return outcome
  if not any(new - old > error for _, old, new, error in shares):
    return dataclasses.replace(
        outcome, sentence=f"{outcome.sentence} Not judged: {words}."
    )
  kind = outcome.kind
  if kind not in ("worse", "overfitted"):
    kind = "unjudged"
  told = outcome.sentence.removeprefix("Learned: ").removesuffix(".")
  return Verdict(
      kind,
      f"More and more could not be judged: {words}. Of the others: {told}.",
  )


@dataclasses.dataclass(frozen=True)
class _Change:
  """A metric of two evaluations.

  name, style: name and style of a metric in `tables.EVALUATIONS`.
  before, after: the values.
  error: two standard errors of their difference, 0 if unknown.
  """

  name: str
  style: str
  before: float
  after: float
  error: float

  @property
  def by(self) -> float:
    return self.after - self.before

  @property
  def words(self) -> str:
    old, new = (text.number(v, self.style) for v in (self.before, self.after))
    by = tables.signed(self.by, self.style)
    if self.error:
      error = tables.error_text(self.error, self.style)
      by = f"{by.removesuffix(' points')} ± {error}".replace(" %", " points")
    return f"held-out {self.name} went from {old} to {new} ({by})"


def _change(
    before: Mapping[str, Any], after: Mapping[str, Any], key: str
) -> _Change:
  errors = [e.get(f"{key}_stderr") for e in (before, after)]
  error = math.hypot(*(e if text.is_number(e) else 0.0 for e in errors))
  name, style = tables.EVALUATIONS[key]
  return _Change(name, style, before[key], after[key], CLEAR * error)


def _side_effects(
    before: Mapping[str, Any], after: Mapping[str, Any], key: str
) -> str:
  """Returns remarks where another metric tells less than the deciding one."""
  out = ""
  if all(text.is_number(e.get(f"greedy_{key}")) for e in (before, after)):
    greedy = _change(before, after, f"greedy_{key}")
    if greedy.by < -greedy.error:
      old, new = (
          text.number(v, greedy.style) for v in (greedy.before, greedy.after)
      )
      out += (
          f"; that of greedy completions fell from {old} to {new}: samples"
          " became less random, not better"
      )
  graded = key == "mean_reward" and all(
      text.is_number(e.get("pass_at_1")) for e in (before, after)
  )
  if graded:
    right = _change(before, after, "pass_at_1")
    if right.by <= right.error and max(right.before, right.after) > 0:
      old, new = (
          text.number(v, "percent") for v in (right.before, right.after)
      )
      out += f"; pass@1 did not rise: {old} before, {new} after"
  return out


def verdict(
    before: Mapping[str, Any],
    after: Mapping[str, Any],
    records: Sequence[Mapping[str, Any]] = (),
) -> Verdict:
  """Returns whether a run learned.

  Held-out values decide. A run overfitted if its training reward rose clearly
  while they fell, or while the mean held-out reward stayed clearly behind.

  Args:
    before, after: held-out evaluations, with `<key>_stderr` if known.
    records: metrics of the steps, with `train/reward_mean`.
  """
  key = metrics.deciding_metric(before, after)
  if key is None:
    why = "no evaluation before and after training"
    if 1.0 in (before.get("failure_share"), after.get("failure_share")):
      why = "no held-out completion could be judged"
    return Verdict("unknown", f"Not known yet: {why}.")
  change = _change(before, after, key)
  shares = change.style == "percent"
  if change.by > change.error:
    full = shares and change.after >= _SATURATED
    more = ": there is hardly anything left to learn" if full else ""
    more += _side_effects(before, after, key)
    return Verdict("learned", f"Learned: {change.words}{more}.")
  reward = trend(records)
  first, last, error = reward or (0.0, 0.0, 0.0)
  rose = last - first > CLEAR * error
  trained = (
      f"training reward rose from {text.number(first)} to {text.number(last)}"
  )
  fell = change.by < -change.error
  overfitted = Verdict(
      "overfitted", f"Overfitted: {trained}, but {change.words}."
  )
  if fell:
    worse = Verdict("worse", f"Got worse: {change.words}.")
    return overfitted if rose else worse
  if shares and change.before >= _SATURATED:
    old, new = (
        text.number(v, "percent") for v in (change.before, change.after)
    )
    return Verdict(
        "saturated",
        f"Saturated: held-out {change.name} was {old} before training, and is"
        f" {new}.",
    )
  # A win rate is in other units than the reward.
  gap_error = math.hypot(CLEAR * error, change.error)
  if rose and key != "win_rate" and last - first - change.by > gap_error:
    return overfitted
  if rose:
    return Verdict(
        "unclear",
        f"Not clear yet: {change.words}, which may be chance, and the"
        f" {trained}. More held-out prompts (evaluate.final_prompts) would"
        " tell.",
    )
  flat = ", and the training reward did not rise" if reward else ""
  return Verdict(
      "nothing", f"Learned nothing that can be measured: {change.words}{flat}."
  )
