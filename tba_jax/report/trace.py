# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""The timeline as a trace that Perfetto and `chrome://tracing` open.

The format: a JSON object with `traceEvents`, times in microseconds. A process
of the run is a process of the trace, its lanes are threads.
"""

from collections.abc import Iterator
import json
from typing import Any, TextIO

from etils import epath

from tba_jax.report import load
from tba_jax.report import text

_MICROS = 1_000_000
_EVENTS_PID = 1


def trace_events(run: load.Run, start: float) -> Iterator[dict[str, Any]]:
  """Yields names of processes and threads, spans, and the run's events.

  Args:
    run: of which they are.
    start: unix time that is 0 in the trace.
  """
  name = lambda kind, pid, tid, value: {
      "ph": "M",
      "name": kind,
      "pid": pid,
      "tid": tid,
      "args": {"name": text.printable(value, 120)},
  }
  pids: dict[tuple[str, int], int] = {}
  tids: dict[int, int] = {}
  kinds = [text.printable(kind, 60) for kind in run.span_kinds]
  for key in sorted(run.lanes, key=lambda k: (k[0] != "trainer", k)):
    lane = run.lanes[key]
    place = lane.role, lane.index
    if place not in pids:
      pids[place] = _EVENTS_PID + 1 + len(pids)
      role = f"{lane.role}-{lane.index}"
      yield name("process_name", pids[place], 0, role)
    pid = pids[place]
    tid = tids[pid] = tids.get(pid, 0) + 1
    yield name("thread_name", pid, tid, lane.lane or "main")
    for kind, t0, t1 in zip(lane.kinds, lane.t0, lane.t1, strict=True):
      yield {
          "ph": "X",
          "name": kinds[kind],
          "pid": pid,
          "tid": tid,
          "ts": round((t0 - start) * _MICROS),
          "dur": max(0, round((t1 - t0) * _MICROS)),
      }
  yield name("process_name", _EVENTS_PID, 0, "events")
  for event in run.events:
    if load.is_number(event.get("time")):
      yield {
          "ph": "i",
          "s": "g",
          "name": text.printable(str(event.get("kind", "")), 60),
          "pid": _EVENTS_PID,
          "tid": 0,
          "ts": round((event["time"] - start) * _MICROS),
          "args": {"message": text.printable(str(event.get("message")), 500)},
      }


def _write(run: load.Run, file: TextIO, start: float) -> None:
  # One event a line, written as it comes: a long run has millions.
  separator = '{"traceEvents":[\n'
  for event in trace_events(run, start):
    file.write(separator + json.dumps(event, separators=(",", ":")))
    separator = ",\n"
  file.write("\n]}\n")


def write_trace(
    run: load.Run, path: epath.PathLike, start: float
) -> epath.Path:
  """Replaces a file by the trace of a run; returns its path."""
  path = epath.Path(path)
  partial = path.parent / f".{path.name}.partial"
  with partial.open("w") as file:
    _write(run, file, start)
  partial.replace(path)
  return path
