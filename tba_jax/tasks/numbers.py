# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Reads final numbers out of worked solutions, such as those of GSM8K.

Completions are written by a policy to be rewarded: every reader here takes any
string, never raises, and takes time linear in its length.
"""

import math
import re

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
_MAX_DIGITS = 40
_FINAL = "####"


def difference(found: float | None, right: float | None) -> str:
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
  if last is None or len(last[0]) > _MAX_DIGITS:
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
