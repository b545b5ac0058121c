# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Gain from more search per optimizer step if rewards are rare.

    python -m studies --config=configs/countdown_sparse.py \\
        search [SEED,… [SETTING …]]

learns to solve 64 prompts, as red-teaming learns to attack one victim, from a
policy that solves 1 % of them. Each step puts the completions of 1, 2, 4, 8 or
16 searchers into the replay buffer and trains on 32 groups of 8: half from the
newest groups, half from all, and within a prompt drawn uniformly (`uniform`) or
by reward (`reward`). `none` trains on one searcher's fresh samples without a
buffer. All runs start from one fine-tuned policy, and samples are one step old.
"""

from collections.abc import Mapping, Sequence
import pathlib
from typing import Any

import matplotlib
from matplotlib import pyplot
import ml_collections
import numpy as np

from benchmarks import results
from studies import curves

RESULTS = pathlib.Path(__file__).parent
RUNS = pathlib.Path("runs") / "search"
_NUM_STEPS = 200
_SEARCHERS = (1, 2, 4, 8, 16)
_NUM_PROMPTS = 64
# Prompts and samples of one searcher per step.
_PROMPTS, _SAMPLES = 8, 8
_DRAWS = ("uniform", "reward")
_FEW = f"task.num_prompts={_NUM_PROMPTS}"
SETTINGS = {
    "none-1": [_FEW, "replay.recent_fraction=1", "replay.recent_window_steps=1"]
} | {
    f"{draw}-{n}": [
        _FEW,
        f"replay.selection={draw}",
        f"search.prompts_per_step={n * _PROMPTS}",
    ]
    for n in _SEARCHERS
    for draw in _DRAWS
}
# Quantities of the last evaluation: key, title, digits.
_ENDS = {
    "pass_at_1": ("pass@1", 3),
    "pass_at_k": ("pass@16", 3),
    "solutions": ("solutions found", 0),
}
_COLORS = ("#56b4e9", "#0072b2", "#009e73", "#e69f00", "#d55e00")
_LINES = {"none": ":", "uniform": "--", "reward": "-"}

matplotlib.use("agg")


def run(
    config: ml_collections.ConfigDict, operands: Sequence[str]
) -> dict[str, Any]:
  """Trains; writes table.md and search.png into the folder.

  Args:
    config: settings of all runs, except those in `SETTINGS`.
    operands: seeds separated by commas (default 0), then names of `SETTINGS`
      (default all).

  Returns:
    `folder`, and `runs`: name, seed and last evaluation of each.
  """
  rows = curves.run_all(make_config(config), SETTINGS, operands, RESULTS, RUNS)
  results.print_table(make_table(rows), RESULTS / "table.md")
  _plot(rows, RESULTS / "search.png")
  return results.summarize(rows, _ENDS, RESULTS)


def make_config(config: ml_collections.ConfigDict) -> ml_collections.ConfigDict:
  """Returns a copy with the common settings."""
  config = config.copy_and_resolve_references()
  with config.unlocked():
    config.task.name = "studies.search.few_prompts:FewPrompts"
    config.task.num_prompts, config.task.reward_s = 0, 0.0
    config.sft.num_steps = config.sft.evaluate_every_steps = 300
    config.search.samples_per_prompt = _SAMPLES
    config.search.prompts_per_step = _PROMPTS
    # Groups of a prompt contain its solutions, once one is found.
    config.replay.reward_temperature = 0.1
    # Nothing is evicted.
    config.replay.capacity_per_prompt = config.replay.capacity
    config.train.num_steps = _NUM_STEPS
    config.evaluate.update(
        every_steps=40,
        num_prompts=_NUM_PROMPTS,
        final_prompts=_NUM_PROMPTS,
        num_completions=16,
        greedy=False,
    )
  return config


def make_table(runs: Sequence[Mapping[str, Any]]) -> list[list[str]]:
  """Returns a row per setting: means over its seeds, with their range."""
  titles = [title for title, _ in _ENDS.values()]
  rows = [["drawn", "searchers", "seeds", *titles, "reward of the last steps"]]
  for row in results.make_rows(SETTINGS, runs, _ENDS):
    last = [
        float(np.mean(run["rewards"][-_NUM_STEPS // 4 :]))
        for run in results.of_name(runs, "-".join(row[:2]))
    ]
    rows.append([*row, results.mean_and_range(last, 3)])
  return rows


def _plot(runs: Sequence[Mapping[str, Any]], path: pathlib.Path) -> None:
  """Draws the columns of `_ENDS` over steps and over completions."""
  figure, grid = pyplot.subplots(
      2, len(_ENDS), figsize=(12, 7), sharey="col", layout="constrained"
  )
  for x, row in zip(("steps", "completions"), grid):
    for (y, (title, _)), axis in zip(_ENDS.items(), row):
      _plot_panel(runs, axis, x, y)
      axis.set_xlabel(x)
      axis.set_ylabel(title)
  for axis in grid[1]:
    axis.set_xscale("log")
  figure.legend(
      *grid[0, 0].get_legend_handles_labels(),
      loc="outside lower center",
      ncols=6,
      fontsize=8,
  )
  figure.savefig(path, dpi=150)
  pyplot.close(figure)


def _plot_panel(
    runs: Sequence[Mapping[str, Any]], axis: Any, x: str, y: str
) -> None:
  """Draws a line per setting, the mean of its seeds."""
  first = int(x == "completions")  # Omit the logarithm of 0.
  for name in SETTINGS:
    runs_of_name = results.of_name(runs, name)
    if not runs_of_name:
      continue
    draw, _, searchers = name.partition("-")
    axis.plot(
        runs_of_name[0][x][first:],
        np.mean([r[y] for r in runs_of_name], axis=0)[first:],
        color=_COLORS[_SEARCHERS.index(int(searchers))],
        linestyle=_LINES[draw],
        label=f"{searchers}, {draw}",
    )
  axis.grid(alpha=0.3)
