# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""The `sweep` program: quality against staleness, objective by objective.

Fine-tunes once, then executes every run of `config.sweep` that has no result
yet: objectives x staleness x seeds. WORKDIR gets `config.json`, `sft/`,
`runs/NAME.json` (a run's result), `sweep.md` and `sweep.png`. An interrupted
run starts over.
"""

from collections.abc import Callable, Mapping, Sequence
import contextlib
import dataclasses
import fnmatch
import importlib.util
import itertools
import math
import pathlib
import re
import sys
import threading
import time
from typing import Any

import ml_collections
import numpy as np
import rich.box
import rich.console
import rich.table
from scipy import special

from tba_jax.config import differences
from tba_jax.config import load
from tba_jax.config import validate
from tba_jax.losses import objective_table
from tba_jax.programs import inline
from tba_jax.programs import sft
from tba_jax.run import run_directory
from tba_jax.system import jsonl
from tba_jax.system import processes

# Settings of an objective; all other settings are shared by all runs.
_OWN_KEYS = (
    "loss.*",
    "optimizer.*",
    "train.prompts_per_batch",
    "train.completions_per_prompt",
    "train.micro_batch_prompts",
    "train.micro_batch_completions",
)
# Keys of a run's result that are checked.
_RESULT = {"settings": {}, "curve": [{}], "diverged_step?": int}
_NAME = re.compile(r"[a-z][a-z0-9_]*")


# Step metrics whose means over the last quarter of a run are saved.
_KEPT = ("reward_mean", "entropy", "ratio_clip_share", "grad_norm",
         "effective_sample_share", "equal_reward_groups")  # fmt: skip


def set_exact_lag(
    config: ml_collections.ConfigDict, lag_steps: int
) -> ml_collections.ConfigDict:
  """Returns a copy in lockstep, `lag_steps` behind, for a single process."""
  config = config.copy_and_resolve_references()
  config.search.update(lockstep=True, lead_steps=lag_steps, wait_for_fresh=True)
  if config.reference.role == "searcher":
    config.reference.role = "trainer"
  return config


@dataclasses.dataclass(frozen=True)
class Lag:
  """The version that samples the batch of step t.

  staleness_steps: lag s, which gives version max(t - s, 0).
  mini_batches, passes: N and T; if either exceeds 1, rounds of N T steps, which
    give version t - t mod N T.
  """

  staleness_steps: int = 0
  mini_batches: int = 1
  passes: int = 1

  @property
  def label(self) -> str:
    if self.passes > 1:
      return f"N={self.mini_batches},T={self.passes}"
    if self.mini_batches > 1:
      return f"N={self.mini_batches}"
    return f"s={self.staleness_steps}"

  def apply(
      self, config: ml_collections.ConfigDict
  ) -> ml_collections.ConfigDict:
    """Returns a copy with this lag that trains only on fresh prompts."""
    config = set_exact_lag(config, self.staleness_steps)
    train, replay = config.train, config.replay
    # Completions that arrive at once; they may all have the same prompt.
    arriving = train.prompts_per_batch * train.completions_per_prompt
    arriving *= self.mini_batches
    config.search.update(
        prompts_per_step=train.prompts_per_batch,
        samples_per_prompt=train.completions_per_prompt,
    )
    replay.update(
        capacity=max(replay.capacity, arriving),
        capacity_per_prompt=max(replay.capacity_per_prompt, arriving),
        recent_fraction=1.0,
        recent_window_steps=1,
        skip_equal_rewards=False,
        warm_start_completions=0,
        dedupe=False,
    )
    config.replay_filter.update(
        duplicates="newest", similarity="none", evict="oldest", freeze_step=0
    )
    if max(self.mini_batches, self.passes) > 1:
      config.search.lockstep = False
      config.rounds.update(
          mini_batches=self.mini_batches, passes=self.passes, lag_rounds=0
      )
    return config


@dataclasses.dataclass(frozen=True)
class SweepRun:
  """A run of a sweep.

  objective: name in `config.sweep.objectives`.
  seed: start of the random numbers for prompts and samples.
  """

  objective: str
  lag: Lag
  seed: int
  config: ml_collections.ConfigDict

  @property
  def name(self) -> str:
    lag = self.lag.label.replace("=", "")
    return f"{self.objective}-{lag}-seed{self.seed}"


class SweepInterrupted(Exception):
  """`should_stop` returned true before the run was done."""


class Bench:
  """Executes the runs of a sweep; compiles once for all lags and seeds.

  loops: maker of the runs' loops.
  """

  def __init__(self, config: ml_collections.ConfigDict, workdir: str):
    """Loads the policy that all runs start from.

    Raises:
      ValueError: WORKDIR/sft/model is missing or disagrees with the config.
    """
    self._evaluate = config.evaluate
    self.loops = inline.LoopMaker(config, workdir)

  def run(
      self,
      run: SweepRun,
      *,
      should_stop: Callable[[], bool] = lambda: False,
  ) -> dict[str, Any]:
    """Trains and evaluates; returns the result as plain JSON types.

    Args:
      should_stop: function checked before each step.

    Returns:
      `curve`: evaluations on held-out prompts, the first at step 0, each later
      one with `train`, the means over the steps since the previous one;
      `versions` that sampled the batch of each step; `train`: means over the
      last quarter of the steps; `diverged_step`: the step whose loss or
      gradient was non-finite, which ends the run, or None; `wall_s`.

    Raises:
      SweepInterrupted: `should_stop` returned true.
    """
    config = run.lag.apply(run.config)
    config.seed = run.seed
    loop = self.loops.make(config, run.objective)
    return self.train(loop, run.name, should_stop=should_stop)

  def train(
      self,
      loop: inline.Loop,
      name: str,
      *,
      should_stop: Callable[[], bool] = lambda: False,
  ) -> dict[str, Any]:
    """Trains and evaluates a loop from `loops`; for results, see `run`."""
    started = time.perf_counter()
    num_steps = loop.config.train.num_steps
    every = loop.config.evaluate.every_steps or num_steps
    curve = [self._measure(loop, 0)]
    metrics, versions = [], []
    means = lambda steps: {
        k: float(np.mean([m[k] for m in steps])) for k in _KEPT
    }
    diverged_step = None

    def should_end() -> bool:
      if should_stop():
        raise SweepInterrupted(f"{name}: stopped at step {len(metrics)}")
      return diverged_step is not None

    def measure(step: int, draw: Any, step_metrics: Mapping[str, Any]) -> None:
      nonlocal diverged_step
      (version,) = np.unique(draw.versions).tolist()
      versions.append(version)
      metrics.append({k: step_metrics[k] for k in _KEPT})
      if step_metrics["nonfinite"]:
        diverged_step = step
      elif (step + 1) % every == 0 or step + 1 == num_steps:
        since = metrics[curve[-1]["step"] :]
        curve.append(self._measure(loop, step + 1) | {"train": means(since)})

    loop.train(measure, should_stop=should_end)
    last = metrics[-max(num_steps // 4, 1) :]
    return {
        "curve": curve,
        "versions": versions,
        "train": means(last),
        "diverged_step": diverged_step,
        "wall_s": time.perf_counter() - started,
    }

  def _measure(self, loop: inline.Loop, step: int) -> dict[str, float]:
    """Returns means over completions of held-out prompts.

    Returns:
      reward: mean reward, task units.
      kl: Σ_t (log π - log π_ref), nats.
      ref_perplexity: exp of the mean of -log π_ref over all tokens.
      length: number of tokens, including the stop token.
      distinct: mean number of distinct completions per prompt.
      pass_at_1, pass_at_k: shares as in `Evaluator.run`.
      distinct_correct: mean number of distinct correct solutions per prompt.
      turns: mean number of policy turns; only with environments.
    """
    result = self.loops.evaluator.run(
        loop.learner.params, self._evaluate.final_prompts, version=step
    )
    return {
        "step": step,
        "reward": result["mean_reward"],
        "kl": result["kl"],
        "ref_perplexity": result["ref_perplexity"],
        "length": result["mean_length"],
        "distinct": result["distinct_share"] * result["k"],
        **{
            name: result[name]
            for name in ("pass_at_1", "pass_at_k", "distinct_correct", "turns")
            if name in result
        },
    }

  def close(self) -> None:
    self.loops.close()


def expand_runs(
    config: ml_collections.ConfigDict,
) -> list[SweepRun]:
  """Returns the runs in order: all runs of a seed, then of the next.

  Raises:
    ConfigError: a setting of `config.sweep` or of a run is invalid.
  """
  recipes = _recipes(config)
  lags = _lags(config.sweep)
  seeds = _numbers(config.sweep, "seeds", low=0)
  if not seeds:
    raise _wrong("seeds", config.sweep.seeds, "must be one seed or more")
  for key, section, value in (
      ("reference.mode", config.reference.mode, "fixed"),
      # Evaluations in a sweep report the KL.
      ("reference.role", config.reference.role, "trainer"),
      ("rounds.mini_batches", config.rounds.mini_batches, 0),
      ("reference.init", config.reference.init, ""),
      # Offline data has no lag.
      ("offline.path", config.offline.path, ""),
  ):
    if section != value:
      raise load.ConfigError(
          f"config.{key} = {section!r}: must be {value!r} with --program=sweep"
      )
  configs = {
      name: _own_config(config, name, overrides)
      for name, overrides in recipes.items()
  }
  return [
      SweepRun(name, lag, seed, configs[name])
      for seed, name, lag in itertools.product(seeds, recipes, lags)
  ]


def run_settings(run: SweepRun) -> dict[str, Any]:
  """Returns the settings that a run's result depends on, by config key."""
  values = load.flatten(run.config.to_dict())
  parts = ("task.", "tokenizer.", "model.", "sft.", "sampling.", "loss.",
           "optimizer.", "train.", "evaluate.", "init", "seed", "explore.",
           "tempering.", "reward.backend", "reward.model", "reward.fallback",
           "reward.normalize_parts", "reward.judge_model", "reward.rubric",
           "reward.score_", "reward.request", "search.order",
           "search.solved_threshold",
           "search.quantization")  # fmt: skip
  return {k: v for k, v in values.items() if k.startswith(parts)}


def result_path(workdir: str | pathlib.Path, run: SweepRun) -> pathlib.Path:
  """Returns the file of a run's result, which is written atomically."""
  return pathlib.Path(workdir) / "runs" / f"{run.name}.json"


def read_result(
    workdir: str | pathlib.Path, run: SweepRun
) -> Mapping[str, Any] | None:
  """Returns the result of a run; None if it is not done.

  Raises:
    ValueError: the result is damaged, or has different settings, which the
      message names.
  """
  path = result_path(workdir, run)
  result = jsonl.read_object(path, _RESULT)
  if result is None:
    return None
  changed = differences.changed(result["settings"], run_settings(run))
  lines = differences.lines(changed)
  if lines:
    raise load.ConfigError(
        f"{path} was made with other settings: {'; '.join(lines)}. Allowed:"
        " the settings that it was made with, another --workdir, or the file"
        " removed, to repeat the run"
    )
  return result


def _recipes(config: ml_collections.ConfigDict) -> dict[str, list[str]]:
  """Returns the overrides of each objective by name."""
  text = config.sweep.objectives
  recipes: dict[str, list[str]] = {}
  for item in filter(str.strip, text.split(";")):
    name, colon, overrides = item.partition(":")
    name = name.strip()
    if not colon or not _NAME.fullmatch(name) or name in recipes:
      raise _wrong("objectives", item.strip(), "must be NAME: KEY=VALUE …")
    recipes[name] = overrides.split()
    for override in recipes[name]:
      key = override.partition("=")[0]
      if not any(fnmatch.fnmatchcase(key, p) for p in _OWN_KEYS):
        allowed = f"keys must be among {', '.join(_OWN_KEYS)}"
        raise _wrong("objectives", f"{name}: {override}", allowed)
  if not recipes:
    raise _wrong(
        "objectives", text, "must be NAME: KEY=VALUE …; NAME: …, at least one"
    )
  return recipes


def _lags(sweep: ml_collections.ConfigDict) -> list[Lag]:
  lags = [Lag(staleness_steps=s) for s in _numbers(sweep, "staleness_steps", 0)]
  # Rounds of one mini-batch have staleness 0.
  lags += [Lag(mini_batches=n) for n in _numbers(sweep, "mini_batches", low=2)]
  if not lags:
    raise _wrong(
        "staleness_steps", sweep.staleness_steps, "must be one or more"
    )
  return lags


def _numbers(sweep: ml_collections.ConfigDict, key: str, low: int) -> list[int]:
  text = sweep[key]
  items = [item.strip() for item in text.split(",") if item.strip()]
  if any(not i.isdecimal() or int(i) < low for i in items):
    raise _wrong(
        key, text, f"must be whole numbers from {low} on, separated by commas"
    )
  return sorted({int(item) for item in items})


def _own_config(
    config: ml_collections.ConfigDict,
    name: str,
    overrides: list[str],
) -> ml_collections.ConfigDict:
  """Returns the checked config of an objective's runs."""
  run_config = config.copy_and_resolve_references()
  try:
    load.apply_overrides(run_config, overrides)
    if objective_table.find(run_config.loss.name).has_teacher:
      raise load.ConfigError(
          f"config.loss.name = {run_config.loss.name!r}: must be an objective"
          " without a teacher in a sweep"
      )
    validate.validate(run_config, program="sweep")
  except load.ConfigError as error:
    raise load.ConfigError(
        f"config.sweep.objectives, {name}: {error}"
    ) from error
  before, now = config.train, run_config.train
  size = now.prompts_per_batch * now.completions_per_prompt
  if size != before.prompts_per_batch * before.completions_per_prompt:
    raise _wrong(
        "objectives",
        f"{name}: {' '.join(overrides)}",
        "must be batches of config.train.prompts_per_batch ·"
        " config.train.completions_per_prompt completions, as all runs have",
    )
  return run_config


def _wrong(key: str, value: Any, allowed: str) -> load.ConfigError:
  return load.ConfigError(f"config.sweep.{key} = {value!r}: {allowed}")


# Tables and the plot

# Quantities of a run's last evaluation: name, title, digits.
QUANTITIES = (
    ("reward", "reward", 3),
    ("kl", "KL to the reference, nats a completion", 2),
    ("ref_perplexity", "perplexity under the reference", 2),
)
_CONFIDENCE = 0.95
_COLORS = ("#0072b2", "#56b4e9", "#d55e00", "#cc79a7", "#009e73", "#e69f00",
           "#000000", "#999999")  # fmt: skip
_MARKERS = "osD^vP*X"


@dataclasses.dataclass(frozen=True)
class Cell:
  """A quantity over the seeds, for an objective and a lag.

  mean: average over the finished, finite runs; NaN if none.
  half_width: half of the mean's confidence interval; NaN below two seeds.
  num_seeds: number of runs in the mean.
  num_diverged: number of runs that ended with a non-finite loss.
  """

  mean: float
  half_width: float
  num_seeds: int
  num_diverged: int

  def text(self, digits: int) -> str:
    """Returns `mean ± half_width`, or `–` if there are no values."""
    out = f"{self.mean:.{digits}f}" if self.num_seeds else "–"
    if self.num_seeds > 1:
      out += f" ± {self.half_width:.{digits}f}"
    if self.num_diverged:
      out += f" ({self.num_diverged} diverged)"
    return out


def mean_and_half_width(values: Sequence[float]) -> tuple[float, float]:
  """Returns the mean and the half-width of its Student's t interval.

      half = t_{n-1, (1 + 0.95) / 2} · s / √n,   s² = Σ (x - mean)² / (n - 1)

  Args:
    values: n finite numbers; the half-width is NaN for n < 2, the mean for n =
      0.
  """
  n = len(values)
  mean = float(np.mean(values)) if n else math.nan
  if n < 2:
    return mean, math.nan
  t = special.stdtrit(n - 1, (1 + _CONFIDENCE) / 2)
  return mean, float(t * np.std(values, ddof=1) / math.sqrt(n))


def table_cells(
    runs: Sequence[SweepRun],
    results: Mapping[str, Mapping[str, Any]],
    quantity: str,
) -> dict[tuple[str, Lag], Cell]:
  """Returns the cell of each objective and lag, in the order of the runs."""
  values: dict[tuple[str, Lag], list[float]] = {}
  diverged: dict[tuple[str, Lag], int] = {}
  for run in runs:
    key = run.objective, run.lag
    values_of_cell = values.setdefault(key, [])
    diverged.setdefault(key, 0)
    result = results.get(run.name)
    if result is None:
      continue
    if result["diverged_step"] is not None:
      diverged[key] += 1
    else:
      values_of_cell.append(result["curve"][-1][quantity])
  return {
      key: Cell(
          *mean_and_half_width(values_of_cell),
          len(values_of_cell),
          diverged[key],
      )
      for key, values_of_cell in values.items()
  }


def markdown_table(
    runs: Sequence[SweepRun], results: Mapping[str, Mapping[str, Any]]
) -> str:
  """Returns a table with a row for each objective and lag."""
  columns = [table_cells(runs, results, name) for name, _, _ in QUANTITIES]
  first = next((r["curve"][0] for r in results.values()), None)
  heads = ["objective", "lag", *(title for _, title, _ in QUANTITIES), "seeds"]
  lines = [_line(heads), _line(["---"] * len(heads))]
  if first is not None:
    before = [f"{first[name]:.{digits}f}" for name, _, digits in QUANTITIES]
    lines.append(_line(["before training", "", *before, ""]))
  for key, cell in columns[0].items():
    texts = [
        column[key].text(digits)
        for column, (_, _, digits) in zip(columns, QUANTITIES)
    ]
    objective, lag = key
    lines.append(_line([objective, lag.label, *texts, str(cell.num_seeds)]))
  return "\n".join(lines) + "\n"


def plot_table(
    runs: Sequence[SweepRun],
    results: Mapping[str, Mapping[str, Any]],
    path: str | pathlib.Path,
) -> None:
  """Writes a PNG with a panel per quantity and a line per objective."""
  # Optional dependency: `pip install 'tba_jax[plots]'`.
  import matplotlib  # pylint: disable=g-import-not-at-top

  matplotlib.use("agg")
  from matplotlib import pyplot  # pylint: disable=g-import-not-at-top

  lags = list(dict.fromkeys(run.lag for run in runs))
  objectives = list(dict.fromkeys(run.objective for run in runs))
  figure, axes = pyplot.subplots(
      1, len(QUANTITIES), figsize=(13, 4.4), layout="constrained"
  )
  for axis, (name, title, _) in zip(axes, QUANTITIES):
    column = table_cells(runs, results, name)
    for i, objective in enumerate(objectives):
      # Shift points, so that intervals do not overlap.
      shift = 0.5 * (i + 0.5) / len(objectives) - 0.25
      points = [column[objective, lag] for lag in lags]
      axis.errorbar(
          np.arange(len(lags)) + shift,
          [cell.mean for cell in points],
          yerr=[_visible(cell.half_width) for cell in points],
          label=objective,
          color=_COLORS[i % len(_COLORS)],
          marker=_MARKERS[i % len(_MARKERS)],
          markersize=4,
          linewidth=1,
          linestyle=":",
          capsize=2,
      )
    axis.set_title(title, fontsize=10)
    axis.set_xticks(range(len(lags)), [lag.label for lag in lags])
    axis.set_xlabel("s steps late, or rounds of N mini-batches", fontsize=9)
    axis.grid(axis="y", alpha=0.3)
  figure.legend(
      *axes[0].get_legend_handles_labels(),
      loc="outside lower center",
      ncols=min(len(objectives), 8),
      fontsize=9,
  )
  with jsonl.replacing(path) as file:
    figure.savefig(file, dpi=100, format="png")
  pyplot.close(figure)


def _visible(half_width: float) -> float:
  return 0.0 if math.isnan(half_width) else half_width


def _line(texts: Sequence[str]) -> str:
  return f"| {' | '.join(texts)} |"


def progress_table(
    runs: Sequence[SweepRun], results: Mapping[str, Mapping[str, Any]]
) -> rich.table.Table:
  """Returns a table of objectives by lags, with mean reward and seed count."""
  name, title, digits = QUANTITIES[0]
  column = table_cells(runs, results, name)
  lags = list(dict.fromkeys(run.lag for run in runs))
  num_seeds = len({run.seed for run in runs})
  table = rich.table.Table(
      "objective",
      *(lag.label for lag in lags),
      box=rich.box.SIMPLE,
      title=f"{title} (runs done of {num_seeds} seeds)",
  )
  for objective in dict.fromkeys(run.objective for run in runs):
    cells = [column[objective, lag] for lag in lags]
    table.add_row(
        objective,
        *(
            f"{cell.text(digits)} ({cell.num_seeds + cell.num_diverged})"
            for cell in cells
        ),
    )
  return table


def _summary(result: Mapping[str, Any]) -> str:
  if result["diverged_step"] is not None:
    return f"diverged at step {result['diverged_step']}"
  last = result["curve"][-1]
  texts = [f"{name} {last[name]:.{digits}f}" for name, _, digits in QUANTITIES]
  return f"{', '.join(texts)} ({result['wall_s']:.0f} s)"


# The program

_PLOT_EVERY_S = 60.0

Results = dict[str, Mapping[str, Any]]


def run(
    config: ml_collections.ConfigDict, workdir: str, operands: Sequence[str]
) -> int:
  """Runs the program; returns its exit status."""
  try:
    if operands:
      raise ValueError(f"--program=sweep takes no operands, not {operands}")
    if importlib.util.find_spec("matplotlib") is None:
      raise ValueError(
          "--program=sweep draws with matplotlib, which is not installed: pip"
          " install 'tba_jax[plots]'"
      )
    runs = expand_runs(config)
    run_directory.lock(workdir)  # Held until this process exits.
    _read_results(workdir, runs)
  except ValueError as error:
    return processes.refuse(error)
  stop = processes.stop_on_signals()
  processes.prepare_compiling()
  try:
    return _sweep(config, workdir, runs, stop)
  except (ValueError, FloatingPointError) as error:
    print(f"error: {error}", file=sys.stderr)
    if isinstance(error, FloatingPointError):
      return processes.EXIT_FATAL
    return processes.EXIT_CONFIG


class _Progress:
  """Prints finished runs, and keeps sweep.md and sweep.png up to date."""

  def __init__(self, workdir: str, runs: Sequence[SweepRun]):
    self._workdir = workdir
    self._runs = runs
    self._started = time.monotonic()
    self._plotted_at = -_PLOT_EVERY_S
    self._shown = set(_read_results(workdir, runs))
    self._num_before = len(self._shown)

  def update(self) -> Results:
    """Shows new results; returns all results so far."""
    results = _read_results(self._workdir, self._runs)
    done, total = len(results), len(self._runs)
    for name in results.keys() - self._shown:
      line = f"{done}/{total} runs"
      if done < total:
        each_s = (time.monotonic() - self._started) / (done - self._num_before)
        line += f", about {each_s * (total - done) / 60:.0f} min left"
      print(f"{line}  {name}: {_summary(results[name])}", flush=True)
    self._shown |= results.keys()
    if results and time.monotonic() - self._plotted_at >= _PLOT_EVERY_S:
      _write_report(self._workdir, self._runs, results)
      self._plotted_at = time.monotonic()
    return results


def _sweep(
    config: ml_collections.ConfigDict,
    workdir: str,
    runs: Sequence[SweepRun],
    stop: threading.Event,
) -> int:
  """Executes the missing runs, then writes the table and plot."""
  _, saved = run_directory.create(workdir, config)
  if saved is not None:
    # The config of a training run may also have sweep objectives.
    is_trained = (pathlib.Path(workdir) / "epoch.json").exists()
    if is_trained or not saved.get("sweep", {}).get("objectives"):
      raise ValueError(
          f"--workdir={workdir}: contains a run of another program; must be"
          " an empty directory or a sweep's"
      )
    run_directory.update(workdir, config)
  progress = _Progress(workdir, runs)
  is_tuned = True
  if config.init == "sft":
    made = sft.run(config, workdir, stop=stop, on_progress=_print_fine_tuning)
    is_tuned = not made["interrupted"]
  if is_tuned:
    _make_runs(config, workdir, runs, stop, progress)
  results = progress.update()
  if results:
    _write_report(workdir, runs, results)
    rich.console.Console().print(progress_table(runs, results))
    print(f"{workdir}/sweep.md and sweep.png: {len(results)}/{len(runs)} runs")
  if len(results) < len(runs):
    print("interrupted; the same command continues")
    return processes.EXIT_INTERRUPTED
  return processes.EXIT_OK


def _print_fine_tuning(step: int, num_steps: int, _: dict[str, float]) -> None:
  print(f"fine-tuning: step {step} of {num_steps}", flush=True)


def _make_runs(
    config: ml_collections.ConfigDict,
    workdir: str,
    runs: Sequence[SweepRun],
    stop: threading.Event,
    progress: _Progress,
) -> None:
  """Executes the runs that have no result."""
  with contextlib.ExitStack() as closing:
    bench = None
    for run in runs:
      if read_result(workdir, run) is not None:
        continue
      if stop.is_set():
        return
      if bench is None:
        bench = Bench(config, workdir)
        closing.callback(bench.close)
      try:
        result = bench.run(run, should_stop=stop.is_set)
      except SweepInterrupted:
        return
      jsonl.atomic_write_json(
          result_path(workdir, run),
          {**result, "settings": run_settings(run)},
      )
      progress.update()


def _read_results(workdir: str, runs: Sequence[SweepRun]) -> Results:
  by_name = {run.name: read_result(workdir, run) for run in runs}
  return {
      name: result for name, result in by_name.items() if result is not None
  }


def _write_report(
    workdir: str, runs: Sequence[SweepRun], results: Results
) -> None:
  folder = pathlib.Path(workdir)
  jsonl.replace_file(folder / "sweep.md", markdown_table(runs, results))
  plot_table(runs, results, folder / "sweep.png")
