# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""The worker processes of a task's environments."""

import pathlib

import ml_collections

from tba_jax.rewards import judges
from tba_jax.rewards import pool
from tba_jax.system import supervised_worker
from tba_jax.tasks import task_table


def make(
    config: ml_collections.ConfigDict,
    workdir: str | pathlib.Path,
    on_event: judges.OnEvent | None,
) -> supervised_worker.WorkerPool:
  """Returns up to `reward.num_workers` workers, which cannot see `workdir`."""
  task = config.task.to_dict()
  named = task_table.with_defaults(task)
  return supervised_worker.WorkerPool(
      "tba_jax.environments.episode_worker",
      {name: named[name] for name in ("source", "opponent")},
      config.reward,
      pool.make_box(task, config.reward, pool.hidden_paths(config, workdir)),
      links={},
      on_event=on_event,
  )
