# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""TB with a trainer that runs ahead of its searcher.

    python -m studies run_ahead [SEED,… [every_N[_bounded] …]]

Unlike the single-process runs of `staleness`, which have an exact lag, `train`
starts a store, a trainer and a searcher that run concurrently. The trainer
publishes only every N steps, so samples are about N / 2 steps old on average
and at most N plus the steps in transit. Task, rates, steps and batches are as
in `staleness` on `preference`; `…_bounded` uses `bounded_token`, which is as
good there as plain TB.

table.md has the reward, the measured staleness, and the KL of the last
quarter's batches.
"""

from collections.abc import Sequence
import pathlib
from typing import Any

import ml_collections
import numpy as np

from benchmarks import results
from benchmarks import trial_run
from studies import curves
from studies.staleness import staleness
from tba_jax.config import validate
from tba_jax.run import metrics
from tba_jax.system import jsonl
from tba_jax.tools import sweep

_EVERY = (1, 16, 64)
_OBJECTIVES = {"": "tb", "_bounded": "tb_bounded_token"}
# Objective and steps of each run.
_RUNS = {
    f"every_{steps}{form}": (objective, steps)
    for form, objective in _OBJECTIVES.items()
    for steps in _EVERY
}
NAMES = tuple(_RUNS)
_KEPT = ("staleness_steps", "most_stale_steps", "kl", "distinct_correct",
         "reward")  # fmt: skip
RESULTS = pathlib.Path(__file__).parent
_START = pathlib.Path("runs") / "staleness" / "preference"


def run(
    config: ml_collections.ConfigDict, operands: Sequence[str]
) -> dict[str, Any]:
  """Executes the missing runs; writes table.md.

  Args:
    config: not read; the task is as in `staleness`.
    operands: seeds, then names; 0 and all by default.

  Returns:
    `runs`: number of results; `folder`.

  Raises:
    ValueError: an operand is wrong, or `staleness` has chosen no learning rate.
    RuntimeError: a run failed.
  """
  del config
  seeds, names = results.parse(operands, NAMES)
  rates = staleness.chosen_rates(staleness.read(), "preference")
  if not set(_OBJECTIVES.values()) <= set(rates):
    raise ValueError("run `staleness select preference` first")

  def train(name: str, seed: int) -> dict[str, Any]:
    objective, every = _RUNS[name]
    common = curves.fine_tune(staleness.make_config("preference"), _START)
    run_config = make_config(common, objective, every, rates[objective], seed)
    with trial_run.run(run_config) as workdir:
      steps = metrics.last_per_step(
          jsonl.read_jsonl(pathlib.Path(workdir) / "metrics.jsonl")
      )
      last = jsonl.read_json(pathlib.Path(workdir) / "eval.json")["after"]
    of_steps = lambda key: [s[key] for s in steps if key in s]
    ages = of_steps("replay/staleness_steps")
    kl = of_steps("train/kl")
    return {
        "reward": [last["mean_reward"]],
        "kl": [float(np.mean(kl[-len(kl) // 4 :]))],
        "distinct_correct": [last["distinct_correct"]],
        "staleness_steps": [float(np.mean(ages))],
        "most_stale_steps": [float(np.max(ages))],
    }

  results.measure(seeds, names, RESULTS, train)
  rows = results.read(NAMES, RESULTS)
  results.print_table(make_table(rows), RESULTS / "table.md")
  return {"runs": len(rows), "folder": str(RESULTS)}


def make_config(
    config: ml_collections.ConfigDict,
    objective: str,
    every_steps: int,
    rate: float,
    seed: int,
) -> ml_collections.ConfigDict:
  """Returns the validated config of a run."""
  run_config = sweep.Lag().apply(
      staleness.make_run_config(config, objective, rate)
  )
  with run_config.unlocked():
    run_config.seed = seed
    run_config.search.update(lockstep=False, lead_steps=1)
    run_config.publish.every_steps = every_steps
    run_config.evaluate.every_steps = 0
    # Guards might stop a run with stale data.
    run_config.guards.action = "off"
    run_config.checkpoint.every_steps = run_config.train.num_steps
  validate.validate(run_config, program="train")
  return run_config


def make_table(all_rows: Sequence[dict[str, Any]]) -> list[list[str]]:
  """Returns a row per setting: means, with 95 % intervals of the rewards."""
  rows = [["objective", "params published every",
           "staleness, steps (largest of a batch)", "reward", "KL, nats",
           "distinct right", "seeds"]]  # fmt: skip
  for name, (objective, steps) in _RUNS.items():
    runs_of_name = results.of_name(all_rows, name)
    if not runs_of_name:
      continue
    ends = {key: [r[key][-1] for r in runs_of_name] for key in _KEPT}
    age, most, kl, distinct, _ = (float(np.mean(ends[key])) for key in _KEPT)
    reward, half = sweep.mean_and_half_width(ends["reward"])
    rows.append(
        [
            objective,
            f"{steps} steps" if steps > 1 else "step",
            f"{age:.1f} ({most:.0f})",
            f"{reward:.3f} ± {half:.3f}",
            *(f"{kl:.1f}", f"{distinct:.1f}", str(len(runs_of_name))),
        ]
    )
  return rows
