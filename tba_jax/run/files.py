# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Where a run's records go: the files of its directory, or memory."""

from collections.abc import Callable, Mapping
import io
import pathlib
from typing import Any, Protocol, TextIO

from tba_jax.system import jsonl


class Lines(Protocol):
  """Receives the records of a JSON Lines file."""

  def write(self, record: Mapping[str, Any]) -> None:
    ...

  def close(self) -> None:
    ...


class Tail:
  """Reads what was appended to a JSON Lines file since the last call."""

  def __init__(self, path: pathlib.Path):
    self._path = path
    self._offset = 0

  def read(self) -> list[dict[str, Any]]:
    """Returns the new complete objects; a partial last line has to wait."""
    try:
      with self._path.open("rb") as f:
        f.seek(0, 2)
        if f.tell() < self._offset:  # The file was replaced.
          self._offset = 0
        f.seek(self._offset)
        data = f.read()
    except OSError:  # The file is missing, or being replaced.
      return []
    whole = data[: data.rfind(b"\n") + 1]
    self._offset += len(whole)
    records = (jsonl.parse_line(line) for line in whole.splitlines())
    return [record for record in records if record is not None]


class Directory:
  """Files of a run directory, by their names there."""

  def __init__(self, folder: pathlib.Path):
    self._folder = folder

  def lines(self, name: str) -> Lines:
    """Opens a JSON Lines file for appending."""
    return jsonl.LineWriter(self._folder / name)

  def text(self, name: str) -> TextIO:
    """Opens a file for appending."""
    return jsonl.open_append(self._folder / name)

  def records(self, name: str) -> jsonl.Records:
    """Returns the objects of a JSON Lines file, and how many are damaged."""
    return jsonl.read_jsonl(self._folder / name)

  def tail(self, name: str) -> Callable[[], list[dict[str, Any]]]:
    """Returns a function that returns the new objects of a JSON Lines file."""
    return Tail(self._folder / name).read

  def write(self, name: str, value: Any) -> None:
    """Replaces a JSON file."""
    jsonl.atomic_write_json(self._folder / name, value)

  def read(self, name: str) -> Any:
    """Returns the value of a JSON file, None if it is missing or unreadable."""
    return jsonl.read_json(self._folder / name)


class Memory:
  """Records in memory, of a run that leaves no files; see `Directory`.

  save_model: function that writes the newest params as a model folder; None
    before the trainer has started.
  """

  def __init__(self):
    self.save_model: Callable[[pathlib.Path], None] | None = None
    self._lines: dict[str, _List] = {}
    self._texts: dict[str, _Text] = {}
    self._values: dict[str, Any] = {}

  def lines(self, name: str) -> Lines:
    return self._lines.setdefault(name, _List())

  def text(self, name: str) -> TextIO:
    return self._texts.setdefault(name, _Text())

  def records(self, name: str) -> jsonl.Records:
    return jsonl.Records(map(_plain, self._lines.get(name, ())))

  def tail(self, name: str) -> Callable[[], list[dict[str, Any]]]:
    num_read = 0

    def read() -> list[dict[str, Any]]:
      nonlocal num_read
      new = self._lines.get(name, [])[num_read:]
      num_read += len(new)
      return [_plain(record) for record in new]

    return read

  def write(self, name: str, value: Any) -> None:
    self._values[name] = value

  def read(self, name: str) -> Any:
    return self._values.get(name)

  def save(self, folder: pathlib.Path) -> None:
    """Writes all records into a folder."""
    directory = Directory(folder)
    for name, records in self._lines.items():
      with directory.text(name) as file:
        file.writelines(jsonl.sealed(jsonl.json_line(r)) for r in records)
    for name, text in self._texts.items():
      with directory.text(name) as file:
        file.write(text.getvalue())
    for name, value in self._values.items():
      directory.write(name, value)


class _List(list):
  """Records of one name, from any thread."""

  def write(self, record: Mapping[str, Any]) -> None:
    self.append(record)

  def close(self) -> None:
    """Does nothing, since the records are still to be read."""


class _Text(io.StringIO):
  """A text that remains readable after its writer closes it."""

  def close(self) -> None:
    """Does nothing."""


def _plain(record: Mapping[str, Any]) -> dict[str, Any]:
  """Returns a record as it would be read from a file."""
  return jsonl.parse_line(jsonl.json_line(record))
