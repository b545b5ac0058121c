# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""A program that turns lines of JSON into lines of JSON, and can be killed.

A line of the output names the line of the input that it answers, `"line": 7`,
and stands in the order of the input. Lines that were written before are kept
and passed over, so the same command goes on where it was ended. A line that
cannot be answered is reported with its file and number and left out; the others
are done. No JAX here.
"""

import codecs
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
import dataclasses
import fcntl
import hashlib
import json
import os
import pathlib
import sys
from typing import Any, BinaryIO

import rich.console
import rich.progress

from tba_jax import jsonl
from tba_jax import processes

# Exit status where some lines could not be answered.
EXIT_BAD_LINES = 1

Record = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Line:
  """One line of the input that is not blank.

  number: from 1.
  record: the object; None where the line holds none.
  problem: why it holds none, else "".
  """

  number: int
  record: Record | None
  problem: str


@dataclasses.dataclass(frozen=True)
class Counts:
  """What became of the lines: written before, written now, not answered."""

  before: int
  done: int
  bad: int


def read(path: pathlib.Path) -> Iterator[Line]:
  """Yields the lines of a file of JSON objects, the wrong ones too."""
  with path.open("rb") as file:
    for number, data in enumerate(file, start=1):
      if number == 1:
        data = data.removeprefix(codecs.BOM_UTF8)
      if data.strip():
        yield _parse(number, data)


def _parse(number: int, data: bytes) -> Line:
  try:
    value = json.loads(data.rstrip(b"\r\n").decode("utf-8"))
  except UnicodeDecodeError as error:
    return Line(number, None, f"not UTF-8 from byte {error.start + 1} on")
  except json.JSONDecodeError as error:
    return Line(number, None, f"not JSON: {error.msg}, column {error.colno}")
  except (ValueError, RecursionError) as error:
    return Line(number, None, f"not JSON: {error}")
  if not isinstance(value, dict):
    return Line(number, None, "not a JSON object")
  return Line(number, value, "")


class Output:
  """The file that is written, with what it holds from an earlier start.

  Beside it, in `.NAME.settings.json`, stands what it was made with, so that it
  is not continued with something else.

  done: numbers of the input's lines that it answers.
  """

  def __init__(self, path: pathlib.Path, settings: Mapping[str, Any]):
    """Opens the file; cuts off the torn line of a writer that was killed.

    Args:
      path: of the file; its folder is made.
      settings: what the answers depend on, of JSON types.

    Raises:
      ValueError: the file was made with other settings or by something else, or
        another process is writing it.
      OSError: it cannot be written.
    """
    self.done: set[int] = set()
    path.parent.mkdir(parents=True, exist_ok=True)
    self._file = path.open("ab+")
    try:
      self._take(path)
      self._check_settings(path, dict(settings))
      self._read(path)
    except BaseException:
      self._file.close()
      raise

  def write(self, records: Sequence[Record]) -> None:
    """Appends answers; they survive the process once this returns."""
    self._file.write("".join(map(jsonl.json_line, records)).encode())
    self._file.flush()

  def close(self) -> None:
    self._file.close()

  def _take(self, path: pathlib.Path) -> None:
    try:
      fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
      raise ValueError(f"{path}: another process is writing it") from error

  def _check_settings(
      self, path: pathlib.Path, settings: dict[str, Any]
  ) -> None:
    beside = path.with_name(f".{path.name}.settings.json")
    if os.fstat(self._file.fileno()).st_size == 0:
      jsonl.atomic_write_json(beside, settings)
      return
    saved = jsonl.read_json(beside)
    remedy = "; remove the file or name another one"
    if not isinstance(saved, dict):
      raise ValueError(f"{path}: it is there already{remedy}")
    settings = json.loads(json.dumps(settings))
    for key in [*settings, *saved]:
      if saved.get(key) != settings.get(key):
        raise ValueError(
            f"{path}: it was begun with {key} = {saved.get(key)!r}, now it is"
            f" {settings.get(key)!r}{remedy}"
        )

  def _read(self, path: pathlib.Path) -> None:
    self._file.seek(0)
    whole = 0
    for number, data in enumerate(self._file, start=1):
      if not data.endswith(b"\n"):
        break
      record = jsonl.parse_line(data)
      if record is None or not isinstance(record.get("line"), int):
        raise ValueError(f"{path}:{number}: not a line that was written here")
      self.done.add(record["line"])
      whole += len(data)
    self._file.truncate(whole)


def digest(path: pathlib.Path) -> tuple[str, int]:
  """Returns the SHA-256 of a file, and how many lines of it are not blank."""
  sha = hashlib.sha256()
  with path.open("rb") as file:
    return _digest(file, sha)


def _digest(file: BinaryIO, sha: Any) -> tuple[str, int]:
  count = 0
  for data in file:
    sha.update(data)
    count += bool(data.strip())
  return sha.hexdigest(), count


def run(
    source: str,
    target: str,
    settings: Mapping[str, Any],
    *,
    prepare: Callable[[Line], Any],
    answer: Callable[[list[Any]], list[Record]],
    batch_lines: int,
) -> Counts:
  """Answers all lines of a file that its output does not answer yet.

  Args:
    source: path of the input.
    target: path of the output.
    settings: what the answers depend on, beside the input.
    prepare: (line) -> what `answer` needs of it; a ValueError reports the line.
    answer: (what was prepared) -> the records to write, in the same order.
    batch_lines: lines that are answered, and written, together.

  Raises:
    ValueError: as `Output` does.
    OSError: a file cannot be read or written.
  """
  path = pathlib.Path(source).expanduser()
  sha, total = digest(path)
  output = Output(
      pathlib.Path(target).expanduser(), {**settings, "input_sha256": sha}
  )
  before, done, bad = len(output.done), 0, 0
  console = rich.console.Console(stderr=True)
  waiting: list[tuple[int, Any]] = []

  def flush() -> None:
    nonlocal done
    records = answer([prepared for _, prepared in waiting])
    output.write(
        [
            {"line": number, **record}
            for (number, _), record in zip(waiting, records, strict=True)
        ]
    )
    done += len(waiting)
    progress.update(task, completed=before + done + bad)
    if not console.is_terminal:
      print(f"{before + done + bad}/{total} lines", file=sys.stderr, flush=True)
    waiting.clear()

  try:
    with _progress(console) as progress:
      task = progress.add_task("lines", total=total, completed=before)
      for line in read(path):
        if line.number in output.done:
          continue
        try:
          if line.problem:
            raise ValueError(line.problem)
          waiting.append((line.number, prepare(line)))
        except ValueError as error:
          bad += 1
          progress.console.print(
              f"{source}:{line.number}: {error}",
              markup=False,
              highlight=False,
              soft_wrap=True,
          )
        if len(waiting) == batch_lines:
          flush()
      if waiting:
        flush()
  finally:
    output.close()
  return Counts(before, done, bad)


def _progress(console: rich.console.Console) -> rich.progress.Progress:
  return rich.progress.Progress(
      *rich.progress.Progress.get_default_columns(),
      rich.progress.MofNCompleteColumn(),
      console=console,
      disable=not console.is_terminal,
  )


def float_list(values: Iterable[float]) -> list[float]:
  """Returns float32 numbers as the shortest that read back as the same."""
  return [float(f"{value:.9g}") for value in values]


def finish(work: Callable[[], Counts]) -> int:
  """Runs a program's work, says what became of it; returns the exit status."""
  try:
    counts = work()
  except (ValueError, OSError) as error:
    print(f"error: {error}", file=sys.stderr)
    return processes.EXIT_CONFIG
  except KeyboardInterrupt:
    print("interrupted; the same command goes on from here", file=sys.stderr)
    return processes.EXIT_INTERRUPTED
  before = f", {counts.before} were done before" if counts.before else ""
  print(
      f"{counts.done} lines done{before}, {counts.bad} could not be done",
      file=sys.stderr,
  )
  return EXIT_BAD_LINES if counts.bad else processes.EXIT_OK
