# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""What watching a run costs its trainer: metrics, spans, state, samples.

Runs that write everything, each step, take turns with runs that log their first
and last step alone and write no samples. Times begin after compilation.

- `record_share`: seconds in which the trainer writes of itself (its span
  `record`) over those in which it works, of the runs that write everything;
- `more_busy`: how much more the trainer works a step in those than in the
  others, the median of the pairs. Besides the writing itself this holds what
  it does to caches and the other processes, and the noise of the machine.
"""

from collections.abc import Sequence
import contextlib
import statistics
import sys
import tempfile
from typing import Any

import ml_collections

from tba_jax import jsonl
from tba_jax import metrics
from tba_jax import supervise

_STEPS = 60
_REPEATS = 2


def run(
    config: ml_collections.ConfigDict, operands: Sequence[str]
) -> dict[str, Any]:
  """Returns both shares, and what each pair of runs measured.

  Args:
    config: of the run; its evaluation, checkpoints and guards are turned off
      and its steps set to `operands[0]` (default 60).
    operands: optimizer steps, then pairs (default 2).

  Raises:
    RuntimeError: a run failed.
  """
  num_steps = int(operands[0]) if operands else _STEPS
  repeats = int(operands[1]) if len(operands) > 1 else _REPEATS
  pairs = []
  for _ in range(repeats):
    on, off = (
        _run(_variant(config, num_steps, watched=watched))
        for watched in (True, False)
    )
    pairs.append(
        {
            "step_ms_on": 1e3 * on["busy_s"] / num_steps,
            "step_ms_off": 1e3 * off["busy_s"] / num_steps,
            "record_ms_on": 1e3 * on["record_s"] / num_steps,
            "record_share": on["record_s"] / on["busy_s"],
            "more_busy": on["busy_s"] / off["busy_s"] - 1,
        }
    )
  return {
      "steps": num_steps,
      "record_share": statistics.median(p["record_share"] for p in pairs),
      "more_busy": statistics.median(p["more_busy"] for p in pairs),
      "pairs": pairs,
  }


def _variant(
    config: ml_collections.ConfigDict, num_steps: int, *, watched: bool
) -> ml_collections.ConfigDict:
  config = config.copy_and_resolve_references()
  with config.unlocked():
    config.init = "scratch"
    config.train.num_steps = num_steps
    config.evaluate.every_steps = 0
    config.evaluate.final_prompts = config.evaluate.batch_prompts
    config.checkpoint.every_steps = num_steps
    config.guards.action = "off"
    config.log.every_steps = 1 if watched else num_steps
    if not watched:
      config.log.samples_every_steps = 0
  return config


def _run(config: ml_collections.ConfigDict) -> dict[str, float]:
  """Returns busy seconds of the loop, and of the writing in it."""
  with tempfile.TemporaryDirectory(prefix="tba_jax_bench_") as workdir:
    # Standard output is for the benchmark's one line.
    with contextlib.redirect_stdout(sys.stderr):
      status = supervise.run(config, workdir, [])
    if status:
      raise RuntimeError(f"a run of the benchmark ended with status {status}")
    records = [
        span["t1"] - span["t0"]
        for span in metrics.read_spans(workdir)
        if span["kind"] == "record"
    ]
    summary = jsonl.read_json(f"{workdir}/summary.json")
    # The first step opens files and is not part of the loop's times.
    return {"busy_s": summary["train_busy_s"], "record_s": sum(records[1:])}
