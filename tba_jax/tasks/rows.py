# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Rows of data: their sources, and a report of rows left out.

A source is a path, with a split in brackets if a folder has several:

    data/train.jsonl             JSON objects, one per line
    data/train.parquet           a Parquet file
    data/mine[train]             a folder with train.jsonl
    data/my_set/1.0.0[train]     a folder prepared by TFDS (ArrayRecord)
    data/saved[train]            a folder of Hugging Face `datasets`: from
                                 `save_to_disk`, or the hub's Parquet files
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
import dataclasses
import json
import pathlib
import re
from typing import Any

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
# The hub's names for Parquet files of a split: train.parquet,
# train-00000-of-00001.parquet, the same with a hash, train/0000.parquet.
_SHARD = (
    r"(.*/)?({split}(-[0-9]+-of-[0-9]+)?([.-][0-9a-f]+)?"
    r"|(partial-)?{split}/[^/]+)\.parquet"
)


def read_rows(key: str, source: str) -> Iterator[Row]:
  """Yields the rows of a source in order.

  `key` is the setting that names the source. Raises ValueError if there is no
  such file, folder or split, or it cannot be read.
  """
  match = _SOURCE.fullmatch(source)
  path = pathlib.Path(match["path"]).expanduser()
  split = match["split"] or ""
  if path.is_dir() and (path / f"{split}.jsonl").is_file():
    path, split = path / f"{split}.jsonl", ""
  if path.is_file():
    if split:
      raise ValueError(f"{key}={source!r}: a file has no splits")
    if path.suffix == ".parquet":
      return _read_arrow(key, source, path.parent, [path])
    return _read_jsonl(path)
  if not source or not path.is_dir():
    raise ValueError(f"{key}={source!r}: there is no such file or folder")
  if (path / "features.json").is_file():
    return _read_tfds(key, source, path, split)
  files = _arrow_files(key, source, path, split)
  return _read_arrow(key, source, path, files)


def _read_jsonl(path: pathlib.Path) -> Iterator[Row]:
  with path.open("rb") as f:
    for number, line in enumerate(f, 1):
      if line.strip():
        yield Row(f"{path.name}:{number}", _parsed(line))


def _parsed(line: bytes) -> dict[str, Any] | None:
  try:
    row = json.loads(line)
    # An escape may be half a surrogate pair, which no tokenizer accepts.
    if b"\\u" in line:
      json.dumps(row, ensure_ascii=False).encode()
  except (ValueError, RecursionError):
    return None
  return row if isinstance(row, dict) else None


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


def _read_arrow(
    key: str, source: str, folder: pathlib.Path, files: Sequence[pathlib.Path]
) -> Iterator[Row]:
  import pyarrow  # pylint: disable=g-import-not-at-top
  from pyarrow import parquet  # pylint: disable=g-import-not-at-top

  for file in files:
    try:
      if file.suffix == ".parquet":
        batches = parquet.ParquetFile(file).iter_batches()
      else:
        batches = pyarrow.ipc.open_stream(str(file))
      number = 0
      for batch in batches:
        for fields in batch.to_pylist():
          number += 1
          yield Row(f"{file.relative_to(folder)}:{number}", fields)
    except (OSError, pyarrow.ArrowException) as error:
      raise ValueError(
          f"{key}={source!r}: {file} cannot be read: {error!r}"
      ) from error


def _arrow_files(
    key: str, source: str, path: pathlib.Path, split: str
) -> list[pathlib.Path]:
  """Returns the files of one split in a folder of Hugging Face `datasets`."""
  listed = path / "dataset_dict.json"
  try:
    if listed.is_file():
      splits = json.loads(listed.read_text())["splits"]
      if split not in splits:
        raise ValueError(
            f"{key}={source!r}: allowed a split in brackets, one of {splits}"
        )
      path, split = path / split, ""
    if (path / "state.json").is_file():
      if split:
        raise ValueError(f"{key}={source!r}: this data set has no splits")
      state = json.loads((path / "state.json").read_text())
      return [path / entry["filename"] for entry in state["_data_files"]]
  except (KeyError, TypeError, json.JSONDecodeError) as error:
    raise ValueError(
        f"{key}={source!r}: {path} cannot be read: {error!r}"
    ) from error
  shard = re.compile(_SHARD.format(split=re.escape(split or "train")))
  found = sorted(
      p
      for p in path.rglob("*.parquet")
      if shard.fullmatch(p.relative_to(path).as_posix())
  )
  if not found:
    raise ValueError(
        f"{key}={source!r}: has no split {split or 'train'!r}; allowed a folder"
        f" with {split or 'train'}.jsonl, one that TFDS prepared, or one of"
        " Hugging Face `datasets` (arrow or parquet)"
    )
  return found


def folder_sources(data: str, held_out: str = "test") -> dict[str, Source]:
  """Returns the sources of both splits of the folder `config.task.data`.

  Raises ValueError if there is no such folder.
  """
  if not data or not pathlib.Path(data).expanduser().is_dir():
    raise ValueError(
        f"config.task.data={data!r}: allowed a folder with train.jsonl and"
        f" {held_out}.jsonl, one prepared by TFDS, one of Hugging Face"
        " `datasets`, or 'made_up'"
    )
  return {
      base.TRAIN: Source("config.task.data", f"{data}[train]"),
      base.HELD_OUT: Source("config.task.data", f"{data}[{held_out}]"),
  }
