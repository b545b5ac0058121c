# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Converts spans to the page's timeline, time shares and a trace."""

from collections.abc import Iterator
import json
from typing import Any

from etils import epath
import numpy as np

from tba_jax.report import run_reader
from tba_jax.run import metrics
from tba_jax.run import text
from tba_jax.system import jsonl

# Spans drawn individually, over all lanes. A longer run is drawn as shares in
# bins, with the spans of its beginning and end.
MAX_SPANS = 24_000
NUM_BINS = 1500
TICKS_PER_S = 1000  # resolution of the page's times

_ROLE_ORDER = ("trainer", "searcher", "store", "supervisor")


def _order(key: tuple[str, int, str]) -> tuple[int, str, int, str]:
  role, index, lane = key
  known = role in _ROLE_ORDER
  rank = _ROLE_ORDER.index(role) if known else len(_ROLE_ORDER)
  return rank, role, index, lane


def time_bins(
    lane: run_reader.Lane, start: float, stop: float, num_kinds: int
) -> list:
  """Returns the kinds present and, for each, NUM_BINS shares in percent."""
  edges = np.linspace(start, stop, NUM_BINS + 1)
  width = (stop - start) / NUM_BINS
  t0, t1 = np.asarray(lane.t0), np.asarray(lane.t1)
  kinds = np.asarray(lane.kinds)
  present = [k for k in range(num_kinds) if (kinds == k).any()]
  shares = []
  for kind in present:
    # Busy seconds before each edge from sorted starts and ends, so that a span
    # across an edge is divided between both bins.
    starts, ends = np.sort(t0[kinds == kind]), np.sort(t1[kinds == kind])
    before = lambda points: np.searchsorted(points, edges, side="right")
    summed = lambda points: np.concatenate([[0.0], np.cumsum(points)])
    seconds = (
        before(starts) * edges
        - summed(starts)[before(starts)]
        - before(ends) * edges
        + summed(ends)[before(ends)]
    )
    share = np.clip(np.diff(seconds) / width, 0.0, 1.0)
    shares.append([int(x) for x in np.rint(100 * share)])
  return [present, shares]


def _spans(lane: run_reader.Lane, origin: float, keep: int) -> list[list[int]]:
  """Returns [kind, start, duration] in ticks of the first and last spans."""
  count = len(lane.t0)
  if count <= keep:
    chosen = range(count)
  else:
    chosen = [*range(keep // 4), *range(count - (keep - keep // 4), count)]
  out = []
  for i in chosen:
    start = round((lane.t0[i] - origin) * TICKS_PER_S)
    length = round((lane.t1[i] - lane.t0[i]) * TICKS_PER_S)
    out.append([lane.kinds[i], start, max(0, length)])
  return out


def origin(run: run_reader.RunData) -> float:
  """Returns the Unix time of the run's first activity."""
  times = [min(lane.t0) for lane in run.lanes.values() if len(lane.t0)]
  times += [
      r["time"]
      for r in (*run.records[:1], *run.sft_records[:1], *run.events[:1])
      if text.is_number(r.get("time"))
  ]
  if text.is_number(run.status.get("started")):
    times.append(run.status["started"])
  return min(times, default=0.0)


def ordered(run: run_reader.RunData) -> list[tuple[str, int, str]]:
  """Returns the keys of lanes with spans, the trainer's first."""
  return [k for k in sorted(run.lanes, key=_order) if len(run.lanes[k].t0)]


def timeline(run: run_reader.RunData) -> dict[str, Any]:
  """Returns lanes, kinds and extent of the timeline; {} without spans."""
  lanes = [run.lanes[key] for key in ordered(run)]
  if not lanes:
    return {}
  start = origin(run)
  stop = max(max(lane.t1) for lane in lanes)
  total = sum(len(lane.t0) for lane in lanes)
  thinned = total > MAX_SPANS
  keep = max(200, MAX_SPANS // len(lanes)) if thinned else total
  out = []
  for lane in lanes:
    row: dict[str, Any] = {
        "role": lane.role,
        "index": lane.index,
        "lane": lane.lane,
        "spans": _spans(lane, start, keep),
        "total": len(lane.t0),
    }
    if len(lane.t0) > keep:
      row["bins"] = time_bins(lane, start, stop, len(run.span_kinds))
      row["detail_until"] = row["spans"][keep // 4 - 1][1]
      row["detail_from"] = row["spans"][keep // 4][1]
    out.append(row)
  return {
      "origin": start,
      "stop": round((stop - start) * TICKS_PER_S),
      "ticks_per_s": TICKS_PER_S,
      "kinds": run.span_kinds,
      "waits": [metrics.is_wait(kind) for kind in run.span_kinds],
      "lanes": out,
      "thinned": thinned,
      "total": total,
  }


def _seconds(lane: run_reader.Lane, kinds: list[str]) -> dict[str, float]:
  lengths = np.asarray(lane.t1) - np.asarray(lane.t0)
  sums = np.bincount(np.asarray(lane.kinds), lengths, minlength=len(kinds))
  return {kind: float(s) for kind, s in zip(kinds, sums, strict=True) if s > 0}


def where_time_went(run: run_reader.RunData) -> list[dict[str, Any]]:
  """Returns seconds by kind for each lane; the rest is `unmeasured_s`."""
  rows = []
  for key in ordered(run):
    lane = run.lanes[key]
    seconds = _seconds(lane, run.span_kinds)
    elapsed = max(lane.t1) - min(lane.t0)
    rest = elapsed - sum(seconds.values())
    rows.append(
        {
            "role": lane.role,
            "index": lane.index,
            "lane": lane.lane,
            "elapsed_s": elapsed,
            "busy_share": metrics.busy_share(seconds, elapsed),
            "seconds": seconds,
            "unmeasured_s": max(0.0, rest),
        }
    )
  return rows


def seconds_per_step(run: run_reader.RunData) -> dict[str, dict[str, float]]:
  """Returns role -> kind -> seconds of work for each step of training.

  Covers all lanes, averaged over a role's processes, from the end of the first
  step, which compiles, to the end of the last; {} for fewer than two steps.
  """
  work = [k for k in run.span_kinds if not metrics.is_wait(k)]
  main = run.lanes.get(("trainer", 0, ""))
  if main is None or "step" not in run.span_kinds:
    return {}
  is_step = np.asarray(main.kinds) == run.span_kinds.index("step")
  ends = np.asarray(main.t1)[is_step]
  steps = run_reader.column(run.records, "time/step_s")[0]
  if len(ends) < 2 or len(steps) < 2 or ends[-1] <= ends[0]:
    return {}
  out: dict[str, dict[str, float]] = {}
  count = lambda role: len({k[1] for k in run.lanes if k[0] == role})
  for key in ordered(run):
    lane, role = run.lanes[key], key[0]
    t0 = np.clip(np.asarray(lane.t0), ends[0], ends[-1])
    t1 = np.clip(np.asarray(lane.t1), ends[0], ends[-1])
    kinds = np.asarray(lane.kinds)
    for kind in work:
      of_kind = kinds == run.span_kinds.index(kind)
      seconds = float((t1 - t0)[of_kind].sum()) / count(role)
      if seconds > 0:
        of_role = out.setdefault(role, {})
        of_role[kind] = of_role.get(kind, 0.0) + seconds
  num_steps = int(steps[-1] - steps[0])
  return {
      role: {kind: s / num_steps for kind, s in kinds.items()}
      for role, kinds in out.items()
  }


# The trace: times in microseconds; a lane is a thread of its process.
_MICROS = 1_000_000
_EVENTS_PID = 1


def trace_events(
    run: run_reader.RunData, start: float
) -> Iterator[dict[str, Any]]:
  """Yields names of processes and threads, spans, and the run's events.

  `start` is the Unix time that is 0 in the trace.
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
    if text.is_number(event.get("time")):
      yield {
          "ph": "i",
          "s": "g",
          "name": text.printable(event.get("kind", ""), 60),
          "pid": _EVENTS_PID,
          "tid": 0,
          "ts": round((event["time"] - start) * _MICROS),
          "args": {"message": text.printable(event.get("message"), 500)},
      }


def write_trace(
    run: run_reader.RunData, path: epath.PathLike, start: float
) -> None:
  """Replaces a file by the trace of a run."""
  # Events are streamed, one per line: a long run has millions.
  separator = '{"traceEvents":[\n'
  with jsonl.replacing(path) as file:
    for event in trace_events(run, start):
      line = separator + json.dumps(event, separators=(",", ":"))
      file.write(line.encode())
      separator = ",\n"
    file.write(b"\n]}\n")
