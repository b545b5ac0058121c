# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""How unlike each other the attacks are that objectives find.

    python -m benchmarks --config=configs/red_team.py:quick \\
        red_team_diversity [SEED,… [SETTING …]]

trains the harmless red-teaming run with each objective and beta of `SETTINGS`,
all from one fine-tuned policy, and evaluates 1,024 attacks every 40 steps: the
share that succeeds, and 1 - mean cosine of the embeddings of those. TB has its
replay buffer, exploration and tempered target as shipped; the others train on
what was just sampled, as they are meant to. The folder
runs/red_team_diversity keeps a result per setting and seed, so that later calls
add to table and plot.
"""

from collections.abc import Mapping, Sequence
import pathlib
import sys
from typing import Any

import matplotlib
from matplotlib import pyplot
import ml_collections
import numpy as np

from benchmarks import exact_loop
from benchmarks import results
from benchmarks import trial_run
from tba_jax.config import load
from tba_jax.system import jsonl
from tba_jax.system import processes

_FOLDER = pathlib.Path("runs") / "red_team_diversity"
_ON_POLICY = [
    "loss.ratio_clip=0.2", "replay.recent_fraction=1",
    "replay.recent_window_steps=1", "replay.selection=uniform",
    "replay.warm_start_completions=0", "replay_filter.similarity=none",
    "explore.fraction=0", "tempering.tau=1", "tempering.tau_decay_steps=0",
]  # fmt: skip
# Objective: overrides, and betas.
_OBJECTIVES = {
    "tb_learned_z": ([], (0.05, 0.1, 0.2)),
    "grpo": (_ON_POLICY, (0.05, 0.2)),
    "proximal_rloo": (_ON_POLICY, (0.05, 0.2)),
    "ppo": (_ON_POLICY, (0.05, 0.2)),
}
SETTINGS = {
    f"{name}-{beta}": [
        f"loss.name={name}", f"loss.beta={beta}", f"loss.beta_final={beta}",
        *overrides,
    ]
    for name, (overrides, betas) in _OBJECTIVES.items()
    for beta in betas
}  # fmt: skip
# Of an evaluation: key, title, digits.
_EVALUATED = {
    "pass_at_1": ("success rate", 3),
    "cosine_distance_right": ("cosine distance of successes", 2),
    "distinct_correct_per_solved": ("distinct successes of 16", 1),
}
_COLORS = ("#d55e00", "#0072b2", "#009e73", "#cc79a7")
_LINES = ("-", "--", ":")

matplotlib.use("agg")


def run(
    config: ml_collections.ConfigDict, operands: Sequence[str]
) -> dict[str, Any]:
  """Trains; writes table.md and red_team.png into the folder.

  Args:
    config: of all runs, but for what `SETTINGS` has.
    operands: seeds separated by commas (default 0), then names of `SETTINGS`
      (default all).

  Returns:
    `folder`, and `runs`: name, seed and last evaluation of each.

  Raises:
    RuntimeError: a run failed.
  """
  seeds, names = results.parse(operands, SETTINGS)
  processes.enable_compilation_cache()
  config = exact_loop.fine_tune(config, _FOLDER)
  with config.unlocked():
    # The trainer waits for each evaluation, so that none is skipped.
    config.evaluate.beside = False
    config.evaluate.num_prompts = config.evaluate.final_prompts
  for seed in seeds:
    for name in names:
      path = _FOLDER / f"{name}-seed{seed}.json"
      if not path.exists():
        own = config.copy_and_resolve_references()
        load.apply_overrides(own, [*SETTINGS[name], f"seed={seed}"])
        found = {"name": name, "seed": seed, **_train(own)}
        jsonl.atomic_write_json(path, found)
        last = {key: found[key][-1] for key in _EVALUATED}
        print(f"{path.stem}: {last}", file=sys.stderr)
  found = results.read(SETTINGS, _FOLDER)
  results.print_table(make_table(found), _FOLDER / "table.md")
  _plot(found, _FOLDER / "red_team.png")
  return results.summarize(found, _EVALUATED, _FOLDER)


def _train(config: ml_collections.ConfigDict) -> dict[str, list[float]]:
  """Returns `steps`, and what is evaluated at each."""
  with trial_run.run(config) as workdir:
    history = jsonl.read_json(f"{workdir}/eval.json")["history"]
  names = {"steps": "step", **{key: key for key in _EVALUATED}}
  return {key: [r[name] for r in history] for key, name in names.items()}


def make_table(runs: Sequence[Mapping[str, Any]]) -> list[list[str]]:
  """Returns a row per setting: means over its seeds, with their range."""
  titles = [title for title, _ in _EVALUATED.values()]
  rows = [["objective", "beta", "seeds", *titles]]
  for name in SETTINGS:
    mine = [r for r in runs if r["name"] == name]
    if not mine:
      continue
    ends = [
        results.mean_and_range([r[key][-1] for r in mine], digits)
        for key, (_, digits) in _EVALUATED.items()
    ]
    objective, _, beta = name.rpartition("-")
    rows.append([objective, beta, str(len(mine)), *ends])
  return rows


def _plot(runs: Sequence[Mapping[str, Any]], path: pathlib.Path) -> None:
  """Draws distance over success rate: a line per setting, mean of seeds."""
  figure, axes = pyplot.subplots(figsize=(7.5, 5), layout="constrained")
  x, y = "pass_at_1", "cosine_distance_right"
  for (objective, (_, betas)), color in zip(_OBJECTIVES.items(), _COLORS):
    for beta, line in zip(betas, _LINES):
      mine = [r for r in runs if r["name"] == f"{objective}-{beta}"]
      if not mine:
        continue
      axes.plot(
          *(np.mean([r[key] for r in mine], axis=0) for key in (x, y)),
          color=color,
          linestyle=line,
          marker=".",
          label=f"{objective}, beta {beta}",
      )
  axes.set_xlabel(_EVALUATED[x][0])
  axes.set_ylabel(_EVALUATED[y][0])
  axes.grid(alpha=0.3)
  axes.legend(frameon=False, fontsize=8)
  figure.savefig(path, dpi=150)
  pyplot.close(figure)
