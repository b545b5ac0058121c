# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Record of asynchronous decisions, so that a run can be rerun.

Together with the journal and a checkpoint, these decisions determine the input
of every step: how far the journal was applied before the step, whether the step
was dispatched before the previous one ended (its draw then lacks that step's
reference log-probs), and the factor on the learning rate. Draws need no record,
because the buffer's generator is in the checkpoint. Checksums of each draw and
the bits of each step's metrics show where a rerun differs.

Lines of `replay/decisions.jsonl`, in the order of events:

    {"epoch", "step", "applied", "config", "machine"}  start of a trainer
    {"draw_names", "names"}    names of checksums and metrics from here on
    {"step", "applied", "ahead", "scale", "draw", "metrics"}  a step

A newer start replaces all steps from its first step on, which are retrained.
"""

import base64
from collections.abc import Callable, Mapping, Sequence
import dataclasses
import os
import pathlib
from typing import Any
import zlib

import numpy as np

from tba_jax import types
from tba_jax.system import jsonl

FILE_NAME = "replay/decisions.jsonl"

_START = {"epoch": int, "step": int, "applied": int, "config": {},
          "machine": {}}  # fmt: skip
_NAMES = {"draw_names": [str], "names": [str]}
_STEP = {
    "step": int,
    "applied": int,
    "ahead": bool,
    "scale": float,
    "draw": [int],
    "metrics": str,
}


@dataclasses.dataclass(frozen=True)
class Start:
  """A start of the trainer.

  epoch: start count of the trainer.
  step: first step.
  applied: journal offset up to which the data had been applied.
  config: settings at the start, as plain values.
  machine: properties of the machine that affect results, by name.
  """

  epoch: int
  step: int
  applied: int
  config: Mapping[str, Any]
  machine: Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Decision:
  """Asynchronous decisions about one step.

  applied: journal offset up to which data was applied before the step.
  ahead: whether the step was dispatched before the previous one had ended.
  scale: factor on the learning rate.
  """

  applied: int
  ahead: bool
  scale: float


@dataclasses.dataclass(frozen=True)
class Step:
  """A recorded step.

  decision: asynchronous decisions about the step.
  draw: checksums of its draw, see `sums_of`.
  metrics: values of the train step, [] float32 by name.
  start: trainer's start that took the step.
  """

  decision: Decision
  draw: Mapping[str, int]
  metrics: Mapping[str, np.float32]
  start: Start


@dataclasses.dataclass(frozen=True)
class Recording:
  """The record of a run.

  steps: recorded steps by number; for retrained steps, the last record.
  """

  starts: Sequence[Start]
  steps: Mapping[int, Step]

  def metric(self, name: str) -> dict[int, float]:
    """Returns a metric by step, in order, without steps that lack it."""
    return {
        n: float(step.metrics[name])
        for n, step in sorted(self.steps.items())
        if name in step.metrics
    }


def sums_of(draw: types.Draw) -> dict[str, int]:
  """Returns the CRC-32 of a draw's ids and of each of its columns, by name."""
  columns = types.columns_of(types.BufferColumns)
  return {
      name: zlib.crc32(np.ascontiguousarray(value))
      for name in ("ids", "ref_versions", "staleness_steps", *columns)
      if (value := getattr(draw, name)) is not None
  }


class DecisionLog:
  """Writes the record; used only by the trainer's thread.

  If a line cannot be written (full disk), this is reported once and the run
  continues, but cannot be rerun past it.
  """

  def __init__(
      self,
      workdir: str | os.PathLike[str],
      on_event: Callable[[str, str], None],
  ):
    """Opens the file of a run directory for appending."""
    self._path = pathlib.Path(workdir) / FILE_NAME
    self._on_event = on_event
    self._names: tuple[list[str], list[str]] = [], []
    self._has_failed = False
    self._lines = jsonl.LineWriter(self._path)

  def start(self, start: Start) -> None:
    """Records a start of the trainer."""
    self._write(vars(start))

  def step(
      self,
      step: int,
      decision: Decision,
      draw: types.Draw,
      metrics: Mapping[str, float],
  ) -> None:
    """Records a step, even a non-finite one."""
    sums = sums_of(draw)
    if (list(sums), list(metrics)) != self._names:
      self._names = list(sums), list(metrics)
      self._write({"draw_names": list(sums), "names": list(metrics)})
    bits = np.array(list(metrics.values()), "<f4").tobytes()
    self._write(
        {
            "step": step,
            **vars(decision),
            "draw": list(sums.values()),
            "metrics": base64.b64encode(bits).decode(),
        }
    )

  def sync(self) -> None:
    """Waits until the record is on the disk; called before a checkpoint."""
    self._try(self._lines.sync)

  def close(self) -> None:
    self._try(self._lines.close)

  def _write(self, record: Mapping[str, Any]) -> None:
    self._try(lambda: self._lines.write(record))

  def _try(self, write: Callable[[], None]) -> None:
    try:
      write()
    except OSError as error:
      if not self._has_failed:
        self._has_failed = True
        self._on_event(
            "not_written",
            f"{self._path.name}: steps from here on cannot be rerun: {error}",
        )


def read(workdir: str | os.PathLike[str]) -> Recording:
  """Returns the record of a run directory.

  Leaves out lines cut off by a crash, and steps that a later start replaced.

  Raises:
    ValueError: the record does not exist.
  """
  path = pathlib.Path(workdir) / FILE_NAME
  starts: list[Start] = []
  steps: dict[int, Step] = {}
  draw_names: list[str] = []
  names: list[str] = []
  for record in jsonl.iter_jsonl(path):
    if not jsonl.schema_error(record, _START):
      starts.append(Start(**{name: record[name] for name in _START}))
      steps = {n: step for n, step in steps.items() if n < record["step"]}
    elif not jsonl.schema_error(record, _NAMES):
      draw_names, names = record["draw_names"], record["names"]
    elif starts and not jsonl.schema_error(record, _STEP):
      bits = np.frombuffer(base64.b64decode(record["metrics"]), "<f4")
      steps[record["step"]] = Step(
          decision=Decision(
              record["applied"], record["ahead"], float(record["scale"])
          ),
          draw=dict(zip(draw_names, record["draw"])),
          metrics=dict(zip(names, bits)),
          start=starts[-1],
      )
  if not starts:
    raise ValueError(
        f"{path}: there is no record of the run's decisions; runs of older"
        " versions have none"
    )
  return Recording(starts, steps)
