# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""From `config.reward` to a judge."""

import ml_collections

from tba_jax.rewards import judges
from tba_jax.rewards import pool
from tba_jax.tasks import base

WHERE = ("process", "pool", "model")


def make_judge(
    config: ml_collections.ConfigDict,
    task: base.Task,
    on_event: judges.OnEvent | None = None,
) -> judges.Judge:
  """Returns the judge of the task's own reward.

  Args:
    config: reads `reward` and, for a pool, `task`.
    task: judges in this process where `reward.where` says so.
    on_event: receives what failed.
  """
  c = config.reward
  if c.where != "pool":
    return judges.InProcess(task, fallback=c.fallback, on_event=on_event)
  return pool.Pool(
      config.task.to_dict(),
      num_workers=c.num_workers,
      deadline_s=c.deadline_s,
      start_deadline_s=c.start_deadline_s,
      memory_mb=c.memory_mb,
      fallback=c.fallback,
      on_event=on_event,
      index_of=task.source_index,
  )
