# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Calls custom reward functions according to their signature.

    def reward(prompt, completion, row)        a number
    def reward(completions, answer, **kwargs)  a list of numbers

The first form judges one completion. The second, which has a parameter
`completions`, `completion_ids` or `prompts`, follows TRL: it judges several
completions of a prompt at once. It gets the data columns by name, each as a
list with one item per completion, and `log_metric(name, value)`; a completion
of a chat prompt is a list of one message; a result of None leaves this reward
out of the sum. Both may be `async`; calls of the first form then run
concurrently.
"""

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
import inspect
import statistics
from typing import Any

from tba_jax.system import user_code
from tba_jax.tasks import base

_COMPLETIONS, _IDS, _PROMPTS = "completions", "completion_ids", "prompts"
_LOG_METRIC = "log_metric"
# Columns that have other names in the second form.
_RENAMED = ("prompt", "completion", _IDS)
# TRL argument that is not passed -> what to do instead.
_NOT_PASSED = {
    "trainer_state": "rewards are judged apart from the trainer, for several"
    " steps at once; settings over steps, such as loss.beta, take"
    " START:END:STEPS",
    "log_extra": "samples.jsonl has prompt, completion, row and rewards;"
    " log_metric(name, value) takes numbers",
    "environments": "environment=… is a class with reset and step, which gives"
    " the rewards",
}


def has_trl_signature(function: Callable[..., Any]) -> bool:
  """Returns whether a function has the second form (see the module)."""
  parameters = _parameters(function)
  kinds = {parameter.kind for parameter in parameters.values()}
  return bool({_COMPLETIONS, _IDS, _PROMPTS} & {*parameters}) or kinds == {
      inspect.Parameter.VAR_KEYWORD
  }


def takes_group(function: Callable[..., Any]) -> bool:
  """Returns whether a function judges a prompt's completions together."""
  return has_trl_signature(function) or _is_async(function)


def call(
    function: Callable[..., Any],
    prompt: base.Prompt,
    completions: Sequence[str],
    row: Mapping[str, Any],
    columns: Mapping[str, Any],
    completion_ids: Sequence[Sequence[int]] = (),
) -> list[Any | base.RewardError]:
  """Returns the unchecked result for each completion, or an error.

  In the second form, a result is None if the function does not judge the
  completion, and a mapping with the result as "reward" if metrics were logged.

  Args:
    prompt: text or messages.
    row: third argument of the first form.
    columns: fields of the data row, arguments of the second form.
    completion_ids: tokens of each completion, with the stop token.
  """
  try:
    if has_trl_signature(function):
      given = {_COMPLETIONS: completions, _IDS: map(list, completion_ids)}
      return _call_group(function, prompt, given, columns)
    _check_parameters(function)
    if _is_async(function):
      calls = [function(prompt, text, row) for text in completions]
      results = asyncio.run(_together(calls))
    else:
      results = [_attempt(function, prompt, c, row) for c in completions]
  except Exception as error:  # User code may raise anything.
    results = [error] * len(completions)
  return [
      _failure(function, result) if isinstance(result, Exception) else result
      for result in results
  ]


def _call_group(
    function: Callable[..., Any],
    prompt: base.Prompt,
    judged: Mapping[str, Iterable[Any]],
    columns: Mapping[str, Any],
) -> list[Any]:
  texts: list[Any] = list(judged[_COMPLETIONS])
  if not isinstance(prompt, str):
    texts = [[{"role": "assistant", "content": text}] for text in texts]
  logged: dict[str, list[Any]] = {}
  lists = {
      name: [value] * len(texts)
      for name, value in {**columns, _PROMPTS: prompt}.items()
      if name not in _RENAMED
  }
  arguments = {
      **lists,
      _COMPLETIONS: texts,
      _IDS: list(judged[_IDS]),
      _LOG_METRIC: lambda name, value: logged.setdefault(name, []).append(
          value
      ),
  }
  parameters = _parameters(function)
  if not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
    arguments = {n: v for n, v in arguments.items() if n in parameters}
  for name, parameter in parameters.items():
    is_rest = parameter.kind in (
        parameter.VAR_KEYWORD,
        parameter.VAR_POSITIONAL,
    )
    if parameter.default is not parameter.empty or is_rest:
      continue
    if name not in arguments:
      why = (
          f"is not passed here: {_NOT_PASSED[name]}"
          if name in _NOT_PASSED
          else f"is no column of the data, which has {', '.join(columns)}"
      )
      raise TypeError(f"its argument {name!r} {why}")
  returned = function(**arguments)
  if inspect.iscoroutine(returned):
    (returned,) = asyncio.run(_together([returned]))
    if isinstance(returned, Exception):
      raise returned
  results = returned.tolist() if hasattr(returned, "tolist") else returned
  if not isinstance(results, (list, tuple)) or len(results) != len(texts):
    size = f" of {len(results)}" if isinstance(results, (list, tuple)) else ""
    raise base.RewardError(
        "nan",
        f"{_place(function)}returned {type(returned).__name__}{size},"
        f" {repr(returned)[:60]}: must be a list of {len(texts)} numbers, one"
        " for each completion",
    )
  if not logged:
    return list(results)
  # Metrics are logged per batch: each completion gets their mean.
  metrics = {n: statistics.fmean(values) for n, values in logged.items()}
  return [{**metrics, "reward": result} for result in results]


def _check_parameters(function: Callable[..., Any]) -> None:
  """Raises TypeError unless a function accepts prompt, completion and row."""
  try:
    signature = inspect.signature(function)
  except (TypeError, ValueError):  # A builtin has none.
    return
  try:
    signature.bind("", "", {})
  except TypeError as error:
    raise TypeError(
        f"takes {signature}: must take (prompt, completion, row), or as in TRL"
        " (completions, **kwargs)"
    ) from error


def _attempt(function: Callable[..., Any], *arguments: Any) -> Any:
  try:
    return function(*arguments)
  except Exception as error:  # User code may raise anything.
    return error


async def _together(calls: Sequence[Coroutine[Any, Any, Any]]) -> list[Any]:
  return await asyncio.gather(*calls, return_exceptions=True)


def _failure(
    function: Callable[..., Any], error: Exception
) -> base.RewardError:
  if isinstance(error, base.RewardError):
    return error
  return base.RewardError("error", user_code.describe(error, function))


def _place(function: Callable[..., Any]) -> str:
  place = user_code.place_of_function(function)
  return f"{place}: " if place else ""


def _parameters(function: Callable[..., Any]) -> Mapping[str, Any]:
  try:
    return inspect.signature(function).parameters
  except (TypeError, ValueError):  # A builtin has none.
    return {}


def _is_async(function: Callable[..., Any]) -> bool:
  method = getattr(type(function), "__call__", None)
  return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
      method
  )
