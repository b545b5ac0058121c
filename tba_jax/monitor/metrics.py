# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""What a run writes about itself: metrics, spans, events, state; and means.

Files are read and written by `jsonl`; here is what stands in them. Nothing
here imports jax: the store's host and the supervisor read these files too.
"""

import collections
from collections.abc import Iterable, Iterator, Mapping
import contextlib
import json
import threading
import time
from typing import Any

from etils import epath

from tba_jax.system import jsonl

# The readers and writers of files, for users of this module.
Records = jsonl.Records
read_jsonl = jsonl.read_jsonl
read_json = jsonl.read_json
atomic_write_json = jsonl.atomic_write_json

# A span whose kind starts so is time in which the role had nothing to do.
WAIT_PREFIX = "wait"
# What every record of a step has.
_HEAD = ("step", "time", "epoch")
FLUSH_EVERY_S = 1.0


class MetricsWriter:
  """Writes `metrics.jsonl`: one object a step, with its wall-clock time."""

  def __init__(self, path: epath.PathLike, *, epoch: int = 0):
    """Opens the file for appending.

    Args:
      path: the file.
      epoch: start count of the writer. A reader drops the steps of an older
        epoch that a newer one did again (`last_per_step`).
    """
    self._epoch = epoch
    self._lines = jsonl.LineWriter(path)

  def write(self, step: int, metrics: Mapping[str, Any]) -> None:
    self._lines.write(
        {
            "step": int(step),
            "time": time.time(),
            "epoch": self._epoch,
            **metrics,
        }
    )

  def close(self) -> None:
    self._lines.close()


class EventLog:
  """Writes `events.jsonl`: restarts, guards, refusals, phases."""

  def __init__(self, path: epath.PathLike):
    self._lines = jsonl.LineWriter(path)

  def write(
      self,
      kind: str,
      message: str,
      *,
      role: str = "",
      index: int = 0,
      **fields: Any,
  ) -> None:
    self._lines.write(
        {
            "time": time.time(),
            "kind": kind,
            "role": role,
            "index": index,
            "message": message,
            **fields,
        }
    )

  def close(self) -> None:
    self._lines.close()


def last_per_step(records: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
  """Returns one record a step, sorted: the history that survived restarts.

  Of two records of one step the later one's fields win. Where a record's
  `epoch` is newer than what came before, the steps from its own on are redone:
  they are dropped before it is taken. What evaluates a step may come after
  later ones, and redoes nothing: it only adds its numbers to the step.
  """
  by_step: dict[int, dict[str, Any]] = {}
  newest = None
  for record in records:
    step = record.get("step")
    if isinstance(step, bool) or not isinstance(step, int):
      continue
    numbers = {k: v for k, v in record.items() if k not in _HEAD}
    adds = numbers and all(k.startswith("eval/") for k in numbers)
    if adds and step in by_step:
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
  """Writes what a role did when: `spans/<role>-<index>.jsonl`.

  A span costs a few microseconds. Lines are written by a thread of the writer
  at least once a second, so a kill loses at most that. Safe to share between
  threads; a thread that works beside the main loop names its own `lane`.
  """

  def __init__(
      self,
      path: epath.PathLike,
      role: str,
      index: int = 0,
      *,
      clock: "BusyClock | None" = None,
  ):
    """Opens the file and starts the flushing thread.

    Args:
      path: the file.
      role: role of the process.
      index: its number among its role.
      clock: also receives each span of the main lane, where given.
    """
    self._head = (
        f'{{"role": {json.dumps(role)}, "index": {int(index)}, "kind": '
    )
    self._clock = clock
    # Wall-clock steps (NTP) must not make a span negative or overlapping.
    self._wall_offset = time.time() - time.perf_counter()
    self._file = jsonl.open_append(path)
    self._pending: collections.deque[str] = collections.deque()
    self._lock = threading.Lock()
    self._closed = threading.Event()
    self._error: BaseException | None = None
    self._thread = threading.Thread(
        target=self._flush_loop, name="spans", daemon=True
    )
    self._thread.start()

  @contextlib.contextmanager
  def span(self, kind: str, *, lane: str = "", **fields: Any) -> Iterator[None]:
    """Records the time of its body, also where the body raises."""
    t0 = time.perf_counter()
    try:
      yield
    finally:
      self.add(
          kind,
          self._wall_offset + t0,
          self._wall_offset + time.perf_counter(),
          lane=lane,
          **fields,
      )

  def add(
      self, kind: str, t0: float, t1: float, *, lane: str = "", **fields: Any
  ) -> None:
    """Records a span from t0 to t1, unix seconds.

    Raises:
      OSError: an earlier span could not be written.
    """
    if self._error is not None:
      raise self._error
    if self._clock is not None and not lane:
      self._clock.add(kind, t1 - t0)
    rest = f', "lane": {json.dumps(lane)}' if lane else ""
    if fields:
      rest += ", " + jsonl.json_line(fields)[1:-2]
    times = f'"t0": {t0:.6f}, "t1": {t1:.6f}'
    self._pending.append(f"{self._head}{json.dumps(kind)}, {times}{rest}}}\n")

  def flush(self) -> None:
    """Writes what is pending to the file."""
    with self._lock:
      # Popped one by one, so that a span added meanwhile is never lost.
      lines = [self._pending.popleft() for _ in range(len(self._pending))]
      if lines:
        self._file.write("".join(lines))
        self._file.flush()

  def _flush_loop(self) -> None:
    while not self._closed.wait(FLUSH_EVERY_S):
      try:
        self.flush()
      except OSError as error:
        self._error = error
        return

  def close(self) -> None:
    """Writes the rest and ends the thread."""
    self._closed.set()
    self._thread.join()
    self.flush()
    self._file.close()


def read_spans(workdir: epath.PathLike) -> jsonl.Records:
  """Returns all readable spans of a run directory, sorted by start."""
  spans = jsonl.Records()
  folder = epath.Path(workdir) / "spans"
  if not folder.exists():
    return spans
  for path in sorted(folder.glob("*.jsonl")):
    read = jsonl.read_jsonl(path)
    spans.skipped += read.skipped
    for span in read:
      times = span.get("t0"), span.get("t1")
      if all(isinstance(t, int | float) for t in times) and "kind" in span:
        spans.append(span)
      else:
        spans.skipped += 1
  spans.sort(key=lambda span: span["t0"])
  return spans


def is_wait(kind: str) -> bool:
  """True where a span of this kind is waiting, not work."""
  return kind.startswith(WAIT_PREFIX)


class BusyClock:
  """Seconds spent by kind of work, summed; safe to share between threads."""

  def __init__(self) -> None:
    self._lock = threading.Lock()
    self._start = time.perf_counter()
    self._seconds: dict[str, float] = {}

  def add(self, kind: str, seconds: float) -> None:
    with self._lock:
      self._seconds[kind] = self._seconds.get(kind, 0.0) + seconds

  @contextlib.contextmanager
  def measure(self, kind: str) -> Iterator[None]:
    """Adds the time of its body to `kind`, also where the body raises."""
    t0 = time.perf_counter()
    try:
      yield
    finally:
      self.add(kind, time.perf_counter() - t0)

  def seconds(self) -> dict[str, float]:
    """Returns the seconds of each kind so far."""
    with self._lock:
      return dict(self._seconds)

  def take(self) -> tuple[dict[str, float], float]:
    """Returns seconds by kind and elapsed seconds since the last take."""
    with self._lock:
      now = time.perf_counter()
      seconds, elapsed = self._seconds, now - self._start
      self._seconds, self._start = {}, now
    return seconds, elapsed


def busy_share(seconds: Mapping[str, float], elapsed_s: float) -> float:
  """Returns the share of the elapsed time that was work, in [0, 1]."""
  busy = sum(s for kind, s in seconds.items() if not is_wait(kind))
  return min(1.0, busy / elapsed_s) if elapsed_s > 0 else 0.0


def overlap_of_ideal(
    generate_s: float, train_s: float, wall_s: float
) -> float | None:
  """Returns how near a stretch of the run came to perfect overlap.

      overlap = max(G, T) / W

  Side by side, the two roles take max(G, T) at best. 1 is that best: the
  slower side never waited. In turns they take G + T.

  Args:
    generate_s: G, busy seconds of the mean searcher.
    train_s: T, busy seconds of the trainer in the same stretch of the run.
    wall_s: W, wall-clock seconds of that stretch.

  Returns:
    The share, None for an empty stretch.
  """
  if wall_s <= 0:
    return None
  return max(generate_s, train_s) / wall_s


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


def write_status(path: epath.PathLike, status: Mapping[str, Any]) -> None:
  """Replaces `status.json` by the live state, with the time of writing."""
  atomic_write_json(path, {"time": time.time(), **status})
