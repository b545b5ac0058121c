# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""The `verify` program: audits the files of a run.

    python -m tba_jax.main --program=verify --workdir=runs/countdown

It shares no code with what it audits: its readers follow the formats that
`replay/journal.py`, `transport/wire.py`, `replay/ledger.py`,
`training/checkpoint.py`, `monitor/run_directory.py` and `monitor/recorder.py`
describe. It writes nothing and needs neither devices nor the run's secret:
without that, keyed hashes are not checked, so it finds damage, not forgery by
somebody who can compute the other digests. A run may be audited while it is
live.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
import contextlib
import dataclasses
import fcntl
import hashlib
import io
import itertools
import json
import math
import os
import pathlib
import re
import statistics
import struct
import sys
import time
from typing import Any

from etils import epath
import ml_collections
import numpy as np
import rich.console
import rich.table
import tensorstore as ts

from tba_jax.system import bucket
from tba_jax.system import processes

_UNITS = ("prompts", "completions", "tokens")
_NUMBER = (int, float)
# Progress is shown on stderr after so many seconds, and every so many then.
_QUIET_S, _SHOW_EVERY_S = 5.0, 2.0

# JSON file -> the fields that it must have, and what to do if it has not.
_FILES = {
    "config.json": (
        {"format": int, "run_id": str, "created": _NUMBER, "config": dict},
        "no program can open the run; restore the file from a copy",
    ),
    "epoch.json": (
        {"epoch": int},
        'the trainer will not start; restore it as {"epoch": N}, N above every'
        ' "epoch" in metrics.jsonl',
    ),
    "eval.json": (
        {},
        "the run cannot go on or be evaluated; restore it from a copy, or"
        " delete it: `before` is then evaluated anew, at the step reached",
    ),
    "ledger.json": (
        {"generated": dict, "rejected": dict, "lost": dict, "closed": bool},
        "a run that goes on writes it again; the account of a finished run is"
        " only in its last checkpoint",
    ),
    "result.json": (
        {"steps": int, "completions": int, "ledger_closed": bool},
        "delete it; the same train command writes it again",
    ),
    "summary.json": (
        {"steps": int, "num_steps": int},
        "the run cannot go on; delete it: the same train command writes it"
        " again",
    ),
    "totals.json": (
        {"wall_s": _NUMBER, "restarts": dict},
        "the run cannot go on; delete it: wall time and restarts are counted"
        " from 0 again",
    ),
    "status.json": (
        {"time": _NUMBER, "phase": str},
        "only the live view reads it; delete it",
    ),
}


@dataclasses.dataclass(frozen=True)
class Problem:
  """Something damaged or missing.

  place: file, and position in it.
  what: what is wrong.
  advice: what it means for the user, and what to do.
  """

  place: str
  what: str
  advice: str


@dataclasses.dataclass
class Part:
  """A row of the table.

  name: of the part of the run.
  found: what was read.
  problems: what is wrong with it.
  notes: traces of crashes that a restart handles, or has handled.
  """

  name: str
  found: str = ""
  problems: list[Problem] = dataclasses.field(default_factory=list)
  notes: list[str] = dataclasses.field(default_factory=list)

  def add(self, place: str, what: str, advice: str) -> None:
    self.problems.append(Problem(place, what, advice))


@dataclasses.dataclass
class Checkpoint:
  """A complete checkpoint of the trainer.

  step: of its directory.
  name: path in the run directory.
  host: its host state, {} if unreadable.
  """

  step: int
  name: str
  host: dict[str, Any]

  @property
  def data(self) -> dict[str, Any]:
    """State of replay; {} if unreadable."""
    return self.host.get("data") or {}


@dataclasses.dataclass(frozen=True)
class Block:
  """A block of a searcher in the journal; `end` is its record's position."""

  end: int
  place: str
  header: dict[str, Any]

  @property
  def sid(self) -> str:
    return self.header["sid"]

  @property
  def sequence(self) -> int:
    return self.header["sequence"]


@dataclasses.dataclass
class Run:
  """What the checks of several parts need to know.

  folder: the run directory.
  live: whether a process of this host works there.
  files: JSON files that could be read, by name.
  events: records of `events.jsonl`.
  show: shows progress.
  """

  folder: pathlib.Path
  live: bool
  show: Callable[[str], None]
  files: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)
  events: list[dict[str, Any]] = dataclasses.field(default_factory=list)

  @property
  def finished(self) -> bool:
    return not self.live and "result.json" in self.files

  @property
  def epoch(self) -> int:
    """Number of times that the trainer was started."""
    return self.files.get("epoch.json", {}).get("epoch", 0)

  @property
  def restarts(self) -> int:
    """Upper bound of the lines that a file may have lost in crashes."""
    counts = self.files.get("totals.json", {}).get("restarts", {})
    return self.epoch + sum(counts.values())

  def setting(self, section: str, key: str, default: Any) -> Any:
    config = self.files.get("config.json", {}).get("config", {})
    return config.get(section, {}).get(key, default)

  def had(self, kind: str) -> bool:
    return any(event.get("kind") == kind for event in self.events)


def run(
    config: ml_collections.ConfigDict | None,
    workdir: str,
    operands: Sequence[str] = (),
) -> int:
  """Prints what is in the run directory and whether it is sound.

  Returns:
    0: all is sound; 1: something is damaged or missing; 2: wrong usage.
  """
  folder = pathlib.Path(workdir)
  error = ""
  if operands or config is not None:
    error = "verify takes --workdir alone"
  elif not any(
      (folder / name).exists()
      for name in ("config.json", "metrics.jsonl", "checkpoints", "replay")
  ):
    error = f"--workdir={workdir}: no run is there"
  if error:
    print(f"error: {error}", file=sys.stderr)
    return processes.EXIT_CONFIG
  parts, live = audit(folder, _Progress())
  table = rich.table.Table(box=None, pad_edge=False, header_style="")
  for name in ("part", "found", "verdict"):
    table.add_column(name, overflow="fold")
  for part in parts:
    count = len(part.problems)
    table.add_row(part.name, part.found, f"{count} wrong" if count else "sound")
  rich.console.Console(highlight=False).print(table)
  for part in parts:
    for note in part.notes:
      print(f"note: {note}")
  problems = [problem for part in parts for problem in part.problems]
  for problem in problems:
    print(f"wrong: {problem.place}: {problem.what}\n  {problem.advice}")
  state = " so far; the run is live" if live else ""
  verdict = f"{len(problems)} wrong" if problems else "sound"
  print(f"{workdir}: {verdict}{state}")
  return 1 if problems else processes.EXIT_OK


class _Progress:
  """Prints on stderr what is being read, once that takes long."""

  def __init__(self):
    self._due = time.monotonic() + _QUIET_S

  def __call__(self, text: str) -> None:
    if time.monotonic() >= self._due:
      print(f"reading {text}", file=sys.stderr, flush=True)
      self._due = time.monotonic() + _SHOW_EVERY_S


def audit(
    folder: pathlib.Path, show: Callable[[str], None] = lambda text: None
) -> tuple[list[Part], bool]:
  """Returns the parts of a run directory, and whether the run is live.

  The files of a live run change between two reads, so it is read again, and
  only problems found twice are kept.
  """
  live = _is_live(folder)
  parts = _audit_once(folder, live, show)
  if live and any(part.problems for part in parts):
    before = {problem for part in parts for problem in part.problems}
    parts = _audit_once(folder, live, show)
    for part in parts:
      part.problems = [one for one in part.problems if one in before]
  return parts, live


def _audit_once(
    folder: pathlib.Path, live: bool, show: Callable[[str], None]
) -> list[Part]:
  run_ = Run(folder, live, show)
  files = _check_files(run_)
  # Acknowledgements first: what is acknowledged is in the journal by then.
  acks, marks = _read_acks(run_)
  events = _check_events(run_)
  checkpoints, saved = _check_checkpoints(run_)
  metrics = _check_metrics(run_, saved)
  journal = _check_journal(run_, saved, marks, acks)
  ledger = _check_ledger(run_, saved)
  _check_results(run_, saved, files)
  parts = [files, metrics, events, journal, acks, ledger, checkpoints]
  for name in ("sft", "reward_model"):
    if (folder / name / "checkpoints").exists():
      parts.append(_check_model(run_, name))
  return parts


def _is_live(folder: pathlib.Path) -> bool:
  """Returns whether a supervisor or trainer of this host has its lock."""
  for name in (".lock", ".trainer.lock"):
    with contextlib.suppress(FileNotFoundError), (folder / name).open() as file:
      try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
      except BlockingIOError:
        return True
  return False


# JSON files.


def _check_files(run_: Run) -> Part:
  """Reads the JSON files of a run."""
  part = Part("files")
  for name, (fields, advice) in _FILES.items():
    path = run_.folder / name
    try:
      value = json.loads(path.read_bytes())
    except FileNotFoundError:
      continue
    except (ValueError, RecursionError) as error:
      part.add(name, f"not JSON: {error}", advice)
      continue
    if wrong := _wrong_field(value, fields):
      part.add(name, wrong, advice)
    else:
      run_.files[name] = value
  _check_evaluations(run_.files.get("eval.json"), part)
  needed = ["config.json"]
  if (run_.folder / "metrics.jsonl").exists():
    needed.append("epoch.json")
  if (run_.folder / "result.json").exists():
    needed += ["eval.json", "ledger.json"]
    needed += ["summary.json"] if "totals.json" in run_.files else []
  for name in needed:
    if not (run_.folder / name).exists() and not run_.live:
      part.add(name, "is missing", _FILES[name][1])
  part.found = ", ".join(name.removesuffix(".json") for name in run_.files)
  return part


def _wrong_field(value: Any, fields: Mapping[str, Any]) -> str:
  """Returns what is wrong with a JSON object, "" if nothing is."""
  if not isinstance(value, dict):
    return "is no JSON object"
  for name, kind in fields.items():
    found = value.get(name)
    if not isinstance(found, kind) or (isinstance(found, bool) and kind is int):
      return f"{name!r} is {found!r}"[:200]
  return ""


def _check_evaluations(value: dict[str, Any] | None, part: Part) -> None:
  """Checks `before`, `after` and `history` of eval.json."""
  if value is None:
    return
  history = value.get("history", [])
  shown = history if isinstance(history, list) else [history]
  for name, one in [
      *((k, value[k]) for k in ("before", "after") if k in value),
      *((f"history[{i}]", one) for i, one in enumerate(shown)),
  ]:
    if wrong := _wrong_field(one, {"step": int, "pass_at_1": _NUMBER}):
      part.add("eval.json", f"{name}: {wrong}", _FILES["eval.json"][1])
      return
  steps = [one["step"] for one in shown]
  if any(a >= b for a, b in itertools.pairwise(steps)):
    part.add(
        "eval.json",
        f"the steps of history do not increase: {steps}",
        _FILES["eval.json"][1],
    )


def _check_results(run_: Run, saved: Sequence[Checkpoint], part: Part) -> None:
  """Compares the results of a finished run with its other files."""
  if not run_.finished:
    return
  result, evaluations = run_.files["result.json"], run_.files.get("eval.json")
  ledger = run_.files.get("ledger.json")
  advice = "one of the two is of another time; trust the other files"
  for name in ("result.json", "summary.json"):
    found = run_.files.get(name)
    if found is None:
      continue
    if saved and found["steps"] != saved[-1].step:
      part.add(
          name,
          f"steps is {found['steps']}, the newest checkpoint has step"
          f" {saved[-1].step}",
          "a checkpoint is missing, or the file is of another time",
      )
    for key in ("before", "after"):
      if evaluations is None:
        continue
      shown = dict(evaluations.get(key, {}))
      shown.pop("samples", None)
      if found.get(key) != shown:
        part.add(name, f"{key!r} is not that of eval.json", advice)
    if ledger and (
        result["ledger_closed"] != ledger["closed"]
        or result["completions"] != ledger["generated"].get("completions")
    ):
      part.add(name, "disagrees with ledger.json", advice)


# JSON lines.


def _read_lines(
    run_: Run, name: str
) -> Iterator[tuple[int, dict[str, Any] | None]]:
  """Yields number and object of each line, None for one that is none.

  The last line of a live run may be incomplete, and is left out.
  """
  path = run_.folder / name
  if not path.exists():
    return
  with path.open("rb") as file:
    for number, line in enumerate(file, 1):
      if not line.strip() or (run_.live and not line.endswith(b"\n")):
        continue
      try:
        record = json.loads(line)
      except (ValueError, RecursionError):
        record = None
      yield number, record if isinstance(record, dict) else None


def _check_events(run_: Run) -> Part:
  """Reads events.jsonl and samples.jsonl."""
  part = Part("events, samples")
  for name, fields in (
      ("events.jsonl", {"time": _NUMBER, "kind": str, "message": str}),
      ("samples.jsonl", {"step": int, "prompt_id": int, "completion": str}),
  ):
    bad, count = [], 0
    for number, record in _read_lines(run_, name):
      count += 1
      if record is None:
        bad.append(number)
      elif wrong := _wrong_field(record, fields):
        part.add(f"{name}, line {number}", wrong, "the report lacks this line")
      elif name == "events.jsonl":
        run_.events.append(record)
    part.found += f"{', ' if part.found else ''}{count} {name[:-6]}"
    if len(bad) > run_.restarts - (run_.finished and run_.epoch == 1):
      part.add(
          f"{name}, line {bad[0]}",
          f"{len(bad)} lines are not JSON, more than crashes explain",
          "the report lacks these lines; training does not read them",
      )
    elif bad:
      part.notes.append(f"{name}: {len(bad)} lines cut off by crashes")
  return part


def _check_metrics(run_: Run, saved: Sequence[Checkpoint]) -> Part:
  """Checks lines, steps and epochs of metrics.jsonl."""
  part = Part("metrics")
  name = "metrics.jsonl"
  advice = "the report lacks this line; training is not affected"
  fields = {"step": int, "time": _NUMBER, "epoch": int}
  steps: list[tuple[int, int, int]] = []  # (epoch, step, line) of train steps.
  evaluated: set[int] = set()
  epoch, bad, torn = 0, 0, []
  for number, record in _read_lines(run_, name):
    place = f"{name}, line {number}"
    if record is None:
      bad = number
      continue
    if wrong := _wrong_field(record, fields):
      part.add(place, wrong, advice)
      continue
    if bad:
      # A crash may cut off the last line of an epoch.
      torn.append(bad)
      if record["epoch"] == epoch:
        part.add(f"{name}, line {bad}", "not JSON", advice)
      bad = 0
    if record["epoch"] < epoch or record["epoch"] > max(run_.epoch, 1):
      part.add(
          place,
          f"epoch {record['epoch']} comes after epoch {epoch} of"
          f" {run_.epoch} epochs",
          "lines were moved or come from another run; restore a copy",
      )
      continue
    epoch = record["epoch"]
    if any(key.startswith("eval/") for key in record):
      evaluated.add(record["step"])
    if "train/loss" in record:
      if steps and steps[-1][0] == epoch and steps[-1][1] >= record["step"]:
        part.add(
            place,
            f"step {record['step']} comes after step {steps[-1][1]} of the"
            " same epoch",
            "lines were moved or doubled; restore a copy",
        )
      steps.append((epoch, record["step"], number))
  if bad and run_.finished:
    part.add(f"{name}, line {bad}", "not JSON", advice)
  elif bad or torn:
    part.notes.append(f"{name}: {len(torn) + bool(bad)} lines cut off")
  history = _check_step_rows(run_, steps, part)
  for one in run_.files.get("eval.json", {}).get("history", ()):
    step = one.get("step") if isinstance(one, dict) else None
    if isinstance(step, int) and max(step - 1, 0) not in evaluated:
      if run_.epoch == 1 and not (run_.live or run_.had("not_written")):
        part.add(name, f"no line of the evaluation after step {step}", advice)
  every = run_.setting("checkpoint", "every_steps", 0)
  if not saved and every and history and history[-1] >= 2 * every:
    part.add(
        "checkpoints",
        f"has no checkpoint, though {name} goes to step {history[-1]}",
        "the run cannot go on; restore the checkpoints from a copy",
    )
  if run_.finished and (run_.folder / name).exists() is False:
    part.add(name, "is missing", "the report is empty; restore it from a copy")
  part.found = (
      f"{len(history)} steps, {len(evaluated)} evaluations, epochs to {epoch}"
  )
  return part


def _check_step_rows(
    run_: Run, steps: Sequence[tuple[int, int, int]], part: Part
) -> list[int]:
  """Checks that no step is left out; returns the steps that survived.

  A newer epoch redoes the steps from its first one on. A crash may lose the
  last lines of an epoch.
  """
  name = "metrics.jsonl"
  grown = [b[1] - a[1] for a, b in itertools.pairwise(steps) if a[0] == b[0]]
  stride = statistics.mode(grown or [run_.setting("log", "every_steps", 1)])
  stride = max(stride, 1)
  history: list[int] = []
  last_epoch = steps[0][0] if steps else 0
  excused = run_.had("not_written")

  def missing(first: int, last: int, number: int, crashed: bool) -> None:
    if first >= last:
      return
    text = f"steps {first} to {last - 1} have no line"
    if crashed or excused:
      part.notes.append(f"{name}: {text}: lost in a crash or on a full disk")
    else:
      part.add(
          f"{name}, before line {number}",
          text,
          "the report lacks these steps; training is not affected",
      )

  for epoch, step, number in steps:
    while history and history[-1] >= step:
      history.pop()
    expected = history[-1] + stride if history else 0
    # Rounded up to a multiple of the period, which a resume may change.
    if step - expected >= stride or (not history and step):
      missing(expected, step, number, crashed=epoch != last_epoch)
    history.append(step)
    last_epoch = epoch
  if run_.finished:
    end = run_.files["result.json"]["steps"]
    expected = history[-1] + stride if history else 0
    if expected < end:
      missing(expected, end, steps[-1][2] + 1 if steps else 1, crashed=False)
  return history


# Checkpoints.


def _check_checkpoints(run_: Run) -> tuple[Part, list[Checkpoint]]:
  """Checks the trainer's checkpoints; returns those that could be listed."""
  part, saved = Part("checkpoints"), []
  folder = epath.Path(bucket.place(run_.folder / "checkpoints"))
  for step, path in _steps(folder, "checkpoints", part):
    checkpoint = _check_checkpoint(run_, path, "checkpoints", step, part)
    if checkpoint is not None:
      saved.append(checkpoint)
  keep = run_.setting("checkpoint", "keep", 1)
  newest = saved[-1] if saved else None
  history = newest.host.get("applied_history", []) if newest else []
  if not run_.live and not run_.had("checkpoint_failed"):
    there = {one.step for one in saved} | _set_aside(folder)
    for step, _ in history[-keep:]:
      if step not in there:
        part.add(
            f"checkpoints/{step}",
            "is missing",
            "the run cannot go back to it; a newer one is there",
        )
  if run_.finished and newest is None:
    part.add(
        "checkpoints",
        "has no checkpoint of a finished run",
        "the model is lost, but for best/ and export/; restore a copy",
    )
  part.found = _found_steps(saved)
  return part, saved


def _check_model(run_: Run, name: str) -> Part:
  """Checks the checkpoints of a model that was trained before the run."""
  part = Part(name)
  folder = epath.Path(bucket.place(run_.folder / name / "checkpoints"))
  prefix = f"{name}/checkpoints"
  saved = [
      _check_checkpoint(run_, path, prefix, step, part)
      for step, path in _steps(folder, prefix, part)
  ]
  part.found = _found_steps([one for one in saved if one])
  return part


def _found_steps(saved: Sequence[Checkpoint]) -> str:
  steps = ", ".join(str(one.step) for one in saved)
  return f"steps {steps}" if steps else "none"


def _set_aside(folder: epath.Path) -> set[int]:
  """Returns the steps of damaged checkpoints that a restart moved aside."""
  names = [path.name for path in folder.iterdir()] if folder.exists() else []
  found = (re.fullmatch(r"damaged-(\d+)", name) for name in names)
  return {int(match[1]) for match in found if match}


def _steps(
    folder: epath.Path, name: str, part: Part
) -> list[tuple[int, epath.Path]]:
  """Returns step and path of the complete checkpoints, oldest first."""
  if not folder.exists():
    return []
  found = []
  for path in folder.iterdir():
    if path.name.isdecimal():
      found.append((int(path.name), path))
    elif "orbax-checkpoint-tmp" in path.name:
      part.notes.append(
          f"{name}/{path.name}: an incomplete save; the next start removes it"
      )
    elif path.name.startswith("damaged-"):
      part.notes.append(
          f"{name}/{path.name}: was damaged, and set aside by a restart"
      )
  found.sort(key=lambda one: one[0])
  # Orbax writes commit markers in buckets, and in newer versions everywhere.
  marked = {path for _, path in found if (path / _COMMIT).exists()}
  for step, path in found:
    if path not in marked and (marked or "://" in str(folder)):
      part.add(
          f"{name}/{step}/{_COMMIT}",
          "is missing: the save was not completed, or the marker deleted",
          "a restart from a bucket takes an older checkpoint; if all else of"
          " the checkpoint is sound, create the file again",
      )
  return found


_CHECKPOINT_FORMAT = 3
_COMMIT = "commit_success.txt"


def _check_checkpoint(
    run_: Run, path: epath.Path, prefix: str, step: int, part: Part
) -> Checkpoint | None:
  """Checks one checkpoint; returns None if a live run has just removed it."""
  name = f"{prefix}/{step}"
  advice = (
      "a restart sets this checkpoint aside and takes the one before; export"
      " and evaluate refuse it. Restore it from a copy, or go on from there"
  )
  mine = Part(name)
  file = "host/process-00000.npz"
  try:
    saved = _read_host((path / file).read_bytes())
    wrong = _wrong_field(
        saved, {"format": int, "checksums": dict, "host_state": dict}
    )
    if not wrong and saved["format"] != _CHECKPOINT_FORMAT:
      wrong = f"has format {saved['format']}, not {_CHECKPOINT_FORMAT}"
  except Exception as error:  # NumPy and zipfile raise many types.
    saved, wrong = {}, f"cannot be read: {type(error).__name__}: {error}"
  if wrong:
    mine.add(f"{name}/{file}", wrong, advice)
    saved = {}
  host = saved.get("host_state", {})
  checkpoint = Checkpoint(step, name, host)
  if saved:
    _check_arrays(run_, path, name, saved["checksums"], step, mine, advice)
    if "data" in host:
      _check_host(run_, checkpoint, mine, advice)
  if mine.problems and run_.live and not path.exists():
    return None
  part.problems += mine.problems
  return checkpoint


def _read_host(data: bytes) -> Any:
  """Returns a host state: JSON, with arrays as further members of an npz."""
  with np.load(io.BytesIO(data), allow_pickle=False) as members:
    arrays = {name: members[name] for name in members.files}

  def decode(value: Any) -> Any:
    if isinstance(value, list):
      return [decode(one) for one in value]
    if not isinstance(value, dict):
      return value
    if "__array__" in value:
      return arrays[value["__array__"]]
    if "__scalar__" in value:
      return arrays[value["__scalar__"]][()]
    if "__pairs__" in value:
      return {key: decode(one) for key, one in value["__pairs__"]}
    return {key: decode(one) for key, one in value.items()}

  return decode(json.loads(arrays["structure"].tobytes()))


def _check_arrays(
    run_: Run,
    path: epath.Path,
    name: str,
    checksums: Mapping[str, int],
    step: int,
    part: Part,
    advice: str,
) -> None:
  """Reads all arrays of the device state and compares their checksums."""
  try:
    metadata = json.loads((path / "state" / "_METADATA").read_bytes())
    arrays = {
        tuple(str(key["key"]) for key in row["key_metadata"])
        for row in metadata["tree_metadata"].values()
        if not row["value_metadata"]["skip_deserialize"]
    }
    driver = "zarr3" if metadata.get("use_zarr3") else "zarr"
  except (OSError, ValueError, KeyError, TypeError) as error:
    part.add(f"{name}/state/_METADATA", f"cannot be read: {error!r}", advice)
    return
  wanted = {_keys_of(text): found for text, found in checksums.items()}
  for keys in sorted(wanted.keys() ^ arrays):
    where = "the checksums" if keys in wanted else "the arrays"
    part.add(f"{name}/state", f"{'.'.join(keys)} is only in {where}", advice)
  context = ts.Context()
  damaged = []
  for count, keys in enumerate(sorted(wanted.keys() & arrays)):
    run_.show(f"{name}, array {count + 1} of {len(wanted)}")
    shown = f"array {'.'.join(keys)}"
    try:
      array = _open_array(path / "state", driver, keys, context)
      if _checksum(array) != wanted[keys]:
        damaged.append(f"{shown} has another checksum than when it was saved")
      elif keys == ("step",) and int(array[...].read().result()) != step:
        damaged.append(f"{shown} is not {step}, as the directory says")
    except Exception as error:  # TensorStore raises many types.
      reason = str(error).splitlines()[0][:300]
      damaged.append(f"{shown} cannot be read: {reason}")
  if damaged:
    more = f"; {len(damaged) - 3} more arrays" if len(damaged) > 3 else ""
    part.add(f"{name}/state", "; ".join(damaged[:3]) + more, advice)


def _keys_of(text: str) -> tuple[str, ...]:
  """Returns the keys of a path in JAX's notation, as .opt_state[1].mu['w']."""
  found = re.findall(r"\.(\w+)|\['([^']*)'\]|\[(\d+)\]", text)
  return tuple(next(filter(None, keys), "") for keys in found)


def _open_array(
    state: epath.Path, driver: str, keys: tuple[str, ...], context: ts.Context
) -> ts.TensorStore:
  """Opens an array of an Orbax checkpoint, in TensorStore's OCDBT format."""
  folder = os.fspath(state)
  if folder.startswith("gs://"):
    root, _, rest = folder.removeprefix("gs://").partition("/")
    base = {"driver": "gcs", "bucket": root, "path": f"{rest}/"}
  else:
    base = {"driver": "file", "path": f"{os.path.abspath(folder)}/"}
  kvstore = {"driver": "ocdbt", "base": base, "path": ".".join(keys) + "/"}
  spec = {"driver": driver, "kvstore": kvstore}
  return ts.open(spec, open=True, read=True, context=context).result()


# Elements that are read at a time.
_CHUNK = 1 << 24


def _checksum(array: ts.TensorStore) -> int:
  """Returns the checksum of an array, read in parts along its first axis.

  Σᵢ mix(bitsᵢ, i) mod 2³²,  i the index in row-major order
  """
  if not array.shape:
    return _mixed_sum(array[...].read().result().reshape(1), 0)[0]
  per_row = max(math.prod(array.shape[1:]), 1)
  rows = max(_CHUNK // per_row, 1)
  total = offset = 0
  for first in range(0, array.shape[0], rows):
    last = min(first + rows, array.shape[0])
    data = array[first:last].read().result()
    part, count = _mixed_sum(data, offset)
    total, offset = total + part, offset + count
  return total % (1 << 32)


def _mixed_sum(data: np.ndarray, offset: int) -> tuple[int, int]:
  """Returns the sum over mixed words, of which `offset` come before."""
  if data.dtype == bool:
    data = data.astype(np.uint8)
  word = np.dtype(f"uint{8 * min(data.dtype.itemsize, 4)}")
  flat = np.ascontiguousarray(data).reshape(-1).view(word)
  bits = flat.astype(np.uint32)
  index = np.arange(offset, offset + bits.size, dtype=np.uint64)
  index = index.astype(np.uint32) * np.uint32(0x9E3779B1)
  mixed = (bits ^ index) * np.uint32(0x85EBCA6B)
  mixed = (mixed ^ mixed >> np.uint32(15)) * np.uint32(0xC2B2AE35)
  return int(np.sum(mixed, dtype=np.uint32)), bits.size


def _check_host(
    run_: Run, checkpoint: Checkpoint, part: Part, advice: str
) -> None:
  """Checks that the counts of a trainer's host state agree."""
  name, data = f"{checkpoint.name}/host", checkpoint.data
  try:
    history = checkpoint.host["applied_history"]
    if history[-1] != [checkpoint.step, data["applied"]]:
      part.add(
          name,
          f"applied_history ends at {history[-1]}, this is step"
          f" {checkpoint.step} at journal position {data['applied']}",
          advice,
      )
    for sid, (sequence, *_) in data["acknowledged"].items():
      if data["watermarks"].get(sid, 0) > sequence:
        part.add(
            name,
            f"{sid}: blocks up to {data['watermarks'][sid]} are applied, up to"
            f" {sequence} acknowledged",
            advice,
        )
    _check_balance(name, data, part, advice)
    rows = data["buffer"]["rows"]
    for key, limit in (("versions", checkpoint.step), ("epochs", run_.epoch)):
      if (worst := rows[key].max(initial=0)) > limit > 0:
        part.add(name, f"{key} of the buffer go to {worst}, over {limit}",
                 advice)  # fmt: skip
  except (KeyError, TypeError, ValueError, IndexError) as error:
    part.add(name, f"lacks what a restart reads: {error!r}", advice)


def _check_balance(
    name: str, data: Mapping[str, Any], part: Part, advice: str
) -> None:
  """Checks a checkpoint's ledger against its buffer:

  accepted = trained + evicted + rejected + lost + untrained in the buffer
  """
  ledger, rows = data["ledger"], data["buffer"]["rows"]
  unused = rows["use_counts"] == 0
  untrained = np.array(
      [
          len(rows["unused_groups"]),
          unused.sum(),
          rows["lengths"][unused].sum(),
      ]
  )
  total = lambda amounts: np.sum([np.zeros(3, int), *amounts.values()], axis=0)
  left = total(ledger["accepted"])
  right = (
      np.array(ledger["trained"])
      + ledger["evicted"]
      + total(ledger["rejected"])
      + total(ledger["lost"])
      + untrained
  )
  if (left != right).any():
    part.add(
        name,
        f"{left.tolist()} {', '.join(_UNITS)} were accepted,"
        f" {right.tolist()} are accounted for",
        "the ledger of a run that goes on from here does not close. " + advice,
    )


# The journal.

_SEGMENT_NAME = re.compile(r"segment-(\d{20})\.journal")
_SEGMENT = struct.Struct("<8sIQ")
_RECORD = struct.Struct("<8sQQ")
_RECORD_MAGIC = b"tbarec\x00\n"
_DIGEST_BYTES = 16
_MESSAGE = struct.Struct("<4sHHIQ")
_MESSAGE_DIGEST_BYTES = 32


def _digest(data: bytes | memoryview, start: int, size: int, end: int) -> bytes:
  """Returns the digest of `size` bytes and what follows a digest to `end`."""
  state = hashlib.blake2b(data[start : start + size], digest_size=_DIGEST_BYTES)
  state.update(data[start + size + _DIGEST_BYTES : end])
  return state.digest()


def _record_end(data: bytes, offset: int, start: int) -> int | None:
  """Returns where the record at an offset ends, None if there is none."""
  begin = offset + _RECORD.size + _DIGEST_BYTES
  if begin > len(data):
    return None
  magic, length, position = _RECORD.unpack_from(data, offset)
  end = begin + length
  if magic != _RECORD_MAGIC or position != start + offset or end > len(data):
    return None
  digest = data[begin - _DIGEST_BYTES : begin]
  view = memoryview(data)
  return end if _digest(view, offset, _RECORD.size, end) == digest else None


def _read_segment(
    data: bytes, start: int
) -> tuple[str, list[tuple[int, int]], list[tuple[int, int]]]:
  """Returns what is wrong with the header, the records and the rest.

  Records and rest are (begin, end), offsets in the file.
  """
  size = _SEGMENT.size + _DIGEST_BYTES
  header = ""
  if len(data) < size:
    header = "is cut off"
  elif _digest(data[:size], 0, _SEGMENT.size, size) != data[size - 16 : size]:
    header = "is damaged"
  elif _SEGMENT.unpack_from(data)[1] != 1:
    header = f"has format {_SEGMENT.unpack_from(data)[1]}, not 1"
  elif _SEGMENT.unpack_from(data)[2] != start:
    header = f"has position {_SEGMENT.unpack_from(data)[2]}"
  records, rest = [], []
  offset = known = min(size, len(data))
  while offset < len(data):
    end = _record_end(data, offset, start)
    if end is None:
      found = data.find(_RECORD_MAGIC, offset + 1)
      offset = len(data) if found < 0 else found
      continue
    if known < offset:
      rest.append((known, offset))
    records.append((offset, end))
    offset = known = end
  if known < len(data):
    rest.append((known, len(data)))
  return header, records, rest


def _decode_message(
    data: bytes,
) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
  """Returns header and arrays of a wire message; its keyed hash is skipped.

  Raises:
    ValueError: the lengths or the JSON part are wrong.
  """
  begin = _MESSAGE.size + _MESSAGE_DIGEST_BYTES
  if len(data) < begin:
    raise ValueError(f"{len(data)} bytes are no message")
  magic, schema, _, text_bytes, array_bytes = _MESSAGE.unpack_from(data)
  if magic != b"TBAJ" or len(data) != begin + text_bytes + array_bytes:
    raise ValueError("wrong magic or length")
  if schema != 1:
    raise ValueError(f"schema {schema}")
  record = json.loads(data[begin : begin + text_bytes])
  arrays, offset = {}, begin + text_bytes
  for name, dtype, shape in record["arrays"]:
    count = math.prod(shape)
    array = np.frombuffer(data, dtype, count, offset)
    arrays[name] = array.reshape(shape)
    offset += -(-array.nbytes // 8) * 8
  return record["header"], arrays


def _check_journal(
    run_: Run,
    saved: Sequence[Checkpoint],
    marks: Mapping[str, list[int]],
    acks: Part,
) -> Part:
  """Checks segments, records, blocks and their acknowledgements."""
  part = Part("journal")
  folder = run_.folder / "replay"
  names = (path.name for path in folder.iterdir()) if folder.exists() else ()
  found = sorted(filter(None, map(_SEGMENT_NAME.fullmatch, names)), key=str)
  starts = sorted(int(match[1]) for match in found)
  keep = run_.setting("checkpoint", "keep", 1)
  restorable = [one for one in saved if "applied" in one.data][-keep:]
  advice = lambda position: _journal_advice(position, restorable)
  blocks: list[Block] = []
  bounds, num_records, num_bytes = {0, *starts}, 0, 0
  end = starts[0] if starts else 0
  for start in starts:
    name = f"replay/segment-{start:020d}.journal"
    run_.show(name)
    try:
      data = (run_.folder / name).read_bytes()
    except FileNotFoundError:  # A live run drops segments.
      continue
    is_last = start == starts[-1]
    if start < end:
      part.add(
          f"{name}, position {start}",
          f"the segment before goes on to position {end}",
          "records of both are replayed; delete the bytes of the one before"
          " that lie past this segment's start",
      )
    elif start > end:
      _check_hole(run_, part, end, start, starts, advice)
    header, records, rest = _read_segment(data, start)
    if is_last and not run_.finished and rest and rest[-1][1] == len(data):
      torn = rest.pop()
      part.notes.append(
          f"{name}: {torn[1] - torn[0]} bytes from byte {torn[0]} are an"
          " unfinished write; a restart cuts them off"
      )
      data = data[: torn[0]]
    if header and data and not (is_last and not records):
      part.add(f"{name}, header", header, "its records are still found; none"
               " is lost. Restore the file from a copy")  # fmt: skip
    for begin, stop in rest:
      part.add(
          f"{name}, byte {begin}",
          f"{stop - begin} bytes to position {start + stop} are no record",
          advice(start + stop),
      )
    for begin, stop in records:
      payload = data[begin + _RECORD.size + _DIGEST_BYTES : stop]
      place = f"{name}, byte {begin}"
      try:
        message, arrays = _decode_message(payload)
        if "sequence" in message:
          _check_block(run_, message, arrays)
          blocks.append(Block(start + stop, place, message))
        elif message["kind"] != "gone":
          raise ValueError(f"kind {message['kind']!r}")
      except (ValueError, KeyError, TypeError) as error:
        part.add(place, f"the message is wrong: {error}", advice(start + stop))
    num_records += len(records)
    num_bytes += len(data)
    bounds |= {start + stop for _, stop in records}
    end = start + len(data)
  _check_sequences(part, blocks, starts, advice)
  _check_applied(part, restorable, bounds, starts, end)
  _check_marks(run_, acks, marks, blocks, saved)
  part.found = (
      f"{len(starts)} segments, {num_records} records, {num_bytes:,} bytes"
  )
  return part


def _journal_advice(position: int, restorable: Sequence[Checkpoint]) -> str:
  """Returns what it means that the record up to a position is lost."""
  needing = [one for one in restorable if one.data["applied"] < position]
  if restorable and not needing:
    return "no restart reads it: every checkpoint is newer. Nothing to do"
  if restorable and needing[-1] is not restorable[-1]:
    return (
        f"the newest checkpoint is newer; a restart from {needing[-1].name}"
        " would count its completions as lost{journal} and sample the prompts"
        " again"
    )
  return (
      "a restart counts its completions as lost{journal} and samples the"
      " prompts again; restore the segment from a copy to keep them"
  )


def _check_hole(
    run_: Run,
    part: Part,
    end: int,
    start: int,
    starts: Sequence[int],
    advice: Callable[[int], str],
) -> None:
  """Checks positions between two segments that no file has.

  A restart cuts an unfinished write off the last segment and begins the next
  one after it; the event has the file, the number of bytes and the offset.
  """
  before = max(one for one in starts if one < start)
  name = f"segment-{before:020d}.journal"
  wanted = f"{name}: cut {start - end} bytes after byte {end - before}"
  for event in run_.events:
    if event["kind"] == "journal_torn" and event["message"].endswith(wanted):
      part.notes.append(f"replay/{wanted}, at a restart after a crash")
      return
  part.add(
      f"replay/{name}",
      f"positions {end} to {start} are missing: the file was cut, or a segment"
      " after it deleted",
      advice(start),
  )


def _check_block(
    run_: Run, header: Mapping[str, Any], arrays: Mapping[str, np.ndarray]
) -> None:
  """Raises ValueError if a block's counts, versions or epochs are wrong."""
  lengths = arrays["completion_lengths"]
  found = [len(header["position"]), lengths.size, int(lengths.sum())]
  amount = [header["amount"][unit] for unit in _UNITS]
  if found != amount:
    raise ValueError(f"has {found} {', '.join(_UNITS)}, says {amount}")
  if run_.epoch and max(header["epoch"]) > run_.epoch:
    raise ValueError(f"epoch {max(header['epoch'])} of {run_.epoch}")
  newest = int(arrays["versions"].max())
  if run_.finished and newest > run_.files["result.json"]["steps"]:
    raise ValueError(f"version {newest} is of no step")


def _check_sequences(
    part: Part,
    blocks: Sequence[Block],
    starts: Sequence[int],
    advice: Callable[[int], str],
) -> None:
  """Checks that each searcher's blocks are there once, without a hole."""
  last: dict[str, Block] = {}
  for block in blocks:
    before = last.get(block.sid)
    if before is None:
      # Earlier segments may have been dropped.
      if starts[0] == 0 and block.sequence and not part.problems:
        part.add(
            block.place,
            f"{block.sid}: blocks 0 to {block.sequence - 1} are missing",
            advice(block.end),
        )
    elif block.sequence <= before.sequence:
      part.add(
          block.place,
          f"{block.sid}: block {block.sequence} is there again, after block"
          f" {before.sequence} of {before.place}",
          "a restart would count it twice; restore the file from a copy",
      )
      continue
    elif block.sequence > before.sequence + 1:
      if part.problems:  # That explain it.
        last[block.sid] = block
        continue
      part.add(
          block.place,
          f"{block.sid}: blocks {before.sequence + 1} to {block.sequence - 1}"
          " before it are missing",
          advice(block.end),
      )
    else:
      for unit in _UNITS:
        was, now = before.header["totals"][unit], block.header["totals"][unit]
        if was + block.header["amount"][unit] != now:
          part.add(
              block.place,
              f"{block.sid}: {unit} go from {was} to {now} with"
              f" {block.header['amount'][unit]} in the block",
              "the ledger does not close; restore the file from a copy",
          )
    last[block.sid] = block


def _check_applied(
    part: Part,
    restorable: Sequence[Checkpoint],
    bounds: set[int],
    starts: Sequence[int],
    end: int,
) -> None:
  """Checks the position from which each checkpoint continues."""
  for one in restorable:
    applied = one.data["applied"]
    first = starts[0] if starts else end
    if applied < first:
      part.add(
          f"replay, position {applied}",
          f"{one.name} continues here, the journal begins at {first}: older"
          " segments were deleted",
          f"a restart from {one.name} counts the rest as lost{{journal}}",
      )
    elif applied > end:
      part.add(
          f"replay, position {end}",
          f"the journal ends here, {one.name} has applied it up to {applied}:"
          " the last segments are missing",
          f"{one.name} has what they held; blocks after it, if any, count as"
          " lost{journal} at a restart",
      )
    elif applied not in bounds and not part.problems:
      part.add(
          f"replay, position {applied}",
          f"{one.name} continues here, where no record ends",
          "checkpoint and journal are of different runs; restore a copy",
      )


def _read_acks(run_: Run) -> tuple[Part, dict[str, list[int]]]:
  """Returns the last mark of each searcher in acknowledged.jsonl."""
  part, marks = Part("acknowledged"), {}
  name = "replay/acknowledged.jsonl"
  path = run_.folder / name
  if not path.exists():
    segments = (
        list(path.parent.glob("segment-*")) if path.parent.exists() else ()
    )
    if segments and not run_.live:
      part.add(
          name,
          "is missing",
          "after a restart nobody knows what was acknowledged since the newest"
          " checkpoint; restore it from a copy",
      )
    part.found = "no file"
    return part, marks
  bad = []
  for number, line in enumerate(path.read_bytes().split(b"\n"), 1):
    if not line.strip():
      continue
    try:
      sid, *mark = json.loads(line)
      if len(mark) != 4 or not all(type(n) is int for n in mark):
        raise ValueError
    except (ValueError, TypeError):
      bad.append(number)
      continue
    if mark < marks.get(sid, []):
      part.add(
          f"{name}, line {number}",
          f"{sid} goes back from {marks[sid]} to {mark}",
          "lines were moved or changed; restore the file from a copy",
      )
    marks[sid] = mark
  if len(bad) > max(run_.restarts, 1) or (bad and run_.finished
                                          and run_.epoch == 1):  # fmt: skip
    part.add(
        f"{name}, line {bad[0]}",
        f"{len(bad)} lines are not marks, more than crashes explain",
        "blocks that they acknowledge are not missed if the journal loses them",
    )
  elif bad:
    part.notes.append(f"{name}: {len(bad)} lines cut off by crashes")
  part.found = f"{len(marks)} searchers"
  return part, marks


def _check_marks(
    run_: Run,
    part: Part,
    marks: Mapping[str, list[int]],
    blocks: Sequence[Block],
    saved: Sequence[Checkpoint],
) -> None:
  """Compares acknowledgements with the journal's blocks and checkpoints."""
  name = "replay/acknowledged.jsonl"
  last = {block.sid: block for block in blocks}
  for sid, (sequence, *totals) in marks.items():
    applied = [one.data.get("watermarks", {}).get(sid, 0) for one in saved]
    there = last[sid].sequence + 1 if sid in last else 0
    known = max([there, *applied])
    if sequence > known:
      part.add(
          f"{name}, {sid}",
          f"acknowledges blocks up to {sequence - 1}, journal and checkpoints"
          f" have them up to {known - 1}",
          "a restart counts the others as lost{journal}; the searcher does not"
          " send them again. Restore the journal from a copy to keep them",
      )
    elif sequence == there:
      known_totals = [last[sid].header["totals"][unit] for unit in _UNITS]
      if totals != known_totals:
        part.add(
            f"{name}, {sid}",
            f"has totals {totals}, block {sequence - 1} has {known_totals}",
            "the ledger may not close after a loss; restore a copy",
        )
    elif run_.finished and sequence < there:
      part.add(
          f"{name}, {sid}",
          f"ends at block {sequence - 1}, the journal at {there - 1}: lines"
          " are missing",
          "blocks after it are not missed if the journal loses them",
      )
  for one in saved:
    for sid, mark in one.data.get("acknowledged", {}).items():
      if mark > marks.get(sid, []) and (run_.folder / name).exists():
        part.add(
            f"{name}, {sid}",
            f"ends at {marks.get(sid)}, {one.name} has {mark}: lines are"
            " missing",
            f"a restart takes that of {one.name}; later ones are unknown",
        )


# The ledger.


def _check_ledger(run_: Run, saved: Sequence[Checkpoint]) -> Part:
  """Adds up the ledger:

  generated = trained_first_time + in_buffer_untrained + evicted_untrained
              + queued + rejected{reason} + lost{cause}
  """
  part, name = Part("ledger"), "ledger.json"
  ledger = run_.files.get(name)
  if ledger is None:
    part.found = "no file"
    return part
  single = ("trained_first_time", "in_buffer_untrained", "evicted_untrained",
            "queued")  # fmt: skip
  try:
    terms = [ledger[term] for term in single]
    terms += [*ledger["rejected"].values(), *ledger["lost"].values()]
    rest = {
        unit: ledger["generated"][unit] - sum(term[unit] for term in terms)
        for unit in _UNITS
    }
    negative = any(term[unit] < 0 for term in terms for unit in _UNITS)
  except (KeyError, TypeError, AttributeError) as error:
    part.add(name, f"a term is missing: {error!r}", _FILES[name][1])
    return part
  part.found = (
      f"{ledger['generated']['completions']} completions,"
      f" {ledger['trained_first_time']['completions']} trained"
  )
  for cause, amount in ledger["lost"].items():
    part.notes.append(
        f"{name}: {amount['completions']} completions lost{{{cause}}}"
    )
  advice = (
      "the run lost or counted data without a record of it; take its results"
      " with care, and report this"
  )
  if any(rest.values()) or negative:
    missing = ", ".join(f"{rest[unit]} {unit}" for unit in _UNITS)
    part.add(name, f"does not close: {missing} are unaccounted for", advice)
  elif not ledger["closed"]:
    part.add(name, "adds up, but says that it is not closed", advice)
  if run_.finished and ledger["queued"]["completions"]:
    part.add(name, "a finished run still has completions queued", advice)
  if run_.finished and saved and saved[-1].data:
    trained = [ledger["trained_first_time"][unit] for unit in _UNITS]
    if (known := saved[-1].data["ledger"]["trained"]) != trained:
      part.add(
          name,
          f"{trained} {', '.join(_UNITS)} are trained, {saved[-1].name} has"
          f" {known}",
          "the file is of another time than the last checkpoint",
      )
  return part
