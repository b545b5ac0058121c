# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Inputs and findings of an audit of a run's files.

Each format has its own audit function, listed in `tools/verify.py`:

    def audit(run: AuditedRun) -> Findings

It yields `Damage`s as tuples, and a text that summarizes the content. Files are
read with the code that wrote them; arrays and amounts are summed by separate,
simple code, to find errors in the writer. It writes nothing, and raises
ValueError, LookupError, TypeError or AttributeError for valid JSON of unknown
shape.
"""

from collections.abc import Callable, Iterator, Sequence
import dataclasses
import pathlib
from typing import Any, NamedTuple

from tba_jax.system import jsonl

# Remedies shared by several formats.
COPY = "restore it from a copy"
REPORT = "the report lacks it; training is not affected"


class Damage(NamedTuple):
  """Damaged or missing data.

  place: file, and position in it.
  advice: consequence for the user, and remedy; "" for a fault that a restart
    handles or has handled.
  """

  place: str
  what: str
  advice: str = ""


Findings = Iterator[tuple[str, str, str] | tuple[str, str] | str]


@dataclasses.dataclass
class AuditedRun:
  """Contents of a run directory, as far as audits have read it.

  live: whether a process of this host works there.
  json: JSON files that could be read, by name.
  marks: last line of each searcher in acknowledged.jsonl.
  saved: step -> host state of the checkpoints, oldest first; {} if unreadable.
  """

  folder: pathlib.Path
  live: bool
  show: Callable[[str], None]
  json: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)
  events: list[dict[str, Any]] = dataclasses.field(default_factory=list)
  marks: dict[str, list[int]] = dataclasses.field(default_factory=dict)
  saved: dict[int, dict[str, Any]] = dataclasses.field(default_factory=dict)

  @property
  def finished(self) -> bool:
    return not self.live and "result.json" in self.json

  @property
  def epoch(self) -> int:
    """Number of times that the trainer was started."""
    return self.json.get("epoch.json", {}).get("epoch", 0)

  @property
  def newest(self) -> int | None:
    """Step of the newest checkpoint."""
    return next(reversed(self.saved), None)

  @property
  def restorable(self) -> dict[str, dict[str, Any]]:
    """Checkpoint name -> replay state, of the newest checkpoints with one."""
    readable = [
        (f"checkpoints/{step}", host["data"])
        for step, host in self.saved.items()
        if host.get("data")
    ]
    return dict(readable[-self.setting("checkpoint", "keep", 1) :])

  def setting(self, section: str, key: str, default: Any) -> Any:
    config = self.json.get("config.json", {}).get("config", {})
    return config.get(section, {}).get(key, default)

  def had(self, kind: str) -> bool:
    return any(event["kind"] == kind for event in self.events)

  def lines(self, name: str) -> Iterator[tuple[int, dict[str, Any] | None]]:
    """Yields number and object of each line; None for an invalid line.

    An incomplete last line of a live run is left out.
    """
    path = self.folder / name
    if not path.exists():
      return
    with path.open("rb") as file:
      for number, line in enumerate(file, 1):
        if line.strip() and (line.endswith(b"\n") or not self.live):
          yield number, jsonl.parse_line(line)

  def cut_lines(self, name: str, damaged: Sequence[int]) -> Findings:
    """Yields a finding for damaged lines, unless crashes explain them all."""
    crashes = 0
    if not (self.finished and self.epoch == 1):
      restarts = self.json.get("totals.json", {}).get("restarts", {})
      crashes = self.epoch + sum(restarts.values())
    if len(damaged) > crashes:
      place = f"{name}, line {', '.join(map(str, damaged[:5]))}"
      yield place, f"{len(damaged)} lines are damaged", REPORT
    elif damaged:
      yield name, f"{len(damaged)} lines cut off by crashes"
