# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""The live state of a run, read from its files as they grow.

The files are being written: any of them may be missing or partial, and any key
of the state missing or invalid.
"""

import collections
from collections.abc import Mapping
import dataclasses
import pathlib
import time
from typing import Any

from tba_jax.report import diagnosis
from tba_jax.report import evidence
from tba_jax.report import run_reader
from tba_jax.run import files
from tba_jax.run import metrics
from tba_jax.run import text

_MAX_HISTORY = 2000
# Most records that are searched for a collapse, and seconds between searches.
_MAX_RECORDS = 4000
_COLLAPSE_EVERY_S = 10.0
# Programs that train a model before the run, each in a folder of its name.
MODEL_PHASES = ("sft", "reward_model")


def _series() -> collections.deque:
  return collections.deque(maxlen=_MAX_HISTORY)


@dataclasses.dataclass
class RunState:
  """State of a run.

  name: run directory, without its parents.
  phase: "setup", "sft", "reward_model", "warm-up", "train", "finish", "done".
  status: the trainer's live state; see `recorder`.
  reward: newest (step, mean reward) pairs.
  held_out: (step, value) pairs of held-out evaluations, by
    `metrics.deciding_metric`.
  made: newest metrics of each of `MODEL_PHASES`.
  made_steps: number of steps of each of `MODEL_PHASES`, if known.
  restarts: number of restarts by role.
  event: the newest event.
  error: the newest event that is an error.
  collapse: reported collapse, or None.
  note: source of the state, or why it is old.
  """

  name: str
  phase: str = "setup"
  status: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  reward: collections.deque = dataclasses.field(default_factory=_series)
  held_out: collections.deque = dataclasses.field(default_factory=_series)
  made: dict[str, Mapping[str, Any]] = dataclasses.field(
      default_factory=lambda: {phase: {} for phase in MODEL_PHASES}
  )
  made_steps: dict[str, int] = dataclasses.field(default_factory=dict)
  restarts: Mapping[str, int] = dataclasses.field(default_factory=dict)
  event: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  error: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  collapse: diagnosis.Collapse | None = None
  note: str = ""

  @property
  def seen(self) -> float | None:
    """Unix time of the latest activity."""
    times = [
        part.get("time")
        for part in (self.status, self.event, *self.made.values())
    ]
    return max(filter(text.is_number, times), default=None)


class Follower:
  """Keeps a `RunState` up to date with a run directory."""

  def __init__(
      self, workdir: str | pathlib.Path, memory: files.Memory | None = None
  ):
    """Reads a run directory, or a run that keeps its records in memory."""
    workdir = pathlib.Path(workdir)
    self._files = memory or files.Directory(workdir)
    self.state = RunState(workdir.name or str(workdir))
    self._metrics = self._files.tail("metrics.jsonl")
    self._records: list[dict[str, Any]] = []
    self._look_at = -_COLLAPSE_EVERY_S
    self._events = self._files.tail("events.jsonl")
    self._samples = self._files.tail("samples.jsonl")
    self._made = {
        phase: files.Tail(workdir / phase / "metrics.jsonl")
        for phase in MODEL_PHASES
    }

  def read(self, *, with_status: bool = True) -> RunState:
    """Reads what is new, with `status.json` by default; returns the state."""
    state = self.state
    new = self._metrics()
    if new:
      self._look_for_collapse(new)
    for record in new:
      step = record.get("step")
      evaluation = {
          key.removeprefix("eval/"): value
          for key, value in record.items()
          if key.startswith("eval/")
      }
      for value, series in (
          (record.get("train/reward_mean"), state.reward),
          (evaluation.get(metrics.deciding_metric(evaluation)), state.held_out),
      ):
        if text.is_number(value) and text.is_number(step):
          # A restart redoes steps.
          while series and series[-1][0] >= step:
            series.pop()
          series.append((step, value))
    for phase, tail in self._made.items():
      for record in tail.read():
        state.made[phase] = {**state.made[phase], **record}
    for event in self._events():
      state.event = event
      if metrics.is_error(event.get("kind"), event.get("message")):
        state.error = event
    if not state.made_steps:
      state.made_steps = self._made_steps()
    if with_status:
      status = self._files.read("status.json")
      if isinstance(status, dict):
        state.status = status
    return state

  def first_sample(self) -> Mapping[str, Any] | None:
    """Returns a sample of the start model with its reward, once there is one.

    The sample is from the evaluation before training, else from the first step.
    """
    results = self._files.read("eval.json")
    before = results.get("before") if isinstance(results, dict) else None
    samples = before.get("samples") if isinstance(before, dict) else None
    first = next(iter(samples or self._samples()), None)
    return first if isinstance(first, dict) else None

  def _look_for_collapse(self, new: list[dict[str, Any]]) -> None:
    self._records += map(evidence.relevant_fields, new)
    every = len(self._records) // _MAX_RECORDS + 1
    if every > 1:
      # Fewer records suffice.
      self._records = [
          record
          for i, record in enumerate(self._records)
          if not i % every or any(key.startswith("eval/") for key in record)
      ]
    now = time.monotonic()
    if now - self._look_at >= _COLLAPSE_EVERY_S:
      self._look_at = now
      run = run_reader.RunData(lines=self._records)
      self.state.collapse = diagnosis.collapse(run)

  def _made_steps(self) -> dict[str, int]:
    saved = self._files.read("config.json")
    out = {}
    for phase in MODEL_PHASES:
      value = saved
      for key in ("config", phase, "num_steps"):
        value = value.get(key) if isinstance(value, dict) else None
      if isinstance(value, int):
        out[phase] = value
    return out
