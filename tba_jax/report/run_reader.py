# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Reads a run directory; the run may be live, finished or killed."""

import array
import collections
from collections.abc import Mapping, Sequence
import dataclasses
import functools
import sys
from typing import Any

from etils import epath
import numpy as np

from tba_jax.run import metrics
from tba_jax.run import text
from tba_jax.system import jsonl

# Folder of a run's counterfactuals, one JSON file each.
COUNTERFACTUALS = "counterfactuals"
_COUNTERFACTUAL = {"label": str, "steps": [{"step": int}]}
# Limits on what a page shows.
MAX_SAMPLES = 2000
MAX_PROMPT_CHARS = 1000
MAX_COMPLETION_CHARS = 2000
MAX_REASON_CHARS = 500
MAX_TOKENS = 256
MAX_TOKEN_CHARS = 64
MAX_EVENTS = 2000
MAX_COUNTERFACTUALS = 7
_empty = functools.partial(dataclasses.field, default_factory=dict)
_SCHEMAS = {
    "eval.json": {"before?": {}, "after?": {}, "history?": [{"step": int}]},
    "summary.json": {"before?": {}, "after?": {}},
}


@dataclasses.dataclass
class Lane:
  """Spans of one thread of a process, in file order.

  role, index: role and index of the process.
  lane: name of the thread, "" for the main loop.
  kinds: index of each span's kind in `RunData.span_kinds`.
  t0, t1: start and end of each span, Unix seconds.
  """

  role: str
  index: int
  lane: str
  kinds: array.array = dataclasses.field(
      default_factory=lambda: array.array("H")
  )
  t0: array.array = dataclasses.field(default_factory=lambda: array.array("d"))
  t1: array.array = dataclasses.field(default_factory=lambda: array.array("d"))


@dataclasses.dataclass
class RunData:
  """Contents of a run directory; any part may be empty.

  config, eval, ledger, status, summary: JSON files of these names.
  lines: metrics records as written.
  lanes: spans by (role, index, lane).
  events: the newest events, oldest first; num_events: of the whole run.
  changes: changed settings by step; see `metrics.settings_changes`.
  samples: evenly spaced samples, printable; num_samples: of the whole run.
  skipped: number of unreadable lines by file.
  counterfactuals: the newest counterfactual reruns: label, and steps with
    metrics.
  damaged: errors of the JSON files that cannot be read and are left out.
  """

  workdir: epath.Path | None = None
  config: dict[str, Any] = _empty()
  eval: dict[str, Any] = _empty()
  ledger: dict[str, Any] = _empty()
  status: dict[str, Any] = _empty()
  summary: dict[str, Any] = _empty()
  lines: Sequence[Mapping[str, Any]] = ()
  sft_records: Sequence[Mapping[str, Any]] = ()
  lanes: dict[tuple[str, int, str], Lane] = _empty()
  span_kinds: Sequence[str] = ()
  events: Sequence[Mapping[str, Any]] = ()
  num_events: int = 0
  changes: dict[int, dict[str, Any]] = _empty()
  samples: Sequence[Mapping[str, Any]] = ()
  num_samples: int = 0
  skipped: dict[str, int] = _empty()
  counterfactuals: Sequence[Mapping[str, Any]] = ()
  damaged: Sequence[str] = ()

  @functools.cached_property
  def records(self) -> list[dict[str, Any]]:
    """One record per step, the history that survived restarts."""
    return metrics.last_per_step(self.lines)

  def setting(self, *keys: str) -> Any:
    """Returns a setting of the run's config, None if missing."""
    value = self.config.get("config")
    for key in keys:
      value = value.get(key) if isinstance(value, dict) else None
    return value


def column(
    records: Sequence[Mapping[str, Any]], name: str
) -> tuple[np.ndarray, np.ndarray]:
  """Returns the steps and values of a metric, [S] int64 and [S] float64."""
  rows = [(r["step"], r[name]) for r in records if text.is_number(r.get(name))]
  steps, values = zip(*rows, strict=True) if rows else ((), ())
  return np.array(steps, np.int64), np.array(values, np.float64)


def printable_sample(record: Mapping[str, Any]) -> dict[str, Any]:
  """Truncates a sample and makes it printable."""
  string = lambda name, limit: text.printable(record.get(name, ""), limit)
  number = lambda value: value if text.is_number(value) else None
  tokens, logprobs = record.get("tokens"), record.get("logprobs")
  if not isinstance(tokens, list) or not isinstance(logprobs, list):
    tokens, logprobs = [], []
  pairs = list(zip(tokens, logprobs, strict=False))
  shown = pairs[:MAX_TOKENS]
  return {
      **{
          name: number(record.get(name))
          for name in ("step", "version", "prompt_id", "reward")
      },
      "prompt": string("prompt", MAX_PROMPT_CHARS),
      "completion": string("completion", MAX_COMPLETION_CHARS),
      "reason": string("reason", MAX_REASON_CHARS),
      "tokens": [text.printable(token, MAX_TOKEN_CHARS) for token, _ in shown],
      "logprobs": [
          round(logprob, 4) if text.is_number(logprob) else None
          for _, logprob in shown
      ],
      "hidden_tokens": len(pairs) - len(shown),
  }


class _Reader:
  """Reads the files of a run directory; records what is unreadable."""

  def __init__(self, workdir: epath.Path):
    self._workdir = workdir
    self.skipped = collections.Counter()
    self.damaged: list[str] = []

  def lines(self, name: str) -> Any:
    skip = functools.partial(self.skipped.update, (name,))
    return jsonl.iter_jsonl(self._workdir / name, skip)

  def object(self, name: str) -> dict[str, Any]:
    try:
      in_folder = name.startswith(f"{COUNTERFACTUALS}/")
      schema = _COUNTERFACTUAL if in_folder else _SCHEMAS.get(name, {})
      return jsonl.read_object(self._workdir / name, schema) or {}
    except ValueError as error:
      self.damaged.append(str(error))
      return {}

  def counterfactuals(self) -> list[dict[str, Any]]:
    """Returns the newest `MAX_COUNTERFACTUALS`, oldest first."""
    folder = self._workdir / COUNTERFACTUALS
    paths = folder.glob("*.json") if folder.exists() else ()
    paths = sorted(paths, key=lambda path: path.stat().mtime)
    objects = (
        self.object(f"{COUNTERFACTUALS}/{path.name}")
        for path in paths[-MAX_COUNTERFACTUALS:]
    )
    return [value for value in objects if value]

  def samples(self) -> tuple[list[dict[str, Any]], int]:
    """Returns at most MAX_SAMPLES samples, evenly spaced, and their total.

    Keeps every n-th sample; doubles n when too many are kept.
    """
    samples, stride, count = [], 1, 0
    for record in self.lines("samples.jsonl"):
      if count % stride == 0:
        samples.append(printable_sample(record))
        if len(samples) > MAX_SAMPLES:
          samples = samples[::2]
          stride *= 2
      count += 1
    return samples, count

  def lanes(self) -> tuple[dict[tuple[str, int, str], Lane], list[str]]:
    """Returns the spans by lane, and the names of their kinds."""
    lanes: dict[tuple[str, int, str], Lane] = {}
    kinds: dict[str, int] = {}
    folder = self._workdir / "spans"
    for path in sorted(folder.glob("*.jsonl")) if folder.exists() else ():
      name = f"spans/{path.name}"
      for span in self.lines(name):
        t0, t1, index = span.get("t0"), span.get("t1"), span.get("index", 0)
        numbers = text.is_number(t0) and text.is_number(t1)
        if not (numbers and isinstance(index, int)):
          self.skipped[name] += 1
          continue
        key = str(span.get("role", "")), index, str(span.get("lane", ""))
        lane = lanes.setdefault(key, Lane(*key))
        kind = str(span.get("kind", ""))
        lane.kinds.append(kinds.setdefault(kind, len(kinds)))
        lane.t0.append(t0)
        lane.t1.append(t1)
    return lanes, list(kinds)


def read_run(workdir: epath.PathLike) -> RunData:
  """Reads a run directory, and warns on stderr of damaged files.

  Raises ValueError if the directory does not exist.
  """
  workdir = epath.Path(workdir)
  if not workdir.is_dir():
    raise ValueError(f"no run directory at {workdir}")
  reader = _Reader(workdir)
  events = list(reader.lines("events.jsonl"))
  samples, num_samples = reader.samples()
  lanes, span_kinds = reader.lanes()
  run = RunData(
      workdir=workdir,
      config=reader.object("config.json"),
      eval=reader.object("eval.json"),
      ledger=reader.object("ledger.json"),
      status=reader.object("status.json"),
      summary=reader.object("summary.json"),
      lines=list(reader.lines("metrics.jsonl")),
      sft_records=metrics.last_per_step(reader.lines("sft/metrics.jsonl")),
      lanes=lanes,
      span_kinds=span_kinds,
      events=events[-MAX_EVENTS:],
      num_events=len(events),
      changes=metrics.settings_changes(events),
      samples=samples,
      num_samples=num_samples,
      counterfactuals=reader.counterfactuals(),
      skipped=dict(reader.skipped),
      damaged=reader.damaged,
  )
  for line in run.damaged:
    print(f"warning: {line}; left out of the report", file=sys.stderr)
  for name, count in sorted(run.skipped.items()):
    what = f"{count} lines cannot be read, cut by a crash or damaged"
    print(f"warning: {workdir / name}: {what}", file=sys.stderr)
  return run
