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

  A canonical text has at most 9 ASCII digits, no sign, space or leading zero.
  "07", "+7", " 7", "7\n" and "٧" give None.
  """
  # Length first: int() of a long string takes quadratic time.
  if not isinstance(text, str) or len(text) > _MAX_DIGITS:
    return None
  return int(text) if _INTEGER.fullmatch(text) else None


def number_difference(answer: float | None, right: float | None) -> str:
  """Returns how a number differs from the correct one, "" if it does not."""
  if answer is None:
    return "no number found"
  if answer == right:
    return ""
  return f"read {answer:.12g}, wanted {right:.12g}"


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


# `final_answer`: variant spellings of signs, spaces, separators, operators and
# currencies.
_SPELLINGS = (
    (re.compile(r"[−–‒－﹣]"), "-"),
    (re.compile(r"[\u00a0\u2007\u2009\u202f]|\\[ ,;:!]"), " "),
    (re.compile(r"\{,\}"), ","),
    (re.compile(r"\\([$%])"), r"\1"),
    (re.compile(r"\\(?:times|cdot|div)(?![A-Za-z])|[×·÷]"), "*"),
    (re.compile(r"(?<![A-Za-z])(?:USD|EUR|GBP|Rs)\.?\s?(?=[0-9])"), "$"),
    (re.compile(r"(?<=[0-9])(?=\\[dt]?frac)"), " "),
    (
        re.compile(
            r"\\[dt]?frac ?(?:\{ ?(-?[0-9.]{1,20}) ?\}|([0-9])) ?"
            r"(?:\{ ?(-?[0-9.]{1,20}) ?\}|([0-9])(?![0-9]))"
        ),
        r"\1\2/\3\4",
    ),
    (re.compile(r"(?<=[0-9]) ?/ ?(?=[0-9])"), "/"),
    # Items of a list have no sign.
    (re.compile(r"\n[ \t]*-[ \t]+"), "\n"),
    (
        re.compile(r"(?<![A-Za-z])(?:minus|negative) {1,3}(?=[$.0-9])", re.I),
        "-",
    ),
)
# Full-width ASCII, as Chinese and Japanese keyboards write it.
_FULL_WIDTH = {code + 0xFEE0: code for code in range(0x21, 0x7F)}
# Beginnings of another text into which the model runs on.
_RUN_ON = re.compile(
    r"</s>|<\|?(?:eos|im_end|eot_id|endoftext|end_of_text)\|?>"
    r"|(?<=\S)\s*?\n\s*?(?:Question|Problem|Q|Human|User)\s?:"
)
_ANSWER_IS = re.compile(r"answer(?:\s{0,3}(?:is|are|=)|\s{0,3}:)", re.I)
# Right after "answer is" as a correction of what was marked before it.
_DIRECTLY = re.compile(r"[\s:*$(]{0,9}[-+]?[$]?[.0-9]")
# What LaTeX leaves to compute, beside the formulas of plain texts.
_LATEX_FORMULA = re.compile(r"\^\{|\\(?:sqrt|pi)(?![a-zA-Z])")
_SENTENCE_END = re.compile(r"[.!?](?=\s|$)|\n")
_GROUPS = re.compile(r"(?<![0-9.,/])[0-9]{1,3}(?: [0-9]{3}(?![0-9/.]))++")
_DIGITS = r"(?:[0-9]++(?:\.[0-9]++)?|\.[0-9]++)"
_SIGN = r"(?:(?<![0-9A-Za-z.)])[-+])?(?:\$\s?)?(?:(?<=\$)[-+])?"
# A sign with a space after it, which opens an answer.
_MINUS = re.compile(r"^([\s*$(]{0,9})-\s{1,3}(?=[$.0-9])")
# A result worked out: "20% of 50, which is 10".
_WORKED_OUT = re.compile(
    rf"[0-9](?:% of|[ \t]?(?:\*\*|[-+*^xX]))[ \t]?\$?{_DIGITS}"
    r"(?:,? (?:which|that) (?:is|equals|makes|gives)|, or)(?= [-$.0-9])"
)
# Several numbers, such as a pair, are no answer.
_LIST = re.compile(
    rf"[\s*$(\[\\{{]*-?{_DIGITS}(?:\s*,\s*-?{_DIGITS})+[\s*$)\]\\}}.]*"
)
# Accounting notation: an amount alone in brackets is negative.
_IN_BRACKETS = re.compile(rf"[\s*$]*\(\s*-?\$\s*{_DIGITS}\s*\)[\s*$.]*")
_SCALES = {
    "hundred": 1e2,
    "thousand": 1e3,
    "million": 1e6,
    "billion": 1e9,
    "trillion": 1e12,
}
_VALUE = re.compile(
    # No quantity: a time or ratio, an ordinal, part of a name such as x3.
    r"(?P<other>(?<![0-9.])[0-9]{1,9}(?::[0-9]{1,9})++"
    rf"|{_DIGITS}(?:st|nd|rd|th)(?![A-Za-z])|(?<=[A-Za-z_]){_DIGITS})"
    # Formulas left to compute: 2^10, 9*2, 10 - 3.
    rf"|(?P<formula>{_DIGITS}(?:[ \t]?(?:\*\*|[-+*^xX])[ \t]?\$?{_DIGITS})++)"
    rf"|(?P<sign>{_SIGN})"
    rf"(?:(?P<whole>[0-9]{{1,9}}) (?P<part>[0-9]{{1,9}}/[1-9][0-9]{{0,8}})"
    rf"|(?<!/)(?P<above>{_DIGITS})/(?P<below>-?{_DIGITS})"
    rf"|(?P<plain>{_UNSIGNED}))(?!/[0-9])"
    rf"(?:[ \t]?(?P<scale>{'|'.join(_SCALES)})(?![A-Za-z-]))?",
    re.I,
)
# Two numbers to choose from are no answer.
_EITHER = re.compile(
    r"[0-9%](?:[ \t]{1,3}[A-Za-z]{1,20})?[ \t*]{1,3}or[ \t*]{1,3}[-$]*[0-9]"
)
# An aside, such as the sum "(9 eggs x $2)".
_ASIDE = re.compile(r"\([^()]{1,200}\)")
_ONES = (
    "one two three four five six seven eight nine ten eleven twelve"
    " thirteen fourteen fifteen sixteen seventeen eighteen nineteen"
).split()
_TENS = "twenty thirty forty fifty sixty seventy eighty ninety".split()
_NUMERALS = {*_ONES, *_TENS, *_SCALES}


def final_answer(text: str) -> float | None:
  r"""Returns the number that a person would read as the answer, else None.

  In order: the number after the last `####` or in the last \boxed{}, whichever
  comes later, unless a later "the answer is" is followed by another; after the
  last "answer is" or "answer:"; the last number. Text after an end token or a
  new "Question:" is ignored. Understands units, signs (-$5, ($5), −5),
  fractions (3/4, \frac{6}{2}, 2 1/2), separators (11,050, 11{,}050, 1 234),
  scales (2 million), full-width digits, and numbers in words where they are the
  whole statement. An equation, "5 + 3 = 8" or "20% of 50, which is 10", counts
  from its last "=" or "which is". None for what is no single number: formulas
  (2^10, 9*2, \sqrt{2}), lists (3, 5), "7 or 8"; times, ordinals and names
  (15:03, 18th, x3) are skipped.
  """
  if not isinstance(text, str):
    return None
  text = text.translate(_FULL_WIDTH)
  for pattern, plain in _SPELLINGS:
    text = pattern.sub(plain, text)
  text = _RUN_ON.split(text, maxsplit=1)[0]
  said = None
  for said in _ANSWER_IS.finditer(text):
    pass
  after = text[said.end() :] if said else ""
  marked = max(text.rfind(_HASHES), _last_box(text))
  if marked >= 0 and not (
      said and said.start() > marked and _DIRECTLY.match(after)
  ):
    if not text.startswith(_HASHES, marked):
      box = last_boxed(text) or ""
      return None if _LATEX_FORMULA.search(box) else _stated(box)
    return _stated(text[marked + len(_HASHES) :].strip().partition("\n")[0])
  if said is not None:
    sentence = _SENTENCE_END.split(after.lstrip(), maxsplit=1)[0]
    if re.search("[0-9]", sentence) or _in_words(sentence) is not None:
      return _stated(sentence)
  if _IN_BRACKETS.fullmatch(text):
    return _stated(text)
  values = _values(_without_asides(text))
  return values[-1] if values else _in_words(text)


def _last_box(text: str) -> int:
  """Returns where the last box with contents begins, -1 if there is none."""
  start = -1
  if last_boxed(text) is not None:
    for box in _BOX.finditer(text):
      start = box.start()
  return start


def _stated(text: str) -> float | None:
  """Returns the number in a text that holds only the answer."""
  text = _WORKED_OUT.sub("=", text).rpartition("=")[2]
  text = _MINUS.sub(r"\1-", _THOUSANDS.sub("", text))
  values = _values(text)
  if not values:
    return _in_words(text)
  if _EITHER.search(text) or _LIST.fullmatch(text):
    return None
  return -abs(values[0]) if _IN_BRACKETS.fullmatch(text) else values[0]


def _without_asides(text: str) -> str:
  """Removes sums in brackets that follow a number: "18 (9 eggs x $2)"."""

  def keep(match: re.Match) -> str:
    is_aside = "=" not in match[0] and len(_values(match[0])) > 1
    return "" if is_aside else match[0]

  first = re.search("[0-9]", text)
  start = first.start() if first else len(text)
  return text[:start] + _ASIDE.sub(keep, text[start:])


def _in_words(text: str) -> float | None:
  """Returns a number in words, alone or with a unit: "twenty-five dollars"."""
  words = re.findall("[a-z]+", text.lower()) if len(text) < 100 else []
  total = part = 0
  limit = math.inf  # The next scale has to be smaller.
  for i, word in enumerate(words):
    low = part % 100
    scale = _SCALES.get(word, math.inf)
    if word in _ONES and (not low or low >= 20 and not low % 10):
      number = _ONES.index(word) + 1
      if low and number > 9:
        return None
      part += number
    elif word in _TENS and not low:
      part += 10 * (_TENS.index(word) + 2)
    elif word == "hundred" and 0 < part < 10:
      part *= 100
    elif 100 < scale < limit and part:
      total, part, limit = total + int(part * scale), 0, scale
    elif word != "and" or not i:
      # A last word may be the unit.
      is_unit = i and i == len(words) - 1 and word not in _NUMERALS
      return float(total + part) if is_unit else None
  return float(total + part) if words else None


def _values(text: str) -> list[float | None]:
  """Returns the numbers in a text; None for a formula, and what no float is."""
  text = _GROUPS.sub(lambda m: m[0].replace(" ", ""), _THOUSANDS.sub("", text))
  return [_value(m) for m in _VALUE.finditer(text) if m["other"] is None]


def _value(match: re.Match) -> float | None:
  if match["formula"] or len(match[0]) > _MAX_NUMBER_CHARS:
    return None
  if match["whole"]:
    value = float(match["whole"]) + float(fractions.Fraction(match["part"]))
  elif match["above"]:
    below = float(match["below"])
    value = float(match["above"]) / below if below else math.nan
  else:
    value = float(match["plain"])
  if match["scale"]:
    value *= _SCALES[match["scale"].lower()]
  if not math.isfinite(value):
    return None
  return -value if "-" in match["sign"] else value
