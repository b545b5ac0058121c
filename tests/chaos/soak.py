# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""What grows in a run of very many steps.

    python -m tests.chaos --config=configs/arithmetic.py:smoke soak \\
        MINUTES [FOLDER [KILL_EVERY_S]]

The config is run with store, trainer and two searchers as processes and without
an end, for so many minutes; nothing in it sleeps. Of each process memory (its
share of it, PSS), descriptors and threads are looked at every two seconds, and
the bytes of spool, journal, logs and all other files of the run. Then the run
is interrupted, which must end it with its ledger saved and no process left. The
same command goes on with the run in FOLDER. With KILL_EVERY_S, a searcher is
killed as often, in turn, once a step was made since the last: what they leave
behind is seen as well.

A line through the last two thirds of each series tells its slope, with an error
from the means of twelve blocks, and so with the noise of slow waves in it. A
series grows if its slope is above the error's 99 % interval, its rise is above
that of a page or a file here and there (`_LEAST`), and more than a quarter of
the rise is left without the largest jump: a cache that fills once is none.
Files that get a line for each step (`_BY_STEP`) must not grow faster than by a
constant number of bytes for each step. Needs Linux.
"""

import collections
from collections.abc import Mapping, Sequence
import contextlib
import dataclasses
import os
import pathlib
import re
import signal
import subprocess
import sys
import tempfile
import time
from typing import Any

import ml_collections
import numpy as np

from tba_jax.run import run_directory
from tba_jax.system import jsonl
from tba_jax.transport.params import shared_files
from tests.chaos import auditor

_ROOT = pathlib.Path(__file__).parents[2]
_SETTINGS = {
    "init": "scratch",
    # Random params have no rewards.
    "replay.skip_equal_rewards": False,
    # What is bounded fills up early.
    "replay.capacity": 2_000,
    "replay.max_segment_mb": 1.0,
    "run.processes": "many",
    "search.num_searchers": 2,
    "search.lease_s": 10.0,
    "train.num_steps": 100_000_000,
    "checkpoint.every_steps": 500,
    "evaluate.every_steps": 500,
    "guards.action": "off",
    "log.samples_every_steps": 500,
}
_PERIOD_S = 2.0
_LEAST_MINUTES = 2
_START_S, _STILL_S, _END_S = 600.0, 240.0, 240.0
_WARM_SHARE, _BLOCKS = 1 / 3, 12
# Quantile of Student's t at .995, with two degrees of freedom less than blocks.
_T = 3.17
# Share of a rise that may be left without its largest jump.
_REST = 0.25
# Growth in the window that is no growth.
_LEAST = {"memory": 1 << 20, "descriptors": 1.0, "threads": 1.0,
          "bytes": 1 << 16}  # fmt: skip
# Files that get a line for each step, or for some.
_BY_STEP = frozenset(("metrics.jsonl", "replay/decisions.jsonl",
                      "samples.jsonl", "spans", "eval.json"))  # fmt: skip
# Growth of the second half of the window over the first that such files may
# have, in bytes a step.
_FASTER = 1.25


def run(
    config: ml_collections.ConfigDict, operands: Sequence[str]
) -> dict[str, Any]:
  """Returns a row for each series, and the names of those that grow.

  Args:
    config: config of the run.
    operands: minutes, folder of the run, seconds between two kills.

  Raises:
    RuntimeError: the run ended, stood still, or left something behind.
    ValueError: an operand is wrong, or there are too few samples.
  """
  minutes, folder, kill_every_s = _parse(operands)
  config = config.copy_and_resolve_references()
  config.update_from_flattened_dict(_SETTINGS)
  folder.mkdir(parents=True, exist_ok=True)
  workdir = folder / "run"
  jsonl.atomic_write_json(folder / "config.json", config.to_dict())
  log = folder / "out.txt"
  # The run's status before it was interrupted.
  (workdir / "status.json").unlink(missing_ok=True)
  with log.open("ab") as out:
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "tests.chaos.chaos"),
            *(str(folder / "config.json"), str(workdir)),
        ],
        cwd=_ROOT,
        stdin=subprocess.DEVNULL,
        stdout=out,
        stderr=subprocess.STDOUT,
    )
  watch = _Watch(workdir, process)
  try:
    first = watch.wait_for_steps()
    samples = watch.sample(60 * minutes, kill_every_s)
    process.send_signal(signal.SIGTERM)
    status = process.wait(_END_S)
  except (RuntimeError, subprocess.TimeoutExpired) as error:
    text = log.read_text(errors="replace")[-3000:]
    raise RuntimeError(f"{folder} (kept): {error}\n{text}") from error
  finally:
    process.kill()
    process.wait()
  jsonl.atomic_write_json(folder / "samples.json", samples)
  run_id = jsonl.read_json(workdir / "config.json")["run_id"]
  left = auditor.leftovers(workdir, run_id)
  if status != 128 + signal.SIGTERM or left:
    raise RuntimeError(f"{folder} (kept): status {status}, left: {left}")
  rows = judge(samples)
  _tell(_table(rows))
  seconds = samples[-1]["seconds"] - samples[0]["seconds"]
  steps = samples[-1]["step"] - samples[0]["step"]
  out = {
      "folder": str(folder),
      "minutes": round(seconds / 60, 1),
      "first_step": first,
      "steps": steps,
      "steps_per_s": round(steps / seconds, 1),
      "killed": watch.num_killed,
      "events": watch.events(),
      "rows": rows,
      "grows": [r["what"] for r in rows if r["verdict"] == "grows"],
  }
  jsonl.atomic_write_json(folder / "result.json", out)
  return out


def _parse(operands: Sequence[str]) -> tuple[float, pathlib.Path, float]:
  minutes, folder, kill_every_s = (*operands, *("15", "", "0")[len(operands) :])
  try:
    numbers = float(minutes), float(kill_every_s)
  except ValueError as error:
    raise ValueError(f"soak {' '.join(operands)}: {error}") from error
  if not (numbers[0] >= _LEAST_MINUTES and numbers[1] >= 0):
    raise ValueError(
        f"soak {' '.join(operands)}: must be {_LEAST_MINUTES} minutes or more,"
        " and seconds from 0 on"
    )
  folder = folder or tempfile.mkdtemp(prefix="tba_jax_soak_")
  return numbers[0], pathlib.Path(folder).absolute(), numbers[1]


def _tell(text: str) -> None:
  # Standard output is for the one line of results.
  print(text, file=sys.stderr, flush=True)


class _Watch:
  """Samples of a run that goes on.

  num_killed: searchers killed so far.
  """

  def __init__(self, workdir: pathlib.Path, process: subprocess.Popen):
    self.num_killed = 0
    self._workdir = workdir
    self._process = process
    # Folders beside the run's own.
    self._places: dict[str, pathlib.Path] = {}
    self._furthest = -1

  def wait_for_steps(self) -> int:
    """Returns the run's step once it trains; raises RuntimeError."""
    deadline = time.monotonic() + _START_S
    while (step := self._step()) < 0:
      if self._process.poll() is not None or time.monotonic() > deadline:
        raise RuntimeError("no step")
      time.sleep(_PERIOD_S)
    config = run_directory.load_config(str(self._workdir))
    run_ = run_directory.open_run(str(self._workdir), config)
    self._places = {
        "spool": run_.spool,
        "params": shared_files.files_directory(
            config.publish.directory, self._workdir, run_.run_id
        ),
    }
    return step

  def sample(self, seconds: float, kill_every_s: float) -> list[dict[str, Any]]:
    """Returns what was seen; raises RuntimeError if the run stops."""
    began = time.monotonic()
    out, kill_at, killed_at = [], began + kill_every_s, -1
    told, moved, before = began, began, -1
    while (now := time.monotonic()) < began + seconds:
      if self._process.poll() is not None:
        raise RuntimeError(f"status {self._process.returncode}")
      sample = self._sample()
      out.append({"seconds": round(now - began, 2), **sample})
      if sample["step"] != before:
        before, moved = sample["step"], now
      if now > moved + _STILL_S:
        raise RuntimeError(f"no step after {before}")
      if kill_every_s and now >= kill_at and before > killed_at:
        kill_at, killed_at = now + kill_every_s, before
        self._kill_searcher()
      if now > told + 60:
        told = now
        _tell(f"{(now - began) / 60:.0f} minutes, step {before}")
      time.sleep(_PERIOD_S)
    return out

  def events(self) -> dict[str, int]:
    """Returns the number of events by kind."""
    records = jsonl.read_jsonl(self._workdir / "events.jsonl")
    kinds = [record["kind"] for record in records]
    return {kind: kinds.count(kind) for kind in sorted(set(kinds))}

  def _kill_searcher(self) -> None:
    rows = jsonl.read_json(self._workdir / "processes.json") or []
    pids = [row["pid"] for row in rows if row["role"] == "searcher"]
    if pids:
      self.num_killed += 1
      with contextlib.suppress(ProcessLookupError):
        os.kill(pids[self.num_killed % len(pids)], signal.SIGKILL)

  def _step(self) -> int:
    """Returns the furthest step so far, -1 before the second."""
    status = jsonl.read_json(self._workdir / "status.json") or {}
    self._furthest = max(self._furthest, status.get("step") or -1)
    return self._furthest

  def _sample(self) -> dict[str, Any]:
    rows = jsonl.read_json(self._workdir / "processes.json") or []
    names = {row["pid"]: f"{row['role']}-{row['index']}" for row in rows}
    names[self._process.pid] = "supervisor"
    processes = {}
    for pid, name in names.items():
      with contextlib.suppress(OSError, ValueError):
        processes[name] = _of_process(pid)
    return {
        "step": self._step(),
        "processes": processes,
        "bytes": self._bytes(),
    }

  def _bytes(self) -> dict[str, int]:
    """Returns the sizes of files, and of folders in sum."""
    out = collections.Counter()
    for place, root in {"": self._workdir, **self._places}.items():
      for folder, folders, files in os.walk(root):
        # The spool may be in the run's folder.
        folders[:] = [
            name
            for name in folders
            if pathlib.Path(folder, name) not in self._places.values()
        ]
        for name in files:
          path = pathlib.Path(folder, name)
          part = place or _part(path.relative_to(root).as_posix())
          with contextlib.suppress(OSError):  # It was removed.
            out[part] += path.stat().st_size
    return dict(out)


def _part(path: str) -> str:
  """Returns the name under which a file of the run directory is counted."""
  if path.endswith(".journal"):
    return "journal"
  folder, _, name = path.rpartition("/")
  if name.startswith(".") and name.endswith(tuple("0123456789")):
    return "files being replaced"
  return path if folder in ("replay", "") else folder.partition("/")[0]


def _of_process(pid: int) -> dict[str, float]:
  """Returns memory in bytes, descriptors and threads; raises OSError."""
  folder = pathlib.Path(f"/proc/{pid}")
  text = (folder / "smaps_rollup").read_text()
  memory = re.search(r"^Pss:\s+(\d+) kB", text, re.MULTILINE)
  threads = re.search(
      r"^Threads:\s+(\d+)", (folder / "status").read_text(), re.MULTILINE
  )
  if not memory or not threads:
    raise ValueError(f"{folder}: a process that has ended")
  return {
      "memory": 1024 * int(memory[1]),
      "descriptors": len(os.listdir(folder / "fd")),
      "threads": int(threads[1]),
  }


@dataclasses.dataclass(frozen=True)
class Trend:
  """A line through a series.

  level: mean of the last block.
  slope: growth for each step.
  error: half the slope's 99 % interval.
  rest: share of the rise that is left without the largest jump.
  halves: slopes of both halves of the blocks.
  steps: steps from the first block to the last.
  """

  level: float
  slope: float
  error: float
  rest: float
  halves: tuple[float, float]
  steps: float


def trend(steps: Sequence[float], values: Sequence[float]) -> Trend:
  """Returns the trend of a series after its first third.

  Args:
    steps: steps of the samples, rising.
    values: values of the samples.

  Raises:
    ValueError: there are too few samples, or no steps.
  """
  first = int(len(values) * _WARM_SHARE)
  if len(values) - first < 2 * _BLOCKS or steps[-1] <= steps[first]:
    raise ValueError(
        f"{len(values)} samples up to step {steps[-1]}: must be"
        f" {3 * _BLOCKS} or more, with steps"
    )
  x = np.array([np.mean(b) for b in np.array_split(steps[first:], _BLOCKS)])
  y = np.array([np.mean(b) for b in np.array_split(values[first:], _BLOCKS)])
  slope, residuals = _line(x, y)
  spread = np.sqrt(np.sum(residuals**2) / (_BLOCKS - 2))
  error = _T * spread / np.sqrt(np.sum((x - x.mean()) ** 2))
  half = _BLOCKS // 2
  halves = _line(x[:half], y[:half])[0], _line(x[half:], y[half:])[0]
  # A jump within a block is in the differences on both of its sides.
  jump = np.max(y[2:] - y[:-2])
  rest = 1 - jump / (y[-1] - y[0]) if y[-1] > y[0] else 0.0
  return Trend(
      float(y[-1]), slope, float(error), float(rest), halves, x[-1] - x[0]
  )


def _line(x: np.ndarray, y: np.ndarray) -> tuple[float, np.ndarray]:
  """Returns the slope of the line through points, and the residuals."""
  slope, start = np.polyfit(x - x.mean(), y, 1)
  return float(slope), y - start - slope * (x - x.mean())


def verdict(found: Trend, least: float, *, by_step: bool = False) -> str:
  """Returns "flat", "by step" or "grows".

  Args:
    found: trend of the series.
    least: growth over the window that is no growth.
    by_step: whether a constant number of bytes for each step is no growth.
  """
  rises = found.slope > found.error and found.slope * found.steps > least
  if not rises or found.rest <= _REST:
    return "flat"
  first, second = found.halves
  if by_step and second <= _FASTER * first:
    return "by step"
  return "grows"


def judge(samples: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
  """Returns a row for each series of samples.

  Raises:
    ValueError: there are too few samples.
  """
  series: dict[tuple[str, str], tuple[list[float], list[float]]] = {}

  def add(name: str, unit: str, step: float, value: float) -> None:
    steps, values = series.setdefault((name, unit), ([], []))
    steps.append(step)
    values.append(value)

  parts = {name for sample in samples for name in sample["bytes"]}
  for sample in samples:
    step = sample["step"]
    for name, result in sample["processes"].items():
      for unit, value in result.items():
        add(name, unit, step, value)
    for name in parts:
      add(name, "bytes", step, sample["bytes"].get(name, 0))
  rows = []
  for (name, unit), (steps, values) in sorted(series.items()):
    result = trend(steps, values)
    rows.append(
        {
            "what": f"{name} {unit}",
            "level": round(result.level, 1),
            "most": max(values),
            "per_1000_steps": round(1000 * result.slope, 3),
            "error": round(1000 * result.error, 3),
            "verdict": verdict(
                result,
                _LEAST[unit],
                by_step=unit == "bytes" and name in _BY_STEP,
            ),
        }
    )
  return rows


def _table(rows: Sequence[Mapping[str, Any]]) -> str:
  lines = [
      "| what | at the end | most | for 1,000 steps | ± | |",
      "|---|---|---|---|---|---|",
  ]
  for row in rows:
    scale, unit = 1, ""
    if row["what"].endswith((" memory", " bytes")):
      scale, unit = 1e6, " MB"
    digits = 3 if unit else 2
    lines.append(
        f"| {row['what']} | {row['level'] / scale:,.1f}{unit} |"
        f" {row['most'] / scale:,.1f}{unit} |"
        f" {row['per_1000_steps'] / scale:+,.{digits}f}{unit} |"
        f" {row['error'] / scale:,.{digits}f} | {row['verdict']} |"
    )
  return "\n".join(lines)
