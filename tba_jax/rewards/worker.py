# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""A worker of the pool: `python -m tba_jax.rewards.worker`.

Builds the task of its first message, sandboxes itself, then answers each
request with a judgement or a reason. It may hang, crash or be killed at any
time. A reward that imports JAX gets the CPU.
"""

from collections.abc import Callable
import functools
import pathlib
import sys
from typing import Any

from tba_jax.system import frames
from tba_jax.system import user_code
from tba_jax.tasks import base
from tba_jax.tasks import build


def main() -> int:
  """Serves requests until the pool closes the pipe."""
  return frames.serve(_begin, shows_prints=True)


def _begin(hello: dict[str, Any]) -> Callable[[list[Any]], dict[str, Any]]:
  for path, folder in hello["links"].items():
    link = pathlib.Path.home() / path
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(folder)
  task = build.make_task(hello["task"])
  task.prepare_judging()
  return functools.partial(_answer, task)


def _answer(task: base.Task, request: list[Any]) -> dict[str, Any]:
  what, *arguments = request
  try:
    if what == "explain":
      return {"reason": str(task.explain(*arguments))}
    judge = task.judge if what == "judge" else task.judge_cut_off
    judged = judge(*arguments)
    return {
        "reward": base.number(judged.reward, "the reward"),
        "key": judged.key,
        "parts": {n: base.number(v, n) for n, v in judged.parts.items()},
    }
  except base.RewardError as error:
    return {"failure": error.cause, "message": str(error)}
  except Exception as error:  # User code, on text that a model wrote.
    return {"failure": "error", "message": user_code.describe(error)}


if __name__ == "__main__":
  sys.exit(main())
