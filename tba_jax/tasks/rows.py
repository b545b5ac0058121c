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

from collections.abc import Iterator
import json
import pathlib
import re
from typing import Any

from tba_jax.tasks import examples as examples_lib

_SOURCE = re.compile(r"(?P<path>.*?)(\[(?P<split>[\w.-]+)\])?", re.S)
# Shards of a split, as the hub names them: train-00000-of-00001.parquet.
_SHARD = r"{split}(-[0-9]+-of-[0-9]+)?(\.[0-9a-f]+)?\.parquet"


def read(key: str, source: str) -> Iterator[examples_lib.Row]:
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


def _jsonl(path: pathlib.Path) -> Iterator[examples_lib.Row]:
  with path.open("rb") as f:
    for number, line in enumerate(f, 1):
      if line.strip():
        yield examples_lib.Row(f"{path.name}:{number}", _parsed(line))


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
) -> Iterator[examples_lib.Row]:
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
    yield examples_lib.Row(f"{builder.info.name}[{split}]:{number}", fields)


def _plain(value: Any) -> Any:
  """Returns a text where TFDS has bytes, and a number for an array of one."""
  if isinstance(value, bytes):
    return value.decode("utf-8", errors="replace")
  return value.tolist() if hasattr(value, "tolist") else value


def _arrow(
    key: str, source: str, path: pathlib.Path, split: str
) -> Iterator[examples_lib.Row]:
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
          yield examples_lib.Row(f"{file.relative_to(path)}:{number}", fields)
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
