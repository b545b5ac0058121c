# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Renders the page of all settings, and the help on one, from `SETTINGS`.

python -m tba_jax.config.reference > docs/config.md
"""

import inspect
import re

from tba_jax.config import load
from tba_jax.config import settings
from tba_jax.config import variants
from tba_jax.tasks import build

_HEAD = """# Every setting

Generated from the `settings.py` of each folder by
`python -m tba_jax.config.reference > docs/config.md`.

Change a setting in a config file, or on the command line with
`--config.KEY=VALUE`; `python -m tba_jax.main --help KEY` prints it. A file that
builds on another one beside it imports that with
`variants.import_config("sft.py", beside=__file__)`, as `configs/tldr/tba.py`
does. "On" in the last column: the setting may
change when a run is resumed. Relations between settings are checked beside
them (`CHECKS`); a wrong config ends the program with status 2 and a line for
each wrong setting, before a device is touched.
`--program=plan --config=FILE` says what a config needs. With "or auto" a
setting that nothing sets follows the model, the data and the machine where the
policy starts from a pretrained model
([rules](your_task.md#what-follows-the-model-the-data-and-the-machine)).
"""
_TABLE = ["| key | default | allowed | meaning | |", "|---|---|---|---|---|"]


def help_on(key: str) -> str:
  """Returns default, allowed values and meaning of a setting or section.

  Raises ConfigError for an unknown key.
  """
  key = key.removeprefix("--").removeprefix("config.")
  rows = _rows()
  keys = [k for k in rows if k == key or k.startswith(f"{key}.")]
  if not keys:
    raise load.ConfigError(load.unknown_key(key, "", list(rows)))
  lines = []
  for name in keys:
    default, allowed, meaning, on = rows[name]
    lines += [f"config.{name} = {default!r}"]
    lines += [f"  {meaning}"] if meaning else []
    lines += [f"  allowed: {allowed}"] if allowed else []
    lines += ["  may change when a run is resumed"] if on else []
  if key in settings.SECTIONS:
    lines.insert(0, settings.SECTIONS[key].meaning)
  return "\n".join(lines)


def _rows() -> dict[str, tuple]:
  """Returns (default, allowed, meaning, may change) by key."""
  rows = {
      key: (
          s.default,
          s.allowed.text + ", or auto" * s.auto,
          s.meaning,
          settings.may_change(key),
      )
      for key, s in settings.SETTINGS.items()
  }
  for task in map(build.find, build.TASKS):
    for key, row in _task_rows(task).items():
      rows.setdefault(key, row)
  return rows


def _task_rows(task: type) -> dict[str, tuple]:
  """Returns the rows of a task's fields, from its docstring."""
  meanings = {}
  for parent in reversed(task.__mro__):  # Fields may be those of a parent.
    # Python strips the indentation from 3.13 on.
    text = inspect.cleandoc(parent.__doc__ or "")
    for names, meaning in re.findall(
        r"^(\w+(?:, \w+)*): (.+(?:\n  .+)*)", text, re.M
    ):
      meanings |= dict.fromkeys(names.split(", "), meaning)
  return {
      f"task.{name}": (
          default,
          variants.type_name(default) if not isinstance(default, str) else "",
          " ".join(meanings.get(name, "").split()),
          False,
      )
      for name, default in task.FIELDS.items()
  }


def _table(rows: dict[str, tuple]) -> list[str]:
  lines = list(_TABLE)
  for key, (default, allowed, meaning, on) in rows.items():
    if isinstance(default, bool):
      allowed = "`True`, `False`"
    cells = (f"`{key}`", f"`{default!r}`", allowed, meaning, "on" if on else "")
    lines.append("| " + " | ".join(c.replace("|", "\\|") for c in cells) + " |")
  return lines


def render() -> str:
  """Returns the page."""
  rows = _rows()
  top = {key: row for key, row in rows.items() if "." not in key}
  lines = [_HEAD, "## top level", "", *_table(top), "", "## task", ""]
  lines += ["`task.name` is one of those below, or `MODULE:CLASS` of your own;"]
  lines += ["the other fields are the task's (see"]
  lines += ["[Your own task](your_task.md))."]
  for name in build.TASKS:
    lines += ["", f"### {name}", "", *_table(_task_rows(build.find(name)))]
  for name, section in settings.SECTIONS.items():
    if name == "task":
      continue
    lines += ["", f"## {name}", ""]
    lines += [section.meaning, ""] if section.meaning else []
    lines += _table({k: r for k, r in rows.items() if k.startswith(f"{name}.")})
  return "\n".join(lines) + "\n"


if __name__ == "__main__":
  print(render(), end="")
