# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Why a completion of countdown is wrong, in a few words."""

from collections.abc import Callable, Sequence

# From a text to a, operation, b, result and the true result.
ReadStep = Callable[[str], tuple[int, str, int, int, int] | None]


def explain(
    numbers: Sequence[int],
    target: int,
    completion: str,
    *,
    read_step: ReadStep,
    max_value: int,
    max_length: int,
) -> str:
  """Returns the first thing that is wrong, "" where the completion is right.

  Args:
    numbers, target: of the prompt.
    completion: any text.
    read_step: `answers.read_step`.
    max_value: the largest result of a step.
    max_length: characters of the longest solution.
  """
  if not completion:
    return "is empty"
  if len(completion) > max_length:
    return f"has {len(completion)} characters, a solution up to {max_length}"
  num_steps = len(numbers) - 1
  left = list(numbers)
  for count, text in enumerate(completion.split(","), 1):
    if count > num_steps:
      return f"has more than {num_steps} steps"
    wrong = _wrong_step(read_step(text), text, left, numbers, max_value)
    if wrong:
      return f"step {count}: {wrong}"
  if len(left) > 1:
    return f"ends with {_listed(left)} left over"
  return "" if left == [target] else f"gives {left[0]}, not {target}"


def _wrong_step(
    step: tuple[int, str, int, int, int] | None,
    text: str,
    left: list[int],
    numbers: Sequence[int],
    max_value: int,
) -> str:
  """Returns what is wrong with a step; else makes it in `left`."""
  if step is None:
    return f'"{text}" is not of the form 4*3=12'
  a, operation, b, result, true = step
  if true != result:
    return f"{a}{operation}{b} is {true}, not {result}"
  if not 1 <= result <= max_value:
    return f"{result} is not from 1 to {max_value}"
  if a < b:
    return f"the larger of {a} and {b} has to stand first"
  for operand in (a, b):
    if operand not in left:
      if operand in numbers:
        return f"uses {operand} once too often"
      return f"uses {operand}, which is not among {_listed(left)}"
    left.remove(operand)
  left.append(result)
  return ""


def _listed(values: Sequence[int]) -> str:
  return ", ".join(map(str, values)) or "what is left"
