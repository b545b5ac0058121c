# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Builds a task from its name: a key of `TASKS`, or `MODULE:CLASS`.

Every process of a run builds the task, so a user's module has to be importable
in each (PYTHONPATH, or the folder that `train` starts in).
"""

from collections.abc import Mapping
import importlib
from typing import Any

import ml_collections

from tba_jax.tasks import base

# Tasks are imported on first use, so that a run does not load all packages.
TASKS: Mapping[str, str] = {
    "arithmetic": "tba_jax.tasks.arithmetic:Arithmetic",
    "chat": "tba_jax.tasks.chat:Chat",
    "countdown": "tba_jax.tasks.countdown:Countdown",
    "countdown_sparse": "tba_jax.tasks.countdown:CountdownSparse",
    "environment": "tba_jax.environments.environment_task:EnvironmentTask",
    "gsm8k": "tba_jax.tasks.gsm8k:Gsm8k",
    "ifbench": "tba_jax.tasks.ifbench:IfBench",
    "instructions": "tba_jax.tasks.instructions:Instructions",
    "math": "tba_jax.tasks.math:Math",
    "custom": "tba_jax.tasks.custom_task:CustomTask",
    "preference": "tba_jax.tasks.preference:Preference",
    "reasoning_gym": "tba_jax.tasks.reasoning_gym:ReasoningGym",
    "red_team": "tba_jax.tasks.red_team:RedTeam",
    "tldr": "tba_jax.tasks.tldr:Tldr",
}


def find(name: Any) -> type[base.PromptSet]:
  """Returns the class that `config.task.name` names."""
  path = TASKS.get(name, name) if isinstance(name, str) else name
  module, colon, attribute = str(path).partition(":")
  if not colon:
    raise ValueError(
        f"config.task.name={name!r}: must be one of {sorted(TASKS)}, or"
        " 'MODULE:CLASS' of a task of your own"
    )
  try:
    cls = getattr(importlib.import_module(module), attribute)
  except Exception as error:  # User code may raise anything.
    raise ValueError(
        f"config.task.name={name!r}: must be a class that can be imported,"
        f" from a folder in PYTHONPATH; {type(error).__name__}: {error}"
    ) from error
  if not (isinstance(cls, type) and issubclass(cls, base.PromptSet)):
    raise ValueError(
        f"config.task.name={name!r}: must be a subclass of"
        " tba_jax.tasks.base.Task"
    )
  return cls


def facts(name: Any) -> type[base.PromptSet]:
  """Returns a task's class, for its class attributes; `Task` if unknown."""
  try:
    return find(name)
  except ValueError:
    return base.Task


def fields(name: Any) -> dict[str, Any] | None:
  """Returns the fields of a task with their defaults; None if unknown."""
  try:
    return dict(find(name).FIELDS)
  except ValueError:
    return None


def with_defaults(task: Mapping[str, Any]) -> dict[str, Any]:
  """Returns `config.task` with defaults filled in."""
  return {**find(task["name"]).FIELDS, **task}


def make_task(config_task: ml_collections.ConfigDict) -> base.PromptSet:
  """Returns the task of `config.task`: a name, and fields over its defaults.

  Raises ValueError for an unknown name or field, or an invalid value.
  """
  fields = dict(config_task)
  name = fields.pop("name", None)
  task_class = find(name)
  for field, value in fields.items():
    if field not in task_class.FIELDS:
      raise ValueError(
          f"config.task.{field}={value!r}: not a field of the task {name!r};"
          f" must be one of {sorted(task_class.FIELDS)}"
      )
  values = {**task_class.FIELDS, **fields}
  if "split_seed" in values:
    base.check_integer("split_seed", values["split_seed"])
  return task_class(**values)


def configured_task(c: Mapping[str, Any]) -> base.PromptSet:
  """Returns the task of settings by key; raises like `make_task`."""
  fields = {k.removeprefix("task."): v for k, v in c.items() if "task." in k}
  return make_task(fields)
