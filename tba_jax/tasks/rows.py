# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Rows of data: their sources, and a report of rows left out.

A source is a file, a folder or a data set of the Hugging Face hub, with a split
in brackets if it has several ("train" where none is named):

    data/train.jsonl             JSON objects, one per line; also .jsonl.gz
    data/train.parquet           a Parquet file
    data/mine[train]             a folder with train.jsonl, train.parquet, …
    data/saved[train]            what `save_to_disk` of `datasets` wrote
    data/my_set/1.0.0[train]     a folder prepared by TFDS (ArrayRecord)
    openai/gsm8k/main[train]     ORG/NAME of the hub, or a folder of it
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
import dataclasses
import gzip
import json
import pathlib
import re
from typing import Any
import zlib

from tba_jax.models import hf_hub
from tba_jax.system import jsonl
from tba_jax.tasks import base

# Why rows are left out, in the order of the checks.
REASONS = {
    "malformed": "is not a JSON object, or has half a surrogate pair",
    "no_prompt": "has no prompt",
    "no_answer": "has no answer",
    "no_number": "has an answer without a number",
    "no_box": "has a solution without a boxed answer",
    "duplicate": "repeats the prompt of another row",
    "in_test": "has a prompt of the test split",
    "equal": "has two equal completions",
    "held_out": "is a pair of the held-out split",
    "too_long": "has a prompt above config.sampling.max_prompt_tokens",
    "answer_too_long": (
        "has an answer above config.sampling.max_completion_tokens"
    ),
}
REPORT_FILE = "data.json"
MAX_PLACES = 5  # places listed in a message


@dataclasses.dataclass(frozen=True)
class Row:
  """One row of a source.

  place: file and line or row, from 1: "train.jsonl:17".
  fields: by name; None if the line is not a JSON object.
  """

  place: str
  fields: dict[str, Any] | None


def text_of(fields: Mapping[str, Any], name: str) -> str | None:
  """Returns a field's text; None if it is missing, no text or blank."""
  value = fields.get(name)
  return value if isinstance(value, str) and value.strip() else None


@dataclasses.dataclass(frozen=True)
class Source:
  """Rows of a file or folder.

  key: setting that names it, such as "config.task.train".
  path: see the module docstring.
  """

  key: str
  path: str

  def __iter__(self) -> Iterator[Row]:
    return read_rows(self.key, self.path)

  def __str__(self) -> str:
    return f"{self.key}={self.path!r}"


class DataReport:
  """Counts rows read, used and left out by split; collects warnings."""

  def __init__(self):
    self.read: dict[str, int] = {}
    self.used: dict[str, int] = {}
    self.warnings: list[str] = []
    self._left_out: dict[str, dict[str, list[str]]] = {}

  def leave_out(self, split: str, reason: str, place: str) -> None:
    self._left_out.setdefault(split, {}).setdefault(reason, []).append(place)

  def places(self, split: str, reason: str) -> list[str]:
    return self._left_out.get(split, {}).get(reason, [])

  def count(self, split: str, reason: str) -> int:
    return len(self.places(split, reason))

  def lines(self) -> list[str]:
    """Returns one line per split and per reason, then the warnings."""
    out = []
    for split, used in self.used.items():
      # A validation split cut from "train" has no rows of its own.
      of_rows = f" of {self.read[split]} rows" if split in self.read else ""
      out.append(f"{split}: {used} prompts{of_rows}")
      for reason, text in REASONS.items():
        places = self.places(split, reason)
        if places:
          more = ", …" if len(places) > MAX_PLACES else ""
          noun = "row" if len(places) == 1 else "rows"
          out.append(
              f"{split}: {len(places)} {noun} left out, each {text}:"
              f" {', '.join(places[:MAX_PLACES])}{more}"
          )
    return out + self.warnings

  def to_json(self) -> dict[str, Any]:
    """Returns the report with the place of every row left out."""
    return {
        "read": self.read,
        "used": self.used,
        "left_out": self._left_out,
        "warnings": self.warnings,
    }


def write_report(
    task: base.Task,
    folder: pathlib.Path,
    on_event: Callable[[str, str], None],
) -> None:
  """Writes FOLDER/data.json and one "data" event per line of the report."""
  if task.report is not None:
    jsonl.atomic_write_json(folder / REPORT_FILE, task.report.to_json())
    for line in task.report.lines():
      on_event("data", line)


_SOURCE = re.compile(r"(?P<path>.*?)(\[(?P<split>[\w.-]+)\])?", re.S)
_FORMATS = (".parquet", ".jsonl", ".jsonl.gz")
# Names of a split's files, people's and the hub's: train.jsonl, train-1.jsonl,
# train-00000-of-00001.parquet, the same with a hash, train/0000.parquet.
_FILE = (
    r"(.*/)?({split}([-_][0-9]+(-of-[0-9]+)?)?([.-][0-9a-f]{{8,}})?"
    r"|(partial-)?{split}/[^/]+)\.(parquet|jsonl|jsonl\.gz)"
)
# Words of a path that name another split than the training split.
_OTHER_SPLIT = re.compile(
    "(^|[^a-z])(valid|validation|val|dev|test|testing|eval|evaluation)"
    "([^a-z]|$)"
)


def find(key: str, source: str) -> pathlib.Path:
  """Returns the file or folder of a source without a split.

  Downloads a data set of the hub. Raises ValueError if there is none.
  """
  try:
    path = hf_hub.find_data(source)
  except ValueError as error:
    message = str(error).removeprefix(f"{source}: ")
    raise ValueError(f"{key}={source!r}: {message}") from error
  if not source or not path.exists():
    has = ""
    if source and path.parent.is_dir():
      names = (p.name for p in path.parent.glob("[!.]*"))
      has = f"; {path.parent} has {_some(names)}"
    raise ValueError(
        f"{key}={source!r}: there is no such file or folder{has}; allowed also"
        " ORG/NAME of the Hugging Face hub"
    )
  return path


def read_rows(key: str, source: str) -> Iterator[Row]:
  """Yields the rows of a source in order.

  `key` is the setting that names the source. Raises ValueError if there is no
  such file, folder or split, or it cannot be read.
  """
  match = _SOURCE.fullmatch(source)
  path, split = find(key, match["path"]), match["split"] or ""
  if path.is_file():
    if split:
      raise ValueError(f"{key}={source!r}: a file has no splits")
    return _read_files(key, source, path.parent, [path])
  if (path / "features.json").is_file():
    return _read_tfds(key, source, path, split)
  files = _saved_files(key, source, path, split)
  files = files or _split_files(key, source, path, split or "train")
  return _read_files(key, source, path, files)


def _read_files(
    key: str, source: str, folder: pathlib.Path, files: Sequence[pathlib.Path]
) -> Iterator[Row]:
  """Yields the rows of files, whose names are shown below `folder`."""
  import pyarrow  # pylint: disable=g-import-not-at-top

  for file in files:
    columnar = file.suffix in (".parquet", ".arrow")
    read = _read_arrow if columnar else _read_jsonl
    try:
      for number, fields in read(file):
        yield Row(f"{file.relative_to(folder)}:{number}", fields)
    except (
        OSError,
        EOFError,
        zlib.error,
        pyarrow.ArrowException,
    ) as error:
      raise ValueError(
          f"{key}={source!r}: {file} cannot be read: {error!r}"
      ) from error


def _read_jsonl(
    file: pathlib.Path,
) -> Iterator[tuple[int, dict[str, Any] | None]]:
  with (gzip.open if file.suffix == ".gz" else open)(file, "rb") as f:
    for number, line in enumerate(f, 1):
      if line.strip():
        yield number, _parsed(line)


def _parsed(line: bytes) -> dict[str, Any] | None:
  try:
    row = json.loads(line)
    # An escape may be half a surrogate pair, which no tokenizer accepts.
    if b"\\u" in line:
      json.dumps(row, ensure_ascii=False).encode()
  except (ValueError, RecursionError):
    return None
  return row if isinstance(row, dict) else None


def _read_arrow(file: pathlib.Path) -> Iterator[tuple[int, dict[str, Any]]]:
  import pyarrow  # pylint: disable=g-import-not-at-top
  from pyarrow import parquet  # pylint: disable=g-import-not-at-top

  if file.suffix == ".parquet":
    batches = parquet.ParquetFile(file).iter_batches()
  else:
    batches = pyarrow.ipc.open_stream(str(file))
  number = 0
  for batch in batches:
    for fields in batch.to_pylist():
      number += 1
      yield number, fields


def _read_tfds(
    key: str, source: str, path: pathlib.Path, split: str
) -> Iterator[Row]:
  # Takes seconds to import; does not need TensorFlow.
  import tensorflow_datasets as tfds  # pylint: disable=g-import-not-at-top

  builder = tfds.builder_from_directory(path)
  if split not in builder.info.splits:
    raise ValueError(
        f"{key}={source!r}: allowed a split in brackets, one of"
        f" {sorted(builder.info.splits)}"
    )
  for number, row in enumerate(builder.as_data_source(split=split), 1):
    fields = {name: _plain(value) for name, value in row.items()}
    yield Row(f"{builder.info.name}[{split}]:{number}", fields)


def _plain(value: Any) -> Any:
  """Decodes bytes; converts arrays to numbers and lists."""
  if isinstance(value, bytes):
    return value.decode("utf-8", errors="replace")
  return value.tolist() if hasattr(value, "tolist") else value


def _saved_files(
    key: str, source: str, path: pathlib.Path, split: str
) -> list[pathlib.Path]:
  """Returns the files that `save_to_disk` of `datasets` lists, [] if none."""
  listed = path / "dataset_dict.json"
  try:
    if listed.is_file():
      splits = json.loads(listed.read_text())["splits"]
      if split not in splits:
        raise ValueError(
            f"{key}={source!r}: allowed a split in brackets, one of {splits}"
        )
      path, split = path / split, ""
    if not (path / "state.json").is_file():
      return []
    if split:
      raise ValueError(f"{key}={source!r}: this data set has no splits")
    state = json.loads((path / "state.json").read_text())
    return [path / entry["filename"] for entry in state["_data_files"]]
  except (KeyError, TypeError, json.JSONDecodeError) as error:
    raise ValueError(
        f"{key}={source!r}: {path} cannot be read: {error!r}"
    ) from error


def _some(names: Iterable[str]) -> str:
  """Returns the first names of many, in order."""
  ordered = sorted(names)
  return (
      ", ".join(ordered[:5]) + ", …" * (len(ordered) > 5)
      or "no .jsonl or .parquet"
  )


def _split_files(
    key: str, source: str, path: pathlib.Path, split: str
) -> list[pathlib.Path]:
  """Returns the files of a split by their names, shards by their numbers.

  The only file of a folder is the training split unless it names another.
  """
  name = re.compile(_FILE.format(split=re.escape(split)))
  files = [p for p in path.rglob("*") if p.name.endswith(_FORMATS)]
  found = []
  for p in files:
    if match := name.fullmatch(p.relative_to(path).as_posix()):
      end = f".{match[match.lastindex]}"
      rank = (len(p.parts), p.name != split + end, _FORMATS.index(end))
      found.append((rank, p))
  names = [p.relative_to(path).as_posix() for p in files]
  if not found and split == "train" and len(files) == 1:
    if not _OTHER_SPLIT.search(names[0].lower()):
      return files
  if not found:
    raise ValueError(
        f"{key}={source!r}: has no split {split!r}; {path} has {_some(names)};"
        f" allowed a folder with {split}.jsonl, {split}.parquet or files as the"
        " hub names them, one that `datasets` saved or TFDS prepared, or the"
        " path of one file"
    )
  # A split may be there twice: the files nearest to the top, train.jsonl
  # before train-1.jsonl, of one format.
  first = min(found)[0]
  return sorted((p for rank, p in found if rank == first), key=_by_numbers)


def _by_numbers(path: pathlib.Path) -> tuple[list[Any], pathlib.Path]:
  """Returns a key that sorts train-2 before train-10."""
  parts = re.split("([0-9]+)", path.as_posix())
  parts[1::2] = map(int, parts[1::2])
  return parts, path


def folder_sources(data: str, held_out: str = "test") -> dict[str, Source]:
  """Returns the sources of both splits of `config.task.data`.

  Raises ValueError if there is no such folder or data set of the hub.
  """
  key = "config.task.data"
  if not find(key, data).is_dir():
    raise ValueError(
        f"{key}={data!r}: allowed a folder with both splits, ORG/NAME of the"
        " Hugging Face hub, or 'made_up'"
    )
  return {
      base.TRAIN: Source(key, f"{data}[train]"),
      base.HELD_OUT: Source(key, f"{data}[{held_out}]"),
  }
