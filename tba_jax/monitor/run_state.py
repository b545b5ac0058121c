# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""What a live view shows of a run, followed file by file as it grows.

The view is read while others write: any file may be missing or half written,
and any key of the state may be absent.
"""

import collections
from collections.abc import Mapping
import dataclasses
import math
import pathlib
from typing import Any

from tba_jax.system import jsonl

MAX_HISTORY = 2000
# Kinds of events that tell of nothing wrong.
_PEACEFUL = frozenset(
    "interrupted journal_room limit profile restart restored signal start"
    " store_started store_stopped".split()
)


@dataclasses.dataclass
class RunState:
  """What is known of a run.

  name: of the run directory.
  phase: "setup", "sft", "reward_model", "warm-up", "train", "finish", "done".
  status: the trainer's live state; see `recorder`.
  reward: newest (step, mean reward) pairs.
  pass_at_1: held-out (step, pass@1) pairs.
  sft: newest record of supervised fine-tuning.
  sft_steps: how many steps it takes, 0 where that is not known.
  reward_model, reward_model_steps: the same of the reward model's training.
  restarts: by role.
  event: the newest event.
  error: the newest event that tells of something wrong.
  note: where the state comes from, or why it is old.
  """

  name: str
  phase: str = "setup"
  status: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  reward: collections.deque = dataclasses.field(
      default_factory=lambda: collections.deque(maxlen=MAX_HISTORY)
  )
  pass_at_1: collections.deque = dataclasses.field(
      default_factory=lambda: collections.deque(maxlen=MAX_HISTORY)
  )
  sft: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  sft_steps: int = 0
  reward_model: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  reward_model_steps: int = 0
  restarts: Mapping[str, int] = dataclasses.field(default_factory=dict)
  event: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  error: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  note: str = ""

  def made(self, phase: str) -> tuple[Mapping[str, Any], int]:
    """Returns the newest record and the steps of a phase that makes a model."""
    if phase == "reward_model":
      return self.reward_model, self.reward_model_steps
    return self.sft, self.sft_steps

  @property
  def seen(self) -> float | None:
    """Time of the newest of all that is known, seconds of the epoch."""
    parts = self.status, self.sft, self.reward_model, self.event
    times = [number(part.get("time")) for part in parts]
    return max((t for t in times if t is not None), default=None)


class Tail:
  """Reads what was added to a file of JSON lines since the last look."""

  def __init__(self, path: pathlib.Path):
    self._path = path
    self._offset = 0

  def read(self) -> list[dict[str, Any]]:
    """Returns the new whole objects; a torn last line waits for its end."""
    try:
      with self._path.open("rb") as f:
        f.seek(0, 2)
        if f.tell() < self._offset:  # Written anew.
          self._offset = 0
        f.seek(self._offset)
        data = f.read()
    except OSError:  # Not there yet, or just being replaced.
      return []
    whole = data[: data.rfind(b"\n") + 1]
    self._offset += len(whole)
    records = (jsonl.parse_line(line) for line in whole.splitlines())
    return [record for record in records if record is not None]


def number(value: Any) -> float | None:
  """Returns a finite number, None where the value is none."""
  if isinstance(value, bool) or not isinstance(value, int | float):
    return None
  return value if math.isfinite(value) else None


class Follower:
  """Keeps a `RunState` up to date with a run directory."""

  def __init__(self, workdir: str | pathlib.Path):
    self._workdir = pathlib.Path(workdir)
    self.state = RunState(self._workdir.name or str(self._workdir))
    self._metrics = Tail(self._workdir / "metrics.jsonl")
    self._sft = Tail(self._workdir / "sft" / "metrics.jsonl")
    self._reward_model = Tail(self._workdir / "reward_model" / "metrics.jsonl")
    self._events = Tail(self._workdir / "events.jsonl")

  def read(self, *, with_status: bool = True) -> RunState:
    """Reads what is new and returns the state.

    Args:
      with_status: also take the live state from `status.json`.
    """
    state = self.state
    for record in self._metrics.read():
      step = number(record.get("step"))
      for name, series in (
          ("train/reward_mean", state.reward),
          ("eval/pass_at_1", state.pass_at_1),
      ):
        value = number(record.get(name))
        if value is not None and step is not None:
          # A restart redoes steps: what it redoes is no longer true.
          while series and series[-1][0] >= step:
            series.pop()
          series.append((step, value))
    for record in self._sft.read():
      state.sft = {**state.sft, **record}
    for record in self._reward_model.read():
      state.reward_model = {**state.reward_model, **record}
    for event in self._events.read():
      state.event = event
      finished = str(event.get("message", "")).endswith("(finished)")
      if event.get("kind") not in _PEACEFUL and not finished:
        state.error = event
    if not state.sft_steps:
      state.sft_steps = self._num_steps("sft")
      state.reward_model_steps = self._num_steps("reward_model")
    if with_status:
      status = jsonl.read_json(self._workdir / "status.json")
      if isinstance(status, dict):
        state.status = status
    return state

  def _num_steps(self, section: str) -> int:
    saved = jsonl.read_json(self._workdir / "config.json")
    for key in ("config", section, "num_steps"):
      saved = saved.get(key) if isinstance(saved, dict) else None
    return saved if isinstance(saved, int) else 0
