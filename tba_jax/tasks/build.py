# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Task name to task.

A name is a key of `TASKS`, or `MODULE:CLASS` of an importable class. Every
process of the run builds the task, so the module has to be on the path of each
(PYTHONPATH, or the folder that `train` is started from).
"""

from collections.abc import Mapping
import importlib
from typing import Any

import ml_collections

from tba_jax.tasks import arithmetic
from tba_jax.tasks import base
from tba_jax.tasks import chat
from tba_jax.tasks import countdown
from tba_jax.tasks import gsm8k
from tba_jax.tasks import math
from tba_jax.tasks import own
from tba_jax.tasks import preference
from tba_jax.tasks import red_team
from tba_jax.tasks import tldr

TASKS: Mapping[str, type[base.Task]] = {
    "arithmetic": arithmetic.Arithmetic,
    "chat": chat.Chat,
    "countdown": countdown.Countdown,
    "countdown_sparse": countdown.CountdownSparse,
    "gsm8k": gsm8k.Gsm8k,
    "math": math.Math,
    "own": own.Own,
    "preference": preference.Preference,
    "red_team": red_team.RedTeam,
    "tldr": tldr.Tldr,
}


def find(name: Any) -> type[base.Task]:
  """Returns the class that `config.task.name` names."""
  if name in TASKS:
    return TASKS[name]
  module, colon, attribute = str(name).partition(":")
  if not colon:
    raise ValueError(
        f"config.task.name={name!r}: allowed {sorted(TASKS)}, or 'MODULE:CLASS'"
        " of a task of your own"
    )
  try:
    found = getattr(importlib.import_module(module), attribute)
  except Exception as error:  # Anything, it is user code.
    raise ValueError(
        f"config.task.name={name!r}: allowed a class that can be imported;"
        f" {type(error).__name__}: {error}"
    ) from error
  if not (isinstance(found, type) and issubclass(found, base.Task)):
    raise ValueError(
        f"config.task.name={name!r}: allowed a subclass of"
        " tba_jax.tasks.base.Task"
    )
  return found


def fields(name: Any) -> dict[str, Any] | None:
  """Returns the fields of a task with their defaults; None if unknown."""
  try:
    return dict(find(name).FIELDS)
  except ValueError:
    return None


def make_task(config_task: ml_collections.ConfigDict) -> base.Task:
  """Returns the task of `config.task`.

  Args:
    config_task: `name`, and any of the fields in the class's `FIELDS`; the
      others get their defaults.

  Raises:
    ValueError: name or field is unknown, or a value is not allowed.
  """
  given = dict(config_task)
  name = given.pop("name", None)
  task_class = find(name)
  for field, value in given.items():
    if field not in task_class.FIELDS:
      raise ValueError(
          f"config.task.{field}={value!r}: not a field of the task {name!r};"
          f" allowed {sorted(task_class.FIELDS)}"
      )
  return task_class(**{**task_class.FIELDS, **given})
