# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Metrics, events and spans as files of JSON lines."""

import collections
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
import contextlib
import dataclasses
import itertools
import json
import logging
import math
import statistics
import threading
import time
from typing import Any, TextIO

from tba_jax.run import files
from tba_jax.run import text
from tba_jax.system import auditing
from tba_jax.system import background
from tba_jax.system import heartbeat
from tba_jax.system import jsonl
from tba_jax.system import processes

# Spans of a kind with this prefix are idle time.
_WAIT_PREFIX = "wait"
FLUSH_EVERY_S = 1.0
_NO_CLOCK = contextlib.nullcontext()
# Most events of one kind that a process writes within so many seconds.
_MAX_EVENTS, _EVENTS_S = 30, 60.0
# Fields that every record of `metrics.jsonl` has.
_HEAD = ("step", "time", "epoch")
# Metrics of evaluations, whose records may come late.
_EVALUATED = ("eval/", "inspect/")
# Kind of event -> what is damaged.
_DAMAGE = {
    "checkpoint_damaged": "checkpoint",
    "damaged": "other file",
    "journal_damaged": "journal",
    "journal_missing": "journal",
    "journal_refused": "journal",
}
OVERLAP_FORMULA = (
    "max(G, T) / W: busy seconds of the mean searcher's cores (G) and of the"
    " trainer's (T) in the W wall-clock seconds of the training loop"
)


# Kinds of events of a healthy run.
_PEACEFUL = frozenset(
    "data idle_devices interrupted journal_room limit logged"
    " one_process profile restart restored sandbox_limited settings_changed"
    " signal store_started store_stopped".split()
)


def is_error(kind: Any, message: Any) -> bool:
  """Returns whether an event reports an error."""
  finished = str(message or "").endswith("(finished)")  # A searcher ended well.
  return kind not in _PEACEFUL and not finished


class MetricsWriter:
  """Writes `metrics.jsonl`: one object per step, with wall-clock time."""

  def __init__(self, lines: files.Lines, *, epoch: int = 0):
    """Takes the open file; `epoch` counts the trainer's starts."""
    self._epoch = epoch
    self._lines = lines

  def write(self, step: int, metrics: Mapping[str, Any]) -> None:
    head = {"step": int(step), "time": time.time(), "epoch": self._epoch}
    self._lines.write({**head, **metrics})

  def close(self) -> None:
    self._lines.close()


@dataclasses.dataclass
class _Window:
  """Events of one kind since `start`, monotonic seconds."""

  start: float
  count: int = 0


class EventLog:
  """Writes `events.jsonl`; an event that cannot be written is logged.

  A process writes a bounded number of events of a kind in a minute, and then
  how many more there were.
  """

  def __init__(
      self,
      lines: files.Lines,
      *,
      role: str = "",
      index: int = 0,
      clock: Callable[[], float] = time.monotonic,
  ):
    """Takes the open file; `role` and `index` name the writing process."""
    self._lines = lines
    self._head = {"role": role, "index": index}
    self._clock = clock
    self._lock = threading.Lock()
    self._windows: dict[str, _Window] = {}

  def write(self, kind: str, message: str, **fields: Any) -> None:
    """Writes one event; `fields` may override role and index."""
    with self._lock:
      now = self._clock()
      self._end_windows(now - _EVENTS_S)
      window = self._windows.setdefault(kind, _Window(now))
      window.count += 1
      if window.count <= _MAX_EVENTS:
        self._write(kind, message, **fields)

  def _end_windows(self, started_until: float) -> None:
    """Ends the windows that started until then; needs the lock."""
    for kind, window in list(self._windows.items()):
      if window.start <= started_until:
        del self._windows[kind]
        if (left_out := window.count - _MAX_EVENTS) > 0:
          passed_s = self._clock() - window.start
          self._write(kind, f"… and {left_out} more in {passed_s:.0f} s")

  def _write(self, kind: str, message: str, **fields: Any) -> None:
    record = {
        "time": time.time(),
        "kind": kind,
        **self._head,
        "message": message,
        **fields,
    }
    try:
      self._lines.write(record)
    except OSError as error:
      logging.error("event not written (%s): %s: %s", error, kind, message)

  def close(self) -> None:
    with self._lock:
      self._end_windows(math.inf)
    with contextlib.suppress(OSError):
      self._lines.close()


def damage(events: Iterable[Mapping[str, Any]]) -> dict[str, int]:
  """Returns how often damage to the run's files was found, by what it hit."""
  kinds = collections.Counter(event.get("kind") for event in events)
  out = {}
  for kind, name in _DAMAGE.items():
    if kinds[kind]:
      out[name] = out.get(name, 0) + kinds[kind]
  return out


def settings_changes(
    events: Iterable[Mapping[str, Any]],
) -> dict[int, dict[str, Any]]:
  """Returns step -> changed settings, (old, new) by key, from that step on.

  A start of the trainer drops the changes from its first step on, since those
  steps were redone.
  """
  out: dict[int, dict[str, Any]] = {}
  for event in events:
    kind, step = event.get("kind"), event.get("step")
    if kind in ("restored", "settings_changed") and isinstance(step, int):
      out = {at: changes for at, changes in out.items() if at < step}
      changes = event.get("changes")
      if isinstance(changes, dict) and all(
          isinstance(pair, list) and len(pair) == 2 for pair in changes.values()
      ):
        out[step] = changes
  return out


def last_per_step(records: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
  """Returns one record per step, sorted: the history that survived restarts.

  A record of a newer epoch drops all steps from its own on, since they were
  redone. Records of one step are merged; later fields win. A record that has
  only evaluations may come late, and is merged into its step.
  """
  by_step: dict[int, dict[str, Any]] = {}
  newest = None
  for record in records:
    step = record.get("step")
    if isinstance(step, bool) or not isinstance(step, int):
      continue
    numbers = {k: v for k, v in record.items() if k not in _HEAD}
    evaluation = numbers and all(k.startswith(_EVALUATED) for k in numbers)
    if evaluation and step in by_step:
      by_step[step].update(numbers)
      continue
    epoch = record.get("epoch", newest)
    if newest is not None and isinstance(epoch, int) and epoch > newest:
      by_step = {s: r for s, r in by_step.items() if s < step}
    if isinstance(epoch, int):
      newest = epoch if newest is None else max(newest, epoch)
    by_step.setdefault(step, {}).update(record)
  return [by_step[step] for step in sorted(by_step)]


class SpanWriter:
  """Writes a role's timeline, `spans/<role>-<index>.jsonl`.

  Thread-safe; threads other than the main loop pass a `lane`. Flushes once
  a second. Spans that cannot be written are dropped, with one log message.
  """

  def __init__(
      self,
      file: TextIO,
      role: str,
      index: int = 0,
      *,
      clock: "BusyClock | None" = None,
  ):
    """Starts the flushing thread.

    Args:
      file: stream open for appending, which the writer closes.
      clock: busy clock that also receives the spans.
    """
    self._head = (
        f'{{"role": {json.dumps(role)}, "index": {int(index)}, "kind": '
    )
    self.clock = clock
    self._activity = heartbeat.Activity(f"{role}-{index}")
    # A step of the wall clock (NTP) must not make a span negative.
    self._wall_offset = time.time() - time.perf_counter()
    self._file = file
    self._pending: collections.deque[tuple[Any, ...]] = collections.deque()
    self._is_closed = False
    self._lock = threading.Lock()
    self._failed = False
    self._flusher = background.Thread("spans", self._flush_loop)

  @contextlib.contextmanager
  def span(self, kind: str, *, lane: str = "", **fields: Any) -> Iterator[None]:
    """Records the time of its body, also if the body raises."""
    clock = self.clock.span(kind, lane) if self.clock else _NO_CLOCK
    marked = contextlib.nullcontext()
    if not lane:
      marked = self._activity.span(kind, waits=is_wait(kind))
    t0 = time.perf_counter()
    try:
      with clock, marked:
        yield
    finally:
      start, end = self._wall_offset + t0, self._wall_offset
      end += time.perf_counter()
      self.add(kind, start, end, lane=lane, **fields)

  def add(
      self, kind: str, t0: float, t1: float, *, lane: str = "", **fields: Any
  ) -> None:
    """Writes a span from t0 to t1, Unix seconds; `clock` does not count it."""
    self._pending.append((kind, t0, t1, lane, fields))

  def _line(
      self, kind: str, t0: float, t1: float, lane: str, fields: dict[str, Any]
  ) -> str:
    rest = f', "lane": {json.dumps(lane)}' if lane else ""
    if fields:
      rest += ", " + jsonl.json_line(fields)[1:-2]
    times = f'"t0": {t0:.6f}, "t1": {t1:.6f}'
    return f"{self._head}{json.dumps(kind)}, {times}{rest}}}\n"

  def progress(self) -> None:
    """Reports progress within a span of the main lane to the supervisor."""
    self._activity.mark()

  def works(self) -> bool:
    """Returns `heartbeat.Activity.works` of the main lane."""
    return self._activity.works

  def flush(self) -> None:
    """Writes pending spans to the file."""
    with self._lock:
      # Popped one by one, so that a span added meanwhile is not lost.
      lines = [
          self._line(*self._pending.popleft())
          for _ in range(len(self._pending))
      ]
      try:
        self._file.write("".join(lines))
        self._file.flush()
        self._failed = False
      except OSError as error:
        if not self._failed:
          logging.error("spans are dropped: %s", error)
        self._failed = True

  def _flush_loop(self, stop: threading.Event) -> None:
    while not stop.wait(FLUSH_EVERY_S):
      self.flush()

  def close(self) -> None:
    """Writes the rest and stops the thread."""
    self._activity.close()
    if self._is_closed:
      return
    self._is_closed = True
    self._flusher.close()
    self.flush()
    with contextlib.suppress(OSError):
      self._file.close()


def is_wait(kind: str) -> bool:
  """Returns whether spans of this kind are waiting, not work."""
  return kind.startswith(_WAIT_PREFIX)


class BusyClock:
  """Measures how long a role worked; thread-safe.

      busy = main + background / num_cores

  `main` is time in which the main lane works, `background` time in which only
  other lanes do: their thread fills one of the cores.
  """

  def __init__(self, num_cores: int | None = None) -> None:
    """Starts the clock; `num_cores` are this process's unless given."""
    cores = num_cores or len(processes.available_cores())
    self._beside_share = 1.0 / max(cores, 1)
    self._lock = threading.Lock()
    self._start = self._changed_at = time.perf_counter()
    self._seconds: dict[str, float] = {}
    # Open spans of the main lane and of other lanes.
    self._num_main = self._num_beside = 0
    self._busy_s = self._taken_s = 0.0

  @contextlib.contextmanager
  def span(self, kind: str, lane: str = "") -> Iterator[None]:
    """Counts the time of its body; by kind only in the main lane."""
    change = 0 if is_wait(kind) else 1
    with self._lock:
      t0 = self._advance()
      self._count(lane, change)
    try:
      yield
    finally:
      with self._lock:
        seconds = self._advance() - t0
        self._count(lane, -change)
        if not lane:
          self._seconds[kind] = self._seconds.get(kind, 0.0) + seconds

  def _count(self, lane: str, change: int) -> None:
    if lane:
      self._num_beside += change
    else:
      self._num_main += change

  def _advance(self) -> float:
    """Adds the time since the last change; returns the time; needs the lock."""
    now = time.perf_counter()
    if self._num_main:
      self._busy_s += now - self._changed_at
    elif self._num_beside:
      self._busy_s += (now - self._changed_at) * self._beside_share
    self._changed_at = now
    return now

  @property
  def busy_s(self) -> float:
    """Busy seconds since the start."""
    with self._lock:
      self._advance()
      return self._busy_s

  def take(self) -> tuple[dict[str, float], float, float]:
    """Returns the times measured since the last call.

    Returns:
      Seconds of the main lane's finished spans by kind, busy seconds, and
      elapsed seconds.
    """
    with self._lock:
      now = self._advance()
      seconds, elapsed_s = self._seconds, now - self._start
      busy_s = self._busy_s - self._taken_s
      self._seconds, self._start, self._taken_s = {}, now, self._busy_s
    return seconds, busy_s, elapsed_s


def busy_share(seconds: Mapping[str, float], elapsed_s: float) -> float:
  """Returns the share of elapsed time spent working, in [0, 1]."""
  busy = sum(s for kind, s in seconds.items() if not is_wait(kind))
  return min(1.0, busy / elapsed_s) if elapsed_s > 0 else 0.0


def overlap_of_ideal(
    generate_s: float, train_s: float, wall_s: float
) -> float | None:
  """Returns how close the roles came to perfect overlap; None for no time.

      overlap = max(G, T) / W

  1 is ideal: the slower side never waited. Without overlap, W = G + T.

  Args:
    generate_s: G, busy seconds of the mean searcher.
    train_s: T, busy seconds of the trainer.
    wall_s: W, wall-clock seconds.
  """
  if wall_s <= 0:
    return None
  return max(generate_s, train_s) / wall_s


def deciding_metric(*evaluations: Mapping[str, Any]) -> str | None:
  """Returns the metric of evaluations by which policies are compared.

  It is the win rate if a judge compares with reference completions. Otherwise
  it is the mean reward, which is what the task asks for, by its better-known
  name pass@1 if each reward is 1 or 0. None if these are missing.
  """
  all_have = lambda key: all(text.is_number(e.get(key)) for e in evaluations)
  if all_have("win_rate"):
    return "win_rate"
  is_share = all_have("pass_at_1")
  if not all_have("mean_reward"):
    return "pass_at_1" if is_share else None
  # Results of earlier versions lack `binary_rewards`.
  equal = is_share and all(
      e.get(
          "binary_rewards",
          math.isclose(e["mean_reward"], e["pass_at_1"], abs_tol=1e-6),
      )
      for e in evaluations
  )
  return "pass_at_1" if equal else "mean_reward"


def more_rows(*evaluations: Mapping[str, Any]) -> dict[str, str]:
  """Returns metric -> label, for parts of the reward and for further splits.

  A single part that equals the reward is left out.
  """
  parts = {key for e in evaluations for key in e if _is_part(key)}
  if len(parts) == 1 and all(
      e.get(*parts) == e.get("mean_reward") for e in evaluations
  ):
    evaluations = [
        {k: v for k, v in e.items() if k not in parts} for e in evaluations
    ]
  labels = {"mean_reward": "mean reward", "pass_at_1": "pass@1"}
  out = {}
  for key in dict.fromkeys(name for e in evaluations for name in e):
    split, slash, name = key.partition("/")
    if split == "reward":
      split, name = "", key
    if not slash or key.endswith(("_stderr", "_interval")):
      continue
    is_part = name.startswith("reward/")
    label = name.replace("/", ", ") if is_part else labels.get(name)
    if label is not None:
      out[key] = f"{split.replace('_', ' ')}: {label}" if split else label
  return out


def _is_part(key: str) -> bool:
  is_error = key.endswith(("_stderr", "_interval"))
  return key.startswith("reward/") and not is_error


class Means:
  """Weighted means of named scalars between two log lines."""

  def __init__(self) -> None:
    self._sums: dict[str, tuple[float, float]] = {}

  def add(self, values: Mapping[str, float], weight: float = 1.0) -> None:
    for name, value in values.items():
      total, weights = self._sums.get(name, (0.0, 0.0))
      self._sums[name] = total + weight * float(value), weights + weight

  def take(self) -> dict[str, float]:
    """Returns the mean of each name since the last take."""
    sums, self._sums = self._sums, {}
    return {
        name: total / weights if weights else float("nan")
        for name, (total, weights) in sums.items()
    }


_EVENT = {"time": float, "kind": str, "message": str}
_SAMPLE = {"step": int, "prompt_id": int, "completion": str}
_RECORD = {"step": int, "time": float, "epoch": int}


def audit_events(run: auditing.AuditedRun) -> auditing.Findings:
  """Reads events.jsonl and samples.jsonl."""
  counts = []
  for name, schema in (("events.jsonl", _EVENT), ("samples.jsonl", _SAMPLE)):
    records, damaged = [], []
    for number, record in run.lines(name):
      if record is None:
        damaged.append(number)
      elif wrong := jsonl.schema_error(record, schema):
        place = f"{name}, line {number}"
        yield place, wrong, auditing.REPORT
      else:
        records.append(record)
    counts.append(f"{len(records)} {name[:-6]}")
    run.events = records if name == "events.jsonl" else run.events
    yield from run.cut_lines(name, damaged)
  yield ", ".join(counts)


def audit_metrics(run: auditing.AuditedRun) -> auditing.Findings:
  """Checks lines, steps and epochs of metrics.jsonl."""
  name = "metrics.jsonl"
  steps: list[tuple[int, int, int]] = []  # (epoch, step, line) of train steps.
  evaluated: set[int] = set()
  damaged: list[int] = []
  epoch = 0
  for number, record in run.lines(name):
    place, wrong, advice = f"{name}, line {number}", "", auditing.COPY
    if record is None:
      damaged.append(number)
      continue
    if wrong := jsonl.schema_error(record, _RECORD):
      advice = auditing.REPORT
    elif not epoch <= record["epoch"] <= max(run.epoch, 1):
      wrong = f"epoch {record['epoch']} after {epoch}"
    else:
      epoch, step = record["epoch"], record["step"]
      if any(key.startswith("eval/") for key in record):
        evaluated.add(step)
      if "train/loss" in record:
        if steps and steps[-1][0] == epoch and steps[-1][1] >= step:
          wrong = f"step {step} comes after step {steps[-1][1]}"
        steps.append((epoch, step, number))
    if wrong:
      yield place, wrong, advice
  yield from run.cut_lines(name, damaged)
  history: list[int] = []
  yield from _step_gaps(run, steps, history)
  # A crash may come after eval.json is written, but before the line.
  if run.finished and run.epoch == 1 and not run.had("not_written"):
    for result in run.json.get("eval.json", {}).get("history", ()):
      if max(result["step"] - 1, 0) not in evaluated:
        what = f"no evaluation after step {result['step']}"
        yield name, what, auditing.REPORT
  every = run.setting("checkpoint", "every_steps", 0)
  last = history[-1] if history else 0
  if not run.saved and (run.finished or 0 < 2 * every <= last):
    yield (
        "checkpoints",
        f"has none, though {name} goes to step {last}",
        f"the run cannot continue and its model is lost; {auditing.COPY}",
    )
  yield f"{len(history)} steps, {len(evaluated)} evaluations, epochs to {epoch}"


def _step_gaps(
    run: auditing.AuditedRun,
    steps: Sequence[tuple[int, int, int]],
    history: list[int],
) -> auditing.Findings:
  """Yields the steps without a line; adds the surviving steps to `history`.

  A newer epoch redoes the steps from its first step on. A crash may lose the
  last lines of an epoch.
  """
  grown = [b[1] - a[1] for a, b in itertools.pairwise(steps) if a[0] == b[0]]
  stride = statistics.mode(grown or [run.setting("log", "every_steps", 1)])
  last_epoch = steps[0][0] if steps else 1
  end = run.json["result.json"]["steps"] if run.finished else 0
  ends = [(steps[-1][0] if steps else 1, end, 0)] if end else []
  for epoch, step, number in [*steps, *ends]:
    while history and history[-1] >= step:
      history.pop()
    expected = history[-1] + stride if history else 0
    # After a restart, the first step is a multiple of the period.
    if step - expected >= (stride if number and history else 1):
      what = f"steps {expected} to {step - 1} have no line"
      if epoch != last_epoch or run.had("not_written"):
        yield "metrics.jsonl", f"{what}: lost in a crash"
      else:
        place = f"line {number}" if number else "the end"
        place = f"metrics.jsonl, before {place}"
        yield place, what, auditing.REPORT
    last_epoch = epoch
    if number:
      history.append(step)
