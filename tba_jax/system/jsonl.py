# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""JSON Lines files and atomically replaced JSON files.

A writer may be killed at any byte, so readers skip and count torn lines.
Objects end with a checksum of the preceding bytes, which only `verify` checks;
other readers drop it, so that files may be edited.
"""

from collections.abc import Callable, Iterator, Mapping
import contextlib
import functools
import json
import math
import os
import threading
from typing import Any, BinaryIO, IO, TextIO
import zlib

from etils import epath
import numpy as np

from tba_jax.system import processes

# Key that lists a record's non-finite values, which JSON cannot represent.
NON_FINITE = "non_finite"

_CHECKSUM = "checksum"
_DIGITS = 8
_END = (f', "{_CHECKSUM}": "'.encode(), b'"}')


def to_json(value: Any, non_finite: list[str], name: str = "") -> Any:
  """Returns `value` as JSON types, with None for non-finite numbers.

  Args:
    value: nested mappings, sequences, arrays and scalars of any library.
    non_finite: receives the dotted name of each non-finite number.
    name: dotted name of `value` itself.
  """
  if value is None or isinstance(value, bool | int | str):
    return value
  if isinstance(value, float):
    if math.isfinite(value):
      return value
    non_finite.append(name)
    return None
  if isinstance(value, Mapping):
    join = f"{name}." if name else ""
    return {
        str(k): to_json(v, non_finite, f"{join}{k}") for k, v in value.items()
    }
  if isinstance(value, list | tuple):
    return [to_json(v, non_finite, f"{name}[{i}]") for i, v in enumerate(value)]
  if hasattr(value, "__array__"):
    return to_json(np.asarray(value).tolist(), non_finite, name)
  return str(value)


def json_line(record: Mapping[str, Any]) -> str:
  """Returns `record` as a line of strict JSON.

  A non-finite number becomes null, and its name is added to `non_finite`.
  """
  try:
    # The common case, several times faster.
    return json.dumps(record, allow_nan=False, default=_plain) + "\n"
  except (ValueError, TypeError):
    non_finite: list[str] = []
    out = to_json(record, non_finite)
    if non_finite:
      out[NON_FINITE] = non_finite
    return json.dumps(out, allow_nan=False) + "\n"


def sealed(text: str) -> str:
  """Returns the JSON of an object with a checksum at its end."""
  body = text.rstrip().removesuffix("}").rstrip()
  if body == "{":
    return text
  digits = f"{zlib.crc32(body.encode()):0{_DIGITS}x}"
  return digits.join((body + _END[0].decode(), _END[1].decode())) + "\n"


def is_sound(data: bytes) -> bool | None:
  """Returns whether a JSON object's checksum is right; None without one.

  An end that is one byte off the form of a checksum counts as a wrong checksum.
  """
  data = data.rstrip(b"\n")
  size = len(_END[0]) + _DIGITS + len(_END[1])
  body, end = data[:-size], data[-size:]
  digits = end[len(_END[0]) :][:_DIGITS]
  expected = digits.join(_END)
  wrong = sum(a != b for a, b in zip(end, expected))
  if not body or wrong > 1:
    return None
  return not wrong and digits == f"{zlib.crc32(body):0{_DIGITS}x}".encode()


def loads(data: str | bytes) -> Any:
  """Returns a JSON value without its checksum; raises as `json.loads` does."""
  value = json.loads(data)
  if isinstance(value, dict):
    value.pop(_CHECKSUM, None)
  return value


def _plain(value: Any) -> Any:
  """Returns a value as JSON types; raises ValueError if it is not finite."""
  non_finite: list[str] = []
  out = to_json(value, non_finite)
  if non_finite:
    raise ValueError(non_finite)
  return out


def open_append(path: epath.PathLike) -> TextIO:
  """Opens for appending; ends a torn line left by a killed writer."""
  path = epath.Path(path)
  path.parent.mkdir(parents=True, exist_ok=True)
  torn = False
  if path.exists() and path.stat().length:
    with path.open("rb") as f:
      f.seek(-1, os.SEEK_END)
      torn = f.read(1) != b"\n"
  file = path.open("a")
  if torn:
    file.write("\n")
  return file


class LineWriter:
  """Appends JSON objects to a file, each flushed before `write` returns."""

  def __init__(self, path: epath.PathLike):
    self._lock = threading.Lock()
    self._file = open_append(path)

  def write(self, record: Mapping[str, Any]) -> None:
    line = sealed(json_line(record))
    with self._lock:
      self._file.write(line)
      self._file.flush()

  def sync(self) -> None:
    """Waits until everything written is on the disk."""
    with self._lock:
      sync_file(self._file)

  def close(self) -> None:
    with self._lock:
      self._file.close()


class Records(list):
  """Objects of a JSON Lines file; `skipped` counts the invalid lines."""

  skipped = 0


def parse_line(line: str | bytes) -> dict[str, Any] | None:
  """Returns the JSON object of a line, None if it is not one."""
  try:
    record = loads(line)
  except (ValueError, RecursionError):  # UnicodeDecodeError is a ValueError
    return None
  return record if isinstance(record, dict) else None


def iter_jsonl(
    path: epath.PathLike, skipped: Callable[[], None] = lambda: None
) -> Iterator[dict[str, Any]]:
  """Yields the objects of a JSON Lines file, none if it does not exist.

  `skipped` is called for each invalid line; blank lines are ignored.
  """
  path = epath.Path(path)
  if not path.exists():
    return
  with path.open("rb") as f:
    for line in f:
      if not line.strip():
        continue
      record = parse_line(line)
      if record is None:
        skipped()
      else:
        yield record


def read_jsonl(path: epath.PathLike) -> Records:
  """Returns the objects of a JSON Lines file, none if it does not exist."""
  records = Records()

  def skip() -> None:
    records.skipped += 1

  records.extend(iter_jsonl(path, skip))
  return records


def atomic_write_json(path: epath.PathLike, value: Any) -> None:
  """Replaces a file by `value` as JSON; non-finite numbers become null."""
  text = json.dumps(to_json(value, []), allow_nan=False, indent=1)
  is_object = isinstance(value, Mapping)
  replace_file(path, sealed(text) if is_object else text + "\n")


def replace_file(path: epath.PathLike, text: str) -> None:
  """Replaces a file atomically, and syncs it if it is local."""
  with replacing(path) as file:
    file.write(text.encode())


@contextlib.contextmanager
def replacing(
    path: epath.PathLike, *, private: bool = False
) -> Iterator[BinaryIO]:
  """Opens a file that replaces another atomically, synced if it is local.

  Args:
    path: file to replace; parents are created.
    private: whether only this user may read it, from its first byte on; for
      local files only.
  """
  path = epath.Path(path)
  path.parent.mkdir(parents=True, exist_ok=True)
  partial = path.parent / f".{path.name}.{os.getpid()}.{threading.get_ident()}"
  try:
    with processes.naming(path):
      if private:
        opener = functools.partial(os.open, mode=0o600)
        opened = open(partial, "wb", opener=opener)
      else:
        opened = partial.open("wb")
      with opened as file:
        yield file
        sync_file(file)
    partial.replace(path)
  except BaseException:
    partial.unlink(missing_ok=True)
    raise
  sync_directory(path.parent)


def sync_file(file: IO[Any]) -> None:
  """Flushes a file, and syncs it if it is local."""
  file.flush()
  try:
    descriptor = file.fileno()
  except (AttributeError, OSError):  # A file in a bucket has no descriptor.
    return
  os.fsync(descriptor)


def sync_directory(path: epath.PathLike) -> None:
  """Syncs a directory if it is local."""
  if "://" in os.fspath(path):
    return
  descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
  try:
    os.fsync(descriptor)
  finally:
    os.close(descriptor)


def read_json(path: epath.PathLike) -> Any:
  """Returns the value of a JSON file, None if it is missing or unreadable."""
  try:
    return loads(epath.Path(path).read_bytes())
  except (OSError, ValueError, RecursionError):
    return None


def read_object(path: epath.PathLike, schema: Any) -> dict[str, Any] | None:
  """Returns the object of a JSON file, None without a file.

  Raises:
    ValueError: the file is not JSON, or does not match the schema.
  """
  path = epath.Path(path)
  try:
    value = loads(path.read_bytes())
  except FileNotFoundError:
    return None
  except (ValueError, RecursionError) as error:
    raise ValueError(f"{path}: damaged, not JSON: {error}") from error
  except OSError as error:
    raise ValueError(f"{path}: cannot be read: {error}") from error
  if error := schema_error(value, schema):
    raise ValueError(f"{path}: damaged: {error}")
  return value


def schema_error(value: Any, schema: Any, name: str = "") -> str:
  """Returns how a JSON value violates a schema, or "".

  Args:
    schema: a type (`float` allows int, `int` not bool), `[schema]` for a list,
      or `{key: schema}` for an object: a key ending in "?" may be missing or
      null, "*" stands for all other keys. Keys without a schema are allowed.
  """
  where = f"{name!r} " if name else ""
  if isinstance(schema, Mapping):
    if not isinstance(value, dict):
      return f"{where}is not an object"
    named = {key.removesuffix("?") for key in schema}
    for key, kind in schema.items():
      plain = key.removesuffix("?")
      keys = [k for k in value if k not in named] if key == "*" else [plain]
      for k in keys:
        full = f"{name}.{k}" if name else k
        if value.get(k) is None and key == f"{k}?":
          continue
        if k not in value:
          return f"{full!r} is missing"
        if error := schema_error(value[k], kind, full):
          return error
    return ""
  if isinstance(schema, list):
    if not isinstance(value, list):
      return f"{where}is not a list"
    errors = (
        schema_error(item, schema[0], f"{name}[{i}]")
        for i, item in enumerate(value)
    )
    return next((error for error in errors if error), "")
  allowed = (int, float) if schema is float else (schema,)
  if type(value) not in allowed:
    return f"{where}is {type(value).__name__}, not {schema.__name__}"
  return ""
