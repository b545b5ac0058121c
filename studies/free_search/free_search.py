# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Gain from more free-running searcher processes.

    python -m studies --config=configs/countdown_sparse.py \\
        free_search [SEARCHERS …]

runs a trainer, a store and SEARCHERS (default 1, 2 and 4) without admission
control (`search.prompts_per_step=0`): a step takes whatever has arrived. Each
reward sleeps `_REWARD_S`, like a verifier or a searcher with its own
accelerator, so searchers hardly compete for cores. Prompts, start and draws
equal `reward-N` in `search.py`.
"""

from collections.abc import Mapping, Sequence
import pathlib
from typing import Any

import ml_collections

from benchmarks import results
from benchmarks import trial_run
from studies import curves
from studies.search import search
from tba_jax.config import load
from tba_jax.run import metrics
from tba_jax.system import jsonl
from tba_jax.system import processes

_SEARCHERS = (1, 2, 4)
_REWARD_S = 0.02
_COLUMNS = ("searchers", "completions a step", "seconds a step", "staleness",
            "pass@1", "pass@16")  # fmt: skip


def run(
    config: ml_collections.ConfigDict, operands: Sequence[str]
) -> dict[str, Any]:
  """Returns `rows`, one per number of searchers; prints them as a table.

  Args:
    config: config of countdown_sparse.
    operands: numbers of searchers.

  Raises:
    ValueError: an operand is not a number.
    RuntimeError: a run failed.
  """
  counts = [int(operand) for operand in operands] or _SEARCHERS
  processes.prepare_compiling()
  config = curves.fine_tune(search.make_config(config), search.RUNS)
  config = make_free(config)
  rows = [_measure(config, count) for count in counts]
  results.print_table([list(_COLUMNS), *map(_cells, rows)])
  return {"rows": rows}


def make_free(config: ml_collections.ConfigDict) -> ml_collections.ConfigDict:
  """Returns `search.make_config` with free-running searchers."""
  config = config.copy_and_resolve_references()
  load.apply_overrides(config, search.SETTINGS["reward-1"])
  with config.unlocked():
    config.task.reward_s = _REWARD_S
    config.run.processes = "many"
    config.search.prompts_per_step = 0
    config.search.wait_for_fresh = False
    config.search.prompts_per_round = 8
  return config


def _measure(
    config: ml_collections.ConfigDict, num_searchers: int
) -> dict[str, Any]:
  config.search.num_searchers = num_searchers
  with trial_run.run(config) as workdir:
    folder = pathlib.Path(workdir)
    records = metrics.last_per_step(jsonl.read_jsonl(folder / "metrics.jsonl"))
    after = jsonl.read_json(folder / "summary.json")["after"]
  # The first steps compile.
  first, last = records[len(records) // 10], records[-1]
  num_steps = last["step"] - first["step"]
  rate = lambda name: (last[name] - first[name]) / num_steps
  return {
      "searchers": num_searchers,
      "completions_per_step": rate("total/completions"),
      "step_s": rate("time"),
      "staleness": last["replay/staleness_steps"],
      "pass_at_1": after["pass_at_1"],
      "pass_at_k": after["pass_at_k"],
  }


def _cells(row: Mapping[str, Any]) -> list[str]:
  return [
      str(row["searchers"]),
      f"{row['completions_per_step']:.0f}",
      f"{row['step_s']:.2f}",
      f"{row['staleness']:.1f}",
      f"{row['pass_at_1']:.3f}",
      f"{row['pass_at_k']:.3f}",
  ]
