# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Reads numbers and steps out of completions, strictly and in bounded time.

A reward reads text that a policy wrote to be rewarded, so every reader here
takes any string, never raises, looks at its length before anything else, and
accepts one spelling only: ASCII digits, no sign, no space, no leading zero.
"""

import math
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


# Reads final numbers out of worked solutions, such as those of GSM8K.
#
# Completions are written by a policy to be rewarded: every reader here takes
# any
# string, never raises, and takes time linear in its length.


# An optional sign that is no operation, digits with or without a fraction (also
# ".5"), and a simple exponent.
_NUMBER = re.compile(
    r"(?<![0-9A-Za-z.)])[-+]?(?:[0-9]+(?:\.[0-9]+)?|\.[0-9]+)"
    r"(?:[eE][-+]?[0-9]{1,3}(?![0-9]))?"
    r"|(?:[0-9]+(?:\.[0-9]+)?|\.[0-9]+)(?:[eE][-+]?[0-9]{1,3}(?![0-9]))?"
)
# A comma between groups of three digits.
_THOUSANDS = re.compile(r"(?<=[0-9]),(?=[0-9]{3}(?![0-9]))")
_CALCULATOR = re.compile(r"<<[^<>\n]*>>")
_MAX_NUMBER_DIGITS = 40
_FINAL = "####"


def number_difference(found: float | None, right: float | None) -> str:
  """Returns what is wrong with a number that was found; "" where nothing is."""
  if found is None:
    return "no number found"
  if found == right:
    return ""
  return f"read {found:.12g}, wanted {right:.12g}"


def without_calculator(text: str) -> str:
  """Returns a solution without its calculator marks `<<48/2=24>>`."""
  return _CALCULATOR.sub("", text)


def last_number(text: str) -> float | None:
  """Returns the last number that a text holds, None where there is none.

  Commas between groups of three digits are part of a number, a sign after a
  digit, letter or bracket is not: "10-3" ends with 3, "1,080." with 1080. Only
  ASCII digits count. A number that is too long or too large for a float is no
  number.
  """
  if not isinstance(text, str):
    return None
  last = None
  for last in _NUMBER.finditer(_THOUSANDS.sub("", text)):
    pass
  if last is None or len(last[0]) > _MAX_NUMBER_DIGITS:
    return None
  value = float(last[0])
  return value if math.isfinite(value) else None


def final_number(text: str) -> float | None:
  """Returns the number after the last `####`, which has to follow at once.

  The rest of that line holds the number and nothing else but spaces, a dollar
  or percent sign, and a full stop.
  """
  if not isinstance(text, str) or _FINAL not in text:
    return None
  line = text.rpartition(_FINAL)[2].lstrip(" ").partition("\n")[0]
  line = line.strip(" $%").removesuffix(".").rstrip(" %")
  plain = _THOUSANDS.sub("", line)
  return last_number(plain) if _NUMBER.fullmatch(plain) else None
