# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Reads numbers and steps out of completions, strictly and in bounded time.

A reward reads text that a policy wrote to be rewarded, so every reader here
takes any string, never raises, looks at its length before anything else, and
accepts one spelling only: ASCII digits, no sign, no space, no leading zero.
"""

import re

OPERATIONS = "+-*"

_INTEGER = re.compile(r"0|[1-9][0-9]*")
# More digits than any task needs: int() of a long string takes quadratic time.
_MAX_DIGITS = 9
_STEP = re.compile(r"([0-9]+)([+*-])([0-9]+)=([0-9]+)")
_MAX_STEP_LENGTH = 4 * _MAX_DIGITS


def parse_integer(text: str) -> int | None:
  """Returns the number that `text` is the canonical decimal of, else None.

  Canonical: ASCII digits only, at most 9 of them, and no leading zero but in
  "0" itself. `parse_integer("7")` is 7; "07", "+7", " 7", "7\\n" and "٧" give
  None.
  """
  if not isinstance(text, str) or len(text) > _MAX_DIGITS:
    return None
  return int(text) if _INTEGER.fullmatch(text) else None


def apply_operation(operation: str, a: int, b: int) -> int:
  """Returns a + b, a - b or a * b.

  Raises:
    ValueError: `operation` is none of `OPERATIONS`.
  """
  if operation == "+":
    return a + b
  if operation == "-":
    return a - b
  if operation == "*":
    return a * b
  raise ValueError(f"operation {operation!r}: allowed {list(OPERATIONS)}")


def read_step(text: str) -> tuple[int, str, int, int, int] | None:
  """Returns (a, operation, b, result, true result) of `a<operation>b=result`.

  None where the text is not of that form or a number is not canonical.
  """
  if not isinstance(text, str) or len(text) > _MAX_STEP_LENGTH:
    return None
  match = _STEP.fullmatch(text)
  if match is None:
    return None
  a, b, result = (parse_integer(match[i]) for i in (1, 3, 4))
  if a is None or b is None or result is None:
    return None
  return a, match[2], b, result, apply_operation(match[2], a, b)


def parse_step(text: str) -> tuple[int, str, int, int] | None:
  """Returns (a, operation, b, result) of a true `a<operation>b=result`.

  None where the text is not of that form, a number is not canonical, or the
  result is wrong: `parse_step("3*4=12")` is (3, "*", 4, 12), and "3*4=13" gives
  None.
  """
  step = read_step(text)
  if step is None:
    return None
  *step, true = step
  return tuple(step) if step[-1] == true else None
