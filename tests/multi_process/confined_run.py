# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Judges in a pool as any user; run by `confinement_test.py`.

`python -m tests.multi_process.confined_run JSON` takes the arguments of `main`.
It has a listener, an abstract socket and a child, and puts them into the texts:
{port}, {name}, {own} for its pid, {child} for the child's. Prints the answers
and the events as JSON.
"""

import json
import os
import socket
import subprocess
import sys
from typing import Any

import ml_collections

from tba_jax.config import load
from tba_jax.config import settings
from tba_jax.rewards import judges
from tba_jax.rewards import pool as pool_lib
from tba_jax.system import processes
from tba_jax.tasks import task_table


def main(
    texts: list[str],
    workdir: str,
    readable: str,
    task: dict[str, Any],
    deadline_s: float = 60.0,
) -> None:
  """Judges the texts by a task, or by that of `reward_trouble` if it is {}."""
  config = settings.get_config()
  config.reward.num_workers, config.reward.deadline_s = 1, deadline_s
  config.reward.readable = readable
  name = f"confined-{os.getpid()}"
  events = []
  child = subprocess.Popen(
      ["sleep", "600"],
      stdout=subprocess.DEVNULL,
      stderr=subprocess.DEVNULL,
      preexec_fn=processes.die_with_parent,
  )
  with (
      socket.create_server(("127.0.0.1", 0)) as server,
      socket.socket(socket.AF_UNIX) as abstract,
  ):
    abstract.bind("\0" + name)
    abstract.listen()
    values = {
        "port": server.getsockname()[1],
        "name": name,
        "own": os.getpid(),
        "child": child.pid,
    }
    more = {"module": "tests.multi_process.reward_trouble"}
    if task:
      config.task = ml_collections.ConfigDict(task)
      load.make_paths_absolute(config)
      task_table.make_task(config.task)  # As the role does, which has a cache.
      more = {}
    pool = pool_lib.Pool(
        config.task.to_dict()
        if task
        else {"name": "trouble", "folder": "data"},
        config.reward,
        hidden=pool_lib.hidden_paths(config, workdir),
        on_event=lambda *event: events.append(event),
        **more,
    )
    answers = pool.judge(
        [
            judges.JudgeRequest("train", 0, _filled(text, values))
            for text in texts
        ]
    )
    print(
        json.dumps(
            {
                "answers": [[j.reward, j.key, j.failure] for j in answers],
                "events": events,
            }
        )
    )
    pool.close()


def _filled(text: str, values: dict[str, Any]) -> str:
  for name, value in values.items():
    text = text.replace(f"{{{name}}}", str(value))
  return text


if __name__ == "__main__":
  main(**json.loads(sys.argv[1]))
