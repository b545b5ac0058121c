# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Rows of data: their sources, and a report of the rows left out.

A source is a file, a folder or a data set on the Hugging Face hub, with a split
in brackets if it has several (the default is "train"):

    data/train.jsonl             JSON objects, one per line; also .jsonl.gz
    data/train.json              an array of objects; also .json.gz
    data/train.parquet           a Parquet file
    data/train.csv               also .tsv and .arrow
    data/mine[train]             a folder with train.jsonl, train.parquet, …
    data/mine/hard[train]        a subset (configuration) that its README names
    data/saved[train]            what `save_to_disk` of `datasets` wrote
    data/my_set/1.0.0[train]     a folder prepared by TFDS (ArrayRecord)
    openai/gsm8k/main[train]     ORG/NAME of the hub, and a subset if several
    org/name/*[train]            all subsets, also of a folder

A range of rows in brackets, counted from 0, selects a part of any source:

    data/train.jsonl[:500]       the first 500
    data/mine[train][-100:]      the last 100
"""

import codecs
from collections.abc import Callable, Iterable, Iterator, Mapping
import contextlib
import dataclasses
import datetime
import decimal
import gzip
import itertools
import json
import math
import pathlib
import re
from typing import Any
import uuid
import zlib

from tba_jax.tasks import base
from tba_jax.tasks import data_sets

# Why rows are left out, in the order of the checks.
REASONS = {
    "malformed": "is not a JSON object, or has half a surrogate pair",
    "no_prompt": "has no prompt",
    "no_user": "has messages that do not end with a user's turn",
    "no_answer": "has no answer",
    "no_number": "has an answer without a number",
    "no_check": "has no instruction that can be checked",
    "no_box": "has a solution without a boxed answer",
    "no_text": "has no text or number where one belongs",
    "messages": "has a conversation that cannot be read",
    "duplicate": "repeats another row",
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

  place: file and line or row, counted from 1, such as "train.jsonl:17".
  fields: values by name; None if the line is not a JSON object.
  """

  place: str
  fields: dict[str, Any] | None


class UnusableError(ValueError):
  """Error for an unusable row: a key of `REASONS`, and the reason in words."""

  def __init__(self, reason: str, message: str):
    super().__init__(message)
    self.reason = reason


def plain(value: Any) -> Any:
  """Returns a value from any kind of file as JSON types.

  UTF-8 bytes, as written by Spark and others, become texts; decimals become an
  integer or float if that is exact, and otherwise a text; dates and times
  become ISO 8601 texts. Other bytes, and objects such as images, are returned
  unchanged: they may be in columns that nothing reads.
  """
  if value is None or isinstance(value, (bool, int, float, str)):
    return value
  if isinstance(value, (bytes, bytearray)):
    try:
      return bytes(value).decode()
    except UnicodeDecodeError:
      return bytes(value)
  if isinstance(value, decimal.Decimal):
    return _number_of(value)
  if isinstance(value, (datetime.date, datetime.time)):
    return value.isoformat()
  if isinstance(value, (datetime.timedelta, uuid.UUID)):
    return str(value)
  if isinstance(value, Mapping):
    return {str(name): plain(item) for name, item in value.items()}
  if isinstance(value, (list, tuple)):
    return [plain(item) for item in value]
  # NumPy arrays and numbers.
  return plain(value.tolist()) if hasattr(value, "tolist") else value


def _number_of(value: decimal.Decimal) -> int | float | str:
  if not value.is_finite():
    return float(value)
  if value == value.to_integral_value():
    return int(value)
  near = float(value)
  return near if decimal.Decimal(repr(near)) == value else format(value, "f")


def as_text(field: str, value: Any) -> str | None:
  """Returns a field's value as a text; None if it is null or NaN.

  A whole float is written as an integer: if a column of integers has gaps,
  pandas stores 12.0 and NaN.

  Raises:
    UnusableError: the value is neither a text nor a number.
  """
  if value is None or isinstance(value, float) and math.isnan(value):
    return None
  if isinstance(value, float) and value.is_integer():
    # int() would add digits above 2**53.
    whole = decimal.Decimal(repr(value)).to_integral_value()
    return format(whole + 0, "f")  # -0.0 is 0.
  if isinstance(value, (str, int, float)):
    return str(value)
  kinds = {list: "a list", dict: "an object", bytes: "bytes, not UTF-8 text"}
  kind = kinds.get(type(value), type(value).__name__)
  inside = ""
  if isinstance(value, dict) and value:
    inside = f", or a field of the object, such as {field}.{next(iter(value))}"
  raise UnusableError(
      "no_text", f"field {field!r} is {kind}: must be a text or number{inside}"
  )


_READ_ROLES = {
    **{role: role for role in base.ROLES},
    "developer": "system",
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
}
# Start of a JSON list of messages.
MESSAGES = re.compile(r'\s*\[\s*\{\s*"')


def messages_of(field: str, value: Any) -> list[dict[str, Any]] | None:
  """Returns the messages of a field; None if it is not a conversation.

  Also accepts ShareGPT's form (`from`, `value`), content in parts of text, the
  role developer (as system), and all of these as JSON text.

  Raises:
    UnusableError: a turn has another role, uses a tool, or has no text.
  """
  if isinstance(value, str) and MESSAGES.match(value):
    try:
      value = json.loads(value)
    except (ValueError, RecursionError):
      return None
  is_list = isinstance(value, list) and value
  if not is_list or not all(isinstance(item, dict) for item in value):
    return None
  if not any("role" in item or "from" in item for item in value):
    return None
  return [
      _message(f"field {field!r}, message {number}", item)
      for number, item in enumerate(value, 1)
  ]


def _message(where: str, message: Mapping[str, Any]) -> dict[str, Any]:
  names = ("role", "content") if "role" in message else ("from", "value")
  role, content = (message.get(name) for name in names)
  refuse = lambda what: UnusableError("messages", f"{where} {what}")
  if not isinstance(role, str) or role not in _READ_ROLES:
    raise refuse(
        f"has {names[0]} {role!r}: must be one of {', '.join(base.ROLES)};"
        " turns of tools need a task of environments"
    )
  if message.get("tool_calls") or message.get("function_call"):
    raise refuse(
        "calls a tool: must be text only; turns of tools need a task of"
        " environments"
    )
  parts = content if isinstance(content, list) else [content]
  texts = []
  for part in parts:
    if isinstance(part, dict) and part.get("type", "text") == "text":
      part = part.get("text")
    if not isinstance(part, str):
      kind = part.get("type") if isinstance(part, dict) else part
      raise refuse(f"has a {names[1]} of {kind!r:.40}: must be text")
    texts.append(part)
  left_out = (*names, "tool_calls", "function_call")
  more = {
      name: value
      for name, value in message.items()
      if name not in left_out and value is not None
  }
  return {"role": _READ_ROLES[role], "content": "".join(texts), **more}


def value_at(fields: Mapping[str, Any], name: str) -> Any:
  """Returns a field's value, or None; "a.b" is field b of object a."""
  value: Any = fields
  if name in fields:
    return fields[name]
  for part in name.split("."):
    value = value.get(part) if isinstance(value, Mapping) else None
  return value


def text_of(fields: Mapping[str, Any], name: str) -> str | None:
  """Returns a field's text; None if it is missing, blank or not a text."""
  value = fields.get(name)
  return value if isinstance(value, str) and value.strip() else None


@dataclasses.dataclass(frozen=True)
class RowSource:
  """Rows of a file, a folder or a data set on the hub.

  key: setting that names the source, such as "config.task.train".
  path: source as described in the module docstring.
  preferred: subset to take if `path` names none.
  """

  key: str
  path: str
  preferred: str = ""

  def __iter__(self) -> Iterator[Row]:
    return read_rows(self.key, self.path, self.preferred)

  def __str__(self) -> str:
    return f"{self.key}={self.path!r}"


class DataReport:
  """Counts of rows read, used and left out by split, and warnings."""

  def __init__(self):
    self.read: dict[str, int] = {}
    self.used: dict[str, int] = {}
    self.warnings: list[str] = []
    # Split -> description of how its prompts were taken from "train".
    self.taken: dict[str, str] = {}
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
      # A split taken from "train" has no row count of its own.
      of_rows = f" of {self.read[split]} rows" if split in self.read else ""
      of_rows += f", {self.taken[split]}" if split in self.taken else ""
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
    """Returns the report, including the place of every row left out."""
    return {
        "read": self.read,
        "used": self.used,
        "taken": self.taken,
        "left_out": self._left_out,
        "warnings": self.warnings,
    }


def write_report(
    task: base.Task,
    write: Callable[[str, Any], None],
    on_event: Callable[[str, str], None],
) -> None:
  """Writes data.json and one "data" event per line of the report.

  Args:
    task: source of the report, which may have none.
    write: (name, value); writes a JSON file.
    on_event: (kind, message); records an event.
  """
  if task.report is not None:
    write(REPORT_FILE, task.report.to_json())
    for line in task.report.lines():
      on_event("data", line)


_SOURCE = re.compile(
    r"(?P<path>.*?)(\[(?P<split>[\w.-]+)\])?(\[(?P<part>-?\d*:-?\d*)\])?",
    re.S,
)
_OF_DATASETS = (".csv", ".tsv", ".arrow")


def read_rows(key: str, source: str, preferred: str = "") -> Iterator[Row]:
  """Yields the rows of a source in order.

  `key` is the setting that names the source; `preferred` is the subset to take
  if the source names none. Raises ValueError if the file, folder or split does
  not exist or cannot be read.
  """
  try:
    match = _SOURCE.fullmatch(source)
    rows_of_source = _read(match["path"], match["split"] or "", preferred)
    yield from _part(rows_of_source, match["part"] or ":")
  except ValueError as error:
    raise ValueError(f"{key}={source!r}: {error}") from error


def _part(rows: Iterator[Row], part: str) -> Iterable[Row]:
  """Returns the rows START:STOP; stops reading after them if possible."""
  start, stop = (int(n) if n else None for n in part.split(":"))
  if min(start or 0, stop or 0) < 0:
    return [*rows][start:stop]
  return itertools.islice(rows, start, stop)


def _read(name: str, split: str, preferred: str) -> Iterator[Row]:
  path = pathlib.Path(name).expanduser()
  if not name:
    raise ValueError("there is no such file or folder")
  if name.endswith("]"):
    raise ValueError(
        "must end with [SPLIT], [START:STOP] in whole numbers of rows, or both"
        " in this order"
    )
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
  """Re-raises readers' errors as ValueError that names what was read."""
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
      yield Row(f"{label}:{number}", plain(fields))


def _read_file(file: pathlib.Path, folder: pathlib.Path) -> Iterator[Row]:
  """Yields the rows of a file; places name it relative to `folder`."""
  kind = pathlib.Path(file.name.removesuffix(".gz")).suffix
  read = {".parquet": _read_parquet, ".json": _read_json}.get(kind, _read_jsonl)
  with _naming(file):
    for number, fields in read(file):
      yield Row(f"{file.relative_to(folder)}:{number}", plain(fields))


def _read_jsonl(
    file: pathlib.Path,
) -> Iterator[tuple[int, dict[str, Any] | None]]:
  with (gzip.open if file.suffix == ".gz" else open)(file, "rb") as f:
    for number, line in enumerate(f, 1):
      if number == 1 and line.startswith(
          (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
      ):
        raise ValueError("it is UTF-16; must be UTF-8")
      if line.strip():
        yield number, _parsed(line)


def _parsed(line: bytes) -> dict[str, Any] | None:
  try:
    return _whole(json.loads(line), line)
  except (ValueError, RecursionError):
    return None


def _whole(row: Any, source: bytes) -> dict[str, Any] | None:
  """Returns a row, or None unless it is an object of encodable texts."""
  if not isinstance(row, dict):
    return None
  try:
    # An escape may be half of a surrogate pair, which no tokenizer accepts.
    if b"\\u" in source:
      json.dumps(row, ensure_ascii=False).encode()
  except ValueError:
    return None
  return row


def _read_json(
    file: pathlib.Path,
) -> Iterator[tuple[int, dict[str, Any] | None]]:
  """Yields the objects in an array or on separate lines.

  Not read by `datasets`, which turns mixed columns into JSON texts, dates in
  texts into times, and 64-bit integers into floats.
  """
  with (gzip.open if file.suffix == ".gz" else open)(file, "rb") as f:
    content = f.read()
  if not content.removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"["):
    yield from _read_jsonl(file)
    return
  for number, row in enumerate(json.loads(content), 1):
    yield number, _whole(row, content)


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
        f"must be a split in brackets, one of {sorted(builder.info.splits)}"
    )
  for number, row in enumerate(builder.as_data_source(split=split), 1):
    yield Row(f"{builder.info.name}[{split}]:{number}", plain(row))


def folder_sources(
    data: str, held_out: str = "test", preferred: str = ""
) -> dict[str, RowSource]:
  """Returns the sources of both splits of `config.task.data`.

  Raises ValueError if `data` is a file.
  """
  key = "config.task.data"
  if pathlib.Path(data).expanduser().is_file():
    raise ValueError(
        f"{key}={data!r}: must be a folder with both splits, ORG/NAME of the"
        " Hugging Face hub, or 'synthetic'"
    )
  return {
      base.TRAIN: RowSource(key, f"{data}[train]", preferred),
      base.HELD_OUT: RowSource(key, f"{data}[{held_out}]", preferred),
  }
