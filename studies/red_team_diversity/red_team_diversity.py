# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Diversity of the attacks that objectives find.

    python -m studies --config=configs/red_team.py:quick \\
        red_team_diversity [SEED,… [SETTING …]]

trains the harmless red-teaming run with each objective and beta of `SETTINGS`,
from one fine-tuned policy, and evaluates 1,024 attacks every 40 steps: the
share of successes, and 1 - mean cosine between their embeddings. TB uses the
config's replay buffer, exploration and tempered target; the on-policy
objectives train on fresh samples.
"""

from collections.abc import Mapping, Sequence
import pathlib
from typing import Any

import ml_collections

from benchmarks import results
from benchmarks import trial_run
from studies import curves
from studies import frontier
from tba_jax.config import load
from tba_jax.system import jsonl
from tba_jax.system import processes

RESULTS = pathlib.Path(__file__).parent
_RUNS = pathlib.Path("runs") / "red_team_diversity"
_ON_POLICY = [
    "loss.ratio_clip=0.2", "replay.recent_fraction=1",
    "replay.recent_window_steps=1", "replay.selection=uniform",
    "replay.warm_start_completions=0", "replay_filter.similarity=none",
    "explore.fraction=0", "tempering.tau=1",
]  # fmt: skip
# Pairs, pruning and filter of Stable-GFlowNet, with its numbers.
_STABLE = [
    "loss.pair_contrast=0.5", "task.min_k=7", "task.min_k_threshold=-10",
    "reference.role=searcher",
]  # fmt: skip
# Objective: overrides, and betas.
_OBJECTIVES = {
    "tb_learned_z": ([], (0.05, 0.1, 0.2)),
    "tb": ([], (0.05, 0.2)),
    "ctb": (_STABLE, (0.05, 0.2)),
    "grpo": (_ON_POLICY, (0.05, 0.2)),
    "proximal_rloo": (_ON_POLICY, (0.05, 0.2)),
    "ppo": (_ON_POLICY, (0.05, 0.2)),
    "online_dpo": ([*_ON_POLICY, "loss.ratio_clip=0"], (0.1, 0.3)),
}
SETTINGS = frontier.make_settings(_OBJECTIVES)
# Quantities of an evaluation: key, title, digits.
_EVALUATED = {
    "pass_at_1": ("success rate", 3),
    "cosine_distance_right": ("cosine distance of successes", 2),
    "distinct_attacks": ("distinct successes of 1,024", 0),
    "unique_attacks": ("clusters of successes", 0),
}
_AXES = {
    key: _EVALUATED[key][0] for key in ("pass_at_1", "cosine_distance_right")
}


def run(
    config: ml_collections.ConfigDict, operands: Sequence[str]
) -> dict[str, Any]:
  """Trains; writes table.md and red_team.png into the folder.

  Args:
    config: settings of all runs, except those in `SETTINGS`.
    operands: seeds separated by commas (default 0), then names of `SETTINGS`
      (default all).

  Returns:
    `folder`, and `runs`: name, seed and last evaluation of each.

  Raises:
    RuntimeError: a run failed.
  """
  seeds, names = results.parse(operands, SETTINGS)
  processes.prepare_compiling()

  def train(name: str, seed: int) -> dict[str, list[float]]:
    tuned = curves.fine_tune(config, _RUNS)
    with tuned.unlocked():
      tuned.evaluate.background = False
      # Before and after training alone.
      tuned.evaluate.every_steps = tuned.train.num_steps
      tuned.checkpoint.every_steps = tuned.train.num_steps
      tuned.evaluate.num_prompts = tuned.evaluate.final_prompts
    load.apply_overrides(tuned, [*SETTINGS[name], f"seed={seed}"])
    return _train(tuned)

  results.measure(seeds, names, RESULTS, train)
  rows = results.read(SETTINGS, RESULTS)
  results.print_table(make_table(rows), RESULTS / "table.md")
  frontier.plot(_OBJECTIVES, rows, _AXES, RESULTS / "red_team.png")
  return results.summarize(rows, _EVALUATED, RESULTS)


def _train(config: ml_collections.ConfigDict) -> dict[str, list[float]]:
  """Returns `steps`, and the evaluated quantities at each."""
  with trial_run.run(config) as workdir:
    history = jsonl.read_json(f"{workdir}/eval.json")["history"]
  names = {"steps": "step", **{key: key for key in _EVALUATED}}
  return {key: [r[name] for r in history] for key, name in names.items()}


def make_table(runs: Sequence[Mapping[str, Any]]) -> list[list[str]]:
  """Returns a row per setting: means over its seeds, with their range."""
  titles = [title for title, _ in _EVALUATED.values()]
  heads = ["objective", "beta", "seeds", *titles]
  return [heads, *results.make_rows(SETTINGS, runs, _EVALUATED)]
