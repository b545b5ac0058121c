# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""A worker of the pool: `python -m tba_jax.rewards.worker`.

Builds the task of its first message, then answers each request with a judgement
or a reason, in a process of its own (`system/keeper.py`), which may hang or
crash. A reward that imports JAX gets the CPU.
"""

import sys
from typing import Any

from tba_jax.system import keeper
from tba_jax.system import user_code
from tba_jax.tasks import base
from tba_jax.tasks import build


def main() -> int:
  """Serves requests until the pool closes the pipe."""
  return keeper.serve(_begin, shows_prints=True)


def _begin(hello: dict[str, Any]) -> keeper.AnswerFn:
  task = build.make_task(hello["task"])
  task.prepare_judging()
  return lambda request: (_answer(task, request), True)


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
