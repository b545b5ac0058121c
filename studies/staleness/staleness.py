# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Quality against staleness: the runs, tables and plot of this folder.

    python -m studies staleness select [TASK …] [OBJECTIVE …]
    python -m studies staleness study [TASK …] [OBJECTIVE …]
    python -m studies staleness at_lag [OBJECTIVE …]
    python -m studies staleness long
    python -m studies staleness table

A run has one task, objective, lag, learning rate and seed, and trains in one
process at the exact lag. The initial policy of a task is fine-tuned once, into
runs/staleness.

A rule fixed before all runs chooses the learning rate of an objective on a
task: the one of `RATES` with the highest final score at lag 4, reward - .02 KL
on held-out prompts, averaged over `SELECTION_SEEDS`. A diverged run has the
lowest score; ties go to the lower rate.

    select  runs for this choice
    study   runs at the chosen rates, with other seeds
    at_lag  both for countdown, with lower rates and scores at the studied lag
    long    four times as many steps and lags up to 256, at `preference`'s rates
    table   no runs

Each command redraws all tables and the plot.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
import math
import pathlib
import statistics
import sys
from typing import Any

import matplotlib
from matplotlib import pyplot
import ml_collections

from benchmarks import results
from studies import curves
from tba_jax.config import load
from tba_jax.config import validate
from tba_jax.system import processes
from tba_jax.tools import sweep


def _beta(value: float) -> tuple[str]:
  return (f"loss.beta={value}",)


OBJECTIVES = {
    "tb": ("loss.name=tb",),
    # Learning rate ~ 1/lag above 4, or by effective sample size.
    "tb_lag_rate": ("loss.name=tb", "optimizer.full_lag_steps=4"),
    "tb_sample_rate": ("loss.name=tb", "optimizer.sample_share_power=1"),
    "tb_clip": ("loss.name=tb", "loss.ratio_clip=0.2"),
    "tb_vespo": ("loss.name=tb", "loss.correction=vespo"),
    "tb_m2_mask": ("loss.name=tb", "loss.correction=m2_mask"),
    # Added after the first selection, due to trials at lag 64.
    "tb_topr": ("loss.name=tb", "loss.correction=topr"),
    "tb_truncate": (
        "loss.name=tb",
        "loss.correction=truncate_sequence",
        "loss.ratio_cap=2",
    ),
    "tb_bounded_token": ("loss.name=tb", "loss.correction=bounded_token"),
    "tb_bounded": ("loss.name=tb", "loss.correction=bounded_sequence"),
    # Due to later trials: all advantages are .1 higher.
    "tb_low_baseline": ("loss.name=tb", "loss.baseline_shift=-0.1"),
    "tb_bounded_low": (
        "loss.name=tb",
        "loss.correction=bounded_sequence",
        "loss.baseline_shift=-0.1",
    ),
    "oapl": ("loss.name=oapl",),
    "ema_tb": ("loss.name=ema_tb",),
    # Added after the first selection: β bounds the move from recent params, not
    # from the reference, so TB's value may not suit them.
    "oapl_beta_0.1": ("loss.name=oapl", *_beta(0.1)),
    "oapl_beta_1": ("loss.name=oapl", *_beta(1.0)),
    "ema_tb_beta_1": ("loss.name=ema_tb", *_beta(1.0)),
}
RATES = {
    "preference": (1e-3, 3e-3, 1e-2),
    "countdown": (1.3e-4, 4e-4, 1.2e-3),
}
SELECTION_SEEDS, SELECTION_LAG = (100, 101), 4
SEEDS = (0, 1, 2, 3, 4)
# The longest lag is a fifth of a run.
LAGS, _NUM_STEPS = (0, 1, 4, 16, 64), 320
# Rates and lags of `at_lag`.
_LAG_TASK, LAG_RATES, _OWN_LAGS = "countdown", (4e-5, 1.3e-4, 4e-4), (16, 64)
# Runs with four times as many steps, at the rates of `preference`.
LONG, LONG_LAGS, _LONG_SEEDS = "preference_long", (0, 64, 256), (0, 1, 2)
LONG_OBJECTIVES = ("tb", "tb_bounded_token")
_KL_WEIGHT = 0.02
_CONFIGS = pathlib.Path(__file__).parents[2] / "configs"
RESULTS = pathlib.Path(__file__).parent
_STARTS = pathlib.Path("runs") / "staleness"
_DIGITS = 4
_COLORS = ("#000000", "#0072b2", "#56b4e9", "#d55e00", "#cc79a7", "#009e73",
           "#e69f00", "#999999", "#f0e442", "#8c6d31", "#5254a3", "#74c476",
           "#8c2d04", "#dd1c77", "#08306b", "#bcbd22", "#17becf")  # fmt: skip
# Goals for an objective at lags 16 and 64.
_TOLERANCE, _KEPT_GAIN, _FEWEST_SEEDS = 0.03, 0.8, 3
_TABLE_LAGS = (0, 16, 64)
# Metrics of the last evaluation, and means over the last quarter of the steps.
_TABLE = {
    "kl": ("KL, nats", 1), "pass_at_k": ("pass@k", 2),
    "distinct_correct": ("distinct right", 1),
}  # fmt: skip
_TABLE_TRAIN = {
    "entropy": ("entropy, nats", 2),
    "effective_sample_share": ("effective sample", 2),
    "ratio_clip_share": ("clipped", 3),
}  # fmt: skip

Run = tuple[str, str, int, float, int]
_KEY = ("task", "objective", "lag", "rate", "seed")

matplotlib.use("agg")


def run(
    config: ml_collections.ConfigDict, operands: Sequence[str]
) -> dict[str, Any]:
  """Executes the missing runs; writes five tables and staleness.png.

  Args:
    config: not read; each task has a config.
    operands: `select`, `study`, `at_lag`, `long` or `table` (default), then
      tasks and objectives if it takes them (default all).

  Returns:
    `runs`: number of results; `rates`: chosen rates by task and objective.

  Raises:
    ValueError: an operand is wrong.
  """
  del config
  what, *names = operands or ["table"]
  takes = {
      "select": (*RATES, *OBJECTIVES), "study": (*RATES, *OBJECTIVES),
      "at_lag": (*OBJECTIVES,), "long": (), "table": (),
  }  # fmt: skip
  if what not in takes:
    raise ValueError(f"operand {what!r}: must be one of {', '.join(takes)}")
  if wrong := {*names} - {*takes[what]}:
    raise ValueError(
        f"staleness {what} {' '.join(sorted(wrong))!r}: must be one of"
        f" {', '.join(takes[what]) or 'nothing'}"
    )
  tasks = [name for name in RATES if name in names] or [*RATES]
  objectives = [n for n in OBJECTIVES if n in names] or [*OBJECTIVES]
  if what == "long":
    measure_runs(LONG, long_runs(read()))
  if what == "at_lag":
    for lag in _OWN_LAGS:
      measure_runs(_LAG_TASK, selection(_LAG_TASK, objectives, lag))
      measure_runs(_LAG_TASK, study_at(lag, read(), objectives))
  for task in tasks:
    if what == "select":
      measure_runs(task, selection(task, objectives))
    elif what == "study":
      measure_runs(task, study(task, read(), objectives))
  results_of = read()
  results.print_table(make_table(results_of), RESULTS / "table.md")
  results.print_table(make_long_table(results_of), RESULTS / "long.md")
  results.print_table(make_goals(results_of), RESULTS / "goals.md")
  results.print_table(make_lag_table(results_of), RESULTS / "at_lag.md")
  results.print_table(make_details(results_of), RESULTS / "details.md")
  _plot(results_of, RESULTS / "staleness.png")
  rates = {task: chosen_rates(results_of, task) for task in RATES}
  return {"runs": len(results_of), "rates": rates}


def selection(
    task: str, objectives: Iterable[str], lag: int = SELECTION_LAG
) -> Iterator[Run]:
  """Yields the runs that determine the learning rates."""
  for objective in objectives:
    for rate in _rates(task, lag):
      for seed in SELECTION_SEEDS:
        yield task, objective, lag, rate, seed


def _rates(task: str, lag: int) -> tuple[float, ...]:
  """Returns the candidate rates."""
  return RATES[task] if lag == SELECTION_LAG else LAG_RATES


def study(
    task: str,
    results_of: Mapping[Run, Mapping[str, Any]],
    objectives: Iterable[str],
) -> Iterator[Run]:
  """Yields the runs at the chosen rates, seed by seed."""
  rates = chosen_rates(results_of, task)
  for seed in SEEDS:
    for objective in objectives:
      for lag in LAGS if objective in rates else ():
        yield task, objective, lag, rates[objective], seed


def study_at(
    lag: int,
    results_of: Mapping[Run, Mapping[str, Any]],
    objectives: Iterable[str],
) -> Iterator[Run]:
  """Yields the runs of a lag at the rates chosen for it."""
  rates = chosen_rates(results_of, _LAG_TASK, lag)
  for seed in SEEDS:
    for objective in objectives:
      if objective in rates:
        yield _LAG_TASK, objective, lag, rates[objective], seed


def long_runs(results_of: Mapping[Run, Mapping[str, Any]]) -> Iterator[Run]:
  """Yields the long runs, seed by seed."""
  rates = chosen_rates(results_of, "preference")
  for seed in _LONG_SEEDS:
    for objective in LONG_OBJECTIVES:
      for lag in LONG_LAGS:
        yield LONG, objective, lag, rates[objective], seed


def score(result: Mapping[str, Any]) -> float:
  """Returns reward - .02 KL at the end; minus infinity for a diverged run."""
  if result["diverged_step"] is not None:
    return -math.inf
  last = result["curve"][-1]
  return last["reward"] - _KL_WEIGHT * last["kl"]


def chosen_rates(
    results_of: Mapping[Run, Mapping[str, Any]],
    task: str,
    lag: int = SELECTION_LAG,
) -> dict[str, float]:
  """Returns the rate of each objective whose selection is complete."""
  out = {}
  for objective in OBJECTIVES:
    scores = {
        rate: [
            score(results_of[key])
            for seed in SELECTION_SEEDS
            if (key := (task, objective, lag, rate, seed)) in results_of
        ]
        for rate in _rates(task, lag)
    }
    if all(len(s) == len(SELECTION_SEEDS) for s in scores.values()):
      # `max` breaks ties by the first, which is the lowest rate.
      out[objective] = max(scores, key=lambda rate: sum(scores[rate]))
  return out


def make_config(task: str) -> ml_collections.ConfigDict:
  """Returns the base config of a task's runs."""
  name = "staleness" if task in ("preference", LONG) else task
  c = load.load_config(str(_CONFIGS / f"{name}.py"), [])
  with c.unlocked():
    c.train.num_steps = _NUM_STEPS * (4 if task == LONG else 1)
    c.evaluate.every_steps = c.train.num_steps // 4
    c.evaluate.greedy = False
    c.reference.role = "trainer"
    c.loss.update(name="tb", ratio_clip=0.0)
    c.optimizer.learning_rate_final = 0.0
    if task == "countdown":
      c.train.prompts_per_batch = c.train.micro_batch_prompts = 16
      c.evaluate.update(final_prompts=128, num_completions=8, batch_prompts=64)
  return c


def make_run_config(
    config: ml_collections.ConfigDict, objective: str, rate: float
) -> ml_collections.ConfigDict:
  """Returns a validated copy with the settings of an objective."""
  run_config = config.copy_and_resolve_references()
  overrides = [*OBJECTIVES[objective], f"optimizer.learning_rate={rate}"]
  load.apply_overrides(run_config, overrides)
  validate.validate(run_config, program="sweep")
  return run_config


def read() -> dict[Run, dict[str, Any]]:
  """Returns all stored results."""
  return {
      tuple(result[k] for k in _KEY): result
      for result in results.read_rows(RESULTS)
  }


def measure_runs(task: str, runs: Iterator[Run]) -> None:
  """Executes the runs without a stored result."""
  results_of = read()
  missing = [key for key in runs if key not in results_of]
  if not missing:
    return
  processes.prepare_compiling()
  config = curves.fine_tune(make_config(task), _STARTS / task)
  bench = sweep.Bench(config, "")
  try:
    for number, key in enumerate(missing, start=1):
      _, objective, lag, rate, seed = key
      if key in read():  # Another process has finished this run.
        continue
      trained = bench.run(
          sweep.SweepRun(
              f"{objective}_{rate:g}",
              sweep.Lag(staleness_steps=lag),
              seed,
              make_run_config(config, objective, rate),
          )
      )
      del trained["versions"]
      result = _rounded(dict(zip(_KEY, key, strict=True)) | trained)
      results.keep(RESULTS, result, _KEY)
      print(
          f"{number}/{len(missing)} {objective}-s{lag}-lr{rate:g}-seed{seed}:"
          f" score {score(result):.3f}, {trained['wall_s']:.0f} s",
          file=sys.stderr,
          flush=True,
      )
  finally:
    bench.close()


def _rounded(value: Any) -> Any:
  if isinstance(value, dict):
    return {k: v if k == "rate" else _rounded(v) for k, v in value.items()}
  if isinstance(value, list):
    return [_rounded(item) for item in value]
  return round(value, _DIGITS) if isinstance(value, float) else value


def _of_study(
    results_of: Mapping[Run, Mapping[str, Any]], *prefix: Any
) -> list[Mapping[str, Any]]:
  """Returns the finite runs of the study, ordered by seed.

  Args:
    results_of: all results.
    *prefix: task, objective, lag, rate, and optionally a seed.
  """
  keys = [prefix] if len(prefix) == 5 else [(*prefix, s) for s in SEEDS]
  return [
      results_of[key]
      for key in keys
      if key in results_of and results_of[key]["diverged_step"] is None
  ]


def _at_end(
    results_of: Mapping[Run, Mapping[str, Any]], quantity: str, *prefix: Any
) -> list[float]:
  """Returns a metric of the last evaluation of the finite runs of the study."""
  return [r["curve"][-1][quantity] for r in _of_study(results_of, *prefix)]


def make_goals(results_of: Mapping[Run, Mapping[str, Any]]) -> list[list[str]]:
  """Returns a row per task and objective: losses at lags 16 and 64.

  A row has the reward lost at 16, the share of the gain at lag 0 kept at 64,
  and the loss in distinct correct completions per prompt at 64, relative to
  `tb` at lag 0. The goal is at most .03 lost, at least .8 kept, and no distinct
  completion lost; differences within half their 95 % interval count as none.
  """
  rows = [["task", "objective", "lost at 16", "gain kept at 64",
           "fewer distinct right at 64 than tb at 0", "goal",
           "seeds"]]  # fmt: skip
  for task in RATES:
    chosen = chosen_rates(results_of, task)
    for objective, rate in chosen.items():
      keys = [(task, objective, lag, rate) for lag in _TABLE_LAGS]
      keys.append((task, "tb", 0, chosen.get("tb")))
      # Use the same seeds for all differences.
      seeds = [
          s for s in SEEDS if all(_of_study(results_of, *k, s) for k in keys)
      ]
      if len(seeds) < _FEWEST_SEEDS:
        continue
      *runs, base = [[results_of[(*k, s)] for s in seeds] for k in keys]
      rewards = [
          [r["curve"][-1]["reward"] for r in rewards_of_lag]
          for rewards_of_lag in runs
      ]
      pairs = zip(rewards[0], rewards[1], strict=True)
      loss, half = sweep.mean_and_half_width([a - b for a, b in pairs])
      start = _mean(r["curve"][0]["reward"] for r in runs[0])
      gains = [_mean(rewards_of_lag) - start for rewards_of_lag in rewards]
      retained = gains[2] / gains[0]
      fewer, half_fewer = sweep.mean_and_half_width(
          [
              b["curve"][-1]["distinct_correct"]
              - a["curve"][-1]["distinct_correct"]
              for a, b in zip(runs[2], base, strict=True)
          ]
      )
      met = (
          loss <= max(_TOLERANCE, half)
          and retained >= _KEPT_GAIN
          and fewer <= half_fewer
      )
      rows.append(
          [
              *(task, f"`{objective}`", f"{loss:.3f} ± {half:.3f}"),
              *(f"{retained:.2f}", f"{fewer:.1f} ± {half_fewer:.1f}"),
              *("met" if met else "missed", str(len(seeds))),
          ]
      )
  return rows


def make_long_table(
    results_of: Mapping[Run, Mapping[str, Any]],
) -> list[list[str]]:
  """Returns a row per objective: reward and KL of long runs, by lag."""
  rows = [["objective", *(f"s = {s}: reward, KL" for s in LONG_LAGS), "seeds"]]
  for objective in LONG_OBJECTIVES:
    rate = chosen_rates(results_of, "preference").get(objective)
    cells, seeds = [], []
    for lag in LONG_LAGS:
      ends = [
          results_of[key]["curve"][-1]
          for seed in _LONG_SEEDS
          if (key := (LONG, objective, lag, rate, seed)) in results_of
          and results_of[key]["diverged_step"] is None
      ]
      mean, half = sweep.mean_and_half_width([end["reward"] for end in ends])
      kl = _mean(end["kl"] for end in ends) if ends else 0.0
      cells.append(f"{mean:.3f} ± {half:.3f}, {kl:.1f}" if ends else "–")
      seeds.append(len(ends))
    if max(seeds):
      rows.append([f"`{objective}`", *cells, str(min(seeds))])
  return rows


def make_lag_table(
    results_of: Mapping[Run, Mapping[str, Any]],
) -> list[list[str]]:
  """Returns a row per objective: results at the rate chosen for each lag."""
  title = "rate, reward, KL, distinct right at s ="
  rows = [["objective", *(f"{title} {lag}" for lag in _OWN_LAGS), "seeds"]]
  rates = {lag: chosen_rates(results_of, _LAG_TASK, lag) for lag in _OWN_LAGS}
  for objective in OBJECTIVES:
    cells, seeds = [], []
    for lag in _OWN_LAGS:
      key = (_LAG_TASK, objective, lag, rates[lag].get(objective))
      rewards = _at_end(results_of, "reward", *key)
      seeds.append(len(rewards))
      if not rewards:
        cells.append("–")
        continue
      mean, half = sweep.mean_and_half_width(rewards)
      kl, distinct = (
          _mean(_at_end(results_of, what, *key))
          for what in ("kl", "distinct_correct")
      )
      cells.append(
          f"{key[-1]:g}, {mean:.3f} ± {half:.3f}, {kl:.1f}, {distinct:.2f}"
      )
    if max(seeds):
      rows.append([f"`{objective}`", *cells, str(min(seeds))])
  return rows


def make_details(
    results_of: Mapping[Run, Mapping[str, Any]],
) -> list[list[str]]:
  """Returns a row per task and objective: means at lags 0, 16 and 64."""
  titles = [title for title, _ in (*_TABLE.values(), *_TABLE_TRAIN.values())]
  lags = ", ".join(map(str, _TABLE_LAGS))
  rows = [["task", "objective", *(f"{t} at {lags}" for t in titles)]]
  for task in RATES:
    for objective, rate in chosen_rates(results_of, task).items():
      runs = [
          _of_study(results_of, task, objective, lag, rate)
          for lag in _TABLE_LAGS
      ]
      if not all(runs):
        continue
      cells = [
          [
              f"{_mean(r['curve'][-1][key] for r in runs_of_lag):.{n}f}"
              for runs_of_lag in runs
          ]
          for key, (_, n) in _TABLE.items()
      ] + [
          [
              f"{_mean(r['train'][key] for r in runs_of_lag):.{n}f}"
              for runs_of_lag in runs
          ]
          for key, (_, n) in _TABLE_TRAIN.items()
      ]
      rows.append([task, f"`{objective}`", *(", ".join(t) for t in cells)])
  return rows


def _mean(values: Iterable[float]) -> float:
  return statistics.fmean(values)


def make_table(results_of: Mapping[Run, Mapping[str, Any]]) -> list[list[str]]:
  """Returns a row per task and objective: scores by rate, rewards by lag.

  A row has the score of each rate at lag 4 (the chosen one in bold), the reward
  of the study at each lag with its 95 % interval, and the minimum number of
  seeds.
  """
  rows = [["task", "objective", "score by rate", *(f"s = {s}" for s in LAGS),
           "seeds"]]  # fmt: skip
  for task, rates in RATES.items():
    chosen = chosen_rates(results_of, task)
    for objective in OBJECTIVES:
      scores = []
      for rate in rates:
        of_rate = [
            score(results_of[key])
            for seed in SELECTION_SEEDS
            if (key := (task, objective, SELECTION_LAG, rate, seed))
            in results_of
        ]
        text = f"{sum(of_rate) / len(of_rate):.3f}" if of_rate else "–"
        scores.append(f"**{text}**" if chosen.get(objective) == rate else text)
      if set(scores) == {"–"}:
        continue
      cells, seeds = [], []
      for lag in LAGS:
        rate = chosen.get(objective)
        values = _at_end(results_of, "reward", task, objective, lag, rate)
        mean, half = sweep.mean_and_half_width(values)
        seeds.append(len(values))
        cell = f"{mean:.3f}" if values else "–"
        cells.append(cell + (f" ± {half:.3f}" if len(values) > 1 else ""))
      rows.append(
          [task, f"`{objective}`", ", ".join(scores), *cells, str(min(seeds))]
      )
  return rows


def _plot(
    results_of: Mapping[Run, Mapping[str, Any]], path: pathlib.Path
) -> None:
  """Draws each task's reward by lag, and by lag times learning rate.

  The left plot has the study's runs at the chosen rates, the right one all runs
  with a lag of at least 1.
  """
  figure, axes = pyplot.subplots(
      len(RATES), 2, figsize=(11.5, 3.6 * len(RATES)), layout="constrained"
  )
  for (task, _), (left, right) in zip(RATES.items(), axes, strict=True):
    chosen = chosen_rates(results_of, task)
    for objective, color in zip(OBJECTIVES, _COLORS, strict=True):
      points = []
      for place, lag in enumerate(LAGS):
        rate = chosen.get(objective)
        values = _at_end(results_of, "reward", task, objective, lag, rate)
        if values:
          mean, half = sweep.mean_and_half_width(values)
          points.append((place, mean, 0.0 if math.isnan(half) else half))
      if points:
        xs, ys, halves = zip(*points, strict=True)
        left.errorbar(xs, ys, halves, color=color, marker=".", capsize=2)
      curve = [
          (key[2] * key[3], result["curve"][-1]["reward"])
          for key, result in results_of.items()
          if key[:2] == (task, objective)
          and key[2]
          and result["diverged_step"] is None
      ]
      if curve:
        right.scatter(
            *zip(*curve, strict=True), color=color, s=12, label=objective
        )
    left.set_xticks(range(len(LAGS)), [str(lag) for lag in LAGS])
    left.set_xlabel("lag S, steps, at each objective's own rate")
    right.set_xscale("log")
    right.set_xlabel("S · η, lag times peak learning rate, all runs")
    for axis in (left, right):
      axis.set_ylabel(f"{task}: held-out reward")
      axis.grid(alpha=0.3)
  # Inside the plots, the legend would hide points.
  handles, names = axes[0, 1].get_legend_handles_labels()
  figure.legend(
      handles, names, loc="outside right center", frameon=False, fontsize=8
  )
  figure.savefig(path, dpi=120)
  pyplot.close(figure)
