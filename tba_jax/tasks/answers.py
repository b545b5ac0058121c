# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
r"""Parses the final number, or the \boxed answer, of a completion.

Completions are untrusted: every function here takes any string, never raises,
and runs in time linear in its length.
"""

import fractions
import math
import re

_MAX_DIGITS = 9
_INTEGER = re.compile(r"0|[1-9][0-9]*")

# A sign that is not an operator, digits with or without decimals (also ".5"),
# and a short exponent.
_UNSIGNED = (
    r"(?:[0-9]++(?:\.[0-9]++)?|\.[0-9]++)(?:[eE][-+]?[0-9]{1,3}(?![0-9]))?"
)
_NUMBER = re.compile(rf"(?<![0-9A-Za-z.)])[-+]?{_UNSIGNED}|{_UNSIGNED}")
_MAX_NUMBER_CHARS = 40
_THOUSANDS = re.compile(r"(?<=[0-9]),(?=[0-9]{3}(?![0-9]))")
_CALCULATOR = re.compile(r"<<[^<>\n]*>>")
_HASHES = "####"
_BOX = re.compile(r"\\(?:boxed|fbox)(?![A-Za-z])\s*")
_BRACE = re.compile(r"\\.|[{}]", re.S)


def parse_integer(text: str) -> int | None:
  r"""Returns the integer that `text` spells canonically, else None.

  Canonical: at most 9 ASCII digits without a sign, space or leading zero.
  "07", "+7", " 7", "7\n" and "٧" give None.
  """
  # Length first: int() of a long string takes quadratic time.
  if not isinstance(text, str) or len(text) > _MAX_DIGITS:
    return None
  return int(text) if _INTEGER.fullmatch(text) else None


def number_difference(found: float | None, right: float | None) -> str:
  """Returns how a number differs from the correct one, "" if it does not."""
  if found is None:
    return "no number found"
  if found == right:
    return ""
  return f"read {found:.12g}, wanted {right:.12g}"


def without_calculator(text: str) -> str:
  """Removes calculator annotations such as `<<48/2=24>>` from a solution."""
  return _CALCULATOR.sub("", text)


def last_number(text: str) -> float | None:
  """Returns the last number of a text, None if there is none.

  As in TBA's GSM8K runs. Commas between groups of three digits belong to the
  number; a sign after a digit, letter or bracket does not: "10-3" ends with 3,
  "1,080." with 1080. None if it is too long or too large for a float.
  """
  if not isinstance(text, str):
    return None
  last = None
  for last in _NUMBER.finditer(_THOUSANDS.sub("", text)):
    pass
  if last is None or len(last[0]) > _MAX_NUMBER_CHARS:
    return None
  value = float(last[0])
  return value if math.isfinite(value) else None


def number_after_hashes(text: str) -> float | None:
  """Returns the number right after the last `####`.

  The rest of the line may hold only spaces, a dollar or percent sign, and a
  full stop.
  """
  if not isinstance(text, str) or _HASHES not in text:
    return None
  line = text.rpartition(_HASHES)[2].lstrip(" ").partition("\n")[0]
  line = line.strip(" $%").removesuffix(".").rstrip(" %")
  plain = _THOUSANDS.sub("", line)
  return last_number(plain) if _NUMBER.fullmatch(plain) else None


def last_boxed(text: str) -> str | None:
  r"""Returns the contents of the last \boxed or \fbox.

  Without braces, they end at a dollar sign or the line end. None if there
  is no box, or it is empty or never closed.
  """
  box = None
  for box in _BOX.finditer(text):
    pass
  if box is None:
    return None
  rest = text[box.end() :]
  if rest[:1] != "{":
    bare = re.split(r"[$\n]", rest, maxsplit=1)[0]
    return bare.strip().removesuffix(".").rstrip() or None
  depth = 0
  for brace in _BRACE.finditer(rest):
    depth += {"{": 1, "}": -1}.get(brace[0], 0)
    if depth == 0 and brace[0] == "}":
      return rest[1 : brace.start()].strip() or None
  return None


# `final_answer`: variant spellings of minus signs, spaces and separators.
_SPELLINGS = (
    (re.compile(r"[−–‒－﹣]"), "-"),
    (re.compile(r"[\u00a0\u2007\u2009\u202f]|\\[ ,;:!]"), " "),
    (re.compile(r"\{,\}"), ","),
    (re.compile(r"\\([$%])"), r"\1"),
    (re.compile(r"(?<=[0-9])(?=\\[dt]?frac)"), " "),
    (
        re.compile(
            r"\\[dt]?frac ?\{ ?(-?[0-9.]{1,20}) ?\} ?\{ ?(-?[0-9.]{1,20}) ?\}"
        ),
        r"\1/\2",
    ),
)
# Where the model runs on into another text.
_RUN_ON = re.compile(
    r"</s>|<\|?(?:eos|im_end|eot_id|endoftext|end_of_text)\|?>"
    r"|(?<=\S)\s*?\n\s*?(?:Question|Problem|Q|Human|User)\s?:"
)
_ANSWER_IS = re.compile(r"answer(?:\s{0,3}(?:is|are|=)|\s{0,3}:)", re.I)
_SENTENCE_END = re.compile(r"[.!?](?=\s|$)|\n")
_GROUPS = re.compile(r"(?<![0-9.,/])[0-9]{1,3}(?: [0-9]{3}(?![0-9/.]))++")
_DIGITS = r"(?:[0-9]++(?:\.[0-9]++)?|\.[0-9]++)"
_SIGN = r"(?:(?<![0-9A-Za-z.)])[-+])?(?:\$\s?)?(?:(?<=\$)[-+])?"
# Accounting notation: an amount alone in brackets is negative.
_IN_BRACKETS = re.compile(rf"[\s*$]*\(\s*-?\$\s*{_DIGITS}\s*\)[\s*$.]*")
_VALUE = re.compile(
    rf"(?P<sign>{_SIGN})"
    rf"(?:(?P<whole>[0-9]{{1,9}}) (?P<part>[0-9]{{1,9}}/[1-9][0-9]{{0,8}})"
    rf"|(?<!/)(?P<above>{_DIGITS})/(?P<below>-?{_DIGITS})"
    rf"|(?P<plain>{_UNSIGNED}))(?!/[0-9])"
)


def final_answer(text: str) -> float | None:
  r"""Returns the number that a person would read as the answer, else None.

  In order: the number after the first `####`; in the last \boxed{}; after the
  last "answer is" or "answer:"; the last number. Text after an end token or a
  new "Question:" is ignored. Understands units, signs (-$5, ($5), −5),
  fractions (3/4, \frac{6}{2}, 2 1/2) and separators (11,050, 11{,}050, 1 234).
  An equation, "5 + 3 = 8", counts from its last "=".
  """
  if not isinstance(text, str):
    return None
  for pattern, plain in _SPELLINGS:
    text = pattern.sub(plain, text)
  text = _RUN_ON.split(text, maxsplit=1)[0]
  _, hashes, rest = text.partition(_HASHES)
  if hashes:
    line = rest.strip().partition("\n")[0]
    return _stated(last_boxed(line) or line)
  boxed = last_boxed(text)
  if boxed is not None:
    return _stated(boxed)
  said = None
  for said in _ANSWER_IS.finditer(text):
    pass
  if said is not None:
    sentence = _SENTENCE_END.split(text[said.end() :].lstrip(), maxsplit=1)[0]
    value = _stated(sentence)
    if value is not None:
      return value
  if _IN_BRACKETS.fullmatch(text):
    return _stated(text)
  values = _values(text)
  return values[-1] if values else None


def _stated(text: str) -> float | None:
  """Returns the number in a text that holds only the answer."""
  values = _values(text.rpartition("=")[2])
  if not values:
    return None
  return -abs(values[0]) if _IN_BRACKETS.fullmatch(text) else values[0]


def _values(text: str) -> list[float | None]:
  """Returns the numbers in a text; None for one that does not fit a float."""
  text = _GROUPS.sub(lambda m: m[0].replace(" ", ""), _THOUSANDS.sub("", text))
  return [_value(match) for match in _VALUE.finditer(text)]


def _value(match: re.Match) -> float | None:
  if len(match[0]) > _MAX_NUMBER_CHARS:
    return None
  if match["whole"]:
    value = float(match["whole"]) + float(fractions.Fraction(match["part"]))
  elif match["above"]:
    below = float(match["below"])
    value = float(match["above"]) / below if below else math.nan
  else:
    value = float(match["plain"])
  if not math.isfinite(value):
    return None
  return -value if "-" in match["sign"] else value
