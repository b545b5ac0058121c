# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""How a user's reward function is called, by its signature.

    def reward(prompt, completion, row)        a number
    def reward(completions, answer, **kwargs)  a list of numbers

The first judges one completion. The second, with a parameter `completions`, is
as in TRL: it judges several completions of a prompt at once, with `prompts` and
the columns of the data by their names, each a list with an item for each
completion. There a completion of a chat prompt is a list of one message. Both
may be `async`; the calls of the first then run together.
"""

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
import inspect
from typing import Any

from tba_jax.system import user_code
from tba_jax.tasks import base

_COMPLETIONS, _PROMPTS = "completions", "prompts"
# Columns that the second form has under other names.
_RENAMED = ("prompt", "completion")


def takes_group(function: Callable[..., Any]) -> bool:
  """Tells whether a function judges completions of a prompt together."""
  return _COMPLETIONS in _parameters(function) or _is_async(function)


def call(
    function: Callable[..., Any],
    prompt: base.Prompt,
    completions: Sequence[str],
    row: Mapping[str, Any],
    columns: Mapping[str, Any],
) -> list[Any | base.RewardError]:
  """Returns the result for each completion, unchecked, or why there is none.

  Args:
    function: see the module.
    prompt: text or messages.
    completions: texts.
    row: third argument of the first form.
    columns: fields of the data's row, arguments of the second form.
  """
  try:
    if _COMPLETIONS in _parameters(function):
      return _call_group(function, prompt, completions, columns)
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
    completions: Sequence[str],
    columns: Mapping[str, Any],
) -> list[Any]:
  parameters = _parameters(function)
  given = {_PROMPTS: prompt, **columns}
  given = {name: v for name, v in given.items() if name not in _RENAMED}
  if not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
    given = {name: v for name, v in given.items() if name in parameters}
  for name, parameter in parameters.items():
    is_optional = parameter.default is not parameter.empty
    is_rest = parameter.kind in (
        parameter.VAR_KEYWORD,
        parameter.VAR_POSITIONAL,
    )
    if not (is_optional or is_rest or name in (_COMPLETIONS, *given)):
      raise TypeError(
          f"its argument {name!r} is no column of the data, which has"
          f" {', '.join(columns)}"
      )
  texts: list[Any] = list(completions)
  if not isinstance(prompt, str):
    texts = [[{"role": "assistant", "content": text}] for text in texts]
  lists = {name: [value] * len(texts) for name, value in given.items()}
  returned = function(**{**lists, _COMPLETIONS: texts})
  if inspect.iscoroutine(returned):
    (returned,) = asyncio.run(_together([returned]))
    if isinstance(returned, Exception):
      raise returned
  numbers = returned.tolist() if hasattr(returned, "tolist") else returned
  if not isinstance(numbers, (list, tuple)) or len(numbers) != len(texts):
    size = f" of {len(numbers)}" if isinstance(numbers, (list, tuple)) else ""
    raise base.RewardError(
        "nan",
        f"{_place(function)}returned {type(returned).__name__}{size},"
        f" {repr(returned)[:60]}: must be a list of {len(texts)} numbers, one"
        " for each completion",
    )
  return list(numbers)


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
