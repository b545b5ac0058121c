# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Distinct solutions that objectives keep, by the pass@1 that they reach.

    python -m studies diversity [SEED,… [SETTING …]]

trains the config with each objective and beta of `SETTINGS`, from one
fine-tuned policy and on samples one step old, and evaluates 8 completions of
300 held-out prompts every 40 steps.
"""

from collections.abc import Mapping, Sequence
import pathlib
from typing import Any

import ml_collections

from benchmarks import results
from studies import curves
from studies import frontier

RESULTS = pathlib.Path(__file__).parent
_RUNS = pathlib.Path("runs") / "diversity"
_NUM_STEPS = 240
_NUM_PROMPTS = 32
_NUM_COMPLETIONS = 8
# Distinct solutions are compared where a run first reaches this.
_PASS_AT_1 = 0.65
# Entropy bonus in place of a larger beta.
_BONUS, _LARGE_BONUS = "loss.entropy_weight=0.01", "loss.entropy_weight=0.1"
_CLIP, _NO_CLIP = "loss.ratio_clip=0.2", "loss.ratio_clip=0"
# Objective: overrides, and betas.
_OBJECTIVES = {
    "tb": ([_CLIP], (0.02, 0.05, 0.1)),
    "tb_dedupe": (["loss.name=tb", _CLIP, "replay.dedupe=True"], (0.02, 0.05)),
    "grpo": ([_CLIP], (0.0, 0.05)),
    "proximal_rloo": ([_CLIP], (0.0, 0.05)),
    "ppo": ([_CLIP], (0.0, 0.05)),
    "online_dpo": ([_NO_CLIP], (0.1, 0.3)),
    "tb_entropy": (["loss.name=tb", _CLIP, _BONUS], (0.02,)),
    "grpo_entropy": (["loss.name=grpo", _CLIP, _BONUS], (0.0,)),
    "tb_large_entropy": (["loss.name=tb", _CLIP, _LARGE_BONUS], (0.02,)),
    "grpo_large_entropy": (["loss.name=grpo", _CLIP, _LARGE_BONUS], (0.0,)),
}
SETTINGS = frontier.make_settings(_OBJECTIVES)
# Quantities of the last evaluation: key, title, digits.
_ENDS = {
    "pass_at_1": ("pass@1", 3),
    "pass_at_k": ("pass@8", 3),
    "distinct_correct_per_solved": ("distinct of 8", 2),
}
_AXES = {
    "pass_at_1": "held-out pass@1",
    "distinct_correct_per_solved": "distinct solutions of 8, per solved prompt",
}


def run(
    config: ml_collections.ConfigDict, operands: Sequence[str]
) -> dict[str, Any]:
  """Trains; writes table.md and diversity.png into the folder.

  Args:
    config: settings of all runs, except those in `SETTINGS`.
    operands: seeds separated by commas (default 0), then names of `SETTINGS`
      (default all).

  Returns:
    `folder`, and `runs`: name, seed and last evaluation of each.
  """
  config = config.copy_and_resolve_references()
  with config.unlocked():
    config.replay.recent_window_steps = 1
    config.replay.skip_equal_rewards = False
    config.search.prompts_per_step = _NUM_PROMPTS
    config.search.samples_per_prompt = _NUM_COMPLETIONS
    config.train.update(
        num_steps=_NUM_STEPS,
        completions_per_prompt=_NUM_COMPLETIONS,
        prompts_per_batch=_NUM_PROMPTS,
        micro_batch_prompts=_NUM_PROMPTS,
    )
    config.evaluate.update(
        every_steps=40,
        final_prompts=300,
        num_completions=_NUM_COMPLETIONS,
        greedy=False,
    )
  rows = curves.run_all(config, SETTINGS, operands, RESULTS, _RUNS)
  results.print_table(make_table(rows), RESULTS / "table.md")
  frontier.plot(_OBJECTIVES, rows, _AXES, RESULTS / "diversity.png")
  return results.summarize(rows, _ENDS, RESULTS)


def make_table(runs: Sequence[Mapping[str, Any]]) -> list[list[str]]:
  """Returns a row per setting: means over its seeds, with their range."""
  titles = [title for title, _ in _ENDS.values()]
  heads = ["objective", "beta", "seeds", *titles]
  rows = [[*heads, f"distinct at pass@1 {_PASS_AT_1}"]]
  for row in results.make_rows(SETTINGS, runs, _ENDS):
    runs_of_row = results.of_name(runs, "-".join(row[:2]))
    cells = [
        results.at_target(
            run["distinct_correct_per_solved"], run["pass_at_1"], _PASS_AT_1
        )
        for run in runs_of_row
    ]
    reached = [value for value in cells if value is not None]
    rows.append([*row, f"{len(reached)} of {len(runs_of_row)} reach it"])
    if len(reached) == len(runs_of_row):
      rows[-1][-1] = results.mean_and_range(reached, 2)
  return rows
