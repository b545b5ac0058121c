# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Rows of a data set with the place that each came from. No JAX here.

A source is a path, told apart by what is there, with a split in brackets where
the folder has several:

    data/train.jsonl               JSON objects, one a line
    data/my_set/1.0.0[train]       a folder that TFDS prepared (ArrayRecord)
    data/saved[train]              a folder of Hugging Face `datasets`: of
                                   `save_to_disk`, or with parquet files
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
import dataclasses
import json
import pathlib
import re
from typing import Any

# From rows to examples: what is wrong is left out, counted and placed.
#
# What is left out does not stop a run, but it is told: `Report.lines` has the
# counts with the first places. A split without an example, and a prompt that is
# in the test split and in another one, are errors.


# Reasons, in the order in which a row is looked at.
REASONS = {
    "malformed": "is no JSON object, or has half a character",
    "no_prompt": "has no prompt",
    "no_answer": "has no answer",
    "no_number": "has an answer without a number",
    "no_box": "has a solution without a boxed answer",
    "duplicate": "repeats the prompt of another row",
    "in_test": "has a prompt of the test split",
    "equal": "has two completions that are equal",
    "too_long": "has a prompt above config.sampling.max_prompt_tokens",
    "answer_too_long": "has an answer above the limit of tokens",
}
_PLACES = 5


@dataclasses.dataclass(frozen=True)
class Row:
  """One row of a source.

  place: file and line, or file and row counted from 1: "train.jsonl:17".
  fields: by name; None where there is no row to read.
  """

  place: str
  fields: dict[str, Any] | None


@dataclasses.dataclass(frozen=True)
class Example:
  """A row that can be used.

  place: where it came from.
  prompt: text that the policy sees.
  answer: reference, "" where the task has none.
  fields: of the row, as they were read.
  """

  place: str
  prompt: str
  answer: str
  fields: Mapping[str, Any]


class Report:
  """Counts of a data set, by split: rows read, used, and left out with why."""

  def __init__(self):
    self.read: dict[str, int] = {}
    self.used: dict[str, int] = {}
    self._left_out: dict[str, dict[str, list[str]]] = {}

  def leave_out(self, split: str, reason: str, place: str) -> None:
    self._left_out.setdefault(split, {}).setdefault(reason, []).append(place)

  def count(self, split: str, reason: str) -> int:
    return len(self.places(split, reason))

  def places(self, split: str, reason: str) -> list[str]:
    return self._left_out.get(split, {}).get(reason, [])

  def lines(self) -> list[str]:
    """Returns a line a split, and one for each reason to leave rows out."""
    out = []
    for split, used in self.used.items():
      # A validation split that was cut has no rows of its own.
      of_rows = f" of {self.read[split]} rows" if split in self.read else ""
      out.append(f"{split}: {used} prompts{of_rows}")
      for reason, text in REASONS.items():
        places = self.places(split, reason)
        if places:
          more = ", …" if len(places) > _PLACES else ""
          noun = "row" if len(places) == 1 else "rows"
          out.append(
              f"{split}: {len(places)} {noun} left out, each {text}:"
              f" {', '.join(places[:_PLACES])}{more}"
          )
    return out

  def to_json(self) -> dict[str, Any]:
    """Returns everything, each place included."""
    return {
        "read": self.read,
        "used": self.used,
        "left_out": self._left_out,
    }


def examples(
    report: Report,
    split: str,
    rows: Iterable[Row],
    make: Callable[[Mapping[str, Any]], tuple[str, str] | str],
) -> list[Example]:
  """Returns the examples of a split; the report gets the others.

  Args:
    report: of the data set.
    split: its name in the report.
    rows: of the split.
    make: from a row's fields to prompt and answer, or to one of `REASONS`.
  """
  seen: set[str] = set()
  out = []
  num_rows = 0
  for row in rows:
    num_rows += 1
    made = "malformed" if row.fields is None else make(row.fields)
    if not isinstance(made, str) and made[0] in seen:
      made = "duplicate"
    if isinstance(made, str):
      report.leave_out(split, made, row.place)
      continue
    prompt, answer = made
    seen.add(prompt)
    out.append(Example(row.place, prompt, answer, row.fields))
  report.read[split] = num_rows
  report.used[split] = len(out)
  return out


def check_splits(
    splits: Mapping[str, list[Example]], *, test: str, report: Report
) -> None:
  """Raises where a split is empty or shares prompts with the test split.

  Prompts are compared without regard to case and white space.

  Args:
    splits: examples by split.
    test: name of the test split.
    report: of them, part of the message.

  Raises:
    ValueError: with file and line of the first few.
  """
  for split, found in splits.items():
    if not found:
      raise ValueError(
          f"config.task: the split {split!r} has no prompt."
          f" {'; '.join(report.lines())}"
      )
  places = _places(splits[test])
  for split, found in splits.items():
    if split == test:
      continue
    shared = [e for e in found if _folded(e.prompt) in places]
    if shared:
      pairs = [
          f"{e.place} = {places[_folded(e.prompt)]}" for e in shared[:_PLACES]
      ]
      raise ValueError(
          f"config.task: {len(shared)} prompts of the split {split!r} are in"
          f" the test split too: {', '.join(pairs)}; allowed none"
      )


def leave_out_shared(
    splits: dict[str, list[Example]], split: str, *, test: str, report: Report
) -> None:
  """Takes the prompts out of a split that the test split has; it counts them.

  Args:
    splits: examples by split, changed.
    split: that loses them.
    test: name of the test split.
    report: of them.
  """
  places = _places(splits[test])
  kept = []
  for example in splits[split]:
    if _folded(example.prompt) in places:
      report.leave_out(split, "in_test", example.place)
    else:
      kept.append(example)
  splits[split] = kept
  report.used[split] = len(kept)


def _places(found: list[Example]) -> dict[str, str]:
  """Returns where each prompt stands, by what it is compared by."""
  return {_folded(e.prompt): e.place for e in found}


def _folded(text: str) -> str:
  return " ".join(text.casefold().split())


_SOURCE = re.compile(r"(?P<path>.*?)(\[(?P<split>[\w.-]+)\])?", re.S)
# Shards of a split, as the hub names them: train-00000-of-00001.parquet.
_SHARD = r"{split}(-[0-9]+-of-[0-9]+)?(\.[0-9a-f]+)?\.parquet"


def read_rows(key: str, source: str) -> Iterator[Row]:
  """Yields the rows of a source in their order.

  Args:
    key: of the setting that names it, for messages.
    source: see the module.

  Raises:
    ValueError: nothing is there, it is of no known kind, or has no such split.
  """
  match = _SOURCE.fullmatch(source)
  path = pathlib.Path(match["path"]).expanduser()
  split = match["split"] or ""
  if path.is_file():
    if split:
      raise ValueError(f"{key}={source!r}: a file has no splits in brackets")
    return _jsonl(path)
  if not path.is_dir():
    raise ValueError(f"{key}={source!r}: there is no such file or folder")
  if (path / "features.json").is_file():
    return _tfds(key, source, path, split)
  return _arrow(key, source, path, split)


def _jsonl(path: pathlib.Path) -> Iterator[Row]:
  with path.open("rb") as f:
    for number, line in enumerate(f, 1):
      if line.strip():
        yield Row(f"{path.name}:{number}", _parsed(line))


def _parsed(line: bytes) -> dict[str, Any] | None:
  """Returns the JSON object of a line, None where it is not one."""
  try:
    row = json.loads(line)
    # An escape may be half a character, which no tokenizer takes.
    if b"\\u" in line:
      json.dumps(row, ensure_ascii=False).encode()
  except (ValueError, RecursionError):
    return None
  return row if isinstance(row, dict) else None


def _tfds(
    key: str, source: str, path: pathlib.Path, split: str
) -> Iterator[Row]:
  # Seconds to import, so only where it is needed. It does without TensorFlow.
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
  """Returns a text where TFDS has bytes, and a number for an array of one."""
  if isinstance(value, bytes):
    return value.decode("utf-8", errors="replace")
  return value.tolist() if hasattr(value, "tolist") else value


def _arrow(
    key: str, source: str, path: pathlib.Path, split: str
) -> Iterator[Row]:
  import pyarrow  # pylint: disable=g-import-not-at-top
  from pyarrow import parquet  # pylint: disable=g-import-not-at-top

  file = path
  try:
    for file in _arrow_files(key, source, path, split):
      if file.suffix == ".parquet":
        batches = parquet.ParquetFile(file).iter_batches()
      else:
        batches = pyarrow.ipc.open_stream(str(file))
      number = 0
      for batch in batches:
        for fields in batch.to_pylist():
          number += 1
          yield Row(f"{file.relative_to(path)}:{number}", fields)
  except (
      OSError,
      KeyError,
      json.JSONDecodeError,
      pyarrow.ArrowException,
  ) as error:
    raise ValueError(
        f"{key}={source!r}: {file} cannot be read: {error!r}"
    ) from error


def _arrow_files(
    key: str, source: str, path: pathlib.Path, split: str
) -> list[pathlib.Path]:
  """Returns the files of a split of a folder of Hugging Face `datasets`."""
  listed = path / "dataset_dict.json"
  if listed.is_file():
    splits = json.loads(listed.read_text())
    if split not in splits["splits"]:
      raise ValueError(
          f"{key}={source!r}: allowed a split in brackets, one of"
          f" {splits['splits']}"
      )
    path, split = path / split, ""
  if (path / "state.json").is_file():
    if split:
      raise ValueError(f"{key}={source!r}: this data set has no splits")
    state = json.loads((path / "state.json").read_text())
    return [path / entry["filename"] for entry in state["_data_files"]]
  shard = re.compile(_SHARD.format(split=re.escape(split or "train")))
  found = sorted(p for p in path.rglob("*.parquet") if shard.fullmatch(p.name))
  if not found:
    raise ValueError(
        f"{key}={source!r}: allowed a folder that TFDS prepared, or one of"
        " Hugging Face `datasets` with this split in arrow or parquet files"
    )
  return found
