# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Which settings of two configs differ, and which of them may.

Settings are flat, by key (`load.flatten`). A key that one side lacks has its
default there: it was made by another version of the code.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from tba_jax.config import load
from tba_jax.config import settings
from tba_jax.system import rules
from tba_jax.tasks import task_table

# Value of a key that a side lacks and that has no default.
MISSING = "not there"


def defaults(task_name: Any, *, imports: bool = True) -> dict[str, Any]:
  """Returns every allowed key with its default.

  Args:
    task_name: `config.task.name`; the fields of an unknown task are left out.
    imports: whether to import a user's own task, MODULE:CLASS.
  """
  fields = {}
  if isinstance(task_name, str) and (imports or task_name in task_table.TASKS):
    fields = task_table.fields(task_name) or {}
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


def changed(
    before: Mapping[str, Any], now: Mapping[str, Any]
) -> dict[str, tuple[Any, Any]]:
  """Returns (old, new) of the settings that differ between two configs.

  Configs may be flat, by key. Files that
  have moved to another folder do not differ.
  """
  return {
      key: (old, new)
      for key, (old, new) in between(load.flatten(before), load.flatten(now))
      if not load.are_moved_files(key, old, new)
  }


def lines(changes: Mapping[str, tuple[Any, Any]]) -> list[str]:
  """Returns `config.KEY = NEW, was OLD` for each setting of `changed`."""
  return [
      f"config.{key} = {new!r}, was {old!r}"
      for key, (old, new) in changes.items()
  ]


def check_resume(
    old: Mapping[str, Any], new: Mapping[str, Any]
) -> dict[str, tuple[Any, Any]]:
  """Returns what `changed` in a run that is resumed with another config.

  Args:
    old: config of the run, in its `config.json`.
    new: requested config.

  Raises:
    ConfigError: a setting must not change; has a line for each, with the
      reason.
  """
  problems = []
  sides = [
      defaults(side.get("task.name")) | side
      for side in map(load.flatten, (old, new))
  ]
  changes = changed(old, new)
  for key, (before, now) in changes.items():
    reason = settings.fixed(key)
    if MISSING in (before, now) and rules.section(key) != "task":
      reason = rules.Fixed("it is of another version of tba_jax")
    if reason is None or not reason.holds(*sides):
      continue
    back = "" if now == MISSING else "set it back, or "
    problems.append(
        f"config.{key} = {now!r}: the run was started with {before!r}, and it"
        f" cannot change when the run is resumed: {reason.why}; {back}give"
        " another --workdir"
    )
  if problems:
    raise load.ConfigError("\n".join(problems))
  return changes


def check_hosts(
    local: Mapping[str, Any],
    remote: Mapping[str, Any],
    sides: tuple[str, str],
    *,
    searcher: bool,
) -> None:
  """Raises ConfigError if two processes of a run would compute differently.

  Args:
    local: settings of one process, by key.
    remote: settings of the other.
    sides: names of the two, for messages.
    searcher: whether one of them is a searcher.
  """
  problems = []
  for key, (a, b) in between(local, remote):
    hosts = settings.hosts(key)
    both_paths = hosts == "path" and "/" in str(a) and "/" in str(b)
    both_paths = both_paths or load.are_same_files(key, a, b)
    of_searcher = searcher and hosts == "searcher"
    if not (hosts == "own" or both_paths or of_searcher):
      problems.append(
          f"config.{key} = {a!r} at {sides[0]}, {b!r} at {sides[1]}: must be"
          " the same on all hosts of a run"
      )
  if problems:
    raise load.ConfigError("\n".join(problems))
