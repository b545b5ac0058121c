# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Renders the settings page and the help on single settings.

python -m tba_jax.config.reference > docs/reference/settings.md
"""

import inspect
import re

from tba_jax.config import load
from tba_jax.config import settings
from tba_jax.config import variants
from tba_jax.system import rules
from tba_jax.tasks import task_table

_HEAD = """# Settings

Generated from the `settings.py` of each folder by
`python -m tba_jax.config.reference > docs/reference/settings.md`.

Change a setting in a config file, or on the command line with
`--config.KEY=VALUE`; `python -m tba_jax.main --help KEY` prints it. A config
builds on a neighboring one with
`variants.import_config("sft.py", relative_to=__file__)`, as in
`configs/tldr/tba.py`. The last column shows whether the setting may change when
[a run is resumed](faults.md#a-changed-setting): "yes", "no" or "partly";
`--help` gives the reason. "or auto" marks settings that, for a pretrained
model, default to [values for the model, the data and the
machine](../guides/your_data.md#settings-chosen-automatically).
An invalid config ends the program with status 2 and one line per invalid
setting, before any device is touched.
"""
_TABLE = [
    "| key | default | allowed | meaning | resume |",
    "|---|---|---|---|---|",
]


def help_on(key: str) -> str:
  """Returns default, allowed values and meaning of a setting or section.

  Raises:
    ConfigError: unknown key.
  """
  key = key.removeprefix("--").removeprefix("config.")
  rows = _rows()
  keys = [k for k in rows if k == key or k.startswith(f"{key}.")]
  if not keys:
    raise load.ConfigError(load.unknown_key(key, "", list(rows)))
  lines = []
  for name in keys:
    for tasks, row in _by_task(name) or [("", rows[name])]:
      default, allowed, meaning, fixed = row
      lines += [f"config.{name} = {default!r}{tasks}"]
      lines += [f"  {meaning}"] if meaning else []
      lines += [f"  allowed: {allowed}"] if allowed else []
      may = {"yes": "may", "no": "cannot", "partly": "may not always"}
      why = f": {fixed.why}" if fixed else ""
      lines += [f"  {may[_resume(fixed)]} change when a run is resumed{why}"]
  if key in settings.SECTIONS:
    lines.insert(0, settings.SECTIONS[key].meaning)
  return "\n".join(lines)


def _resume(fixed: rules.Fixed | None) -> str:
  """Returns whether a setting may change when a run is resumed."""
  if fixed is None:
    return "yes"
  return "no" if fixed.holds is rules.Fixed.holds else "partly"


def _rows() -> dict[str, tuple]:
  """Returns (default, allowed, meaning, `settings.fixed`) by key."""
  rows = {
      key: (
          s.default,
          s.allowed.text + ", or auto" * s.auto,
          s.meaning,
          settings.fixed(key),
      )
      for key, s in settings.SETTINGS.items()
  }
  for task in map(task_table.find, task_table.TASKS):
    for key, row in _task_rows(task).items():
      rows.setdefault(key, row)
  return rows


def _by_task(key: str) -> list[tuple[str, tuple]]:
  """Returns a task field's distinct rows, as (tasks in parentheses, row)."""
  of_row: dict[tuple, list[str]] = {}
  # The custom task comes first.
  for name in sorted(task_table.TASKS, key=lambda name: name != "custom"):
    rows = _task_rows(task_table.find(name))
    if key in rows:
      of_row.setdefault(rows[key], []).append(name)
  return [
      (f"  (task.name: {', '.join(names)})", row)
      for row, names in of_row.items()
  ]


def _task_rows(task: type) -> dict[str, tuple]:
  """Returns the rows of a task's fields; meanings come from its docstring."""
  meanings = {}
  for parent in reversed(task.__mro__):  # Parents may document fields.
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
          settings.fixed(f"task.{name}"),
      )
      for name, default in task.FIELDS.items()
  }


def _table(rows: dict[str, tuple]) -> list[str]:
  lines = list(_TABLE)
  for key, (default, allowed, meaning, fixed) in rows.items():
    if isinstance(default, bool):
      allowed = "`True`, `False`"
    cells = f"`{key}`", f"`{default!r}`", allowed, meaning, _resume(fixed)
    lines.append("| " + " | ".join(c.replace("|", "\\|") for c in cells) + " |")
  return lines


def render() -> str:
  """Returns the settings page in Markdown."""
  rows = _rows()
  top = {key: row for key, row in rows.items() if "." not in key}
  lines = [_HEAD, "## top level", "", *_table(top), "", "## task", ""]
  lines += ["`task.name` is one of the names below, or the `MODULE:CLASS` of"]
  lines += ["[your own task](../guides/your_reward.md#a-task-class). The other"]
  lines += ["fields depend on the task."]
  for name in task_table.TASKS:
    lines += ["", f"### {name}", "", *_table(_task_rows(task_table.find(name)))]
  for name, section in settings.SECTIONS.items():
    if name == "task":
      continue
    lines += ["", f"## {name}", ""]
    lines += [section.meaning, ""] if section.meaning else []
    lines += _table({k: r for k, r in rows.items() if k.startswith(f"{name}.")})
  return "\n".join(lines) + "\n"


if __name__ == "__main__":
  print(render(), end="")
