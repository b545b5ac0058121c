# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""The `verify` program: audits the files of a run.

    python -m tba_jax.main --program=verify --workdir=runs/countdown

Journal, messages and host states are read by the code that wrote them. Sums,
and the digests of records and arrays, are this file's own, so that an error in
theirs is found. It writes nothing and needs neither devices nor the run's
secret: without that, keyed hashes are not checked, so it finds damage, not
forgery by somebody who can compute the other digests. A run may be audited
while it is live. Logs, spans, tables and pages have no digests.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
import contextlib
import dataclasses
import functools
import hashlib
import itertools
import json
import math
import os
import pathlib
import re
import statistics
import sys
import time
from typing import Any
import zlib

from etils import epath
import ml_collections
import numpy as np
import rich.console
import rich.table
import safetensors
import tensorstore as ts

from tba_jax.channels import journal
from tba_jax.learning import host_state
from tba_jax.monitor import run_directory
from tba_jax.replay import ledger as ledger_lib
from tba_jax.system import bucket
from tba_jax.system import jsonl
from tba_jax.system import processes
from tba_jax.transport import wire

# Files of JSON with checksums, by folder.
_SEALED = ("", "best", "reward_model", "replay", "sft")
_UNITS = ledger_lib.Amount._fields
# Progress is shown on stderr after so many seconds, and every so many then.
_QUIET_S, _SHOW_EVERY_S = 5.0, 2.0
_REPORT = "the report lacks it; training is not affected"
_COPY = "restore it from a copy"
_DELETE = "the run cannot continue; delete it: the same command writes it again"

# pass@1 is null if no completion could be judged.
_EVALUATION = {"step": int, "pass_at_1?": float}

# JSON file -> schema (`jsonl.schema_error`), and what to do if it is violated.
_FILES = {
    "config.json": (
        {"format": int, "run_id": str, "created": float, "config": {}},
        f"no program can open the run; {_COPY}",
    ),
    "epoch.json": (
        {"epoch": int},
        'the trainer will not start; restore it as {"epoch": N}, N above every'
        ' "epoch" in metrics.jsonl',
    ),
    "eval.json": (
        {
            "before?": _EVALUATION,
            "after?": _EVALUATION,
            "history?": [_EVALUATION],
        },
        f"the run cannot continue; {_COPY}, or delete it: `before` is then"
        " evaluated at the step reached",
    ),
    "ledger.json": (
        {"generated": {}, "rejected": {}, "lost": {}, "closed": bool},
        "a run that continues writes it again; the account of a finished run is"
        " in its last checkpoint",
    ),
    "result.json": (
        {"steps": int, "completions": int, "ledger_closed": bool},
        _DELETE,
    ),
    "summary.json": ({"steps": int, "num_steps": int}, _DELETE),
    "totals.json": ({"wall_s": float, "restarts": {}}, _DELETE),
    "status.json": ({"time": float, "phase": str}, "delete it"),
}


@dataclasses.dataclass(frozen=True)
class Problem:
  """Something damaged or missing.

  place: file, and position in it.
  what: fault.
  advice: meaning of the fault for the user, and remedy.
  """

  place: str
  what: str
  advice: str


@dataclasses.dataclass
class Part:
  """A row of the table.

  name: name of the part of the run.
  found: summary of its content.
  problems: faults of the part.
  notes: traces of faults that a restart handles, or has handled.
  """

  name: str
  found: str = "none"
  problems: list[Problem] = dataclasses.field(default_factory=list)
  notes: list[str] = dataclasses.field(default_factory=list)

  def add(self, place: str, what: str, advice: str) -> None:
    self.problems.append(Problem(place, what, advice))


@dataclasses.dataclass
class Checkpoint:
  """A complete checkpoint of the trainer.

  step: step in the directory's name.
  name: path in the run directory.
  data: state of replay, {} if unreadable.
  history: [step, journal position] of the checkpoints when it was saved.
  """

  step: int
  name: str
  data: dict[str, Any]
  history: list[list[int]]


@dataclasses.dataclass
class RunFiles:
  """Contents of a run directory, as far as the checks have read it.

  folder: the run directory.
  live: whether a process of this host works there.
  show: shows progress.
  json: JSON files that could be read, by name.
  events: records of events.jsonl.
  marks: last line of each searcher in acknowledged.jsonl.
  saved: checkpoints, oldest first.
  """

  folder: pathlib.Path
  live: bool
  show: Callable[[str], None]
  json: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)
  events: list[dict[str, Any]] = dataclasses.field(default_factory=list)
  marks: dict[str, list[int]] = dataclasses.field(default_factory=dict)
  saved: list[Checkpoint] = dataclasses.field(default_factory=list)

  @property
  def finished(self) -> bool:
    return not self.live and "result.json" in self.json

  @property
  def epoch(self) -> int:
    """Number of times that the trainer was started."""
    return self.json.get("epoch.json", {}).get("epoch", 0)

  @property
  def cut_lines(self) -> int:
    """Number of lines that a file may have lost the end of, in crashes."""
    if self.finished and self.epoch == 1:
      return 0
    counts = self.json.get("totals.json", {}).get("restarts", {})
    return self.epoch + sum(counts.values())

  @property
  def restorable(self) -> list[Checkpoint]:
    """Checkpoints for which the journal is kept."""
    readable = [one for one in self.saved if one.data]
    return readable[-self.setting("checkpoint", "keep", 1) :]

  def setting(self, section: str, key: str, default: Any) -> Any:
    config = self.json.get("config.json", {}).get("config", {})
    return config.get(section, {}).get(key, default)

  def had(self, kind: str) -> bool:
    return any(event["kind"] == kind for event in self.events)


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
  else:
    error = _wrong_format(folder / "config.json")
  if error:
    return processes.refuse(error)
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
  verdict = f"{len(problems)} wrong" if problems else "sound"
  print(f"{workdir}: {verdict}{' so far; the run is live' if live else ''}")
  return 1 if problems else processes.EXIT_OK


def _wrong_format(path: pathlib.Path) -> str:
  """Returns why this version cannot audit a run, "" if it can."""
  saved = jsonl.read_json(path)
  if jsonl.schema_error(saved, {"format": int}):
    return ""  # Damaged, which the audit tells.
  try:
    run_directory.check_format(path, saved)
  except ValueError as error:
    return str(error)
  return ""


class _Progress:
  """Prints on stderr what is being read, once reading takes long."""

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
  run_, parts = RunFiles(folder, live, show), []
  # Acknowledgements before the journal, which has what they acknowledge.
  checks = {
      "files": _check_files,
      "checksums": _check_checksums,
      "events, samples": _check_events,
      "acknowledged": _check_acks,
      "checkpoints": _check_checkpoints,
      "metrics": _check_metrics,
      "journal": _check_journal,
      "ledger": _check_ledger,
      "results": _check_results,
  }
  for name in ("sft", "reward_model", "best"):
    if (folder / name).exists():
      checks[name] = functools.partial(_check_model, name=name)
  for name, check in checks.items():
    part = Part(name)
    parts.append(part)
    try:
      check(run_, part)
    # Valid JSON of any shape gets here.
    except (ValueError, LookupError, TypeError, AttributeError) as error:
      part.add(name, f"not as it was written: {error!r}", _COPY)
  return parts


def _is_live(folder: pathlib.Path) -> bool:
  """Returns whether a supervisor or trainer of this host has its lock."""
  for name in (".lock", ".trainer.lock"):
    with contextlib.suppress(FileNotFoundError), (folder / name).open() as file:
      if not processes.try_lock(file.fileno(), shared=True):
        return True
  return False


# JSON files.


def _check_files(run_: RunFiles, part: Part) -> None:
  """Reads the JSON files of a run."""
  for name, (schema, advice) in _FILES.items():
    try:
      value = jsonl.loads((run_.folder / name).read_bytes())
      wrong = jsonl.schema_error(value, schema)
    except FileNotFoundError:
      continue
    except (ValueError, RecursionError) as error:
      wrong = f"not JSON: {error}"
    if name == "eval.json" and not wrong:
      steps = [one["step"] for one in value.get("history") or ()]
      if any(a >= b for a, b in itertools.pairwise(steps)):
        wrong = f"the steps of history do not increase: {steps}"
    if wrong:
      part.add(name, wrong, advice)
    else:
      run_.json[name] = value
  needed = ["config.json"]
  if (run_.folder / "metrics.jsonl").exists():
    needed.append("epoch.json")
  if (run_.folder / "result.json").exists():
    needed += ["eval.json", "ledger.json"]
    needed += ["summary.json"] if "totals.json" in run_.json else []
  for name in needed:
    if not (run_.folder / name).exists() and not run_.live:
      part.add(name, "is missing", _FILES[name][1])
  part.found = ", ".join(name.removesuffix(".json") for name in run_.json)


def _check_checksums(run_: RunFiles, part: Part) -> None:
  """Compares the checksums of JSON files, and of the lines of others."""
  count = 0
  for folder in _SEALED:
    for path in sorted((run_.folder / folder).glob("*.json*")):
      name = str(path.relative_to(run_.folder))
      with path.open("rb") as file:
        parts = file if path.suffix == ".jsonl" else [file.read()]
        for number, data in enumerate(parts, 1):
          verdict = jsonl.is_sound(data)
          count += verdict is not None
          if verdict is False:
            in_line = f", line {number}" if path.suffix == ".jsonl" else ""
            advice = _FILES.get(name, (None, _COPY))[1]
            part.add(f"{name}{in_line}", "differs from its checksum", advice)
  part.found = f"{count} of files and lines"


def _check_results(run_: RunFiles, part: Part) -> None:
  """Compares the results of a finished run with its other files."""
  if not run_.finished:
    return
  part.found = "of a finished run"
  advice = "one of the two is of another time; trust the older results less"
  evaluations, ledger = run_.json.get("eval.json"), run_.json.get("ledger.json")
  for name in ("result.json", "summary.json"):
    saved = run_.json.get(name)
    if saved is None:
      continue
    if run_.saved and saved["steps"] != run_.saved[-1].step:
      part.add(
          name,
          f"has {saved['steps']} steps, the newest checkpoint"
          f" {run_.saved[-1].step}",
          "a checkpoint is missing, or the file is of another time",
      )
    for key in ("before", "after") if evaluations else ():
      of_eval = evaluations.get(key) or {}
      shown = {k: v for k, v in of_eval.items() if k != "samples"}
      if saved[key] != shown:
        part.add(name, f"{key!r} is not that of eval.json", advice)
    if ledger and (saved["ledger_closed"], saved["completions"]) != (
        ledger["closed"],
        ledger["generated"]["completions"],
    ):
      part.add(name, "disagrees with ledger.json", advice)


# JSON lines.


def _read_lines(
    run_: RunFiles, name: str
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
      yield number, jsonl.parse_line(line)


def _check_events(run_: RunFiles, part: Part) -> None:
  """Reads events.jsonl and samples.jsonl."""
  counts = []
  for name, schema in (
      ("events.jsonl", {"time": float, "kind": str, "message": str}),
      ("samples.jsonl", {"step": int, "prompt_id": int, "completion": str}),
  ):
    records = []
    bad: list[int] = []
    for number, record in _read_lines(run_, name):
      if record is None:
        bad.append(number)
      elif wrong := jsonl.schema_error(record, schema):
        part.add(f"{name}, line {number}", wrong, _REPORT)
      else:
        records.append(record)
    counts.append(f"{len(records)} {name[:-6]}")
    if name == "events.jsonl":
      run_.events = records
    _check_cut_lines(run_, part, name, bad)
  part.found = ", ".join(counts)


def _check_cut_lines(
    run_: RunFiles, part: Part, name: str, bad: Sequence[int]
) -> None:
  """Checks that no more lines are cut off than crashes explain."""
  if len(bad) > run_.cut_lines:
    lines = ", ".join(map(str, bad[:5]))
    part.add(f"{name}, line {lines}", f"{len(bad)} lines are damaged", _REPORT)
  elif bad:
    part.notes.append(f"{name}: {len(bad)} lines cut off by crashes")


def _check_metrics(run_: RunFiles, part: Part) -> None:
  """Checks lines, steps and epochs of metrics.jsonl."""
  name = "metrics.jsonl"
  steps: list[tuple[int, int, int]] = []  # (epoch, step, line) of train steps.
  evaluated: set[int] = set()
  bad: list[int] = []
  epoch = 0
  for number, record in _read_lines(run_, name):
    place = f"{name}, line {number}"
    if record is None:
      bad.append(number)
      continue
    schema = {"step": int, "time": float, "epoch": int}
    if wrong := jsonl.schema_error(record, schema):
      part.add(place, wrong, _REPORT)
      continue
    if not epoch <= record["epoch"] <= max(run_.epoch, 1):
      part.add(place, f"epoch {record['epoch']} after {epoch}", _COPY)
      continue
    epoch, step = record["epoch"], record["step"]
    if any(key.startswith("eval/") for key in record):
      evaluated.add(step)
    if "train/loss" in record:
      if steps and steps[-1][0] == epoch and steps[-1][1] >= step:
        part.add(place, f"step {step} comes after step {steps[-1][1]}", _COPY)
      steps.append((epoch, step, number))
  _check_cut_lines(run_, part, name, bad)
  history = _check_step_rows(run_, steps, part)
  # A crash may come between eval.json and the line.
  if run_.finished and run_.epoch == 1 and not run_.had("not_written"):
    for one in run_.json.get("eval.json", {}).get("history", ()):
      if max(one["step"] - 1, 0) not in evaluated:
        part.add(name, f"no evaluation after step {one['step']}", _REPORT)
  every = run_.setting("checkpoint", "every_steps", 0)
  last = history[-1] if history else 0
  if not run_.saved and (run_.finished or 0 < 2 * every <= last):
    part.add(
        "checkpoints",
        f"has none, though {name} goes to step {last}",
        f"the run cannot continue and its model is lost; {_COPY}",
    )
  part.found = (
      f"{len(history)} steps, {len(evaluated)} evaluations, epochs to {epoch}"
  )


def _check_step_rows(
    run_: RunFiles, steps: Sequence[tuple[int, int, int]], part: Part
) -> list[int]:
  """Checks that no step is left out; returns the steps that survived.

  A newer epoch redoes the steps from its first one on. A crash may lose the
  last lines of an epoch.
  """
  grown = [b[1] - a[1] for a, b in itertools.pairwise(steps) if a[0] == b[0]]
  stride = statistics.mode(grown or [run_.setting("log", "every_steps", 1)])
  history: list[int] = []
  last_epoch = steps[0][0] if steps else 1
  end = run_.json["result.json"]["steps"] if run_.finished else 0
  ends = [(steps[-1][0] if steps else 1, end, 0)] if end else []
  for epoch, step, number in [*steps, *ends]:
    while history and history[-1] >= step:
      history.pop()
    expected = history[-1] + stride if history else 0
    # After a restart, the first step is a multiple of the period.
    if step - expected >= (stride if number and history else 1):
      what = f"steps {expected} to {step - 1} have no line"
      place = f"line {number}" if number else "the end"
      if epoch != last_epoch or run_.had("not_written"):
        part.notes.append(f"metrics.jsonl: {what}: lost in a crash")
      else:
        part.add(f"metrics.jsonl, before {place}", what, _REPORT)
    last_epoch = epoch
    if number:
      history.append(step)
  return history


# Checkpoints.


def _check_checkpoints(run_: RunFiles, part: Part) -> None:
  """Checks the trainer's checkpoints."""
  folder = epath.Path(bucket.place(run_.folder / "checkpoints"))
  for step, path in _steps(folder, "checkpoints", part):
    checkpoint = _check_checkpoint(run_, path, "checkpoints", step, part)
    if checkpoint is not None:
      run_.saved.append(checkpoint)
  names = {path.name for path in folder.iterdir()} if folder.exists() else ()
  history = run_.saved[-1].history if run_.saved else []
  for step, _ in history[-run_.setting("checkpoint", "keep", 1) :]:
    if not (run_.live or run_.had("checkpoint_failed")) and names.isdisjoint(
        (f"{step}", f"damaged-{step}")
    ):
      part.notes.append(
          f"checkpoints/{step}: deleted; a restart continues from"
          f" checkpoints/{run_.saved[-1].step}"
      )
  part.found = _found_steps(run_.saved)


def _check_model(run_: RunFiles, part: Part, *, name: str) -> None:
  """Checks a model beside the run's: its checkpoints, and its folder."""
  model = run_.folder / name / "model"
  for path in sorted(model.glob("*.safetensors")):
    for problem in _damaged_tensors(path):
      part.add(f"{name}/model/{path.name}", problem, _COPY)
  prefix = f"{name}/checkpoints"
  folder = epath.Path(bucket.place(run_.folder / prefix))
  saved = [
      _check_checkpoint(run_, path, prefix, step, part)
      for step, path in _steps(folder, prefix, part)
  ]
  part.found = _found_steps([one for one in saved if one])
  if model.exists():
    part.found += ", a model"


def _damaged_tensors(path: pathlib.Path) -> Iterator[str]:
  """Yields what differs from the digests in a file's metadata."""
  try:
    with safetensors.safe_open(str(path), framework="np") as file:
      digests = json.loads((file.metadata() or {}).get("blake2b", "{}"))
      for name, digest in digests.items():
        data = np.ascontiguousarray(file.get_tensor(name)).tobytes()
        if hashlib.blake2b(data, digest_size=16).hexdigest() != digest:
          yield f"tensor {name} is damaged"
  except safetensors.SafetensorError as error:
    yield f"damaged or cut off: {error}"


def _found_steps(saved: Sequence[Checkpoint]) -> str:
  steps = ", ".join(str(one.step) for one in saved)
  return f"steps {steps}" if steps else "none"


def _steps(
    folder: epath.Path, name: str, part: Part
) -> list[tuple[int, epath.Path]]:
  """Returns step and path of the complete checkpoints, oldest first."""
  steps = []
  for path in folder.iterdir() if folder.exists() else ():
    if path.name.isdecimal():
      steps.append((int(path.name), path))
    elif "orbax-checkpoint-tmp" in path.name:
      part.notes.append(f"{name}/{path.name}: a save that was interrupted")
    elif path.name.startswith("damaged-"):
      part.notes.append(f"{name}/{path.name}: set aside by a restart")
  steps.sort(key=lambda one: one[0])
  # Orbax writes commit markers in buckets, and in newer versions everywhere.
  marked = [step for step, path in steps if (path / _COMMIT).exists()]
  for step, _ in steps:
    if step not in marked and (marked or bucket.is_remote(folder)):
      part.add(
          f"{name}/{step}/{_COMMIT}",
          "is missing: the save was not completed, or the marker deleted",
          "a restart from a bucket takes an older checkpoint; if all else of"
          " this one is sound, create the file again",
      )
  return steps


_COMMIT = "commit_success.txt"


def _check_checkpoint(
    run_: RunFiles, path: epath.Path, prefix: str, step: int, part: Part
) -> Checkpoint | None:
  """Checks one checkpoint; returns None if a live run has just removed it."""
  name = f"{prefix}/{step}"
  problems: list[tuple[str, str]] = []
  file = f"host/{host_state.NAME}"
  host: dict[str, Any] = {}
  try:
    with (path / file).open("rb") as opened:
      saved = host_state.read(opened)
    if saved["format"] != host_state.FORMAT:
      raise ValueError(f"format {saved['format']}, not {host_state.FORMAT}")
    host = saved["host_state"]
    problems += _check_arrays(run_, path, name, saved["checksums"], step)
    if "data" in host:
      problems += _check_host(run_, step, host)
  except Exception as error:  # NumPy and zipfile raise many types.
    problems.append((file, f"cannot be read: {type(error).__name__}: {error}"))
  if problems and run_.live and not path.exists():
    return None
  for place, what in problems:
    part.add(
        f"{name}/{place}",
        what,
        "a restart sets this checkpoint aside and takes the one before; export"
        f" and evaluate refuse it. Go on from there, or {_COPY}",
    )
  data, history = host.get("data", {}), host.get("applied_history", [])
  return Checkpoint(step, name, data, history)


def _check_arrays(
    run_: RunFiles,
    path: epath.Path,
    name: str,
    checksums: Mapping[str, int],
    step: int,
) -> list[tuple[str, str]]:
  """Compares the checksums of all arrays; returns (place, what) of problems."""
  try:
    for file in ("_CHECKPOINT_METADATA", "state/_sharding"):
      json.loads((path / file).read_bytes())
    file = "state/_METADATA"
    metadata = json.loads((path / file).read_bytes())
    arrays = {
        tuple(str(key["key"]) for key in row["key_metadata"])
        for row in metadata["tree_metadata"].values()
        if not row["value_metadata"]["skip_deserialize"]
    }
  except (OSError, ValueError, LookupError, TypeError) as error:
    return [(file, f"cannot be read: {error!r}")]
  wanted = {_keys_of(text): checksum for text, checksum in checksums.items()}
  damaged = [
      f"array {'.'.join(keys)} has no checksum, or is missing"
      for keys in sorted(wanted.keys() ^ arrays)
  ]
  driver = "zarr3" if metadata.get("use_zarr3") else "zarr"
  context = ts.Context()
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
  more = f"; {len(damaged) - 3} more arrays" if len(damaged) > 3 else ""
  return [("state", "; ".join(damaged[:3]) + more)] if damaged else []


def _keys_of(text: str) -> tuple[str, ...]:
  """Returns the keys of a path in JAX's notation, as .opt_state[1].mu['w']."""
  groups = re.findall(r"\.(\w+)|\['([^']*)'\]|\[(\d+)\]", text)
  return tuple(next(filter(None, keys), "") for keys in groups)


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
    run_: RunFiles, step: int, host: Mapping[str, Any]
) -> list[tuple[str, str]]:
  """Checks that the counts of a trainer's host state agree.

  accepted = trained + evicted + rejected + lost + untrained in the buffer
  """
  data, problems = host["data"], []
  ledger, rows = data["ledger"], data["buffer"]["rows"]
  if host["applied_history"][-1] != [step, data["applied"]]:
    problems.append(f"applied_history ends at {host['applied_history'][-1]}")
  for sid, (sequence, *_) in data["acknowledged"].items():
    if (applied := data["watermarks"].get(sid, 0)) > sequence:
      problems.append(f"{sid}: applied to {applied}, acknowledged {sequence}")
  for key, limit in (("versions", step), ("epochs", run_.epoch)):
    if (worst := rows[key].max(initial=0)) > limit > 0:
      problems.append(f"{key} of the buffer go to {worst}, over {limit}")
  unused = rows["use_counts"] == 0
  # The mask has no padding.
  sampled = rows["sampled_mask"][np.repeat(unused, rows["completion_lengths"])]
  parts = [
      (len(rows["unused_groups"]), int(unused.sum()), int(sampled.sum())),
      *(ledger["trained"], ledger["evicted"]),
      *(*ledger["rejected"].values(), *ledger["lost"].values()),
  ]
  accepted, accounted = _sum(ledger["accepted"].values()), _sum(parts)
  if accepted != accounted:
    problems.append(
        f"{[*accepted]} {', '.join(_UNITS)} were accepted, {[*accounted]} are"
        " accounted for"
    )
  return [("host", what) for what in problems]


def _sum(amounts: Iterable[Sequence[int]]) -> ledger_lib.Amount:
  return sum(amounts, ledger_lib.Amount())


# The journal.

_ACKS = "replay/acknowledged.jsonl"
_SEGMENT_NAME = re.compile(r"segment-(\d{20})\.journal")
_DIGEST_BYTES = 16


@dataclasses.dataclass(frozen=True)
class Block:
  """A block of a searcher; `end` is the position of its record."""

  place: str
  end: int
  sid: str
  sequence: int
  amount: list[int]
  totals: list[int]


def _is_intact(data: bytes, begin: int, split: int, end: int) -> bool:
  """Returns whether a digest at `split` is that of the bytes around it."""
  rest = split + _DIGEST_BYTES
  state = hashlib.blake2b(data[begin:split], digest_size=_DIGEST_BYTES)
  state.update(data[rest:end])
  return state.digest() == data[split:rest]


def _read_segment(
    path: pathlib.Path, data: bytes, start: int
) -> tuple[str, list[journal.RecordSpan], list[tuple[int, int]]]:
  """Returns what is wrong with the header, the records and the rest.

  The rest are (begin, end) of damaged bytes, offsets in the file.
  """
  size = journal.HEADER_BYTES
  if len(data) < size:
    header = "is cut off"
  elif not _is_intact(data, 0, size - _DIGEST_BYTES, size):
    header = "is damaged"
  else:
    position = int.from_bytes(data[size - 24 : size - 16], "little")
    header = f"has position {position}" if position != start else ""
  records, rest = [], []
  for span in journal.split_segment(path, data, start):
    split = span.start + journal.RECORD_BYTES - _DIGEST_BYTES
    is_record = span.payload is not None
    if is_record and _is_intact(data, span.start, split, span.end):
      records.append(span)
    elif (begin := max(span.start, min(size, len(data)))) < span.end:
      rest.append((begin, span.end))
  return header, records, rest


def _check_journal(run_: RunFiles, part: Part) -> None:
  """Checks segments, records, blocks and their acknowledgements."""
  folder = run_.folder / "replay"
  names = (path.name for path in folder.iterdir()) if folder.exists() else ()
  matches = filter(None, map(_SEGMENT_NAME.fullmatch, names))
  starts = sorted(int(match[1]) for match in matches)
  blocks: list[Block] = []
  ends, num_records, num_bytes = {0, *starts}, 0, 0
  end = before = starts[0] if starts else 0
  for start in starts:
    name = f"replay/segment-{start:020d}.journal"
    run_.show(name)
    try:
      data = (run_.folder / name).read_bytes()
    except FileNotFoundError:  # A live run drops segments.
      continue
    if start < end:
      part.add(
          f"{name}, position {start}",
          f"the previous segment extends to position {end}",
          "records of both are replayed; truncate it there",
      )
    elif start > end:
      _check_hole(run_, part, before, end, start)
    num_bytes += len(data)
    before, end = start, start + len(data)
    try:
      header, records, rest = _read_segment(run_.folder / name, data, start)
    except ValueError as error:
      part.add(f"{name}, header", str(error), "use that version")
      continue
    if start == starts[-1] and not run_.finished:
      if rest and rest[-1][1] == len(data):
        torn, _ = rest.pop()
        part.notes.append(f"{name}: an unfinished write from byte {torn} on")
      header = header if records else ""
    if header:
      part.add(f"{name}, header", header, "its records are found all the same")
    for begin, stop in rest:
      part.add(
          f"{name}, byte {begin}",
          f"{stop - begin} bytes to position {start + stop} are no record",
          _journal_advice(run_, start + stop),
      )
    for span in records:
      place = f"{name}, byte {span.start}"
      try:
        block = _read_block(run_, span.payload)
        if block is not None:
          blocks.append(Block(place, start + span.end, *block))
      except (ValueError, LookupError, TypeError) as error:
        advice = _journal_advice(run_, start + span.end)
        part.add(place, f"the message is wrong: {error}", advice)
    num_records += len(records)
    ends |= {start + span.end for span in records}
  _check_sequences(run_, part, blocks, is_whole=starts[:1] == [0])
  _check_applied(run_, part, ends, starts[0] if starts else end, end)
  _check_marks(run_, part, blocks)
  part.found = (
      f"{len(starts)} segments, {num_records} records, {num_bytes:,} bytes"
  )


def _journal_advice(run_: RunFiles, position: int) -> str:
  """Returns what it means that the record up to a position is lost."""
  restorable = run_.restorable
  needing = [one for one in restorable if one.data["applied"] < position]
  if restorable and not needing:
    return "no restart reads it: all checkpoints are newer. Nothing to do"
  when = ""
  if restorable and needing[-1] is not restorable[-1]:
    when = f" from {needing[-1].name}, which is not the newest,"
  return (
      f"a restart{when} counts its completions as lost{{journal}} and samples"
      f" the prompts again; to keep them, {_COPY}"
  )


def _check_hole(
    run_: RunFiles, part: Part, before: int, end: int, start: int
) -> None:
  """Checks that a crash explains positions between segments.

  A restart cuts an unfinished write off the last segment and begins the next
  one after it; the event has the file, the number of bytes and the offset.
  """
  name = f"segment-{before:020d}.journal"
  cut = f"{name}: cut {start - end} bytes after byte {end - before}"
  for event in run_.events:
    if event["kind"] == "journal_torn" and event["message"].endswith(cut):
      part.notes.append(f"replay/{cut}, at a restart after a crash")
      return
  part.add(
      f"replay/{name}",
      f"positions {end} to {start} are missing: the file was cut, or a segment"
      " after it deleted",
      _journal_advice(run_, start),
  )


def _read_block(
    run_: RunFiles, data: bytes
) -> tuple[str, int, list[int], list[int]] | None:
  """Returns a message's sid, sequence, amount and totals; None if no block.

  Raises:
    ValueError, LookupError, TypeError: the message is not as documented.
  """
  header, arrays = wire.decode_unverified(data)
  if "sequence" not in header:
    if header["kind"] not in ("gone", "missing", "unknown"):
      raise ValueError(f"kind {header['kind']!r}")
    return None
  amount, totals = (
      [header[key][unit] for unit in _UNITS] for key in ("amount", "totals")
  )
  mask = arrays["sampled_mask"]
  counts = [len(mask), math.prod(mask.shape[:2]), int(mask.sum())]
  if counts != amount:
    raise ValueError(f"has {counts} {', '.join(_UNITS)}, says {amount}")
  if max(header["epoch"]) > run_.epoch > 0:
    raise ValueError(f"epoch {max(header['epoch'])} of {run_.epoch}")
  newest = int(arrays["versions"].max())
  if run_.finished and newest > run_.json["result.json"]["steps"]:
    raise ValueError(f"version {newest} is of no step")
  return header["sid"], header["sequence"], amount, totals


def _check_sequences(
    run_: RunFiles, part: Part, blocks: Sequence[Block], *, is_whole: bool
) -> None:
  """Checks that each searcher's blocks are there once, without a hole.

  `is_whole`: no segment was dropped yet. Holes explained by other problems are
  not reported.
  """
  last: dict[str, Block] = {}
  explained = bool(part.problems)
  for block in blocks:
    before = last.get(block.sid)
    expected = before.sequence + 1 if before else 0
    if before and block.sequence < expected:
      part.add(
          block.place,
          f"block {block.sequence} of {block.sid} is there again, after"
          f" {before.place}",
          f"a restart would count it twice; {_COPY}",
      )
      continue
    last[block.sid] = block
    if block.sequence > expected and (before or is_whole) and not explained:
      part.add(
          block.place,
          f"blocks {expected} to {block.sequence - 1} of {block.sid} before it"
          " are missing",
          _journal_advice(run_, block.end),
      )
    elif before and block.sequence == expected:
      summed = [a + b for a, b in zip(before.totals, block.amount, strict=True)]
      if summed != block.totals:
        part.add(
            block.place,
            f"totals of {block.sid} are {block.totals}, the blocks add up to"
            f" {summed}",
            f"the ledger does not close; {_COPY}",
        )


def _check_applied(
    run_: RunFiles, part: Part, ends: set[int], first: int, end: int
) -> None:
  """Checks the position from which each checkpoint continues."""
  explained = bool(part.problems)
  for one in run_.restorable:
    applied = one.data["applied"]
    place = f"replay, position {applied}"
    if applied < first:
      part.add(
          place,
          f"{one.name} continues here, the journal begins at {first}: older"
          " segments were deleted",
          f"a restart from {one.name} counts the rest as lost{{journal}}",
      )
    elif applied > end:
      part.add(
          place,
          f"{one.name} has applied the journal to here, it ends at {end}: the"
          " last segments are missing",
          f"{one.name} has what they held before; what came after it counts as"
          " lost{journal} at a restart",
      )
    elif applied not in ends and not explained:
      part.add(place, f"{one.name} continues here, amid a record", _COPY)


def _check_acks(run_: RunFiles, part: Part) -> None:
  """Reads acknowledged.jsonl."""
  path = run_.folder / _ACKS
  if not path.exists():
    return
  bad = []
  for number, line in enumerate(path.read_bytes().split(b"\n"), 1):
    if not line.strip():
      continue
    try:
      *fields, crc = json.loads(line)
      sid, *mark = fields
      if len(mark) != 4 or not all(type(n) is int for n in mark):
        raise ValueError
      if crc != zlib.crc32(json.dumps(fields).encode()):
        raise ValueError
    except (ValueError, TypeError):
      bad.append(number)
      continue
    if mark < run_.marks.get(sid, []):
      what = f"{sid} goes back from {run_.marks[sid]} to {mark}"
      part.add(f"{_ACKS}, line {number}", what, _COPY)
    run_.marks[sid] = mark
  _check_cut_lines(run_, part, _ACKS, bad)
  part.found = f"searchers: {len(run_.marks)}"


def _check_marks(run_: RunFiles, part: Part, blocks: Sequence[Block]) -> None:
  """Compares acknowledgements with the journal's blocks and checkpoints."""
  if not (run_.folder / _ACKS).exists():
    acknowledged = any(one.data["acknowledged"] for one in run_.restorable)
    if acknowledged or (blocks and run_.finished):
      part.add(
          _ACKS,
          "is missing",
          "after a restart nobody knows what was acknowledged since the newest"
          f" checkpoint; {_COPY}",
      )
    return
  last = {block.sid: block for block in blocks}
  advice = f"blocks after it are not missed if the journal loses them; {_COPY}"
  for sid, (sequence, *totals) in run_.marks.items():
    place = f"{_ACKS}, {sid}"
    there = last[sid].sequence + 1 if sid in last else 0
    known = [one.data["watermarks"].get(sid, 0) for one in run_.restorable]
    if sequence > max([there, *known]):
      part.add(
          place,
          f"acknowledges blocks up to {sequence - 1}, journal and checkpoints"
          f" have them up to {max([there, *known]) - 1}",
          "a restart counts the others as lost{journal}; the searcher does not"
          " send them again. To keep them, restore the journal from a copy",
      )
    elif sequence == there and totals != last[sid].totals:
      what = f"has totals {totals}, block {sequence - 1} {last[sid].totals}"
      part.add(place, what, f"the ledger may not close after a loss; {_COPY}")
    elif run_.finished and sequence < there:
      what = f"ends at block {sequence - 1}, the journal at {there - 1}"
      part.add(place, what, advice)
  for one in run_.restorable:
    for sid, mark in one.data["acknowledged"].items():
      if mark > run_.marks.get(sid, []):
        what = f"ends at {run_.marks.get(sid)}, {one.name} has {mark}"
        part.add(f"{_ACKS}, {sid}", what, advice)


# The ledger.


def _check_ledger(run_: RunFiles, part: Part) -> None:
  """Checks that the sum of `replay/ledger.py` closes."""
  name = "ledger.json"
  ledger = run_.json.get(name)
  if ledger is None:
    return
  single = ("trained_first_time", "in_buffer_untrained", "evicted_untrained",
            "queued")  # fmt: skip
  amounts = [ledger[term] for term in single]
  amounts += [*ledger["rejected"].values(), *ledger["lost"].values()]
  generated, *terms = (
      ledger_lib.Amount(**amount) for amount in (ledger["generated"], *amounts)
  )
  rest = generated - _sum(terms)
  advice = (
      "the run lost data, or counted it twice, without a record of it: trust"
      " its results less, and report this"
  )
  if any(rest) or min(map(min, terms)) < 0:
    what = ", ".join(f"{n} {unit}" for n, unit in zip(rest, _UNITS))
    part.add(name, f"does not close: {what} are unaccounted for", advice)
  elif ledger.get("unknown"):
    for reason in ledger["unknown"]:
      part.add(name, f"may lack losses: {reason}", _COPY)
  elif not ledger["closed"]:
    part.add(name, "adds up, but says that it is not closed", advice)
  if run_.finished and ledger["queued"]["completions"]:
    part.add(name, "has queued completions after the end", advice)
  if run_.finished and run_.saved and run_.saved[-1].data:
    trained = [ledger["trained_first_time"][unit] for unit in _UNITS]
    if (known := run_.saved[-1].data["ledger"]["trained"]) != trained:
      what = f"{trained} are trained, {run_.saved[-1].name} has {known}"
      part.add(name, what, "it is of another time than the last checkpoint")
  for cause, amount in ledger["lost"].items():
    count = amount["completions"]
    part.notes.append(f"{name}: {count} completions lost{{{cause}}}")
  part.found = (
      f"{ledger['generated']['completions']} completions,"
      f" {ledger['trained_first_time']['completions']} trained"
  )
