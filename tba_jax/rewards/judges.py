# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Judges: completions in, rewards out, whatever the reward's code does.

A completion whose reward cannot be had gets the fallback in its place, is
counted by its cause, and costs nothing else. The causes:

    error     the reward raised
    nan       it is not a finite number, or none that float32 holds
    deadline  no answer in time; the worker was killed
    crash     the worker ended by itself
    start     no worker could be started

and what a task names itself, such as `exit` of a verifier's command.
"""

import abc
from collections.abc import Callable, Mapping, Sequence
import copy
import dataclasses
import threading
from typing import Any

import numpy as np

from tba_jax.tasks import base

# What float32 holds, in which rewards are kept and learned from.
_MAX_REWARD = float(np.finfo(np.float32).max)
# Characters of a reason; what a page or table can show.
MAX_REASON = 500

OnEvent = Callable[[str, str], None]


@dataclasses.dataclass(frozen=True)
class Request:
  """A completion to judge: of which prompt, and its text.

  stopped: whether it ended by itself, not at the limit of tokens.
  """

  split: str
  index: int
  completion: str
  stopped: bool = True


class Judge(abc.ABC):
  """Judges completions and keeps count."""

  def __init__(self, *, fallback: float, on_event: OnEvent | None = None):
    """Takes what is common.

    Args:
      fallback: reward of a completion that could not be judged.
      on_event: receives ("reward_failed", message) at the first, second, fourth
        … failure of a cause.
    """
    self._fallback = fallback
    self._on_event = on_event
    self._lock = threading.Lock()
    self._completions = 0
    self._sums: dict[str, float] = {}
    self._failures: dict[str, int] = {}

  @abc.abstractmethod
  def _judge(self, requests: Sequence[Request]) -> list[base.Judgement]:
    """Returns one judgement a request, failures made by `_failed`."""

  def judge(self, requests: Sequence[Request]) -> list[base.Judgement]:
    """Returns one judgement a request, in their order; never raises."""
    judged = self._judge(requests)
    with self._lock:
      self._completions += len(judged)
      for one in judged:
        if not one.failure:
          for name, value in one.parts.items():
            self._sums[name] = self._sums.get(name, 0.0) + value
    return judged

  def _explain(self, requests: Sequence[Request]) -> list[str]:
    """Returns one reason a request, failures made by `no_reason`."""
    return [""] * len(requests)

  def explain(self, requests: Sequence[Request]) -> list[str]:
    """Returns why each completion is wrong, "" where it is right or not known.

    For the few that are shown. Counts nothing and never raises: where the
    task's own code fails, that is the reason.
    """
    return [str(reason)[:MAX_REASON] for reason in self._explain(requests)]

  def set_metrics(
      self, prompts: Sequence[Mapping[str, Any]]
  ) -> Mapping[str, float]:
    """Returns metrics of completions as a set; none here.

    Args:
      prompts: of an evaluation: of each prompt `samples`, with `completion`,
        and `right`, whether each of them is.
    """
    del prompts
    return {}

  def totals(self) -> dict[str, Any]:
    """Returns counts since the start, plain enough for JSON.

    completions: judged, failed ones included.
    failures: by cause.
    sums: of each part of the reward, over those that did not fail.
    """
    with self._lock:
      return {
          "completions": self._completions,
          "failures": copy.copy(self._failures),
          "sums": copy.copy(self._sums),
      }

  def close(self) -> None:
    """Ends what was started; the judge is not used afterwards."""

  def _failed(
      self, request: Request, cause: str, message: str
  ) -> base.Judgement:
    with self._lock:
      count = self._failures[cause] = self._failures.get(cause, 0) + 1
    if self._on_event is not None and count & (count - 1) == 0:
      self._on_event(
          "reward_failed",
          f"{cause}, {count} so far; prompt {request.index} of"
          f" {request.split!r}: {message[:300]}",
      )
    return base.Judgement(self._fallback, None, failure=cause)

  def _checked(
      self, request: Request, judgement: base.Judgement
  ) -> base.Judgement:
    """Returns the judgement with plain floats, or a failure."""
    try:
      reward = float(judgement.reward)
      parts = {name: float(v) for name, v in judgement.parts.items()}
    except (TypeError, ValueError, OverflowError) as error:
      return self._failed(request, "nan", str(error))
    for name, value in {"reward": reward, **parts}.items():
      if not abs(value) <= _MAX_REWARD:
        return self._failed(request, "nan", f"{name} is {value}")
    return dataclasses.replace(judgement, reward=reward, parts=parts)


def no_reason(message: str) -> str:
  """Returns what stands in the place of a reason that could not be had."""
  return f"(no reason: {message})"


class InProcess(Judge):
  """Calls the task right here: for rewards that are fast and never hang."""

  def __init__(
      self,
      task: base.Task,
      *,
      fallback: float,
      on_event: OnEvent | None = None,
  ):
    """Takes the task; see `Judge`."""
    super().__init__(fallback=fallback, on_event=on_event)
    self._task = task

  def _judge(self, requests: Sequence[Request]) -> list[base.Judgement]:
    return [self._judge_one(request) for request in requests]

  def _explain(self, requests: Sequence[Request]) -> list[str]:
    return [self._explain_one(request) for request in requests]

  def _explain_one(self, request: Request) -> str:
    try:
      return self._task.explain(
          request.split, request.index, request.completion
      )
    # Code of the user's, on text of a policy's.
    except (Exception, SystemExit) as error:
      return no_reason(repr(error))

  def _judge_one(self, request: Request) -> base.Judgement:
    try:
      judgement = self._task.judge(
          request.split, request.index, request.completion
      )
    except base.RewardError as error:
      return self._failed(request, error.cause, str(error))
    # Code of the user's, on text of a policy's.
    except (Exception, SystemExit) as error:
      return self._failed(request, "error", repr(error))
    return self._checked(request, judgement)
