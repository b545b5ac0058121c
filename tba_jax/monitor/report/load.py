# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Reads a run directory, also of a run that still goes on or was killed."""

import array
from collections.abc import Mapping, Sequence
import dataclasses
import math
from typing import Any
import unicodedata

from etils import epath
import numpy as np

from tba_jax.monitor import metrics
from tba_jax.system import jsonl

# Makes text that a model wrote harmless to show, on a page or a terminal.


# Control characters have pictures of their own from here on: ESC is ␛.
_PICTURES = 0x2400
_DELETE_PICTURE = "␡"
_KEPT = "\n\t"


def _visible(char: str) -> str:
  code = ord(char)
  if code < 0x20:
    return chr(_PICTURES + code)
  if code == 0x7F:
    return _DELETE_PICTURE
  return f"⟦U+{code:04X}⟧"


def printable(text: str, limit: int = 0, *, one_line: bool = False) -> str:
  """Returns `text` with everything that acts instead of showing made visible.

  Control characters (so ANSI escapes), marks that turn the direction of
  writing, invisible format characters, lone surrogates and unassigned or
  private code points are written out. Line ends and tabs stay.

  Args:
    text: any string.
    limit: longest result in characters of `text`; what is cut is counted in
      the result. 0 = no limit.
    one_line: write line ends and tabs out too.
  """
  cut = max(0, len(text) - limit) if limit else 0
  kept = "" if one_line else _KEPT
  shown = text[: len(text) - cut]
  if not shown.isprintable() or not shown.isascii():
    shown = "".join(
        c
        if c in kept
        or unicodedata.category(c)[0] != "C"
        and c not in "\u2028\u2029"
        else _visible(c)
        for c in shown
    )
  return f"{shown} … ({cut:,} more characters)" if cut else shown


# What the page can show of samples: so many, and so much of each.
MAX_SAMPLES = 2000
MAX_PROMPT_CHARS = 1000
MAX_COMPLETION_CHARS = 2000
MAX_REASON_CHARS = 500
MAX_TOKENS = 256
MAX_TOKEN_CHARS = 64
MAX_EVENTS = 2000


@dataclasses.dataclass
class Lane:
  """Spans of one thread of one process, in the order of the file.

  role, index, lane: whose they are; lane is "" for the main loop.
  kinds: kind of each span, as a number into `Run.span_kinds`.
  t0, t1: its start and end, unix seconds.
  """

  role: str
  index: int
  lane: str
  kinds: array.array
  t0: array.array
  t1: array.array


@dataclasses.dataclass
class Run:
  """What a run directory holds; each part may be empty.

  workdir: the directory.
  config, eval, ledger, status, summary: the JSON files of these names.
  records: one metrics record a step, the surviving history.
  sft_records: the same of supervised fine-tuning.
  lanes: spans by (role, index, lane).
  span_kinds: names of the kinds of spans.
  events: the newest events, oldest first.
  num_events: how many there are.
  samples: evenly chosen samples, made printable.
  num_samples: how many there are.
  skipped: unreadable lines by file.
  """

  workdir: epath.Path
  config: dict[str, Any]
  eval: dict[str, Any]
  ledger: dict[str, Any]
  status: dict[str, Any]
  summary: dict[str, Any]
  records: list[dict[str, Any]]
  sft_records: list[dict[str, Any]]
  lanes: dict[tuple[str, int, str], Lane]
  span_kinds: list[str]
  events: list[dict[str, Any]]
  num_events: int
  samples: list[dict[str, Any]]
  num_samples: int
  skipped: dict[str, int]


def is_number(value: Any) -> bool:
  """True for a finite int or float; a bool is no number."""
  if isinstance(value, bool) or not isinstance(value, int | float):
    return False
  return math.isfinite(value)


def column(
    records: Sequence[Mapping[str, Any]], name: str
) -> tuple[np.ndarray, np.ndarray]:
  """Returns a metric against steps, of the records that have it.

  Args:
    records: one a step, `Run.records` say.
    name: of the metric, "train/kl" say.

  Returns:
    Steps, [S] int64, and values, [S] float64; both finite, both empty where no
    record has the metric.
  """
  rows = [(r["step"], r[name]) for r in records if is_number(r.get(name))]
  steps, values = zip(*rows, strict=True) if rows else ((), ())
  return np.array(steps, np.int64), np.array(values, np.float64)


class _Skips:
  """Counts unreadable lines by file."""

  def __init__(self) -> None:
    self.by_file: dict[str, int] = {}

  def counter(self, name: str) -> Any:
    def count() -> None:
      self.by_file[name] = self.by_file.get(name, 0) + 1

    return count


def _read_object(path: epath.Path) -> dict[str, Any]:
  value = jsonl.read_json(path)
  return value if isinstance(value, dict) else {}


def printable_sample(record: Mapping[str, Any]) -> dict[str, Any]:
  """Returns a sample as the page shows it, cut to size and made printable."""
  string = lambda name: str(record.get(name, ""))
  number = lambda name: record[name] if is_number(record.get(name)) else None
  tokens, logprobs = record.get("tokens"), record.get("logprobs")
  if not isinstance(tokens, list) or not isinstance(logprobs, list):
    tokens, logprobs = [], []
  pairs = list(zip(tokens, logprobs, strict=False))
  return {
      "step": number("step"),
      "version": number("version"),
      "prompt_id": number("prompt_id"),
      "reward": number("reward"),
      "prompt": printable(string("prompt"), MAX_PROMPT_CHARS),
      "completion": printable(string("completion"), MAX_COMPLETION_CHARS),
      "reason": printable(string("reason"), MAX_REASON_CHARS),
      "tokens": [
          printable(str(token), MAX_TOKEN_CHARS)
          for token, _ in pairs[:MAX_TOKENS]
      ],
      "logprobs": [
          round(logprob, 4) if is_number(logprob) else None
          for _, logprob in pairs[:MAX_TOKENS]
      ],
      "hidden_tokens": max(0, len(pairs) - MAX_TOKENS),
  }


def _read_samples(
    path: epath.Path, skips: _Skips
) -> tuple[list[dict[str, Any]], int]:
  """Returns at most MAX_SAMPLES samples spread over the run, and their count.

  Keeps each n-th sample, and doubles n whenever too many are kept.
  """
  kept: list[dict[str, Any]] = []
  stride, count = 1, 0
  for record in jsonl.iter_jsonl(path, skips.counter(path.name)):
    if count % stride == 0:
      kept.append(printable_sample(record))
      if len(kept) > MAX_SAMPLES:
        kept = kept[::2]
        stride *= 2
    count += 1
  return kept, count


def _read_lanes(
    folder: epath.Path, skips: _Skips
) -> tuple[dict[tuple[str, int, str], Lane], list[str]]:
  lanes: dict[tuple[str, int, str], Lane] = {}
  kinds: dict[str, int] = {}
  paths = sorted(folder.glob("*.jsonl")) if folder.exists() else []
  for path in paths:
    name = f"spans/{path.name}"
    skip = skips.counter(name)
    for span in jsonl.iter_jsonl(path, skip):
      t0, t1, index = span.get("t0"), span.get("t1"), span.get("index", 0)
      if not (is_number(t0) and is_number(t1) and isinstance(index, int)):
        skip()
        continue
      key = str(span.get("role", "")), index, str(span.get("lane", ""))
      if key not in lanes:
        arrays = array.array("H"), array.array("d"), array.array("d")
        lanes[key] = Lane(*key, *arrays)
      kind = str(span.get("kind", ""))
      lanes[key].kinds.append(kinds.setdefault(kind, len(kinds)))
      lanes[key].t0.append(t0)
      lanes[key].t1.append(t1)
  return lanes, list(kinds)


def read_run(workdir: epath.PathLike) -> Run:
  """Returns what a run directory holds; missing files are empty parts.

  Raises:
    ValueError: there is no such directory.
  """
  workdir = epath.Path(workdir)
  if not workdir.is_dir():
    raise ValueError(f"no run directory at {workdir}")
  skips = _Skips()

  def records(name: str) -> list[dict[str, Any]]:
    return metrics.last_per_step(
        jsonl.iter_jsonl(workdir / name, skips.counter(name))
    )

  events = list(
      jsonl.iter_jsonl(workdir / "events.jsonl", skips.counter("events.jsonl"))
  )
  samples, num_samples = _read_samples(workdir / "samples.jsonl", skips)
  lanes, span_kinds = _read_lanes(workdir / "spans", skips)
  return Run(
      workdir=workdir,
      config=_read_object(workdir / "config.json"),
      eval=_read_object(workdir / "eval.json"),
      ledger=_read_object(workdir / "ledger.json"),
      status=_read_object(workdir / "status.json"),
      summary=_read_object(workdir / "summary.json"),
      records=records("metrics.jsonl"),
      sft_records=records("sft/metrics.jsonl"),
      lanes=lanes,
      span_kinds=span_kinds,
      events=events[-MAX_EVENTS:],
      num_events=len(events),
      samples=samples,
      num_samples=num_samples,
      skipped=skips.by_file,
  )
