# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""A worker of the pool: `python -m tba_jax.rewards.worker`.

Builds the task from its first message, then answers each request with a
judgement or a reason, in a separate process (`system/keeper.py`), which may
hang or crash. A reward that imports JAX gets the CPU.
"""

import sys
from typing import Any

from tba_jax.system import keeper
from tba_jax.system import user_code
from tba_jax.tasks import base
from tba_jax.tasks import task_table


def main() -> int:
  """Serves requests until the pool closes the pipe."""
  return keeper.serve(_begin, shows_prints=True)


def _begin(hello: dict[str, Any]) -> keeper.AnswerFn:
  task = task_table.make_task(hello["task"])
  task.prepare_judging()
  return lambda request: (_answer(task, request), True)


def _answer(task: base.Task, request: list[Any]) -> dict[str, Any]:
  what, *arguments = request
  try:
    if what == "explain":
      return {"reason": str(task.explain(*arguments))}
    if what == "judge_group":
      return {
          "group": [
              _message(judgement) for judgement in task.judge_group(*arguments)
          ]
      }
    judge = task.judge if what == "judge" else task.judge_cut_off
    return _message(judge(*arguments))
  except base.RewardError as error:
    return _message(error)
  except Exception as error:  # User code, on text that a model wrote.
    return _message(base.RewardError("error", user_code.describe(error)))


def _message(judged: base.Judgement | base.RewardError) -> dict[str, Any]:
  """Returns a judgement's message; raises RewardError for a non-number."""
  if isinstance(judged, base.RewardError):
    return {"failure": judged.cause, "message": str(judged)}
  return {
      "reward": base.number(judged.reward, "the reward"),
      "key": judged.key,
      "parts": {n: base.number(v, n) for n, v in judged.parts.items()},
  }


if __name__ == "__main__":
  sys.exit(main())
