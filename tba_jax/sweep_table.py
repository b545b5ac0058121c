# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""The results of a sweep as numbers, as text and as a plot. No JAX here."""

from collections.abc import Mapping, Sequence
import dataclasses
import math
import pathlib
from typing import Any

import matplotlib

matplotlib.use("agg")
from matplotlib import pyplot  # pylint: disable=g-import-not-at-top
import numpy as np
from scipy import special

from tba_jax import sweep_types

# Of the last evaluation of a run: name, title, digits.
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
  """A quantity over the seeds of an objective at a lag.

  mean: over the seeds whose run is done and finite; nan where there is none.
  half_width: of the confidence interval of the mean; nan below two seeds.
  num_seeds: that `mean` is over.
  num_diverged: seeds whose run ended with a loss that is not finite.
  """

  mean: float
  half_width: float
  num_seeds: int
  num_diverged: int

  def text(self, digits: int) -> str:
    """Returns `mean ± half_width`, `–` where there is nothing."""
    out = f"{self.mean:.{digits}f}" if self.num_seeds else "–"
    if self.num_seeds > 1:
      out += f" ± {self.half_width:.{digits}f}"
    if self.num_diverged:
      out += f" ({self.num_diverged} diverged)"
    return out


def mean_and_half_width(values: Sequence[float]) -> tuple[float, float]:
  """Returns the mean and half of its confidence interval, by Student's t.

      half = t_{n-1, (1 + 0.95) / 2} · s / √n,   s² = Σ (x - mean)² / (n - 1)

  Args:
    values: n finite numbers; below 2 the half is nan, at 0 the mean, too.
  """
  n = len(values)
  mean = float(np.mean(values)) if n else math.nan
  if n < 2:
    return mean, math.nan
  t = special.stdtrit(n - 1, (1 + _CONFIDENCE) / 2)
  return mean, float(t * np.std(values, ddof=1) / math.sqrt(n))


def cells(
    runs: Sequence[sweep_types.Run],
    results: Mapping[str, Mapping[str, Any]],
    quantity: str,
) -> dict[tuple[str, sweep_types.Lag], Cell]:
  """Returns the cell of each objective and lag, in the order of the runs.

  Args:
    runs: of the sweep.
    results: of those that are done, by the name of the run.
    quantity: key of an evaluation.
  """
  values: dict[tuple[str, sweep_types.Lag], list[float]] = {}
  diverged: dict[tuple[str, sweep_types.Lag], int] = {}
  for run in runs:
    key = run.objective, run.lag
    mine = values.setdefault(key, [])
    diverged.setdefault(key, 0)
    result = results.get(run.name)
    if result is None:
      continue
    if result["diverged_step"] is not None:
      diverged[key] += 1
    else:
      mine.append(result["curve"][-1][quantity])
  return {
      key: Cell(*mean_and_half_width(mine), len(mine), diverged[key])
      for key, mine in values.items()
  }


def markdown(
    runs: Sequence[sweep_types.Run], results: Mapping[str, Mapping[str, Any]]
) -> str:
  """Returns one table: a row for each objective and lag."""
  columns = [cells(runs, results, name) for name, _, _ in QUANTITIES]
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


def plot(
    runs: Sequence[sweep_types.Run],
    results: Mapping[str, Mapping[str, Any]],
    path: str | pathlib.Path,
) -> None:
  """Writes a PNG: a panel for each quantity, a line for each objective."""
  lags = list(dict.fromkeys(run.lag for run in runs))
  objectives = list(dict.fromkeys(run.objective for run in runs))
  figure, axes = pyplot.subplots(
      1, len(QUANTITIES), figsize=(13, 4.4), layout="constrained"
  )
  for axis, (name, title, _) in zip(axes, QUANTITIES):
    column = cells(runs, results, name)
    for i, objective in enumerate(objectives):
      # Side by side, so that no interval hides another.
      shift = 0.5 * (i + 0.5) / len(objectives) - 0.25
      mine = [column[objective, lag] for lag in lags]
      axis.errorbar(
          np.arange(len(lags)) + shift,
          [cell.mean for cell in mine],
          yerr=[_visible(cell.half_width) for cell in mine],
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
  path = pathlib.Path(path)
  partial = path.with_name(f".{path.name}")
  figure.savefig(partial, dpi=100, format="png")
  pyplot.close(figure)
  partial.replace(path)


def _visible(half_width: float) -> float:
  return 0.0 if math.isnan(half_width) else half_width


def _line(texts: Sequence[str]) -> str:
  return f"| {' | '.join(texts)} |"
