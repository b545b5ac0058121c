# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Statistics on which the diagnosis of a run rests.

An unknown number is NaN: no comparison with it holds.
"""

from collections.abc import Mapping, Sequence
import math
from typing import Any, NamedTuple

import numpy as np

from tba_jax.report import run_reader
from tba_jax.report import tables
from tba_jax.run import metrics
from tba_jax.run import text

# Name -> whether it holds, a sentence with its numbers, and what to do.
Rows = Mapping[str, tuple[bool, str] | tuple[bool, str, str]]
# Standard errors from which a difference, and a loss, count as real; a loss
# must also be at least this share of the best value.
_CLEAR, _CLEAR_LOSS, _LEAST_LOSS = 2.0, 3.0, 0.05
# Share of correct completions, or of wins, above which little is left to learn.
_FULL = 0.98
# Blocks of steps in a fifth of a run.
_NUM_BLOCKS = 8
# Fewest steps of a block, most blocks, and first steps, of the initial policy,
# that later steps are compared with.
_BLOCK, _MAX_BLOCKS, _START = 10, 100, 3

_REWARD, _GAP = "train/reward_mean", "train/logprob_gap"
_ON_POLICY, _SKIPPED = "train/on_policy_share", "replay/skipped_groups"
# Completions of a batch by staleness, and their number.
_HISTOGRAM, BATCH = "replay/staleness_histogram", "completions of a batch"
# Metrics of a moment.
_READ = (
    *(_GAP, _SKIPPED, BATCH, "train/entropy", "train/kl_per_token"),
    *("train/effective_sample_share", "train/ratio_clip_share"),
    *("replay/completion_tokens", "replay/stop_rate"),
)


def number(value: Any) -> float:
  return value if text.is_number(value) else math.nan


class Mean(NamedTuple):
  """A mean with its standard error, 0 if unknown, and its number style."""

  value: float = math.nan
  error: float = 0.0
  style: str = "number"

  @property
  def is_full(self) -> bool:
    return self.style == "percent" and self.value >= _FULL

  def __str__(self) -> str:
    return text.number(self.value, self.style)


class Change:
  """A change from one mean to another, with a margin of 2 standard errors."""

  def __init__(self, before: Mean = Mean(), after: Mean = Mean()):
    self.before, self.after = before, after
    self.by = after.value - before.value
    self.margin = _CLEAR * math.hypot(before.error, after.error)
    self.is_known = not math.isnan(self.by)
    self.rose, self.fell = self.by > self.margin, self.by < -self.margin

  def __str__(self) -> str:
    by = tables.signed(self.by, self.after.style)
    if self.margin:
      error = tables.error_text(self.margin, self.after.style)
      by = f"{by.removesuffix(' points')} ± {error}".replace(" %", " points")
    return f"went from {self.before} to {self.after} ({by})"


def evaluated(sides: Sequence[Mapping[str, Any]], key: str | None) -> Change:
  """Returns the change of a metric between two evaluations."""
  if not all(text.is_number(side.get(key)) for side in sides):
    return Change()
  return Change(*(_evaluation(side, key) for side in sides))


def _evaluation(evaluation: Mapping[str, Any], key: str) -> Mean:
  error = evaluation.get(f"{key}_stderr")
  error = error if text.is_number(error) else 0.0
  return Mean(evaluation[key], error, tables.EVALUATIONS[key][1])


def trend(
    records: Sequence[Mapping[str, Any]],
    name: str = _REWARD,
    style: str = "number",
) -> Change:
  """Returns the change of a metric from the first to the last fifth of a run.

  Errors are from means of blocks of steps, since steps that share data are not
  independent. Unknown for fewer than ten steps.
  """
  values = [r[name] for r in records if text.is_number(r.get(name))]
  n = len(values) // 5
  ends = []
  for fifth in (values[:n], values[-n:]) if n > 1 else ():
    blocks = np.array_split(fifth, min(n, _NUM_BLOCKS))
    deviation = float(np.std([block.mean() for block in blocks], ddof=1))
    ends.append(Mean(sum(fifth) / n, deviation / math.sqrt(len(blocks)), style))
  return Change(*ends)


def idle(run: run_reader.RunData) -> tuple[float, float]:
  """Returns the shares of time in which trainer and searchers waited."""
  known = tables.outcome(run)
  names = "trainer_busy_share", "searchers_busy_share"
  busy = [number(known.get(name)) for name in names]
  is_known = not any(map(math.isnan, busy))
  return tuple(max(0.0, 1.0 - b) if is_known else math.nan for b in busy)


def mean(run: run_reader.RunData, name: str) -> float:
  """Returns the mean of a metric over the steps."""
  values = run_reader.column(run.records, name)[1]
  return float(values.mean()) if len(values) else math.nan


def by_age(run: run_reader.RunData) -> Change:
  """Returns the change of reward from old to young completions of a batch."""
  # Paired by step, so that progress during the run does not matter.
  names = "replay/reward_old", "replay/reward_young"
  rows = [[r.get(name) for name in names] for r in run.records]
  rows = [row for row in rows if all(map(text.is_number, row))]
  if len(rows) < 2:
    return Change()
  old, young = np.array(rows, np.float64).T
  error = float((young - old).std(ddof=1)) / math.sqrt(len(rows))
  return Change(Mean(float(old.mean())), Mean(float(young.mean()), error))


def _loss(means: Sequence[Mean]) -> float:
  """Returns how far the last mean is below the best, 0 if it may be chance."""
  best, last = max(means, key=lambda m: m.value), means[-1]
  loss = best.value - last.value
  margin = _CLEAR_LOSS * math.hypot(best.error, last.error)
  return loss if loss > max(margin, _LEAST_LOSS * abs(best.value)) else 0.0


def _fell(means: Sequence[Mean]) -> bool:
  """Returns whether half of the gain is clearly lost."""
  gained = max(m.value for m in means) - means[0].value
  return _loss(means) > gained / 2


class Moment(NamedTuple):
  """A run up to the end of a block of steps.

  step: first step of the block.
  values: medians of `_READ` by block; in the first block, of three steps.
  rewards: mean reward by block.
  held_out: evaluation results so far, at most one of each block.
  """

  step: int
  values: Sequence[Mapping[str, float]]
  rewards: Sequence[Mean]
  held_out: Sequence[Mean]

  def start_and_now(self, name: str) -> tuple[float, float]:
    return tuple(self.values[i].get(name, math.nan) for i in (0, -1))

  @property
  def is_good(self) -> bool:
    """Whether the held-out metric has risen or is full, and has not fallen."""
    if len(self.held_out) < 2 or _loss(self.held_out):
      return False
    first, *_, last = self.held_out
    return Change(first, last).rose or last.is_full

  @property
  def held_out_fell(self) -> bool:
    return len(self.held_out) > 1 and _fell(self.held_out)

  @property
  def reward_rose(self) -> bool:
    return Change(self.rewards[0], self.rewards[-1]).rose

  @property
  def _counts_rewards(self) -> bool:
    return not (self.start_and_now(_SKIPPED)[1] > 0 or self.is_good)

  @property
  def fell(self) -> bool:
    """Whether the reward, or the held-out metric, has fallen."""
    return self.held_out_fell or (self._counts_rewards and _fell(self.rewards))

  @property
  def is_lost(self) -> bool:
    """Whether `fell` holds, or the reward counts and has not risen."""
    return self.fell or (self._counts_rewards and not self.reward_rose)

  def __str__(self) -> str:
    """What became of the reward, or of the held-out metric that fell."""
    means, name = self.rewards, "reward"
    if self.held_out_fell and not _fell(means):
      means, name = self.held_out, "held-out result"
    old = means[0].value
    if _fell(means):
      name, old = f"{name} fell", max(m.value for m in means)
    new = text.number(means[-1].value)
    return f"the {name} from {text.number(old)} to {new}"


def relevant_fields(record: Mapping[str, Any]) -> dict[str, Any]:
  """Returns the fields of a record of `metrics.jsonl` that moments read."""
  names = {"step", "epoch", _REWARD, _ON_POLICY, _HISTOGRAM, *_READ}
  return {
      key: value
      for key, value in record.items()
      if key in names or key.startswith("eval/") and key.count("/") == 1
  }


def moments(records: Sequence[Mapping[str, Any]]) -> list[Moment]:
  """Returns a run's moments; `records` has one record for each step."""
  steps = [r for r in records if text.is_number(r.get(_REWARD))]
  size = max(_BLOCK, math.ceil(len(steps) / _MAX_BLOCKS))
  evaluations = _evaluations(records)
  out, values, rewards, held_out, num_seen = [], [], [], [], 0
  for start in range(0, len(steps) - size + 1, size):
    part = steps[start : start + size]
    values.append(_medians(part if start else part[:_START]))
    column = [r[_REWARD] for r in part]
    error = float(np.std(column, ddof=1)) / math.sqrt(size)
    rewards.append(Mean(float(np.mean(column)), error))
    until = [mean for step, mean in evaluations if step <= part[-1]["step"]]
    held_out += until[num_seen:][-1:]
    num_seen = len(until)
    out.append(Moment(part[0]["step"], values[:], rewards[:], held_out[:]))
  return out


def _medians(part: Sequence[Mapping[str, Any]]) -> dict[str, float]:
  rows = [{name: number(r.get(name)) for name in _READ} for r in part]
  for row, record in zip(rows, part, strict=True):
    if not number(record.get(_ON_POLICY)) > 0:
      row[_GAP] = math.nan
    if isinstance(counts := record.get(_HISTOGRAM), Mapping):
      row[BATCH] = sum(filter(text.is_number, counts.values()))
  columns = {n: [r[n] for r in rows if not math.isnan(r[n])] for n in _READ}
  return {n: float(np.median(v)) for n, v in columns.items() if v}


def _evaluations(
    records: Sequence[Mapping[str, Any]],
) -> list[tuple[int, Mean]]:
  """Returns (step, value) of the evaluations' deciding metric.

  It is an external judge's score, if available, rather than the reward.
  """
  best = {
      r["step"]: {k.removeprefix("eval/"): v for k, v in r.items()}
      for r in records
      if any(key.startswith("eval/") for key in r)
  }
  key = metrics.deciding_metric(*best.values()) if best else None
  if all(text.is_number(e.get("gold_reward")) for e in best.values()):
    key = "gold_reward"
  return [(step, _evaluation(e, key)) for step, e in best.items() if key]
