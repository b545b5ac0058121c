# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""The reference of all settings, made from where they are written.

    python -m tba_jax.config.reference > docs/config.md

Defaults and meanings are those of `settings.py` and what it takes
in,
what is allowed is in `tba_jax/config/ranges.py`, a task's fields are in its
class.
"""

import io
import pathlib
import re
import tokenize
from typing import Any

from tba_jax.config import load
from tba_jax.config import ranges
from tba_jax.config import settings
from tba_jax.config import settings_red_team
from tba_jax.config import settings_rewards
from tba_jax.config import validate
from tba_jax.tasks import build

_HEAD = """# Every setting

Made by `python -m tba_jax.config.reference > docs/config.md`; a test tells
when it is out of date. Change it in `tba_jax/config/settings.py`.

A setting is changed in a config file, or on the command line with
`--config.KEY=VALUE`. "On" in the last column: it may change when a run is
continued. What settings must be to each other stands in
`tba_jax/config/relations.py`; a config that breaks any of it ends the program
with status 2 and a line for each wrong setting, before a device is touched.
`python -m tba_jax.main --program=plan --config=FILE` tells what a config will
need.
"""
_SECTION = re.compile(r"  c\.(\w+) = ")
_KEY = re.compile(r"(?:^ {6}|d\(|, )(\w+)=")
# A section within a section, a line for each of its keys.
_INNER = re.compile(r" {6}(\w+)=d\($")
_INNER_KEY = re.compile(r"^ {10}(\w+)=")


def comments(source: str) -> dict[str, str]:
  """Returns what the comments of `get_config` say of each section and key.

  A comment on the line of a key is about it, and so is a block of comments
  right above a line that has only this key. A block above a section is about
  the section.
  """
  said: dict[str, str] = {}
  notes = {
      token.start[0]: token.string.lstrip("# ")
      for token in tokenize.generate_tokens(io.StringIO(source).readline)
      if token.type == tokenize.COMMENT
  }
  section, inner, block = "", "", []
  start = source.index("def get_config")
  first = source.count("\n", 0, start) + 1
  for number, line in enumerate(source.splitlines(), 1):
    if number < first:
      continue
    note = notes.get(number)
    if note is not None and line.lstrip().startswith("#"):
      block.append(note)
      continue
    code = line.partition("#")[0]
    opened = _SECTION.match(code)
    if opened:
      section = opened[1]
      said[section] = " ".join(block)
      block = []
    keys = _KEY.findall(code) if section else []
    if opened := _INNER.match(code):
      inner = opened[1]
    elif inner:
      keys = [f"{inner}.{key}" for key in _INNER_KEY.findall(code)]
      inner = inner if keys else ""
    for key in keys:
      parts = [" ".join(block)] * bool(block) + [note] * bool(note)
      said[f"{section}.{key}"] = "; ".join(parts)
    block = []
  return said


def _allowed(key: str, default: Any) -> str:
  if isinstance(default, bool):
    return "`True`, `False`"
  if key in ranges.NAMES:
    return ", ".join(f"`{name}`" for name in ranges.NAMES[key])
  if key in ranges.RANGES:
    return ranges.RANGES[key][1].removeprefix("allowed ")
  return ""


def _row(key: str, default: Any, meaning: str) -> str:
  on = "on" if validate.is_resumable(key) else ""
  cells = (f"`{key}`", f"`{default!r}`", _allowed(key, default), meaning, on)
  return "| " + " | ".join(c.replace("|", "\\|") for c in cells) + " |"


_TABLE = ["| key | default | allowed | meaning | |", "|---|---|---|---|---|"]


def _tasks() -> list[str]:
  """Returns a table for each task: its fields, as its docstring tells them."""
  lines = ["", "## task", "", "`task.name` is one of those below, or"]
  lines += ["`MODULE:CLASS` of your own; the other fields are the task's (see"]
  lines += ["[Your own task](your_task.md))."]
  for name, task in build.TASKS.items():
    said = dict(re.findall(r"^  (\w+): (.+(?:\n    .+)*)", task.__doc__, re.M))
    lines += ["", f"### {name}", "", *_TABLE]
    for field, default in task.FIELDS.items():
      meaning = " ".join(said.get(field, "").split())
      lines.append(_row(f"task.{field}", default, meaning))
  return lines


def render() -> str:
  """Returns the page."""
  said: dict[str, str] = {}
  for module in (settings, settings_red_team, settings_rewards):
    said |= comments(pathlib.Path(module.__file__).read_text("utf-8"))
  lines = [_HEAD, "## top level", "", *_TABLE]
  values = load.flatten(settings.get_config())
  # In the order of the file, which puts together what belongs together.
  order = {key: place for place, key in enumerate(said)}
  keys = sorted(values, key=lambda key: order.get(key, len(order)))
  row = lambda key: _row(key, values[key], said.get(key, ""))
  lines += [row(key) for key in keys if "." not in key]
  lines += _tasks()
  for section in dict.fromkeys(k.split(".")[0] for k in keys if "." in k):
    if section == "task":
      continue
    lines += ["", f"## {section}", ""]
    if said.get(section):
      lines += [said[section], ""]
    lines += _TABLE
    lines += [row(key) for key in keys if key.startswith(f"{section}.")]
  return "\n".join(lines) + "\n"


if __name__ == "__main__":
  print(render(), end="")
