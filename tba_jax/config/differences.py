# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Compares configs: which settings differ, and which are allowed to.

Settings are flat, by key (`load.flatten`). A key missing from one side, which
another version of the code wrote, counts as its default.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from tba_jax.config import load
from tba_jax.config import settings
from tba_jax.system import rules
from tba_jax.tasks import task_table

# Stands for a missing key that has no default either.
MISSING = "not there"


def defaults(task_name: Any, *, imports: bool = True) -> dict[str, Any]:
  """Returns the default of every valid key.

  Args:
    task_name: `config.task.name`; an unknown task adds no fields.
    imports: whether to import a custom task class, MODULE:CLASS.
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
    imports: whether to import a custom task class.
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
  """Returns {key: (old, new)} for the settings that differ.

  The configs may be nested or flat. A file moved to another folder is not a
  difference.
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
  """Returns `changed` of a resumed run's old and new config.

  Args:
    old: config saved in the run's `config.json`.

  Raises:
    ConfigError: settings changed that must not; one line each, with the reason.
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
      reason = rules.Fixed("it belongs to another version of tba_jax")
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
    remote: settings of the other process.
    searcher: whether either process is a searcher.
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
