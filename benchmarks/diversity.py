# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Distinct solutions that objectives keep, at the pass@1 that they reach.

    python -m benchmarks diversity [SEED,… [SETTING …]]

trains the config with each objective and beta of `SETTINGS`, all from one
fine-tuned policy and with samples one step old, and evaluates every 40 steps: 8
completions of 300 held-out prompts. The folder runs/diversity keeps a result
per setting and seed, so that later calls add to table and plot.
"""

from collections.abc import Mapping, Sequence
import pathlib
from typing import Any

import matplotlib
from matplotlib import pyplot
import ml_collections
import numpy as np

from benchmarks import exact_loop
from benchmarks import results

_FOLDER = pathlib.Path("runs") / "diversity"
_NUM_STEPS = 240
# Distinct solutions are compared where a run first reaches this.
_PASS_AT_1 = 0.65
_CLIP, _NO_CLIP = "loss.ratio_clip=0.2", "loss.ratio_clip=0"
# Objective: overrides, and betas.
_OBJECTIVES = {
    "tb": ([_CLIP], (0.02, 0.05, 0.1)),
    "tb_dedupe": (["loss.name=tb", _CLIP, "replay.dedupe=True"], (0.02, 0.05)),
    "grpo": ([_CLIP], (0.0, 0.05)),
    "proximal_rloo": ([_CLIP], (0.0, 0.05)),
    "ppo": ([_CLIP], (0.0, 0.05)),
    "online_dpo": ([_NO_CLIP], (0.1, 0.3)),
}
SETTINGS = {
    f"{name}-{beta}": [
        f"loss.name={name}", f"loss.beta={beta}", f"loss.beta_final={beta}",
        *overrides,
    ]
    for name, (overrides, betas) in _OBJECTIVES.items()
    for beta in betas
}  # fmt: skip
# Of the last evaluation: key and digits.
_ENDS = {"pass_at_1": 3, "pass_at_k": 3, "distinct_correct_per_solved": 2}
_AXES = ("pass_at_1", "distinct_correct_per_solved")
_COLORS = ("#d55e00", "#e69f00", "#0072b2", "#009e73", "#cc79a7", "#000000")
_LINES = ("-", "--", ":", "-.")

matplotlib.use("agg")


def run(
    config: ml_collections.ConfigDict, operands: Sequence[str]
) -> dict[str, Any]:
  """Trains; writes table.md and diversity.png into the folder.

  Args:
    config: of all runs, but for what `SETTINGS` has.
    operands: seeds separated by commas (default 0), then names of `SETTINGS`
      (default all).

  Returns:
    `folder`, and `runs`: name, seed and last evaluation of each.
  """
  config = config.copy_and_resolve_references()
  with config.unlocked():
    config.replay.recent_window_steps = 1
    config.train.num_steps = _NUM_STEPS
    config.evaluate.update(
        every_steps=40, final_prompts=300, num_completions=8, greedy=False
    )
  found = exact_loop.run_all(config, SETTINGS, operands, _FOLDER)
  results.print_table(make_table(found), _FOLDER / "table.md")
  _plot(found, _FOLDER / "diversity.png")
  return results.summarize(found, _ENDS, _FOLDER)


def make_table(runs: Sequence[Mapping[str, Any]]) -> list[list[str]]:
  """Returns a row per setting: means over its seeds, with their range."""
  rows = [
      ["objective", "beta", "seeds", "pass@1", "pass@8", "distinct of 8",
       f"distinct at pass@1 {_PASS_AT_1}"]
  ]  # fmt: skip
  for name in SETTINGS:
    mine = [r for r in runs if r["name"] == name]
    if not mine:
      continue
    ends = {
        key: results.mean_and_range([r[key][-1] for r in mine], digits)
        for key, digits in _ENDS.items()
    }
    reached = [
        value for r in mine if (value := distinct_at(r, _PASS_AT_1)) is not None
    ]
    objective, _, beta = name.rpartition("-")
    rows.append(
        [
            objective,
            beta,
            str(len(mine)),
            *ends.values(),
            results.mean_and_range(reached, 2)
            if len(reached) == len(mine)
            else f"{len(reached)} of {len(mine)} reach it",
        ]
    )
  return rows


def distinct_at(result: Mapping[str, Any], pass_at_1: float) -> float | None:
  """Returns the distinct solutions where a run first reaches `pass_at_1`."""
  xs, ys = result["pass_at_1"], result["distinct_correct_per_solved"]
  for i in range(1, len(xs)):
    if xs[i] >= pass_at_1:
      share = (pass_at_1 - xs[i - 1]) / (xs[i] - xs[i - 1])
      return ys[i - 1] + share * (ys[i] - ys[i - 1])
  return None


def _plot(runs: Sequence[Mapping[str, Any]], path: pathlib.Path) -> None:
  """Draws distinct solutions over pass@1: a line per setting, mean of seeds."""
  figure, axes = pyplot.subplots(figsize=(7.5, 5), layout="constrained")
  for (objective, (_, betas)), color in zip(_OBJECTIVES.items(), _COLORS):
    for beta, line in zip(betas, _LINES):
      mine = [r for r in runs if r["name"] == f"{objective}-{beta}"]
      if not mine:
        continue
      axes.plot(
          *(np.mean([r[key] for r in mine], axis=0) for key in _AXES),
          color=color,
          linestyle=line,
          marker=".",
          label=f"{objective}, beta {beta}",
      )
  axes.set_xlabel("held-out pass@1")
  axes.set_ylabel("distinct solutions of 8, per solved prompt")
  axes.grid(alpha=0.3)
  axes.legend(frameon=False, fontsize=7, ncols=2, handlelength=4)
  figure.savefig(path, dpi=150)
  pyplot.close(figure)
