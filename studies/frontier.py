# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Settings and plot of objectives with several betas each."""

from collections.abc import Mapping, Sequence
import itertools
import pathlib
from typing import Any

import matplotlib
from matplotlib import pyplot
import numpy as np

from benchmarks import results

# Overrides and betas, by objective.
Objectives = Mapping[str, tuple[Sequence[str], Sequence[float]]]

_COLORS = ("#d55e00", "#e69f00", "#0072b2", "#009e73", "#cc79a7", "#000000",
           "#56b4e9", "#999999")  # fmt: skip
_MARKERS = (".", "x", "^")  # the next one where the colors start again
_LINES = ("-", "--", ":", "-.")

matplotlib.use("agg")


def make_settings(objectives: Objectives) -> dict[str, list[str]]:
  """Returns overrides (`KEY=VALUE`) by name, OBJECTIVE-BETA."""
  return {
      f"{name}-{beta}": [
          f"loss.name={name}",
          f"loss.beta={beta}",
          *overrides,
      ]
      for name, (overrides, betas) in objectives.items()
      for beta in betas
  }


def plot(
    objectives: Objectives,
    runs: Sequence[Mapping[str, Any]],
    axes: Mapping[str, str],
    path: pathlib.Path,
) -> None:
  """Draws a line per setting, the mean of its seeds, a point per evaluation.

  Args:
    objectives: objectives of `make_settings`.
    runs: results of its names.
    axes: keys of x and y in a result -> titles of the axes.
    path: path of the PNG.
  """
  figure, axis = pyplot.subplots(figsize=(7.5, 5), layout="constrained")
  styles = itertools.cycle(itertools.product(_MARKERS, _COLORS))
  for (objective, (_, betas)), (marker, color) in zip(
      objectives.items(), styles
  ):
    for beta, line in zip(betas, itertools.cycle(_LINES)):
      if points := results.of_name(runs, f"{objective}-{beta}"):
        axis.plot(
            *(np.mean([r[key] for r in points], axis=0) for key in axes),
            color=color,
            linestyle=line,
            marker=marker,
            label=f"{objective}, beta {beta}",
        )
  axis.set_xlabel(list(axes.values())[0])
  axis.set_ylabel(list(axes.values())[1])
  axis.grid(alpha=0.3)
  if runs:
    axis.legend(frameon=False, fontsize=7, ncols=2, handlelength=4)
  figure.savefig(path, dpi=150)
  pyplot.close(figure)
