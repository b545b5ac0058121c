# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Names the cause of a collapse: a pure function of the metrics' history.

The history is cut into blocks of steps. Rewards are compared with those of the
first block, other metrics with the first three steps. A collapse is a loss that
comes with a cause. A loss:

    fell    the mean reward is below its best block by more than 3 standard
            errors of the difference, a twentieth of it and half of what had
            been gained; or the held-out metric is
    flat    the mean reward is not clearly above the first block (2 errors)

A held-out metric that has clearly risen, or is full, and has not fallen
outweighs the rewards of batches, whose prompts and completions a run may
choose. Where groups of equal rewards are left out, batches tell nothing, and
only the held-out metric counts. A cause:

    entropy           nats a token, at a tenth of its start or at three times
                      as much; fell or flat. Cui et al. 2025
                      (arXiv:2505.22617): a policy without entropy has nothing
                      left to learn from
    KL                nats a token above the entropy lost, at .5: the policy's
                      tokens have become so unlikely to the reference; fell or
                      flat. Gao et al. 2022 (arXiv:2210.10760): past some KL the
                      true reward falls
    effective sample  the share of a batch that importance weights leave, below
    size              5 % or two completions, and a third of its best; fell.
                      VCPO (arXiv:2602.17616) scales the rate by it
    clipped share     of tokens with a corrected gradient, above .2 and twice
                      that of the start; fell. GSPO runs well at .15 (Zheng et
                      al. 2025, arXiv:2507.18071)
    log-prob gap      between trainer and sampler at staleness 0, above .1 nats
                      a token, the guards' limit for bfloat16; fell. Yao et al.
                      2025, "Your efficient RL framework secretly brings you
                      off-policy RL training"
    length            mean tokens of a completion at twice or half of the start
                      while the reward rose, and the held-out metric fell
                      or the share of completions that stop by themselves was
                      halved. Singhal et al. 2023 (arXiv:2310.03716): much of a
                      reward model's reward is length

Entropy and KL tell how far the policy has moved: far, for nothing, is enough.
Sample size, clipping and gap are of the data, and take a reward that fell. A
cause counts from two blocks in a row on; the first is the one to mend.
"""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import math
from typing import Any

import numpy as np

from tba_jax.monitor import metrics
from tba_jax.monitor import text

# Steps of a block at least, and blocks at most.
_BLOCK, _MAX_BLOCKS = 10, 100
# Steps at the start that a cause is measured against: the policy as it was.
_START = 3
# Blocks in a row that a cause takes to count.
_IN_A_ROW = 2
# Standard errors of a fall and of a rise that are taken as real.
_FELL, _ROSE = 3.0, 2.0
# Share of the best value that a fall takes, and held-out share of correct
# completions, or of wins, from which on little is left to learn.
_LEAST_FALL, _FULL = 0.05, 0.98
_ENTROPY_LOW, _ENTROPY_HIGH = 0.1, 3.0
_KL_NATS = 0.5
_SAMPLE_SHARE, _SAMPLE_COUNT, _SAMPLE_DROP = 0.05, 2.0, 3.0
_CLIP_SHARE, _CLIP_RISE = 0.2, 2.0
_GAP_NATS = 0.1
_LENGTH_TIMES, _STOP_TIMES = 2.0, 2.0

# Metrics that the rules read, besides held-out ones.
_READ = (
    "train/reward_mean",
    "train/entropy",
    "train/kl_per_token",
    "train/effective_sample_share",
    "train/ratio_clip_share",
    "replay/completion_tokens",
    "replay/stop_rate",
    "replay/skipped_groups",
)
_GAP, _ON_POLICY = "train/logprob_gap", "train/on_policy_share"
_HISTOGRAM, _COUNT = "replay/staleness_histogram", "completions of a batch"
_HEAD = ("step", "epoch")


@dataclasses.dataclass(frozen=True)
class Collapse:
  """A collapse, by its first cause.

  cause: "entropy", "KL", "effective sample size", "clipped share", "log-prob
    gap" or "length".
  step: first step of the blocks that show the cause.
  until: step before which it had ended; None if it lasts.
  what: numbers, in words.
  remedy: advice, in words.
  followers: (cause, step) of what came after it.
  """

  cause: str
  step: int
  until: int | None
  what: str
  remedy: str
  followers: tuple[tuple[str, int], ...] = ()

  @property
  def line(self) -> str:
    """The collapse in one line."""
    return f"{self.cause} {self._since}: {self.what}"

  @property
  def sentence(self) -> str:
    """The same with what followed, and what to do."""
    after = ", ".join(f"{name} (step {step})" for name, step in self.followers)
    after = f"; after it {after}" if after else ""
    return (
        f"Collapse by {self.cause} {self._since}: {self.what}{after}. To do:"
        f" {self.remedy}."
    )

  @property
  def _since(self) -> str:
    until = "" if self.until is None else f" until step {self.until}"
    return f"since step {self.step}{until}"


@dataclasses.dataclass(frozen=True)
class _Value:
  """A mean, its standard error, and whether it can hardly rise."""

  mean: float
  error: float
  is_full: bool = False


@dataclasses.dataclass(frozen=True)
class _Block:
  """Consecutive steps.

  first, last: steps.
  values: metric -> its median; a metric without a finite value is missing.
  reward: mean reward of the batches.
  held_out: newest held-out value, None without one so far.
  """

  first: int
  last: int
  values: Mapping[str, float]
  reward: _Value | None
  held_out: _Value | None


def kept(record: Mapping[str, Any]) -> dict[str, Any]:
  """Returns the part of a record of `metrics.jsonl` that the rules read."""
  names = {*_HEAD, *_READ, _GAP, _ON_POLICY, _HISTOGRAM}
  return {
      key: value
      for key, value in record.items()
      if key in names or key.startswith("eval/") and key.count("/") == 1
  }


def find(records: Sequence[Mapping[str, Any]]) -> Collapse | None:
  """Returns the collapse that a run's metrics show, or None.

  Args:
    records: records of `metrics.jsonl`, oldest first; any key may be missing.
  """
  blocks = _blocks(metrics.last_per_step(records))
  causes = []
  for name, (rule, words, remedy) in _RULES.items():
    shown = [i > 0 and rule(blocks, i) for i in range(len(blocks))]
    start, end = _longest_last(shown)
    if start is not None:
      until = blocks[end].first if end < len(blocks) else None
      what = words(blocks, end - 1)
      causes.append(Collapse(name, blocks[start].first, until, what, remedy))
  if not causes:
    return None
  # The earlier one in the table wins where causes show in the same block.
  first, *others = sorted(causes, key=lambda cause: cause.step)
  followers = tuple((other.cause, other.step) for other in others)
  return dataclasses.replace(first, followers=followers)


def _longest_last(shown: Sequence[bool]) -> tuple[int | None, int]:
  """Returns start and end of the last run of True that is long enough."""
  end = len(shown)
  while end:
    if not shown[end - 1]:
      end -= 1
      continue
    start = end
    while start and shown[start - 1]:
      start -= 1
    if end - start >= _IN_A_ROW:
      return start, end
    end = start
  return None, 0


def _blocks(records: Sequence[Mapping[str, Any]]) -> list[_Block]:
  """Returns whole blocks of trained steps."""
  steps = [r for r in records if text.is_number(r.get("train/reward_mean"))]
  size = max(_BLOCK, math.ceil(len(steps) / _MAX_BLOCKS))
  held_out = _held_out(records)
  out = []
  for start in range(0, len(steps) - size + 1, size):
    part = steps[start : start + size]
    last = part[-1]["step"]
    newest = [value for step, value in held_out if step <= last]
    out.append(
        _Block(
            part[0]["step"],
            last,
            _medians(part if start else part[:_START]),
            _mean([r["train/reward_mean"] for r in part]),
            newest[-1] if newest else None,
        )
    )
  return out


def _mean(values: Sequence[float]) -> _Value:
  error = float(np.std(values, ddof=1)) / math.sqrt(len(values))
  return _Value(float(np.mean(values)), error)


def _medians(part: Sequence[Mapping[str, Any]]) -> dict[str, float]:
  columns = {
      name: [r[name] for r in part if text.is_number(r.get(name))]
      for name in _READ
  }
  columns[_GAP] = [
      r[_GAP]
      for r in part
      if text.is_number(r.get(_GAP))
      and text.is_number(r.get(_ON_POLICY))
      and r[_ON_POLICY] > 0
  ]
  columns[_COUNT] = [
      sum(n for n in r[_HISTOGRAM].values() if text.is_number(n))
      for r in part
      if isinstance(r.get(_HISTOGRAM), Mapping)
  ]
  return {n: float(np.median(v)) for n, v in columns.items() if v}


def _held_out(
    records: Sequence[Mapping[str, Any]],
) -> list[tuple[int, _Value]]:
  """Returns (step, value) of the evaluations' deciding metric.

  An outside judge's score, where there is one, rather than the reward.
  """
  evaluations = [
      (r["step"], {k.removeprefix("eval/"): v for k, v in r.items()})
      for r in records
      if any(key.startswith("eval/") for key in r)
  ]
  results = [e for _, e in evaluations]
  key = metrics.deciding_metric(*results) if results else None
  if results and all(text.is_number(e.get("gold_reward")) for e in results):
    key = "gold_reward"
  if key is None:
    return []
  error = lambda e: v if text.is_number(v := e.get(f"{key}_stderr")) else 0.0
  is_share = key in ("pass_at_1", "win_rate")
  return [
      (step, _Value(e[key], error(e), is_share and e[key] >= _FULL))
      for step, e in evaluations
  ]


def _drop(values: Sequence[_Value]) -> float:
  """Returns the last value's distance from the best, 0 if it may be chance."""
  best, last = max(values, key=lambda v: v.mean), values[-1]
  drop = best.mean - last.mean
  error = _FELL * math.hypot(best.error, last.error)
  return drop if drop > max(error, _LEAST_FALL * abs(best.mean)) else 0.0


def _fell(values: Sequence[_Value]) -> bool:
  """Returns whether half of what was gained is clearly gone."""
  gained = max(v.mean for v in values) - values[0].mean
  return _drop(values) > gained / 2


def _rose(values: Sequence[_Value]) -> bool:
  """Returns whether the last value is clearly above the first."""
  error = _ROSE * math.hypot(values[0].error, values[-1].error)
  return values[-1].mean - values[0].mean > error


def _held_out_until(blocks: Sequence[_Block], i: int) -> list[_Value]:
  """Returns the distinct held-out values up to a block."""
  values = [b.held_out for b in blocks[: i + 1] if b.held_out is not None]
  return [v for j, v in enumerate(values) if not j or v is not values[j - 1]]


def _is_good(blocks: Sequence[_Block], i: int) -> bool:
  """Returns whether the held-out metric has risen, or is full, and stayed."""
  held_out = _held_out_until(blocks, i)
  if len(held_out) < 2 or _drop(held_out):
    return False
  return _rose(held_out) or held_out[-1].is_full


def _held_out_fell(blocks: Sequence[_Block], i: int) -> bool:
  held_out = _held_out_until(blocks, i)
  return len(held_out) > 1 and _fell(held_out)


def _rewards(blocks: Sequence[_Block], i: int) -> list[_Value]:
  """Returns the batches' rewards up to a block, [] if they tell nothing."""
  skips = _of(blocks, i, "replay/skipped_groups") > 0
  return [] if skips else [b.reward for b in blocks[: i + 1]]


def _has_fallen(blocks: Sequence[_Block], i: int) -> bool:
  if _held_out_fell(blocks, i):
    return True
  rewards = _rewards(blocks, i)
  return bool(rewards) and _fell(rewards) and not _is_good(blocks, i)


def _is_lost(blocks: Sequence[_Block], i: int) -> bool:
  """Returns whether the reward has fallen, or was never gained."""
  rewards = _rewards(blocks, i)
  is_flat = bool(rewards) and not _rose(rewards) and not _is_good(blocks, i)
  return is_flat or _has_fallen(blocks, i)


def _of(blocks: Sequence[_Block], i: int, name: str) -> float:
  """Returns a block's value, NaN if unknown: no limit is crossed by it."""
  return blocks[i].values.get(name, math.nan)


def _entropy(blocks: Sequence[_Block], i: int) -> bool:
  first, now = (_of(blocks, j, "train/entropy") for j in (0, i))
  moved = now < _ENTROPY_LOW * first or now > _ENTROPY_HIGH * first
  return moved and _is_lost(blocks, i)


def _kl(blocks: Sequence[_Block], i: int) -> bool:
  first, now = (_of(blocks, j, "train/entropy") for j in (0, i))
  # The KL of a policy that is merely sharper is at most the entropy it lost.
  excess = _of(blocks, i, "train/kl_per_token") - max(0.0, first - now)
  return excess > _KL_NATS and _is_lost(blocks, i)


def _sample_size(blocks: Sequence[_Block], i: int) -> bool:
  name = "train/effective_sample_share"
  now, count = _of(blocks, i, name), blocks[i].values.get(_COUNT, math.inf)
  best = max(b.values.get(name, 0.0) for b in blocks[: i + 1])
  low = now <= max(_SAMPLE_SHARE, _SAMPLE_COUNT / max(count, 1.0))
  return low and now < best / _SAMPLE_DROP and _has_fallen(blocks, i)


def _clipped(blocks: Sequence[_Block], i: int) -> bool:
  first, now = (_of(blocks, j, "train/ratio_clip_share") for j in (0, i))
  much = now > max(_CLIP_SHARE, _CLIP_RISE * first)
  return much and _has_fallen(blocks, i)


def _gap(blocks: Sequence[_Block], i: int) -> bool:
  return _of(blocks, i, _GAP) > _GAP_NATS and _has_fallen(blocks, i)


def _length(blocks: Sequence[_Block], i: int) -> bool:
  first, now = (_of(blocks, j, "replay/completion_tokens") for j in (0, i))
  moved = now > _LENGTH_TIMES * first or now < first / _LENGTH_TIMES
  stopped, stops = (_of(blocks, j, "replay/stop_rate") for j in (0, i))
  runs_on = stops < stopped / _STOP_TIMES and not _is_good(blocks, i)
  is_hollow = runs_on or _held_out_fell(blocks, i)
  return moved and is_hollow and _rose([b.reward for b in blocks[: i + 1]])


def _change(
    what: str, name: str, unit: str, style: str = "number"
) -> Callable[[Sequence[_Block], int], str]:
  """Returns the words on a metric, and on what became of the reward."""

  def words(blocks: Sequence[_Block], i: int) -> str:
    old, new = (text.number(_of(blocks, j, name), style) for j in (0, i))
    return f"{what} went from {old} to {new}{unit}, {_loss(blocks, i)}"

  return words


def _loss(blocks: Sequence[_Block], i: int) -> str:
  """Returns the words on the reward, or on the held-out metric that fell."""
  rewards, name = [b.reward for b in blocks[: i + 1]], "reward"
  if _held_out_fell(blocks, i) and not _fell(rewards):
    rewards, name = _held_out_until(blocks, i), "held-out result"
  first, last = rewards[0].mean, rewards[-1].mean
  best = max(value.mean for value in rewards)
  if _fell(rewards):
    old, new = text.number(best), text.number(last)
    return f"the {name} fell from {old} to {new}"
  return f"the {name} from {text.number(first)} to {text.number(last)}"


# Cause -> its rule, the words on it, and what to do.
_RULES = {
    "log-prob gap": (
        _gap,
        _change("trainer and sampler differ; it", _GAP, " nats a token"),
        "compare both in float32; see masks, temperature and dtypes",
    ),
    "effective sample size": (
        _sample_size,
        _change(
            "the share of the batch that counts",
            "train/effective_sample_share",
            "",
            "percent",
        ),
        "lower search.lead_steps or publish.every_steps, or set"
        " optimizer.sample_share_power",
    ),
    "clipped share": (
        _clipped,
        _change(
            "tokens with a corrected gradient",
            "train/ratio_clip_share",
            "",
            "percent",
        ),
        "fresher data, or a lower optimizer.learning_rate",
    ),
    "length": (
        _length,
        _change("a completion", "replay/completion_tokens", " tokens"),
        "see samples.jsonl: the reward pays for length; judge it by another"
        " measure or set a penalty",
    ),
    "entropy": (
        _entropy,
        _change("it", "train/entropy", " nats a token"),
        "raise loss.beta or loss.entropy_weight, lower optimizer.learning_rate",
    ),
    "KL": (
        _kl,
        _change(
            "the distance from the reference",
            "train/kl_per_token",
            " nats a token",
        ),
        "raise loss.beta, lower optimizer.learning_rate, stop earlier",
    ),
}
