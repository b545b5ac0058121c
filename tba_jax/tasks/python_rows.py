# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Writes rows from a Python program to files that all processes of a run read.

Rows are a list of objects, prompts or messages; a pandas DataFrame; or a
`Dataset` of Hugging Face `datasets`. A mapping has rows by split, like a
`DatasetDict`.
"""

from collections.abc import Iterable, Iterator, Mapping
import json
import os
import pathlib
from typing import Any

from tba_jax.system import jsonl
from tba_jax.tasks import custom_task
from tba_jax.tasks import rows

SPLITS = ("train", "test", "validation")
# Columns that can be used as prompts unchanged; the first that exists is taken.
_PROMPTS = ("prompt", "messages", "conversations")


def sources(
    data: Any, folder: pathlib.Path, template: str = ""
) -> tuple[dict[str, str], str]:
  """Returns sources of rows by split, and the template of their prompts.

  Args:
    data: path, which is returned unchanged, or rows; see the module docstring.
    folder: destination of a file for each split; once the run has begun, its
      existing files are kept.
    template: `config.task.prompt`; "" takes the column with prompts.

  Raises:
    ValueError: a row, which the message names, has no prompt or cannot be
      written; or the run has begun with different rows.
  """
  named = {"train": data}
  if isinstance(data, Mapping):
    named = dict(data)
    if "train" not in named or not named.keys() <= {*SPLITS}:
      raise ValueError(
          f"data={{{', '.join(map(repr, named))}: …}}: must have the splits"
          " 'train' and, if any, 'test' and 'validation'; columns of rows are a"
          " DataFrame or a Dataset, such as Dataset.from_dict(…)"
      )
  out = {}
  for split, part in named.items():
    if isinstance(part, (str, os.PathLike)):
      out[split] = os.fspath(part)
      continue
    argument = "data" if part is data else f"data[{split!r}]"
    records = list(_records(argument, part))
    if not records:
      raise ValueError(f"{argument}: has no rows")
    template = template or _template(argument, records[0])
    lines = [
        _line(argument, index, record, template)
        for index, record in enumerate(records)
    ]
    out[split] = str(_write(argument, folder / f"{split}.jsonl", lines))
  return out, template


def _records(argument: str, data: Any) -> Iterator[dict[str, Any]]:
  """Yields the rows as dicts."""
  if hasattr(data, "to_dict") and hasattr(data, "columns"):  # A DataFrame.
    data = data.to_dict("records")
  if not isinstance(data, Iterable):
    raise ValueError(
        f"{argument}={data!r:.60}: must be a path, a list of rows, a DataFrame"
        " or a Dataset"
    )
  for index, row in enumerate(data):
    if isinstance(row, (str, list)):
      row = {"prompt": row}
    if not isinstance(row, Mapping):
      raise ValueError(
          f"{argument}[{index}]={row!r:.60}: must be an object with the fields"
          " of a row, a prompt, or a list of messages"
      )
    yield dict(row)


def _template(argument: str, record: Mapping[str, Any]) -> str:
  for name in _PROMPTS:
    if name in record:
      return f"{{{name}}}"
  raise ValueError(
      f"{argument}: rows have the fields {', '.join(map(str, record))} and none"
      " of 'prompt' or 'messages'; make one of theirs by"
      f" prompt='{{{next(iter(record), 'question')}}}'"
  )


def _line(
    argument: str, index: int, record: Mapping[str, Any], template: str
) -> str:
  """Returns a row as a line of JSON."""
  place = f"{argument}[{index}]"
  fields = rows.plain(record)
  try:
    prompt = custom_task.prompt_of(template, fields)
  except rows.UnusableError as error:
    raise ValueError(f"{place}: {error}") from error
  turns = [] if isinstance(prompt, str) else [m["role"] for m in prompt]
  if turns and "user" not in turns[-2 if turns[-1] == "assistant" else -1 :]:
    raise ValueError(
        f"{place}: its messages end with {turns[-1]!r}: must end with a user's"
        " turn, perhaps before the assistant's answer"
    )
  if not prompt or (isinstance(prompt, str) and not prompt.strip()):
    raise ValueError(
        f"{place}: has no prompt: {template} needs fields with text; it has"
        f" {repr(fields)[:100]}"
    )
  for name, value in fields.items():
    try:
      json.dumps(value, ensure_ascii=False).encode()
    except (TypeError, ValueError) as error:
      raise ValueError(
          f"{place}: field {name!r} cannot be written as JSON: {error}; leave"
          " it out"
      ) from error
  return json.dumps(fields, ensure_ascii=False)


def _write(argument: str, path: pathlib.Path, lines: list[str]) -> pathlib.Path:
  """Writes a file, unless the run has already begun with the same lines."""
  text = "".join(f"{line}\n" for line in lines)
  has_begun = (path.parent.parent / "config.json").exists()
  if path.exists() and has_begun:
    if path.read_text("utf-8") != text:
      raise ValueError(
          f"{argument}: differs from the rows that the run began with, which"
          f" are in {path}; give the same, that path, or another workdir"
      )
    return path
  path.parent.mkdir(parents=True, exist_ok=True)
  jsonl.replace_file(path, text)
  return path
