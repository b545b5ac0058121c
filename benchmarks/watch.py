# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Cost of monitoring to the trainer: metrics, spans, state, samples.

- `cost`: time in the trainer's loop (`record_ms`) plus CPU time of the writer
  thread (`write_cpu_ms`) for a step with metrics, over the time of a step. It
  includes the run's state, written once a second. Since a run writes at every
  step by default, this is the trainer's overhead even if thread and step share
  a core.
- `paired`: the same overhead from step times, with a 95 % interval. The run
  writes at every fourth step: of four steps, the first writes, the second runs
  while the writer thread does, and the others do neither. The median difference
  between these halves also includes effects of caches and of the interpreter's
  lock, and noise, as the interval shows.

Times start after compilation and exclude waiting. Panel and searchers run in
other processes.
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
    ValueError: the steps are too few.
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
  """Returns the thread's CPU time for a step that writes.

  Args:
    writes: spans of the thread.
    start, end: bounds of the measured period.
    step_s: seconds per step, since state is written once a second.
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
  """Returns a 95 % interval of the median.

  Its bounds are order statistics: the number of values below the median is
  binomial, approximated as normal.
  """
  n = len(ordered)
  reach = 0.98 * math.sqrt(n)
  low = max(0, math.floor(n / 2 - reach))
  high = min(n - 1, math.ceil(n / 2 + reach))
  return ordered[low], ordered[high]
