# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Which settings of two runs differ, and how to print them.

Settings are flat, by key (`load.flatten`). A key that one side lacks has its
default there: it was made by another version of the code.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from tba_jax.config import load
from tba_jax.config import settings
from tba_jax.tasks import build

# Value of a key that a side neither has nor has a default for.
MISSING = "not there"


def defaults(task_name: Any, *, imports: bool = True) -> dict[str, Any]:
  """Returns every allowed key with its default.

  Args:
    task_name: `config.task.name`; the fields of an unknown task are left out.
    imports: whether to import a user's own task, MODULE:CLASS.
  """
  fields = {}
  if isinstance(task_name, str) and (imports or task_name in build.TASKS):
    fields = build.fields(task_name) or {}
  return {
      key: setting.default for key, setting in settings.SETTINGS.items()
  } | {f"task.{name}": value for name, value in fields.items()}


def between(
    *sides: Mapping[str, Any], imports: bool = True
) -> Iterator[tuple[str, list[Any]]]:
  """Yields (key, value of each side) for the settings that differ.

  Args:
    *sides: settings by key.
    imports: whether `defaults` may import a task of the user's own.
  """
  complete = [
      defaults(side.get("task.name"), imports=imports) | side for side in sides
  ]
  for key in sorted(set().union(*sides)):
    values = [side.get(key, MISSING) for side in complete]
    if any(value != values[0] for value in values):
      yield key, values


def changed(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
  """Returns a text for each setting that differs, `config.KEY = NOW, was OLD`.

  Files that have moved to another folder do not differ.
  """
  return [
      f"config.{key} = {new!r}, was {old!r}"
      for key, (old, new) in between(before, now)
      if not load.are_moved_files(key, old, new)
  ]
