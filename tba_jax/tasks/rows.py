# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Tasks over rows of data: sources, rows, and a report of rows left out.

A source is a path, with a split in brackets if a folder has several:

    data/train.jsonl             JSON objects, one per line
    data/train.parquet           a Parquet file
    data/mine[train]             a folder with train.jsonl
    data/my_set/1.0.0[train]     a folder prepared by TFDS (ArrayRecord)
    data/saved[train]            a folder of Hugging Face `datasets`: from
                                 `save_to_disk`, or the hub's Parquet files
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
import dataclasses
import functools
import json
import pathlib
import re
from typing import Any, ClassVar

import numpy as np

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
_MAX_PLACES = 5  # places listed in a message


@dataclasses.dataclass(frozen=True)
class Row:
  """One row of a source.

  place: file and line or row, from 1: "train.jsonl:17".
  fields: by name; None if the line is not a JSON object.
  """

  place: str
  fields: dict[str, Any] | None


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


@dataclasses.dataclass(frozen=True)
class Example:
  """A usable row.

  index: in its split, before long prompts were dropped.
  place: of the row.
  prompt: text that the policy sees.
  answer: reference, "" if the task has none.
  fields: of the row, as read.
  """

  index: int
  place: str
  prompt: str
  answer: str
  fields: Mapping[str, Any]


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
          more = ", …" if len(places) > _MAX_PLACES else ""
          noun = "row" if len(places) == 1 else "rows"
          out.append(
              f"{split}: {len(places)} {noun} left out, each {text}:"
              f" {', '.join(places[:_MAX_PLACES])}{more}"
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


class RowsTask(base.Task):
  """Prompts and reference answers from rows of data.

  Splits are "train", "held_out" (the test split) and, optionally, "validation".
  Subclasses make prompts from rows (`_make`) and give rewards.
  """

  # Words with the space before them, and single digits, so that a small model
  # can learn arithmetic.
  WORDS: ClassVar[str] = r" ?[A-Za-z]+|[0-9]|#+|[^0-9A-Za-z#]"
  CHARACTERS: ClassVar[str] = r"[\s\S]"
  MAX_WORDS: ClassVar[int] = 20_000

  reads_data: ClassVar[bool] = True

  def __init__(
      self,
      sources: Mapping[str, Iterable[Row]],
      *,
      validation_prompts: int = 0,
      split_seed: int = 0,
      drop_shared: bool = False,
  ):
    """Reads the rows.

    Args:
      sources: rows by split.
      validation_prompts: training prompts to move to "validation".
      split_seed: seed of their choice.
      drop_shared: drops training prompts that are in the test split, instead
        of raising an error.

    Raises:
      ValueError: a setting is wrong, a source cannot be read or has no usable
        row, or a split shares prompts with the test split.
    """
    base.check_integer("validation_prompts", validation_prompts, 0, 2**31)
    base.check_integer("split_seed", split_seed)
    self.report = DataReport()
    self._splits: dict[str, list[Example]] = {}
    field_names: set[str] = set()
    for split, rows in sources.items():
      self._splits[split] = self._read(split, rows, field_names)
      if not self._splits[split]:
        raise ValueError(self._why_empty(split, rows, field_names))
    self._check_overlap(sources, drop_shared)
    if validation_prompts:
      self._cut_validation(validation_prompts, split_seed)

  def _make(self, fields: Mapping[str, Any]) -> tuple[str, str] | str:
    """Returns a row's (prompt, answer), or a key of `REASONS`."""
    raise NotImplementedError

  def _used_fields(self) -> Mapping[str, Sequence[str]]:
    """Returns the row fields that each setting mentions."""
    return {}

  def completion_of(self, example: Example) -> str:
    """Returns an example's target in supervised fine-tuning."""
    return example.answer

  def _shortened(
      self, example: Example, fits: Callable[[str], bool]
  ) -> str | None:
    """Returns a shorter prompt that fits, None if the task has none."""
    del example, fits
    return None

  def _read(
      self, split: str, rows: Iterable[Row], field_names: set[str]
  ) -> list[Example]:
    """Returns the usable rows of a split; reports the others."""
    prompts: set[str] = set()
    found: list[Example] = []
    num_rows = 0
    for row in rows:
      num_rows += 1
      field_names.update(row.fields or ())
      made = "malformed" if row.fields is None else self._make(row.fields)
      if not isinstance(made, str) and made[0] in prompts:
        made = "duplicate"
      if isinstance(made, str):
        self.report.leave_out(split, made, row.place)
        continue
      prompts.add(made[0])
      found.append(Example(len(found), row.place, *made, row.fields))
    self.report.read[split], self.report.used[split] = num_rows, len(found)
    return found

  def _why_empty(
      self, split: str, source: Iterable[Row], field_names: set[str]
  ) -> str:
    """Returns the error message for a split without a usable row."""
    for setting, names in self._used_fields().items():
      missing = [name for name in names if name not in field_names]
      if missing and field_names:
        return (
            f"config.task.{setting}: no row of {source} has the field"
            f" {missing[0]!r}; its fields are {sorted(field_names)}"
        )
    if not self.report.read[split]:
      return f"{source}: has no rows"
    why = "; ".join(self.report.lines())
    return f"{source}: no row can be used, {why}; fields {sorted(field_names)}"

  def _check_overlap(
      self, sources: Mapping[str, Iterable[Row]], drop_shared: bool
  ) -> None:
    """Finds prompts of the test split, ignoring case and white space."""
    folded = lambda example: " ".join(example.prompt.casefold().split())
    test = {folded(e): e.place for e in self._splits[base.HELD_OUT]}
    for split, found in self._splits.items():
      shared = [e for e in found if folded(e) in test]
      if split == base.HELD_OUT or not shared:
        continue
      if not drop_shared or split != base.TRAIN:
        pairs = [f"{e.place} = {test[folded(e)]}" for e in shared[:_MAX_PLACES]]
        raise ValueError(
            f"config.task: {len(shared)} prompts of the split {split!r} are in"
            f" the test split too: {', '.join(pairs)}; allowed none"
        )
      for example in shared:
        self.report.leave_out(split, "in_test", example.place)
      self._keep(split, [e for e in found if folded(e) not in test])
      if not self._splits[split]:
        raise ValueError(
            f"{sources[split]}: every prompt is in the test split too"
        )

  def _cut_validation(self, num_prompts: int, seed: int) -> None:
    found = self._splits[base.TRAIN]
    if num_prompts >= len(found):
      raise ValueError(
          f"config.task.validation_prompts={num_prompts}: allowed up to"
          f" {len(found) - 1}, less than the training prompts"
      )
    order = np.random.default_rng([seed, 0x7A1]).permutation(len(found))
    chosen = set(order[:num_prompts].tolist())
    self._keep(base.VALIDATION, [e for i, e in enumerate(found) if i in chosen])
    self._keep(base.TRAIN, [e for i, e in enumerate(found) if i not in chosen])

  def _keep(self, split: str, found: list[Example]) -> None:
    """Sets and renumbers the examples of a split."""
    self._splits[split] = [
        dataclasses.replace(e, index=i) for i, e in enumerate(found)
    ]
    self.report.used[split] = len(found)

  def drop_long(
      self, tokenizer: Any, max_prompt_tokens: int, max_answer_tokens: int = 0
  ) -> None:
    fits = lambda text: len(tokenizer.encode_prompt(text)) <= max_prompt_tokens
    for split, found in self._splits.items():
      kept = []
      for example in found:
        reason = ""
        if not fits(example.prompt):
          shorter = self._shortened(example, fits)
          if shorter is None:
            reason = "too_long"
          else:
            example = dataclasses.replace(example, prompt=shorter)
        if not reason and max_answer_tokens and split == base.TRAIN:
          answer = self.completion_of(example)
          if len(tokenizer.encode(answer)) > max_answer_tokens:
            reason = "answer_too_long"
        if reason:
          self.report.leave_out(split, reason, example.place)
        else:
          kept.append(example)
      self._splits[split] = kept
      self.report.used[split] = len(kept)
      if not kept:
        raise ValueError(
            f"config.sampling.max_prompt_tokens={max_prompt_tokens}: every"
            f" prompt of the split {split!r} is longer, or its answer is"
        )

  @property
  def splits(self) -> Sequence[str]:
    return tuple(self._splits)

  def example(self, split: str, index: int) -> Example:
    """Returns the example that a prompt was made from."""
    base.check_split(split)
    return self._splits[split][index]

  def num_prompts(self, split: str) -> int:
    base.check_split(split)
    return len(self._splits.get(split, ()))

  def source_index(self, split: str, index: int) -> int:
    return self.example(split, index).index

  def prompt(self, split: str, index: int) -> str:
    return self.example(split, index).prompt

  def solution_key(self, split: str, index: int, completion: str) -> str | None:
    return self.judge(split, index, completion).key

  def reward(self, split: str, index: int, completion: str) -> float:
    return self.judge(split, index, completion).reward

  def reference_completion(
      self, split: str, index: int, rng: np.random.Generator
  ) -> str:
    """Returns the row's own answer; `rng` is not used."""
    return self.completion_of(self.example(split, index))

  @functools.cached_property
  def _vocabulary(self) -> tuple[list[str], int, int]:
    """Sorted words of all rows; longest prompt and completion, in words."""
    pattern = re.compile(self.tokenizer_pattern)
    words = {split: set() for split in self._splits}
    longest = [0, 0]
    for split, found in self._splits.items():
      for example in found:
        texts = example.prompt, self.completion_of(example)
        for i, text in enumerate(texts):
          these = pattern.findall(text)
          words[split].update(these)
          longest[i] = max(longest[i], len(these))
    every = set.union(*words.values())
    return sorted(every | set("0123456789")), *longest

  def tokenizer_words(self) -> Sequence[str]:
    words = self._vocabulary[0]
    if len(words) > self.MAX_WORDS:
      raise ValueError(
          f"config.tokenizer.source='task': the texts have {len(words)} words,"
          f" allowed up to {self.MAX_WORDS}; name a folder with a tokenizer"
      )
    return words

  def warn_of_unseen_words(self) -> None:
    """Adds a warning about held-out texts with tokens unseen in training.

    Such a token keeps its initial embedding.
    """
    pattern = re.compile(self.tokenizer_pattern)
    texts = lambda e: f"{e.prompt}\n{self.completion_of(e)}"
    tokens = lambda e: set(pattern.findall(texts(e)))
    trained = set().union(*map(tokens, self._splits[base.TRAIN]))
    held_out = self._splits[base.HELD_OUT]
    unseen = [tokens(e) - trained - {"\n"} for e in held_out]
    count = sum(map(bool, unseen))
    if count:
      some = sorted(set().union(*unseen))[:_MAX_PLACES]
      self.report.warnings.append(
          f"warning: {count} of {len(held_out)} held-out rows have tokens that"
          f" no training row has, such as {some}: the model cannot learn them."
          " Use characters (config.task.tokenizer='characters') or a"
          " pretrained tokenizer"
      )

  @property
  def tokenizer_pattern(self) -> str:
    return self.WORDS

  @property
  def max_prompt_tokens(self) -> int:
    return self._vocabulary[1]

  @property
  def max_completion_tokens(self) -> int:
    return self._vocabulary[2] + 1  # and the stop token


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
