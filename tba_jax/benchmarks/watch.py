# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""What watching a run costs its trainer: metrics, spans, state, samples.

One asynchronous run writes its metrics and samples at every fourth step alone.
Of each four steps, the first writes and the second runs beside the thread that
puts it into files; the third and fourth do neither. So the two halves of four
steps, under half a second apart, are a pair, and what drifts from minute to
minute is the same in both. Times begin after compilation and leave waiting out.

- `cost`: how much longer the writing half works, over the time of one step;
  median over the pairs, with its 95 % interval (of ranks, so that a few slow
  steps do not matter). As a run writes at every step by default, this is the
  share of the trainer's time that watching takes; with samples at each of them
  it is more than a run's, which writes those every
  `log.samples_every_steps`.
- `record_ms`: of a writing step, in the trainer's own thread.
- `write_ms`: the same in the thread beside it, waiting for a core included.

Spans and the state of the run (once a second) are written in both halves:
`record_ms` of a step that writes nothing, `idle_record_ms`, has their part.
"""

from collections.abc import Sequence
import math
import statistics
from typing import Any

import ml_collections

from tba_jax import metrics
from tba_jax.benchmarks import trial_run

_STEPS = 240
_EVERY = 4
# The first four compile, open files and fill caches.
_FIRST = 8


def run(
    config: ml_collections.ConfigDict, operands: Sequence[str]
) -> dict[str, Any]:
  """Returns the cost of watching and what it is made of.

  Args:
    config: of the run; its evaluation, checkpoints and guards are turned off
      and its steps set to `operands[0]` (default 240).
    operands: optimizer steps, 16 or more.

  Raises:
    RuntimeError: the run failed.
    ValueError: there are too few steps.
  """
  num_steps = int(operands[0]) if operands else _STEPS
  if num_steps < _FIRST + 2 * _EVERY:
    raise ValueError(
        f"watch {num_steps}: allowed {_FIRST + 2 * _EVERY} steps or more"
    )
  config = trial_run.make_config(config, num_steps)
  with config.unlocked():
    config.log.every_steps = _EVERY
    config.log.samples_every_steps = _EVERY
  with trial_run.run(config) as workdir:
    return {"steps": num_steps, **summarize(metrics.read_spans(workdir))}


def summarize(spans: Sequence[dict[str, Any]]) -> dict[str, Any]:
  """Returns the figures of a run's spans; see the module."""
  mine = [s for s in spans if s["role"] == "trainer"]
  main = [s for s in mine if not s.get("lane")]
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
  length_ms = lambda s: 1e3 * (s["t1"] - s["t0"])
  record_ms = lambda first: statistics.median(
      length_ms(records[n + i]) for n in starts for i in first
  )
  # A step's jobs stand in its four steps' time.
  writes = [length_ms(s) for s in mine if s.get("lane") == "write"]
  return {
      "pairs": len(costs),
      "step_ms": 1e3 * step_s,
      "cost": statistics.median(costs),
      "cost_interval": _median_interval(costs),
      "record_ms": record_ms((0,)),
      "idle_record_ms": record_ms((2, 3)),
      "write_ms": sum(writes) / (len(records) / _EVERY),
  }


def _busy_s(start: float, end: float, waits: Sequence[dict[str, Any]]) -> float:
  """Returns the seconds between two times in which nothing was waited for."""
  waited = (min(s["t1"], end) - max(s["t0"], start) for s in waits)
  return end - start - sum(max(0.0, s) for s in waited)


def _median_interval(ordered: Sequence[float]) -> tuple[float, float]:
  """Returns values between which the median lies in 95 of 100 samples.

  By ranks: the number of values below the median is binomial, here taken as
  normal.
  """
  n = len(ordered)
  reach = 0.98 * math.sqrt(n)
  low = max(0, math.floor(n / 2 - reach))
  high = min(n - 1, math.ceil(n / 2 + reach))
  return ordered[low], ordered[high]
