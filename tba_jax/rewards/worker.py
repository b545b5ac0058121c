# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""A worker of the pool: `python -m tba_jax.rewards.worker`.

Builds the task that its first message describes, then answers each request with
a judgement or, for what is shown, a reason. It may hang, crash or be killed at
any moment. No JAX here; a reward that brings it gets the CPU.
"""

import os
import resource
import sys
from typing import Any

from tba_jax.rewards import pool
from tba_jax.system import processes
from tba_jax.tasks import base
from tba_jax.tasks import build


def main() -> int:
  """Serves requests until the pool closes the pipe."""
  processes.die_with_parent()
  requests = os.fdopen(os.dup(0), "rb")
  replies = os.fdopen(os.dup(1), "wb")
  # What a reward prints must not be taken for an answer, and it reads nothing.
  os.dup2(2, 1)
  with open(os.devnull, "rb") as nothing:
    os.dup2(nothing.fileno(), 0)
  hello = pool.read_frame(requests)
  if hello is None:
    return 0
  if hello["memory_mb"]:
    limit = hello["memory_mb"] << 20
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
  try:
    task = build.make_task(hello["task"])
  except Exception as error:  # The pool tells it.
    pool.write_frame(replies, {"error": repr(error)})
    return 1
  pool.write_frame(replies, {"ready": True})
  while (request := pool.read_frame(requests)) is not None:
    pool.write_frame(replies, _answer(task, request))
  return 0


def _answer(task: base.Task, request: list[Any]) -> dict[str, Any]:
  what, *arguments = request
  try:
    if what == "explain":
      return {"reason": str(task.explain(*arguments))}
    judged = task.judge(*arguments)
    return {
        "reward": float(judged.reward),
        "key": judged.key,
        "parts": {name: float(v) for name, v in judged.parts.items()},
    }
  except base.RewardError as error:
    return {"failure": error.cause, "message": str(error)}
  except Exception as error:  # Code of the user's, on text of a policy's.
    return {"failure": "error", "message": repr(error)[:500]}


if __name__ == "__main__":
  sys.exit(main())
