# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Task name to task."""

from collections.abc import Mapping

import ml_collections

from tba_jax.tasks import arithmetic
from tba_jax.tasks import base
from tba_jax.tasks import countdown

TASKS: Mapping[str, type[base.Task]] = {
    "arithmetic": arithmetic.Arithmetic,
    "countdown": countdown.Countdown,
}


def make_task(config_task: ml_collections.ConfigDict) -> base.Task:
  """Returns the task that `config.task` describes.

  Args:
    config_task: `name`, and any of the fields that the task's class lists in
      `FIELDS`; those left out have the values written there.

  Raises:
    ValueError: the name or a field is not known, or a value is not allowed.
  """
  fields = dict(config_task)
  name = fields.pop("name", None)
  if name not in TASKS:
    raise ValueError(f"config.task.name={name!r}: allowed {sorted(TASKS)}")
  task_class = TASKS[name]
  for field, value in fields.items():
    if field not in task_class.FIELDS:
      raise ValueError(
          f"config.task.{field}={value!r}: not a field of the task {name!r};"
          f" allowed {sorted(task_class.FIELDS)}"
      )
  return task_class(**{**task_class.FIELDS, **fields})
