# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Speedup by asynchrony for different costs of generation and training.

    python -m benchmarks cost_ratios [RATIOxSEARCHERS …]

Runs the same steps, each on new completions, in three modes:

    synchronous   one process generates and trains in turn, at staleness 0
    lockstep      store, trainer and searchers as processes, at staleness 0
    asynchronous  the same processes, sampling ahead by `search.lead_steps`

The model is tiny. Delays (`delays.py`) simulate the cost of generation (G
seconds per step in the reward: a verifier, an environment or the searchers'
accelerators) and of training (T seconds in the loss: the trainer's
accelerator). n searchers thus divide G by n on any machine, and a step takes at
least

    synchronous      G + T
    lockstep         G/n + T
    asynchronous     max(G/n, T)

The excess is the cost of everything else: sampling and training a tiny model,
messages, publication, polling.
"""

from collections.abc import Mapping, Sequence
import math
from typing import Any

import ml_collections

from benchmarks import delays
from benchmarks import results
from benchmarks import trial_run
from tba_jax.config import variants
from tba_jax.system import processes

_CASES = ("0.25x1", "1x1", "4x1", "4x2", "4x4", "16x1", "16x2", "16x4")
_STEPS, _SLOW_STEPS = 12, 4
# Column title -> format of a row's cell.
_COLUMNS = {
    "G / T": lambda row: f"{row['ratio']:g}",
    "searchers": lambda row: str(row["searchers"]),
    "synchronous": lambda row: _times_bound(row, "synchronous"),
    "lockstep": lambda row: _times_bound(row, "lockstep"),
    "asynchronous": lambda row: _times_bound(row, "asynchronous"),
    "speed-up": lambda row: f"{row['speedup']:.2f}",
    "ideal": lambda row: f"{row['ideal']:.2f}",
    "share": lambda row: f"{row['share']:.2f}",
    "over lockstep": lambda row: f"{row['speedup_over_lockstep']:.2f}",
    "staleness": lambda row: f"{row['staleness']:.1f}",
}


def run(
    config: ml_collections.ConfigDict,
    operands: Sequence[str],
    num_steps: int = 0,
) -> dict[str, Any]:
  """Returns a row per case; prints them as a table to standard error.

  Args:
    config: config of countdown; it is shrunk, and evaluations are turned off.
    operands: cases RATIOxSEARCHERS; `4x2` is G = 4 T with two searchers.
    num_steps: timed steps of each run; 0 = 12, or 4 if G exceeds T.

  Returns:
    `train_s`: T. `rows`: seconds per step and their bound for each mode;
    speedup: synchronous over asynchronous; ideal: (G + T) / max(G/n, T);
    share: bound over asynchronous; speedup_over_lockstep; staleness in steps.

  Raises:
    ValueError: an operand is invalid.
    RuntimeError: a run failed.
  """
  cases = [_parse(operand) for operand in operands or _CASES]
  processes.prepare_compiling()
  rows, synchronous_s = [], {}
  for ratio, searchers in cases:
    steps = num_steps or (_STEPS if ratio <= 1 else _SLOW_STEPS)
    slow = with_delays(config, ratio, searchers)
    if ratio not in synchronous_s:
      synchronous_s[ratio] = trial_run.time_loop(slow, steps)
    seconds = {"synchronous": synchronous_s[ratio]}
    for name in ("lockstep", "asynchronous"):
      seconds[name], staleness = trial_run.time_roles(
          slow, steps, lockstep=name == "lockstep"
      )
    rows.append(make_row(ratio, searchers, seconds, staleness))
    results.print_table(make_table(rows))
  return {"train_s": delays.TRAIN_S, "rows": rows}


def make_row(
    ratio: float,
    searchers: int,
    seconds: Mapping[str, float],
    staleness: float,
) -> dict[str, Any]:
  """Returns a row of `run` from the seconds per step of each mode."""
  generate = ratio / searchers
  bounds = {
      "synchronous": ratio + 1,
      "lockstep": generate + 1,
      "asynchronous": max(generate, 1),
  }
  row = {"ratio": ratio, "searchers": searchers, "staleness": staleness}
  for name, bound in bounds.items():
    row[f"{name}_s"] = seconds[name]
    row[f"{name}_bound_s"] = bound * delays.TRAIN_S
  return row | {
      "speedup": seconds["synchronous"] / seconds["asynchronous"],
      "ideal": bounds["synchronous"] / bounds["asynchronous"],
      "share": row["asynchronous_bound_s"] / row["asynchronous_s"],
      "speedup_over_lockstep": seconds["lockstep"] / seconds["asynchronous"],
  }


def make_table(rows: Sequence[Mapping[str, Any]]) -> list[list[str]]:
  """Returns the table's text, with step times and bounds as multiples of T."""
  cells = [[text_of(row) for text_of in _COLUMNS.values()] for row in rows]
  return [list(_COLUMNS), *cells]


def _times_bound(row: Mapping[str, float], name: str) -> str:
  step, bound = (
      row[f"{name}{end}"] / delays.TRAIN_S for end in ("_s", "_bound_s")
  )
  return f"{step:.2f} ({bound:g})"


def _parse(operand: str) -> tuple[float, int]:
  """Returns the ratio and the number of searchers of a case."""
  ratio, _, searchers = operand.partition("x")
  try:
    case = float(ratio), int(searchers)
  except ValueError:
    case = 0.0, 0
  if not (0 < case[0] < math.inf and case[1] > 0):
    raise ValueError(
        f"operand {operand!r}: must be RATIOxSEARCHERS, both above 0, as 4x2"
    )
  return case


def with_delays(
    config: ml_collections.ConfigDict, ratio: float, searchers: int
) -> ml_collections.ConfigDict:
  """Returns a small copy with the delays of a case."""
  config = config.copy_and_resolve_references()
  search = config.search
  with config.unlocked():
    variants.make_smoke(config)
    completions = search.prompts_per_step * search.samples_per_prompt
    config.task.name = "benchmarks.delays:SlowCountdown"
    config.task.reward_s = ratio * delays.TRAIN_S / completions
    config.loss.name = f"{delays.__file__}:slow_tb"
    config.run.processes = "many"
    config.reference.role = "trainer"  # As in the synchronous loop.
    # One block per searcher and step.
    search.num_searchers = searchers
    search.prompts_per_round = math.ceil(search.prompts_per_step / searchers)
  return config
