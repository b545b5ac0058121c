# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Many searchers on one store and one drain, measured and modeled.

Searchers share a process and sleep for random times instead of sampling.
Everything else is real: they are granted prompts and deliver groups of 8
completions of 64 tokens through outbox, store, drain and synced journal. The
trainer is a thread that receives groups and counts 32 of them as a step.

Two runs calibrate the model, `Pipeline`: one searcher, and the largest number
of searchers with half the sleep, which saturates the store. They give the time
of a poll of the drain and of each further group. The model predicts the other
runs.
"""

from collections.abc import Callable, Sequence
import dataclasses
import json
import math
import os
import pathlib
import statistics
import sys
import time
from typing import Any

import ml_collections
import numpy as np

from benchmarks import scale_searchers
from benchmarks import store_queue
from tba_jax.system import processes
from tba_jax.transport.groups import grants as grants_lib

_COUNTS = (1, 2, 4, 8, 16, 32, 64)
# Seconds per measurement, repeats, and seconds of sampling a group.
_SETTINGS = (2.0, 5.0, 0.1)
_GROUPS_PER_STEP = 32
# Before a measurement: seconds, and times of sampling a group.
_WARM_S = 1.0
_WARM_SAMPLES = 2
# Share of the sleep in the run that saturates the store. Without sleep, a
# searcher would deliver everything granted at once, and get a single answer.
_FULL_SHARE = 0.5
_START_S = 120.0
_STOP_S = 60.0
_FILE = "searchers.json"
# Maximum iterations for a fixed point that is reached within a few.
_ITERATIONS = 100
# Tokens and log-probs.
_GROUP_BYTES = scale_searchers.COMPLETIONS * scale_searchers.TOKENS * 8


@dataclasses.dataclass(frozen=True)
class Pipeline:
  """Rate and staleness of n searchers in front of a store with its drain.

  The slower of the two sets the rate. By Little's law (Little 1961: number =
  rate times time), a group's staleness is the groups in flight divided by the
  groups per step.

  num_searchers: n.
  sample_s: seconds of one searcher for one group.
  serve_s: seconds of store and drain for one group.
  groups_per_step: groups that are sampled for each optimizer step.
  round_groups: groups of a searcher's round, sent as one block.
  credits: maximum number of a searcher's unacknowledged blocks.
  granted_rounds: maximum number of undelivered rounds granted to a searcher,
    including the one being sampled.
  hand_over_s: seconds from the end of sampling until the trainer has a group,
    with a single searcher.
  idle_s: seconds between two polls of an empty queue.
  look_s: seconds of a poll that finds one group.
  more_s: seconds of such a poll for each further group.
  """

  num_searchers: int
  sample_s: float
  serve_s: float = 0.0
  groups_per_step: float = 1.0
  round_groups: float = 1.0
  credits: float = math.inf
  granted_rounds: float = math.inf
  hand_over_s: float = 0.0
  idle_s: float = 0.0
  look_s: float = 0.0
  more_s: float = 0.0

  def rates(self) -> dict[str, float]:
    """Returns the groups per second of each stage by itself."""
    return {
        "searchers": self.num_searchers / self.sample_s,
        "store": 1.0 / self.serve_s if self.serve_s else math.inf,
    }

  def slowest(self) -> str:
    """Returns the stage that sets the rate; ties go to the first."""
    rates = self.rates()
    return min(rates, key=rates.get)

  def groups_per_s(self) -> float:
    """Returns the rate of the whole pipeline."""
    return min(self.rates().values())

  def groups_in_flight(self) -> float:
    """Returns the groups sampled with a version but not yet trained on.

    If searchers are slowest, these are the groups being sampled and delivered.
    If the store is slowest, queues fill up to the credits or grants; a granted
    round waits as long on its way to a searcher as on its way back, and only
    rounds whose sampling has begun are in flight.
    """
    sampling = self.num_searchers * self.round_groups
    rate = self.groups_per_s()
    if self.slowest() == "searchers":
      return sampling + rate * self.hand_over()
    under_way = sampling * min(1 + self.credits, self.granted_rounds)
    if self.granted_rounds <= 1 + self.credits:
      # rate · (s + (n · granted / rate - s) / 2), by Little's law.
      under_way = (under_way + rate * self.sample_s * self.round_groups) / 2
    return under_way

  def hand_over(self) -> float:
    """Returns the seconds from the end of sampling until the trainer has it.

    A group that arrives while the drain is idle waits for half of its pause,
    which `hand_over_s` contains; otherwise for half of the current poll. If m
    groups arrive at random during a poll, the next poll finds m. With
    probability exp(-m) it finds none, and the next nonempty poll finds one:
    m + exp(-m) on average. A poll's length depends on this number, so both are
    solved together.
    """
    if not self.look_s:
      return self.hand_over_s
    other_groups_per_s = self.groups_per_s() * (1 - 1 / self.num_searchers)
    groups_per_look, busy, look_s = 1.0, 0.0, self.look_s
    for _ in range(_ITERATIONS):
      look_s = self.look_s + (groups_per_look - 1) * self.more_s
      coming = other_groups_per_s * look_s
      groups_per_look = min(coming + math.exp(-coming), self.num_searchers)
      busy = min(coming / groups_per_look, 1.0)
    return self.hand_over_s + busy * max(0.0, look_s - self.idle_s) / 2

  def staleness_steps(self) -> float:
    """Returns the mean staleness of data when it is first trained on."""
    return self.groups_in_flight() / self.groups_per_step


def run(
    config: ml_collections.ConfigDict, operands: Sequence[str]
) -> dict[str, Any]:
  """Returns measurements and predictions for each number of searchers.

  Args:
    config: `search.credits`, `search.lease_s`, `store.*` and `replay`'s
      segments are read.
    operands: any prefix of: seconds of a measurement, repeats, mean seconds of
      sampling a group, and numbers of searchers, as 1,4,16. The model needs 1
      as the first number; otherwise nothing is predicted.

  Returns:
    `runs`: by number of searchers, medians over the repeats of groups and bytes
    per second, staleness in steps, milliseconds from the end of sampling to the
    trainer, CPU shares of store, drain and searchers, times of the drain's
    polls, and a searcher's store requests per second. With a model also its
    predictions and their errors, `full`, the run with half the sleep, and
    `worst_error`.

  Raises:
    ValueError: an operand is not a number above 0.
    RuntimeError: a process of the benchmark ended or delivered nothing.
  """
  counts = [*map(int, operands[3].split(","))] if operands[3:] else _COUNTS
  settings = [*map(float, operands[:3]), *_SETTINGS[len(operands[:3]) :]]
  if len(operands) > 4 or min(*settings, *counts) <= 0:
    raise ValueError(f"operands {list(operands)}: must be 4 above 0")
  seconds, repeats, sample_s = settings
  cores = processes.available_cores()
  measured: dict[int, list[dict[str, float]]] = {n: [] for n in counts}
  most, full = max(counts), []
  try:
    with store_queue.Queue(config, "benchmarks.scale_searchers") as queue:
      for repeat in range(int(repeats)):
        for n in counts:
          name = f"r{repeat}n{n}"
          measured[n].append(_measure(queue, name, n, sample_s, seconds))
        if counts[0] == 1:
          full_s = _FULL_SHARE * sample_s
          name = f"r{repeat}full"
          full.append(_measure(queue, name, most, full_s, seconds))
  finally:
    processes.pin(cores)
  medians = {n: _median(rows) for n, rows in measured.items()}
  out = {"sample_s": sample_s, "group_bytes": _GROUP_BYTES}
  if not full:
    return {**out, "runs": {str(n): row for n, row in medians.items()}}
  filled = _median(full)
  model_of = calibrate(medians[1], filled, config.search.credits)
  runs = {str(n): _with_model(row, model_of(n)) for n, row in medians.items()}
  return {
      **out,
      "full": {str(most): filled},
      "runs": runs,
      "worst_error": {
          name: max(row[f"{name}_error"] for row in runs.values())
          for name in ("groups_per_s", "staleness_steps")
      },
  }


def calibrate(
    single: dict[str, float], full: dict[str, float], num_credits: int
) -> Callable[[int], Pipeline]:
  """Returns the model for each number of searchers.

  Args:
    single: result of the run with one searcher.
    full: result of the run that saturates the store.
    num_credits: credits of a searcher.
  """
  groups_per_look = full["groups_per_look"]
  more_ms = (full["look_ms"] - single["look_ms"]) / max(
      groups_per_look - 1, 1e-9
  )

  def model_of(num_searchers: int) -> Pipeline:
    return Pipeline(
        num_searchers=num_searchers,
        sample_s=1 / single["groups_per_s"],
        serve_s=1 / full["groups_per_s"],
        groups_per_step=_GROUPS_PER_STEP,
        credits=num_credits,
        granted_rounds=grants_lib.GRANTS_AHEAD,
        hand_over_s=single["hand_over_ms"] / 1e3,
        idle_s=single["idle_ms"] / 1e3,
        look_s=single["look_ms"] / 1e3,
        more_s=max(more_ms, 0.0) / 1e3,
    )

  return model_of


def _with_model(row: dict[str, float], model: Pipeline) -> dict[str, float]:
  """Returns a row with the model's predictions."""
  out = dict(row)
  for name, value in (
      ("groups_per_s", model.groups_per_s()),
      ("staleness_steps", model.staleness_steps()),
      ("hand_over_ms", model.hand_over() * 1e3),
  ):
    out[f"{name}_predicted"] = value
    out[f"{name}_error"] = abs(value / row[name] - 1)
  return out


def _median(rows: Sequence[dict[str, float]]) -> dict[str, float]:
  return {
      name: statistics.median(row[name] for row in rows) for name in rows[0]
  }


def _measure(
    queue: store_queue.Queue,
    name: str,
    num_searchers: int,
    sample_s: float,
    seconds: float,
) -> dict[str, float]:
  """Runs some searchers for some seconds; returns the results."""
  path = queue.folder / _FILE
  path.unlink(missing_ok=True)
  with queue.draining() as drain:
    drain.log = []
    queue.say(f"start {name} {num_searchers} {sample_s}")
    deadline = time.monotonic() + _START_S
    while not drain.log:
      drain.receive_for(0.05)
      if time.monotonic() > deadline:
        raise RuntimeError(f"{num_searchers} searchers did not start")
    drain.receive_for(max(_WARM_S, _WARM_SAMPLES * sample_s))
    start, cpu_s = time.monotonic(), _cpu_s(queue.service_pid)
    before = drain.poll_stats()
    drain.receive_for(seconds)
    # On a busy machine, many searchers may need longer to deliver.
    while drain.log[-1][-1] < start:
      drain.receive_for(0.05)
      if time.monotonic() > start + seconds + _START_S:
        raise RuntimeError(f"{num_searchers} searchers deliver nothing")
    wall_s = time.monotonic() - start
    cpu_s = _cpu_s(queue.service_pid) - cpu_s
    polls = drain.poll_stats()
    polls.subtract(before)
    queue.say(f"stop {path}")
    deadline = time.monotonic() + _STOP_S
    while not path.exists():
      drain.receive_for(0.05)
      if time.monotonic() > deadline:
        raise RuntimeError(f"{num_searchers} searchers did not stop")
    log = drain.log
  reported = json.loads(path.read_text())
  row = analyse(log, reported["times"], start, start + wall_s)
  # Print results so far, in case a later run fails.
  print(f"scale: {name} {json.dumps(row)}", file=sys.stderr, flush=True)
  return {
      **row,
      "mb_per_s": row["groups_per_s"] * _GROUP_BYTES / 1e6,
      "store_core_share": cpu_s / wall_s,
      "drain_core_share": polls["busy_s"] / wall_s,
      "look_ms": 1e3 * polls["served_s"] / max(polls["served"], 1),
      "groups_per_look": polls["blocks"] / max(polls["served"], 1),
      "idle_ms": 1e3 * (wall_s - polls["served_s"]) / max(polls["empty"], 1),
      "searchers_core_share": reported["busy_share"],
      "asks_per_searcher_s": reported["asks_per_s"] / num_searchers,
  }


def analyse(
    log: Sequence[tuple[str, int, float]],
    times: dict[str, list[list[float]]],
    start: float,
    stop: float,
) -> dict[str, float]:
  """Returns rate, staleness and hand-over time over a period of a run.

  Staleness is fractional: the number of groups that arrived between a group's
  start and its arrival, over the groups per step.

  Args:
    log: searcher, sequence and arrival time of each block, in order.
    times: start and end of sampling of each block, by searcher.
    start, stop: bounds of the period, seconds of the same clock.

  Raises:
    RuntimeError: nothing arrived in the period.
  """
  taken_at = np.array([at for _, _, at in log])
  chosen = [i for i, at in enumerate(taken_at) if start <= at < stop]
  if not chosen:
    raise RuntimeError("no block arrived during the measurement")
  stale, hand_over_s = [], []
  for i in chosen:
    sid, sequence, at = log[i]
    began, ended = times[sid][sequence]
    stale.append((i - np.searchsorted(taken_at, began)) / _GROUPS_PER_STEP)
    hand_over_s.append(at - ended)
  return {
      "groups_per_s": len(chosen) / (stop - start),
      "staleness_steps": float(np.mean(stale)),
      "hand_over_ms": float(np.mean(hand_over_s)) * 1e3,
  }


def _cpu_s(pid: int) -> float:
  """Returns the CPU seconds of a process so far."""
  text = pathlib.Path(f"/proc/{pid}/stat").read_text()
  fields = text.rpartition(")")[2].split()
  return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
