# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Share of the ideal overlap that an asynchronous run reaches.

Alternates between lockstep and asynchronous runs of the config, with the same
cores, completions and updates, from random params (learning does not affect
the times). Timing begins after compilation. With G and T the busy seconds of
searcher and trainer in lockstep,

    ideal = (G + T) / max(G, T)
    achieved = lockstep wall / asynchronous wall

and `share` is the median over the repeats of achieved / ideal.
"""

from collections.abc import Sequence
import statistics
from typing import Any

import ml_collections

from benchmarks import trial_run
from tba_jax.system import jsonl

_REPEATS = 3
_STEPS = 120


def run(
    config: ml_collections.ConfigDict, operands: Sequence[str]
) -> dict[str, Any]:
  """Returns wall times, busy seconds, ideal and achieved overlap, and ratios.

  Args:
    config: config of the run; its evaluation, checkpoints and guards are turned
      off and its steps set to `operands[0]` (default 120).
    operands: optimizer steps, then repeats (default 3).

  Raises:
    RuntimeError: a run failed.
  """
  num_steps = int(operands[0]) if operands else _STEPS
  repeats = int(operands[1]) if len(operands) > 1 else _REPEATS
  pairs = []
  for _ in range(repeats):
    lockstep = _run(trial_run.make_variant(config, num_steps, lockstep=True))
    asynchronous = _run(
        trial_run.make_variant(config, num_steps, lockstep=False)
    )
    generate_s = lockstep["generate_busy_s"]
    train_s = lockstep["train_busy_s"]
    ideal = (generate_s + train_s) / max(generate_s, train_s)
    achieved = lockstep["train_wall_s"] / asynchronous["train_wall_s"]
    pairs.append(
        {
            "lockstep_wall_s": lockstep["train_wall_s"],
            "async_wall_s": asynchronous["train_wall_s"],
            "generate_s": generate_s,
            "train_s": train_s,
            "ideal": ideal,
            "achieved": achieved,
            "share": achieved / ideal,
            "async_staleness_mean": asynchronous["staleness_mean"],
            "async_completions_per_s": asynchronous["completions_per_s"],
        }
    )
  return {
      "steps": num_steps,
      "share": statistics.median(p["share"] for p in pairs),
      "repeats": pairs,
  }


def _run(config: ml_collections.ConfigDict) -> dict[str, Any]:
  with trial_run.run(config) as workdir:
    return jsonl.read_json(f"{workdir}/summary.json")
