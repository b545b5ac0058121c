# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Cost of watching a run to its trainer: metrics, spans, state, samples.

- `cost`: of a step whose metrics are written, the time in the trainer's own
  loop (`record_ms`) and the processor time of the thread that puts it into
  files (`write_cpu_ms`), over the time of a step. As a run writes at every step
  by default, this is the share of the trainer's time that watching takes, even
  where thread and step share a core; the state of the run, written once a
  second, is part of it.
- `paired`: the same from outside, with its 95 % interval. The run writes at
  every fourth step alone. Of four steps, the first writes, and the second runs
  with the thread; the third and fourth do neither. The median of the
  differences of these halves holds what `cost` cannot see, caches and the
  interpreter's lock, and the noise of the machine: the interval shows how much.

Times begin after compilation and leave waiting out. The panel and the searchers
have processes of their own.
"""

from collections.abc import Sequence
import math
import statistics
from typing import Any

import ml_collections

from benchmarks import trial_run
from tba_jax.run import metrics
from tba_jax.system import jsonl

_STEPS = 240
_EVERY = 4
# The first four steps compile, open files and fill caches.
_FIRST = 8


def run(
    config: ml_collections.ConfigDict, operands: Sequence[str]
) -> dict[str, Any]:
  """Returns the cost of watching and its components.

  Args:
    config: config of the run; its evaluation, checkpoints and guards are turned
      off and its steps set to `operands[0]` (default 240).
    operands: optimizer steps, 16 or more.

  Raises:
    RuntimeError: the run failed.
    ValueError: there are too few steps.
  """
  num_steps = int(operands[0]) if operands else _STEPS
  if num_steps < _FIRST + 2 * _EVERY:
    raise ValueError(
        f"watch {num_steps}: must be {_FIRST + 2 * _EVERY} steps or more"
    )
  config = trial_run.make_config(config, num_steps)
  with config.unlocked():
    config.log.every_steps = _EVERY
    # Keep the share of writing steps the same as in a run.
    config.log.samples_every_steps *= _EVERY
  with trial_run.run(config) as workdir:
    spans = jsonl.read_jsonl(f"{workdir}/spans/trainer-0.jsonl")
    return {"steps": num_steps, **summarize(spans)}


def summarize(spans: Sequence[dict[str, Any]]) -> dict[str, Any]:
  """Returns the figures of a run's spans; see the module."""
  spans_of_trainer = [s for s in spans if s["role"] == "trainer"]
  main = [s for s in spans_of_trainer if not s.get("lane")]
  records = {s["step"]: s for s in main if s["kind"] == "record"}
  waits = [s for s in main if metrics.is_wait(s["kind"])]
  busy = {
      step: _busy_s(records[step - 1]["t1"], record["t1"], waits)
      for step, record in records.items()
      if step - 1 in records
  }
  starts = range(_FIRST, max(records) - _EVERY + 1, _EVERY)
  halves = [(busy[n] + busy[n + 1], busy[n + 2] + busy[n + 3]) for n in starts]
  step_s = statistics.median(idle for _, idle in halves) / 2
  costs = sorted((on - idle) / step_s for on, idle in halves)
  record_ms = statistics.median(
      1e3 * (records[n]["t1"] - records[n]["t0"]) for n in starts
  )
  write_cpu_ms = 1e3 * _write_cpu_s(
      [s for s in spans_of_trainer if s.get("lane") == "write"],
      records[starts[0]]["t0"],
      records[max(records)]["t0"],
      step_s,
  )
  return {
      "pairs": len(costs),
      "step_ms": 1e3 * step_s,
      "record_ms": record_ms,
      "write_cpu_ms": write_cpu_ms,
      "cost": (record_ms + write_cpu_ms) / (1e3 * step_s),
      "paired": statistics.median(costs),
      "paired_interval": median_interval(costs),
  }


def _write_cpu_s(
    writes: Sequence[dict[str, Any]], start: float, end: float, step_s: float
) -> float:
  """Returns the thread's processor time of a step that writes.

  Args:
    writes: spans of the thread.
    start, end: bounds of the time that counts.
    step_s: seconds of a step; the state of the run is written once a second,
      not once a step.
  """
  inside = [s for s in writes if start <= s["t0"] < end]
  cpu_s = lambda *kinds: sum(s["cpu_s"] for s in inside if s["kind"] in kinds)
  num_written = sum(s["kind"] == "metrics" for s in inside)
  return (
      cpu_s("metrics", "samples") / max(num_written, 1)
      + cpu_s("state") / (end - start) * step_s
  )


def _busy_s(start: float, end: float, waits: Sequence[dict[str, Any]]) -> float:
  """Returns the seconds between two times that were not spent waiting."""
  waited = (min(s["t1"], end) - max(s["t0"], start) for s in waits)
  return end - start - sum(max(0.0, s) for s in waited)


def median_interval(ordered: Sequence[float]) -> tuple[float, float]:
  """Returns values between which the median lies in 95 of 100 samples.

  Uses ranks: the number of values below the median is binomial, approximated as
  normal.
  """
  n = len(ordered)
  reach = 0.98 * math.sqrt(n)
  low = max(0, math.floor(n / 2 - reach))
  high = min(n - 1, math.ceil(n / 2 + reach))
  return ordered[low], ordered[high]
