# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Reads and compares the boxed answers of solutions in LaTeX.

An answer is right where its text is the reference's, but for how it is set, or
where the library `math-verify` finds both equal: 1/2 and 0.5, x+1 and 1+x.

Texts are a policy's, to be rewarded. All but `equal` take any string, never
raise, and take time linear in its length. `equal` calls on sympy, which may
take for ever: it belongs in a process that may be killed.
"""

import fractions
import functools
import logging
import re
from typing import Any

# Longer answers are compared as texts only.
MAX_CHARS = 400

_BOX = re.compile(r"\\(?:boxed|fbox)(?![A-Za-z])\s*")
_BRACE = re.compile(r"\\.|[{}]", re.S)
_NUMBER = re.compile(r"[-+]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)")
_THOUSANDS = re.compile(r"[-+]?[0-9]{1,3}(?:,[0-9]{3})+(?:\.[0-9]+)?")
# What only sets a formula, and says nothing.
_SILENT = re.compile(
    r"\\(?:left|right|displaystyle)(?![A-Za-z])|\\[bB]igg?[lr]?(?![A-Za-z])"
    r"|\\[!,;:()\[\]]|\\?\$|\^\\circ(?![A-Za-z])|\^\{\\circ\}|\\?%"
)
_FRACTION = re.compile(r"\\[dt]frac(?![A-Za-z])")
_WORDS = re.compile(r"\\(?:text|textbf|textit|mathrm|mbox)\s*\{([^{}]*)\}")
# Spaces between two digits tell numbers apart.
_SPACE = re.compile(r"(?<![0-9])\s+|\s+(?![0-9])")


def last_boxed(text: str) -> str | None:
  r"""Returns what the last \boxed or \fbox of a text holds.

  Without braces it is what follows, up to a dollar sign or the line's end.
  None where there is no box, it is empty, or it is never closed.
  """
  box = None
  for box in _BOX.finditer(text):
    pass
  if box is None:
    return None
  rest = text[box.end() :]
  if rest[:1] == "{":
    return _in_braces(rest)
  bare = re.split(r"[$\n]", rest, maxsplit=1)[0]
  return bare.strip().removesuffix(".").rstrip() or None


def _in_braces(text: str) -> str | None:
  """Returns what the first pair of braces of a text holds, None for nothing."""
  depth = 0
  for brace in _BRACE.finditer(text):
    depth += {"{": 1, "}": -1}.get(brace[0], 0)
    if depth == 0 and brace[0] == "}":
      return text[1 : brace.start()].strip() or None
  return None


def normalized(answer: str) -> str:
  r"""Returns an answer without what only sets it.

  Spaces, dollar, percent and degree signs, \left and \right, a last full stop
  and the commas of thousands go, \text{a} is a, \dfrac is \frac.
  """
  if len(answer) > MAX_CHARS:
    return " ".join(answer.split())
  plain = _WORDS.sub(r"\1", _SILENT.sub("", answer))
  plain = _SPACE.sub("", _FRACTION.sub(r"\\frac", plain)).strip()
  plain = plain.removesuffix(".")
  return plain.replace(",", "") if _THOUSANDS.fullmatch(plain) else plain


def equal(reference: str, answer: str) -> bool:
  """Tells whether an answer is right; see the module.

  Args:
    reference: the right answer, without its box.
    answer: the one to compare, without its box.

  Raises:
    ImportError: `math-verify` is not installed and the texts do not decide.
  """
  decided = equal_as_texts(reference, answer)
  return _verify(reference, answer) if decided is None else decided


def equal_as_texts(reference: str, answer: str) -> bool | None:
  """Tells whether an answer is right by the texts alone; None: they don't say.

  Takes what `equal` takes, and time linear in it.
  """
  left, right = normalized(reference), normalized(answer)
  if not left or not right or left == right:
    return left == right != ""
  if max(len(reference), len(answer)) > MAX_CHARS:
    return False
  plain = _NUMBER.fullmatch(left) and _NUMBER.fullmatch(right)
  if plain and "%" not in reference + answer:
    return fractions.Fraction(left) == fractions.Fraction(right)
  return None


# A reference is compared with all completions of its prompt, of which many are
# alike.
@functools.lru_cache(maxsize=4096)
def _verify(reference: str, answer: str) -> bool:
  # Brings sympy, half a second: only where the texts do not decide.
  import math_verify  # pylint: disable=g-import-not-at-top

  # Its own deadline is an alarm, which C code can outlast and threads cannot
  # have; the pool's bounds all of it.
  return bool(
      math_verify.verify(
          _parse(reference), _parse(answer), timeout_seconds=None
      )
  )


@functools.lru_cache(maxsize=1024)
def _parse(answer: str) -> list[Any]:
  """Returns what math-verify reads in an answer, [] where it reads nothing."""
  import math_verify  # pylint: disable=g-import-not-at-top

  # It warns that no deadline of its own is set.
  logging.getLogger("math_verify").setLevel(logging.ERROR)
  # LaTeX only: its reader of plain expressions has Python evaluate the text.
  config = math_verify.LatexExtractionConfig(boxed_match_priority=0)
  return math_verify.parse(
      f"\\boxed{{{answer}}}",
      [config],
      fallback_mode="no_fallback",
      parsing_timeout=None,
  )
