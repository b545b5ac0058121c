# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Rows of data: their sources, and a report of rows left out.

A source is a file, a folder or a data set of the Hugging Face hub, with a split
in brackets if it has several ("train" where none is named):

    data/train.jsonl             JSON objects, one per line; also .jsonl.gz
    data/train.parquet           a Parquet file
    data/train.csv               also .tsv, .arrow, and .json, an array
    data/mine[train]             a folder with train.jsonl, train.parquet, …
    data/mine/hard[train]        a subset (configuration) that its README names
    data/saved[train]            what `save_to_disk` of `datasets` wrote
    data/my_set/1.0.0[train]     a folder prepared by TFDS (ArrayRecord)
    openai/gsm8k/main[train]     ORG/NAME of the hub, and a subset if several
    org/name/*[train]            all subsets, also of a folder
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
import contextlib
import dataclasses
import gzip
import json
import pathlib
import re
from typing import Any
import zlib

from tba_jax.system import jsonl
from tba_jax.tasks import base
from tba_jax.tasks import data_sets

# Why rows are left out, in the order of the checks.
REASONS = {
    "malformed": "is not a JSON object, or has half a surrogate pair",
    "no_prompt": "has no prompt",
    "no_answer": "has no answer",
    "no_number": "has an answer without a number",
    "no_check": "has no instruction that can be checked",
    "no_box": "has a solution without a boxed answer",
    "duplicate": "repeats the prompt of another row",
    "in_test": "has a prompt of the test split",
    "in_validation": "has a prompt of the validation split",
    "equal": "has two equal completions",
    "held_out": "is a pair of the held-out split",
    "too_long": "has a prompt above config.sampling.max_prompt_tokens",
    "rerendered": (
        "has an answer that the chat template writes otherwise than after its"
        " prompt"
    ),
    "answer_too_long": (
        "has an answer above config.sampling.max_completion_tokens"
    ),
    "pair_too_long": (
        "has a completion above config.reward_model.max_completion_tokens"
    ),
}
REPORT_FILE = "data.json"
MAX_PLACES = 5  # places listed in a message


@dataclasses.dataclass(frozen=True)
class Row:
  """One row of a source.

  place: file and line or row, from 1: "train.jsonl:17".
  fields: values by name; None if the line is not a JSON object.
  """

  place: str
  fields: dict[str, Any] | None


def text_of(fields: Mapping[str, Any], name: str) -> str | None:
  """Returns a field's text; None if it is missing, no text or blank."""
  value = fields.get(name)
  return value if isinstance(value, str) and value.strip() else None


@dataclasses.dataclass(frozen=True)
class Source:
  """Rows of a file, folder or data set of the hub.

  key: setting that names it, such as "config.task.train".
  path: see the module docstring.
  preferred: subset to take where `path` names none.
  """

  key: str
  path: str
  preferred: str = ""

  def __iter__(self) -> Iterator[Row]:
    return read_rows(self.key, self.path, self.preferred)

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
_OF_DATASETS = (".csv", ".tsv", ".json", ".arrow")


def read_rows(key: str, source: str, preferred: str = "") -> Iterator[Row]:
  """Yields the rows of a source in order.

  `key` is the setting that names the source; `preferred` the subset to take
  where the source names none. Raises ValueError if there is no such file,
  folder or split, or it cannot be read.
  """
  try:
    yield from _read(source, preferred)
  except ValueError as error:
    raise ValueError(f"{key}={source!r}: {error}") from error


def _read(source: str, preferred: str) -> Iterator[Row]:
  match = _SOURCE.fullmatch(source)
  name, split = match["path"], match["split"] or ""
  path = pathlib.Path(name).expanduser()
  if not name:
    raise ValueError("there is no such file or folder")
  if path.is_file():
    if split:
      raise ValueError("a file has no splits")
    if path.name.removesuffix(".gz").endswith(_OF_DATASETS):
      yield from _numbered(path.name, data_sets.read_file(path))
    else:
      yield from _read_file(path, path.parent)
  elif (path / "features.json").is_file():
    yield from _read_tfds(path, split)
  else:
    for label, folder, content in data_sets.read(name, split, preferred):
      if isinstance(content, list):
        for file in content:
          yield from _read_file(file, folder)
      else:
        yield from _numbered(label, content)


@contextlib.contextmanager
def _naming(what: Any) -> Iterator[None]:
  """Raises the errors of readers as ValueError that names what they read."""
  import pyarrow  # pylint: disable=g-import-not-at-top

  try:
    yield
  except (
      ValueError,
      OSError,
      EOFError,
      zlib.error,
      pyarrow.ArrowException,
  ) as error:
    raise ValueError(f"{what} cannot be read: {error!r}") from error


def _numbered(
    label: str, records: Iterable[Mapping[str, Any]]
) -> Iterator[Row]:
  with _naming(label):
    for number, fields in enumerate(records, 1):
      yield Row(f"{label}:{number}", dict(fields))


def _read_file(file: pathlib.Path, folder: pathlib.Path) -> Iterator[Row]:
  """Yields the rows of a file, whose name is shown below `folder`."""
  read = _read_parquet if file.suffix == ".parquet" else _read_jsonl
  with _naming(file):
    for number, fields in read(file):
      yield Row(f"{file.relative_to(folder)}:{number}", fields)


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


def _read_parquet(file: pathlib.Path) -> Iterator[tuple[int, dict[str, Any]]]:
  from pyarrow import parquet  # pylint: disable=g-import-not-at-top

  batches = parquet.ParquetFile(file).iter_batches()
  records = (fields for batch in batches for fields in batch.to_pylist())
  return enumerate(records, 1)


def _read_tfds(path: pathlib.Path, split: str) -> Iterator[Row]:
  # Takes seconds to import; does not need TensorFlow.
  import tensorflow_datasets as tfds  # pylint: disable=g-import-not-at-top

  builder = tfds.builder_from_directory(path)
  if split not in builder.info.splits:
    raise ValueError(
        f"allowed a split in brackets, one of {sorted(builder.info.splits)}"
    )
  for number, row in enumerate(builder.as_data_source(split=split), 1):
    fields = {name: _plain(value) for name, value in row.items()}
    yield Row(f"{builder.info.name}[{split}]:{number}", fields)


def _plain(value: Any) -> Any:
  """Decodes bytes; converts arrays to numbers and lists."""
  if isinstance(value, bytes):
    return value.decode("utf-8", errors="replace")
  return value.tolist() if hasattr(value, "tolist") else value


def folder_sources(
    data: str, held_out: str = "test", preferred: str = ""
) -> dict[str, Source]:
  """Returns the sources of both splits of `config.task.data`.

  Raises ValueError if it is a file.
  """
  key = "config.task.data"
  if pathlib.Path(data).expanduser().is_file():
    raise ValueError(
        f"{key}={data!r}: allowed a folder with both splits, ORG/NAME of the"
        " Hugging Face hub, or 'made_up'"
    )
  return {
      base.TRAIN: Source(key, f"{data}[train]", preferred),
      base.HELD_OUT: Source(key, f"{data}[{held_out}]", preferred),
  }
