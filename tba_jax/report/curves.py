# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Converts metrics records to the page's charts: curves and histograms."""

from collections.abc import Mapping, Sequence
import dataclasses
import math
from typing import Any

from tba_jax.run import text

Records = Sequence[Mapping[str, Any]]

# A chart is about 500 pixels wide: more points would not be visible.
MAX_POINTS = 800
# Limits of a histogram over time.
MAX_COLUMNS = 80
MAX_ROWS = 12
# Most metrics named by the user's code that have a chart each.
MAX_OWN = 12


@dataclasses.dataclass(frozen=True)
class Chart:
  """A chart: a title, its unit, and its series by label.

  series: label -> metric.
  zero: whether the axis starts at 0.
  percent: whether values are shares.
  """

  title: str
  unit: str
  series: Mapping[str, str]
  zero: bool = False
  percent: bool = False


_ERRORS = "± 2 standard errors"
CHARTS = (
    Chart("Reward", "task units", {"mean of the batch": "train/reward_mean"}),
    Chart(
        "Held-out pass@1", _ERRORS, {"pass@1": "eval/pass_at_1"}, percent=True
    ),
    Chart(
        "Held-out pass@k", _ERRORS, {"pass@k": "eval/pass_at_k"}, percent=True
    ),
    Chart(
        "Held-out win-rate",
        f"against the reference completions; {_ERRORS}",
        {"sampled": "eval/win_rate", "greedy": "eval/greedy_win_rate"},
        percent=True,
    ),
    # A rise of one and a fall of the other show that the reward is exploited.
    Chart(
        "Held-out reward",
        f"of training and of the judge; {_ERRORS}",
        {"reward": "eval/mean_reward", "judge's": "eval/gold_reward"},
    ),
    Chart(
        "Not judged",
        f"completions without a reward; {_ERRORS}",
        {
            "training": "reward/failure_share",
            "held-out": "eval/failure_share",
        },
        zero=True,
        percent=True,
    ),
    Chart(
        "Turns",
        f"answered by the environment, of a completion; {_ERRORS}",
        {"training": "reward/turns", "held-out": "eval/turns"},
        zero=True,
    ),
    Chart(
        "Environment's time",
        "seconds a completion",
        {"seconds": "reward/environment_s"},
        zero=True,
    ),
    Chart("KL to the reference", "nats a completion", {"KL": "train/kl"}, True),
    Chart("Loss", "", {"loss": "train/loss"}),
    Chart("Entropy", "nats a token", {"entropy": "train/entropy"}, True),
    Chart(
        "log Z",
        "nats, band: ± 1 standard deviation",
        {"log Z": "train/log_z_mean"},
    ),
    Chart(
        "Residual", "mean |residual|, nats", {"residual": "train/residual_abs"}
    ),
    Chart("Gradient norm", "before clipping", {"norm": "train/grad_norm"}),
    Chart("Learning rate", "", {"learning rate": "train/learning_rate"}),
    Chart("Beta", "reward per nat", {"β": "train/beta"}, True),
    Chart(
        "Staleness",
        "steps, mean of the batch",
        {"staleness": "replay/staleness_steps"},
        zero=True,
    ),
    Chart(
        "Batch",
        "shares",
        {
            "fresh": "replay/fresh_share",
            "unique": "replay/unique_share",
            "equal-reward groups": "train/equal_reward_groups",
            "ratio clipped": "train/ratio_clip_share",
            "effective": "train/effective_sample_share",
        },
        percent=True,
    ),
    Chart(
        "Experts",
        "tokens of the busiest of any layer over its layer's mean",
        {"busiest": "train/expert_load_max"},
        zero=True,
    ),
    Chart(
        "Time of a step",
        "seconds",
        {
            "step": "time/step_s",
            "waiting": "time/wait_s",
            "drawing": "time/draw_s",
        },
        zero=True,
    ),
    Chart(
        "Reward by age",
        "of the younger and the older completions of a batch",
        {"younger": "replay/reward_young", "older": "replay/reward_old"},
    ),
    Chart("Buffer", "completions", {"size": "replay/size"}, True),
    Chart("Uses of a completion", "mean", {"uses": "replay/use_count"}),
    Chart(
        "Held-out distinct solutions",
        "correct ones among k samples",
        {
            "all prompts": "eval/distinct_correct",
            "solved prompts": "eval/distinct_correct_per_solved",
        },
        zero=True,
    ),
)


def _band(name: str) -> tuple[str, float]:
  """Returns the metric drawn as a ± band around another, and its factor."""
  if name == "train/log_z_mean":
    return "train/log_z_std", 1.0
  return f"{name}_stderr", 2.0


def _short(value: float) -> float:
  """Rounds to 5 significant digits, to keep the page small."""
  return float(f"{value:.5g}")


def thin(
    records: Records, name: str, band: str = "", band_scale: float = 1.0
) -> dict[str, list[float]]:
  """Returns a series of at most MAX_POINTS points.

  Args:
    records: metrics records, one per step, with `step` and `time`.
    band: metric drawn as a ± band around `name`; "" = the range of the values
      that a point covers.
    band_scale: factor of `band`.

  Returns:
    Lists of equal length: `step` and `time` (Unix seconds) of each point's last
    step, `mean`, `low` and `high`. All values are finite.
  """
  rows = [
      (r["step"], r.get("time") or 0.0, r[name], r.get(band) if band else None)
      for r in records
      if text.is_number(r.get(name))
  ]
  out = {"step": [], "time": [], "mean": [], "low": [], "high": []}
  per_point = max(1, math.ceil(len(rows) / MAX_POINTS))
  for start in range(0, len(rows), per_point):
    part = rows[start : start + per_point]
    values = [value for _, _, value, _ in part]
    mean = sum(values) / len(values)
    low, high = min(values), max(values)
    if band:
      widths = [w for *_, w in part if text.is_number(w)]
      width = band_scale * sum(widths) / len(widths) if widths else 0.0
      low, high = mean - width, mean + width
    out["step"].append(part[-1][0])
    out["time"].append(round(float(part[-1][1]), 2))
    out["mean"].append(_short(mean))
    out["low"].append(_short(low))
    out["high"].append(_short(high))
  return out


def _chart(chart: Chart, records: Records) -> dict[str, Any] | None:
  series = []
  for label, name in chart.series.items():
    band, scale = _band(name)
    if not any(text.is_number(record.get(band)) for record in records):
      band = ""
    points = thin(records, name, band, scale)
    if points["step"]:
      series.append(
          {"label": label, "name": name, "band": bool(band), **points}
      )
  if not series:
    return None
  return {
      "title": chart.title,
      "unit": chart.unit,
      "zero": chart.zero,
      "percent": chart.percent,
      "series": series,
  }


def with_evaluations(
    records: Records, evaluations: Mapping[str, Any]
) -> list[dict[str, Any]]:
  """Returns the records with the history of `eval.json` as `eval/...`."""
  by_step = {record["step"]: dict(record) for record in records}
  rows = evaluations.get("history") or []
  # A curve shows one split: the one evaluated during training.
  validation = [row for row in rows if row.get("split") == "validation"]
  for row in validation or rows:
    record = by_step.setdefault(row["step"], {"step": row["step"]})
    for name, value in row.items():
      if name == "time":
        record.setdefault("time", value)
      elif name != "step":
        record.setdefault(f"eval/{name}", value)
  return [by_step[step] for step in sorted(by_step)]


def axes(records: Records) -> dict[str, list[float]]:
  """Returns the totals sampled until each step, for axes other than the step.

  Returns:
    `step`, `completions` and `tokens` of equal length, at most MAX_POINTS + 1;
    {} if the run did not record them.
  """
  names = "total/completions", "total/tokens"
  rows = [
      (r["step"], *(r[name] for name in names))
      for r in records
      if all(text.is_number(r.get(name)) for name in names)
  ]
  if not rows:
    return {}
  every = math.ceil(len(rows) / MAX_POINTS)
  chosen = [*rows[:-1:every], rows[-1]]
  columns = map(list, zip(*chosen, strict=True))
  return dict(zip(("step", "completions", "tokens"), columns, strict=True))


def custom_charts(records: Records) -> list[Chart]:
  """Returns charts of metrics named by losses, rewards and environments.

  At most `MAX_OWN` losses have a chart; the rewards have charts only if they
  are no more than `MAX_OWN`.
  """
  known = {name for chart in CHARTS for name in chart.series.values()}
  names = {name for record in records for name in record} - known
  losses = sorted(name for name in names if name.startswith("loss/"))
  rewards = sorted(
      name
      for name in names
      if name.startswith("reward/") and not name.startswith("reward/failed_")
  )
  rewards *= len(rewards) <= MAX_OWN
  title = lambda name: name.replace("/", ": ", 1).capitalize()
  return [
      Chart(title(name), "of the loss", {"mean": name})
      for name in losses[:MAX_OWN]
  ] + [
      Chart(
          title(name),
          f"mean of a completion; {_ERRORS}",
          {"training": name, "held-out": f"eval/{name}"},
      )
      for name in rewards
  ]


def known_charts(records: Records) -> list[dict[str, Any]]:
  """Returns the charts of `CHARTS` and `custom_charts` that have data."""
  charts = (
      _chart(chart, records) for chart in (*CHARTS, *custom_charts(records))
  )
  return [chart for chart in charts if chart]


def other_charts(records: Records, *, exclude: bool = True) -> list[dict]:
  """Returns a chart per scalar metric, by default without `known_charts`."""
  charts = (*CHARTS, *custom_charts(records))
  known = {n for c in charts for name in c.series.values()
           for n in (name, _band(name)[0])}  # fmt: skip
  names: dict[str, None] = {}
  for record in records:
    for name, value in record.items():
      if text.is_number(value) and name not in ("step", "time", "epoch"):
        names[name] = None
  charts = (
      _chart(Chart(name, "", {name: name}), records)
      for name in sorted(names)
      if not (exclude and name in known)
  )
  return [chart for chart in charts if chart]


def add_counterfactuals(
    charts: Sequence[dict[str, Any]],
    counterfactuals: Sequence[Mapping[str, Any]],
    records: Records,
) -> None:
  """Adds a series per counterfactual to the charts of metrics it changes.

  Args:
    charts: result of `known_charts` or `other_charts`; changed in place.
    counterfactuals: `RunData.counterfactuals`.
    records: metrics of the run, whose times the steps get.
  """
  recorded = {record["step"]: record for record in records}
  for chart in charts:
    run_series = list(chart["series"])
    for counterfactual in counterfactuals:
      label = text.printable(counterfactual["label"], 80, one_line=True)
      for series in run_series:
        name = series["name"]
        rows = [
            {**row, "time": recorded[row["step"]].get("time")}
            for row in counterfactual["steps"]
            if row["step"] in recorded and name in row
        ]
        if any(
            row.get(name) != recorded[row["step"]].get(name) for row in rows
        ):
          prefix = f"{series['label']}, " * (len(run_series) > 1)
          points = thin(rows, name)
          chart["series"].append(
              {"label": prefix + label, "name": name, "band": False, **points}
          )


def sum_histograms(records: Records, name: str) -> list[list[float]]:
  """Returns [value, count] pairs of a histogram metric, summed over steps."""
  total: dict[float, float] = {}
  for record in records:
    histogram = record.get(name)
    if not isinstance(histogram, dict):
      continue
    for key, count in histogram.items():
      try:
        value = float(key)
      except ValueError:
        continue
      if math.isfinite(value) and text.is_number(count):
        total[value] = total.get(value, 0) + count
  return [[value, total[value]] for value in sorted(total)]


def histogram_over_time(records: Records, name: str) -> dict[str, list[Any]]:
  """Returns a histogram metric over the course of the run.

  Returns:
    `step`: last step of each of at most MAX_COLUMNS intervals; `value`: the
    histogram's values, the last one including all above if `more`; `share`: per
    value, its share in each interval. {} without data.
  """
  with_it = [r for r in records if isinstance(r.get(name), dict)]
  per_column = max(1, math.ceil(len(with_it) / MAX_COLUMNS))
  columns = []
  for start in range(0, len(with_it), per_column):
    part = with_it[start : start + per_column]
    columns.append((part[-1]["step"], dict(sum_histograms(part, name))))
  totals = sum_histograms(with_it, name)
  values = [value for value, count in totals if count]
  if not values:
    return {}
  more = len(values) > MAX_ROWS
  shown, above = values[:MAX_ROWS], values[MAX_ROWS:]
  shares = [[] for _ in shown]
  for _, counts in columns:
    total = sum(counts.values()) or 1
    row = [counts.get(value, 0) for value in shown]
    row[-1] += sum(counts.get(value, 0) for value in above)
    for share, count in zip(shares, row, strict=True):
      share.append(round(count / total, 3))
  return {
      "step": [step for step, _ in columns],
      "value": shown,
      "more": more,
      "share": shares,
  }


def last_histogram(records: Records, name: str) -> list[list[float]]:
  """Returns [value, count] pairs of the newest record that has `name`."""
  for record in reversed(records):
    if isinstance(record.get(name), dict):
      return sum_histograms([record], name)
  return []
