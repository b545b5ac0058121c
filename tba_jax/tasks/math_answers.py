# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
r"""Compares mathematical answers, as found in \boxed{}.

The steps, in order: compare texts up to typesetting; compare lists, sets,
tuples, intervals and equations part by part; compare numbers exactly, in their
units and bases; compare the rest, such as x+1 and 1+x, as formulas parsed by
the library `math-verify`. The last step calls sympy, which may never return.
"""

from collections.abc import Callable, Sequence
import fractions
import functools
import logging
import re
from typing import Any
import unicodedata
import zlib

from tba_jax.tasks import answers

MAX_CHARS = 400  # longer answers are compared as texts only
_MAX_ITEMS = 30  # in an unordered list
_MAX_EXPONENT = 400

# Function that decides whether two formulas are equal.
Verify = Callable[[str, str], bool]


class _UndecidedError(Exception):
  """Only `math-verify` can decide."""


def equal(reference: str, answer: str) -> bool:
  """Returns whether an answer equals the reference, both without the box.

  Raises ImportError if `math-verify` is needed and not installed.
  """
  return _equal(reference, answer, _verify)


def equal_as_texts(reference: str, answer: str) -> bool | None:
  """Compares answers without `math-verify`; returns None if undecided."""

  def undecided(left: str, right: str) -> bool:
    raise _UndecidedError(left, right)

  try:
    return _equal(reference, answer, undecided)
  except _UndecidedError:
    return None


def _equal(reference: str, answer: str, verify: Verify) -> bool:
  left, right = normalized(reference), normalized(answer)
  if not left or not right:
    return False
  if left == right:
    return True
  if max(len(reference), len(answer)) > MAX_CHARS:
    return False
  if _joined(_plain(reference)) == _joined(_plain(answer)):
    return True
  left, right = _cleaned(reference), _cleaned(answer)
  if not (_is_balanced(left) and _is_balanced(right)):
    return False
  choices = _choice(left), _choice(right)
  if all(choices) and any(_CHOICE.fullmatch(t) for t in (left, right)):
    return choices[0] == choices[1]
  return _same(left, right, verify)


# ---- Typesetting.

_THOUSANDS = re.compile(r"[-+]?[0-9]{1,3}(?:,[0-9]{3})+(?:\.[0-9]+)?")
# Typesetting that does not change the meaning.
_TYPESETTING = re.compile(
    r"\\(?:left|right|displaystyle)(?![A-Za-z])|\\[bB]igg?[lr]?(?![A-Za-z])"
    r"|\\[!,;:()\[\]]|\\?\$|\^\\circ(?![A-Za-z])|\^\{\\circ\}|\\?%"
)
_SEPARATOR = re.compile(r",\s{0,9}\\!\s{0,9}")
_FRACTION = re.compile(r"\\[dt]frac(?![A-Za-z])")
_TEXT = re.compile(r"\\(?:text|textbf|textit|mathrm|mbox)\s*\{([^{}]*)\}")
# A space between two digits separates numbers.
_SPACE = re.compile(r"(?<![0-9])\s+|\s+(?![0-9])")


def normalized(answer: str) -> str:
  r"""Returns an answer without typesetting.

  Removes spaces, dollar, percent and degree signs, \left and \right, a final
  full stop and thousands separators; \text{a} becomes a, \dfrac \frac.
  """
  if len(answer) > MAX_CHARS:
    return " ".join(answer.split())
  plain = _plain(answer)
  # "100, 200" are two numbers.
  is_number = _THOUSANDS.fullmatch(plain.removesuffix("."))
  return _joined(plain.replace(",", "") if is_number else plain)


def _plain(answer: str) -> str:
  """Removes typesetting except spaces."""
  plain = _TYPESETTING.sub("", _SEPARATOR.sub(",", answer))
  return _TEXT.sub(r"\1", _FRACTION.sub(r"\\frac", plain)).strip()


def _joined(plain: str) -> str:
  """Removes spaces and a final full stop."""
  return _SPACE.sub("", plain).strip().removesuffix(".")


_SYMBOLS = {
    "∞": r"\infty ",
    "≤": "<=",
    "≥": ">=",
    "⩽": "<=",
    "⩾": ">=",
    "≠": r"\ne ",
    "×": r"\times ",
    "·": r"\cdot ",
    "⋅": r"\cdot ",
    "∙": r"\cdot ",
    "÷": "/",
    "±": r"\pm ",
    "∓": r"\mp ",
    "∪": r"\cup ",
    "∩": r"\cap ",
    "∅": r"\emptyset ",
    "∈": r"\in ",
    "∠": r"\angle ",
    "°": r"^\circ ",
    "º": r"^\circ ",
    "−": "-",
    "–": "-",
    "—": "-",
    "′": "'",
    "’": "'",
    "⟨": r"\langle ",
    "⟩": r"\rangle ",
}
_TO_RAISE = "⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻⁽⁾ⁿⁱ"
_TO_LOWER = "₀₁₂₃₄₅₆₇₈₉₊₋₍₎ₐₑₒₓₙₖ"
_ROOT = re.compile(
    r"([√∛])\s*(?:([0-9]++(?:\.[0-9]++)?|[^\W\d_])|\(([^()]*)\)|\{([^{}]*)\})"
)
_STYLES = (
    "text(?:bf|it|rm|sf|tt|normal)?|math(?:rm|bf|it|sf|tt)|mbox|operatorname"
)
# Applied in this order.
_REWRITES = tuple(
    (re.compile(pattern), plain)
    for pattern, plain in (
        # A single dollar does not delimit a formula.
        (r"^(\s*-?\s*)\$(?=\s*[0-9.][^$]*$)", r"\1\\$"),
        (
            r"\\(?:left|right|displaystyle|textstyle|limits)(?![A-Za-z])"
            r"|\\[bB]igg?[lr]?(?![A-Za-z])|\\!|(?<!\\)\$|\\[()\[\]]",
            "",
        ),
        (r"\{,\}", ","),
        (r"\\[,;: ]|~|\\(?:q?quad|thinspace)(?![A-Za-z])", " "),
        (rf"\\(?:{_STYLES})\s*\{{([^{{}}]*)\}}", r"\\text{\1}"),
        (r"\\text\{([^{}A-Za-z]*)\}", r"\1"),
        (r"\\([$%])", r"\1"),
        (r"\\[dtc]frac(?![A-Za-z])", r"\\frac"),
        # Names in plain text.
        (r"(?<![\\A-Za-z])(sqrt|pi|sin|cos|tan|ln|log)(?![A-Za-z])", r"\\\1"),
        (r"(?<![\\A-Za-z])inf(?:inity)?(?![A-Za-z])", r"\\infty"),
        (r"\\frac\s*([0-9])\s*([0-9])", r"\\frac{\1}{\2}"),
        (r"\\frac\s*([0-9A-Za-z])\s*\{", r"\\frac{\1}{"),
        (r"(\\frac\s*\{[^{}]*\})\s*([0-9A-Za-z])", r"\1{\2}"),
        (r"\\sqrt\s*([0-9]++|[A-Za-z])", r"\\sqrt{\1}"),
        (r"\\sqrt\s*\(([^()]*)\)", r"\\sqrt{\1}"),
        (r"\^\s*\{?\s*\\circ(?![A-Za-z])\s*\}?|\\degree(?![A-Za-z])", "°"),
        (r"\\(?:leq?|leqslant)(?![A-Za-z])|=<", "<="),
        (r"\\(?:geq?|geqslant)(?![A-Za-z])|=>", ">="),
        (r"\\lt(?![A-Za-z])", "<"),
        (r"\\gt(?![A-Za-z])", ">"),
        (r"\\neq?(?![A-Za-z])", r"\\ne "),
        (r"\\l(?:brace|vert)(?![A-Za-z])", r"\\{"),
        (r"\\rbrace(?![A-Za-z])", r"\\}"),
        (r"\\langle(?![A-Za-z])", "("),
        (r"\\rangle(?![A-Za-z])", ")"),
        (r"\\varnothing(?![A-Za-z])", r"\\emptyset"),
        (r"\s+", " "),
    )
)


def _cleaned(answer: str) -> str:
  """Returns an answer, in LaTeX or Unicode, in a canonical LaTeX spelling."""

  def scripts(text: str, characters: str, mark: str) -> str:
    return re.sub(
        f"[{characters}]+",
        lambda m: f"{mark}{{{unicodedata.normalize('NFKC', m[0])}}}",
        text,
    )

  text = answers.with_plain_digits(answer)
  text = scripts(scripts(text, _TO_RAISE, "^"), _TO_LOWER, "_")
  text = _ROOT.sub(
      lambda m: ("\\sqrt{" if m[1] == "√" else "\\sqrt[3]{")
      + (m[2] or m[3] or m[4] or "")
      + "}",
      text,
  )
  text = "".join(map(_in_latex, text)) if not text.isascii() else text
  for pattern, plain in _REWRITES:
    text = pattern.sub(plain, text)
  return text.strip().removesuffix(".").strip()


def _in_latex(character: str) -> str:
  if character.isascii():
    return character
  if character in _SYMBOLS:
    return _SYMBOLS[character]
  name = unicodedata.name(character, "").split()
  if name[:1] == ["GREEK"] and name[2:3] == ["LETTER"] and len(name) == 4:
    word = name[3].lower()
    return f"\\{word if name[1] == 'SMALL' else word.title()} "
  plain = unicodedata.normalize("NFKC", character)
  if "⁄" in plain:
    above, below = plain.split("⁄")
    return f"\\frac{{{above}}}{{{below}}}"
  return plain


def _is_balanced(text: str) -> bool:
  depth = 0
  for brace in re.finditer(r"\\.|[{}]", text, re.S):
    depth += {"{": 1, "}": -1}.get(brace[0], 0)
    if depth < 0:
      return False
  return depth == 0


# ---- Structure.

_CHOICE = re.compile(r"\(?(?:\\text\{\s*)?\(?([A-J])\)?\s*\}?\)?\.?")
_CHOSEN = re.compile(r"(?:\\text\{\s*)?(?:\(([A-J])\)|([A-J])[.):](?=[\s}]))")
# What may be left of "=" or "\in" as the name of the answer.
_NAME = (
    r"(?:\\text\{[^{}]*\}|\([A-Za-z](?:, ?[A-Za-z])+\)"
    r"|(?:m ?)?\\angle ?[A-Z]{1,3}|\\overline\{[A-Z]{2}\}"
    r"|\\?[A-Za-z]+(?:_\{?\w{1,9}\}?)?(?:\^\{-1\})?'*"
    r"(?: ?\([A-Za-z](?:, ?[A-Za-z])*\))?)"
)
_MEMBER = re.compile(rf"{_NAME} ?\\in(?![A-Za-z]) ?")
_SEPARATED = re.compile(
    r"(?P<open>\\\{|[\[({]|\\begin\{[a-z]*\})"
    r"|(?P<close>\\\}|[\])}]|\\end\{[a-z]*\})"
    r"|(?P<cup>\\cup(?![A-Za-z]))"
    r"|(?P<comma>[,;]|(?<![A-Za-z\\])(?:or|and)(?![A-Za-z]))"
    r"|(?P<equal>(?<![<>=:])=(?![<>=]))"
    r"|(?P<relation>[<>]=?)|\\[A-Za-z]+|\\."
)
_OR = re.compile(r",?\s*\\text\{\s*(or|and)\s*\}")
_DIGIT_COMMA = re.compile(r"(?<![0-9.,])[0-9]{1,3}(?:,[0-9]{3})+(?![0-9,])")
# Lists and quantities that are entirely in \text{}.
_WHOLE_TEXT = re.compile(r"\\text\{\s*([^{}]*[,;][^{}]*|[-+]?[0-9][^{}]*)\}")
# Lists of values are unordered, tuples and intervals are ordered.
_UNORDERED = ("list", "set", "union")


def _choice(text: str) -> str:
  """Returns the letter of a multiple-choice answer, else ""."""
  match = _CHOICE.fullmatch(text) or _CHOSEN.match(text)
  return next(filter(None, match.groups()), "") if match else ""


def _split(text: str, kind: str) -> list[str]:
  """Splits a text at separators of a kind that are outside all brackets."""
  parts, depth, start = [], 0, 0
  for mark in _SEPARATED.finditer(text):
    depth += (mark["open"] is not None) - (mark["close"] is not None)
    if depth == 0 and mark[kind]:
      parts.append(text[start : mark.start()].strip())
      if kind == "relation":
        parts.append(mark[0])
      start = mark.end()
  return [*parts, text[start:].strip()]


def _brackets(text: str) -> tuple[str, str] | None:
  """Returns the brackets around a text and their contents; None without."""
  depth = 0
  for mark in _SEPARATED.finditer(text):
    depth += (mark["open"] is not None) - (mark["close"] is not None)
    if depth == 0:
      first = re.match(r"\\?\{|[\[(]", text)
      if first and mark["close"] and mark.end() == len(text):
        inside = text[first.end() : mark.start()].strip()
        return first[0][-1] + mark[0][-1], inside
      return None
  return None


def _parts(text: str) -> tuple[str, list[str]]:
  """Returns the kind and parts of an answer; ("", [text]) if it has no parts.

  Kinds are the keys of `_UNORDERED`, and the brackets of tuples and intervals.
  """
  text = _MEMBER.sub("", text, count=1) if _MEMBER.match(text) else text
  text = _DIGIT_COMMA.sub(lambda m: m[0].replace(",", ""), text)
  whole = _WHOLE_TEXT.fullmatch(text)
  text = _OR.sub(r" \1 ", whole[1] if whole else text)
  if len(parts := _split(text, "cup")) > 1:
    return "union", parts
  if len(parts := [p for p in _split(text, "comma") if p]) > 1:
    bounds = [_bounds(part) for part in parts]
    if all(bounds):
      if len(bounds) == 2 and " and " in text:
        return _both(*bounds)
      return "union", [_in_brackets(*b) for b in bounds]
    return "list", parts
  if bound := _bounds(text):
    return bound
  around = _brackets(text)
  if around and around[0] == "{}":
    return "set", [p for p in _split(around[1], "comma") if p]
  if around and len(parts := _split(around[1], "comma")) > 1:
    return around[0], parts
  if around and around[0] == "()":
    return _parts(around[1])
  if r"\pm" in text:
    plus = text.replace(r"\pm", "+").replace(r"\mp", "-")
    minus = text.replace(r"\pm", "-").replace(r"\mp", "+")
    return "list", [plus.removeprefix("+").strip(), minus]
  return "", [text]


def _in_brackets(kind: str, bounds: Sequence[str]) -> str:
  return f"{kind[0]}{','.join(bounds)}{kind[1]}"


def _bounds(text: str) -> tuple[str, list[str]] | None:
  """Returns the interval of 2 < x, x >= 3 or 2 <= x < 5; None otherwise."""
  parts = _split(text, "relation")
  is_name = [re.fullmatch(_NAME, part) is not None for part in parts[::2]]
  if len(parts) == 3 and sum(is_name) == 1:
    left, sign, right = parts
    if is_name[1]:
      left, right = right, left
      sign = sign.translate({60: 62, 62: 60})
    closed = len(sign) == 2
    if sign[0] == "<":
      return "(" + ")]"[closed], [r"-\infty", right]
    return "(["[closed] + ")", [right, r"\infty"]
  if len(parts) == 5 and is_name == [False, True, False]:
    low, sign, _, other, high = parts
    if sign[0] != other[0]:
      return None
    if sign[0] == ">":
      low, sign, other, high = high, other, sign, low
    return "(["[len(sign) == 2] + ")]"[len(other) == 2], [low, high]
  return None


def _both(
    first: tuple[str, list[str]], second: tuple[str, list[str]]
) -> tuple[str, list[str]]:
  """Returns the intersection of a lower and an upper bound."""
  if first[1][1] == r"\infty":
    first, second = second, first
  (left, (low, high)), (right, (lower, upper)) = first, second
  if low == r"-\infty" and upper == r"\infty":
    return right[0] + left[1], [lower, high]
  return "union", [_in_brackets(*first), _in_brackets(*second)]


def _same(left: str, right: str, verify: Verify) -> bool:
  """Compares two answers in canonical spelling by their structure."""
  (kind, parts), (other, other_parts) = _parts(left), _parts(right)
  if bool(kind) != bool(other):  # (x, y) = (1, 2) and (1, 2)
    (kind, parts), (other, other_parts) = (
        _parts(_unnamed(text)) for text in (left, right)
    )
  if kind == "set" and not other or other == "set" and not kind:
    kind = other = "list"
  if not kind and not other:
    return _same_value(parts[0], other_parts[0], verify)
  if {kind, other} == {"list", "set"}:
    kind = other
  if kind != other or len(parts) != len(other_parts):
    return False
  if kind not in _UNORDERED:
    return all(_same(a, b, verify) for a, b in zip(parts, other_parts))
  if len(parts) > _MAX_ITEMS:
    return False
  for part in parts:
    same = next((o for o in other_parts if _same(part, o, verify)), None)
    if same is None:
      return False
    other_parts.remove(same)
  return True


def _unnamed(text: str) -> str:
  """Returns the right side of `name = value`, other texts unchanged."""
  sides = _split(text, "equal")
  is_named = len(sides) == 2 and re.fullmatch(_NAME, sides[0])
  return sides[1] if is_named else text


# ---- Values.

# Digits in a base: 204_5, 1A_{16}.
_IN_BASE = re.compile(
    r"(-?[0-9][0-9A-F]*)(?: ?_ ?\{? ?(?:\\text\{)?(\w+)\}?\}?"
    r"| ?(?:\\text\{)? ?\(?base ([0-9]+)\)?\}?)"
)
_TIME = re.compile(
    r"([0-9]{1,2})(?::([0-5][0-9]))? ?(?:\\text\{)? ?"
    r"([ap])?\.? ?(?(3)m\.?) ?\}?",
    re.I,
)
_RATIO = re.compile(r"([0-9]{1,9}) ?: ?([1-9][0-9]{0,8})")
_WORDS = re.compile(r"\\text\{[^{}]*[A-Za-z][^{}]*\}")


def _letters(text: str) -> str:
  return re.sub(r"\\text|[{}\s]", "", text).casefold()


def _same_value(left: str, right: str, verify: Verify) -> bool:
  """Compares two answers that are not lists."""
  if _joined(left) == _joined(right):
    return True
  if not left or not right:
    return False
  sides = _split(left, "equal"), _split(right, "equal")
  if max(map(len, sides)) > 1:
    return _same_equation(*sides, verify)
  bases = _IN_BASE.fullmatch(left), _IN_BASE.fullmatch(right)
  if any(bases):
    spelled = [m and (m[1], m[2] or m[3]) for m in bases]
    return spelled[0] == spelled[1]
  times = _TIME.fullmatch(left), _TIME.fullmatch(right)
  if all(times) and any(t[2] or t[3] for t in times):
    return _same_time(*times)
  if ":" in left + right:
    ratios = [_RATIO.sub(r"\1/\2", text) for text in (left, right)]
    if any(":" in text for text in ratios):
      return False
    left, right = ratios
  (left, unit), (right, other_unit) = _quantity(left), _quantity(right)
  factor = _factor(unit, other_unit)
  if factor is None:
    return False
  if _WORDS.search(left + right):
    return _letters(left) == _letters(right)
  number, second = _number(left), _number(right)
  if number is not None and second is not None:
    return _same_number(number, second, factor)
  return factor == 1 and verify(left, right)


def _same_equation(left: list[str], right: list[str], verify: Verify) -> bool:
  """Compares equations side by side, or a value with x = value."""
  if len(left) > 1 and len(right) > 1:
    names = [re.fullmatch(_NAME, sides[0]) for sides in (left, right)]
    if all(names) and _joined(left[0]) == _joined(right[0]):
      return _same(left[-1], right[-1], verify)
    return verify("=".join(left), "=".join(right))
  if len(left) > 1:
    left, right = right, left
  if re.fullmatch(_NAME, right[-1]) and not re.fullmatch(_NAME, right[0]):
    right = right[::-1]
  name, *values = right
  # A name, or a true equation, such as 2+3=5.
  if not re.fullmatch(_NAME, name):
    values.insert(0, name)
  if not all(_same(values[-1], value, verify) for value in values[:-1]):
    return False
  return _same(left[0], values[-1], verify)


def _same_time(left: re.Match, right: re.Match) -> bool:
  def minutes(match: re.Match) -> int:
    return int(match[1]) % 12 * 60 + int(match[2] or 0)

  halves = {
      "p" if int(m[1]) > 12 else m[3].lower()
      for m in (left, right)
      if m[3] or int(m[1]) > 12
  }
  return len(halves) < 2 and minutes(left) == minutes(right)


# Name of a unit -> what it measures, and its size in the first unit of the
# kind.
_UNITS: dict[str, tuple[str, fractions.Fraction]] = {}
for _measure, _names in {
    "length": "m meter metre 1|mm millimeter millimetre 1/1000"
    "|cm centimeter centimetre 1/100|km kilometer kilometre 1000"
    "|in inch inche 127/5000|ft foot feet 381/1250|yd yard 1143/1250"
    "|mi mile 201168/125",
    "mass": "kg kilogram kilo 1|g gram 1/1000|mg milligram 1/1000000"
    "|lb pound 45359237/100000000|oz ounce 45359237/1600000000",
    "time": "s sec second 1|min minute 60|h hr hour 3600|day 86400"
    "|week wk 604800|ms millisecond 1/1000",
    "months": "month 1|year yr 12",
    "volume": "l liter litre 1|ml milliliter millilitre 1/1000",
    "money": "$ dollar usd buck 1|cent ¢ 1/100",
    "euros": "€ euro eur 1",
    "pounds": "£ gbp 1",
    "angle": "° degree deg 1",
    "celsius": "°c 1",
    "fahrenheit": "°f 1",
    "radians": "rad radian 1",
}.items():
  for _some in _names.split("|"):
    *_each, _size = _some.split()
    for _name in _each:
      _UNITS[_name] = _measure, fractions.Fraction(_size)
_POWERS = {
    "square": 2,
    "sq": 2,
    "squared": 2,
    "cubic": 3,
    "cu": 3,
    "cubed": 3,
}
_SHORT = {"mph": "mile/hour", "kph": "km/hour", "kmh": "km/hour"}
_CURRENCY = re.compile(r"(-?) ?(\$|\\text\{ ?(?:USD|EUR|GBP) ?\}|€|£) ?")
_QUANTITY = re.compile(
    r"(?P<value>.*?[0-9A-Za-z)}!]) ?"
    r"(?:(?P<degrees>° ?(?:(?:\\text\{)? ?[CF] ?\}?)?)"
    r"|\\text\{(?P<text>[^{}]*)\}(?P<second> ?/ ?\\text\{[^{}]*\})?"
    r"(?:\^\{?(?P<power>[23])\}?)?"
    r"|(?P<plain>(?:(?<=[0-9}!]) ?)(?:[A-Za-z][A-Za-z./ ]*|[$€£¢])"
    r"(?:\^\{?[23]\}?)?))"
)
# What a unit measures, its power and its size; None if unknown.
_Unit = tuple[str, int, fractions.Fraction] | None


def _quantity(text: str) -> tuple[str, _Unit]:
  """Returns the value and unit of a quantity; other texts, and None."""
  if money := _CURRENCY.match(text):
    return money[1] + text[money.end() :], _unit(money[2])
  match = _QUANTITY.fullmatch(text)
  if not match or not re.search(r"[0-9]|\\pi", match["value"]):
    return text, None
  if match["degrees"]:
    letter = re.sub(r"\\text|[^CF]", "", match["degrees"])
    return match["value"], _unit("°" + letter)
  if match["plain"]:
    name = match["plain"].strip()
    known = _unit(name)
    # 5x and 2i are formulas; 5 m is a quantity only with the space.
    is_spaced = match["plain"][:1] == " " or len(name) > 1
    if known is None and not re.search("[A-Za-z]{3}", name):
      return text, None
    if not is_spaced and name not in "$€£¢":
      return text, None
    return match["value"], known
  text = match["text"] + (match["second"] or "")
  unit = _unit(re.sub(r"\\text|[{}]", "", text))
  if unit and match["power"]:
    unit = unit[0], int(match["power"]), unit[2]
  return match["value"], unit


def _unit(name: str) -> _Unit:
  """Returns the unit with a name, or None if it is unknown."""
  power = re.search(r"\^\{?([23])\}?$", name)
  name = name[: power.start()] if power else name
  name = re.sub(r"\\text|[{}.]", "", name).strip().lower()
  name = re.sub(r"\s*/\s*|\s+(?:per|an?)\s+", "/", _SHORT.get(name, name))
  over = []
  for part in name.split("/"):
    words = part.split()
    powers = [_POWERS[w] for w in words if w in _POWERS]
    named = (w if w in _UNITS else w.removesuffix("s") for w in words)
    known = next((_UNITS[w] for w in named if w in _UNITS), None)
    if known is None:
      return None
    over.append((known[0], powers[0] if powers else 1, known[1]))
  if power:
    over[0] = over[0][0], int(power[1]), over[0][2]
  if len(over) == 1:
    return over[0]
  size = over[0][2] ** over[0][1]
  for _, exponent, part_size in over[1:]:
    size /= part_size**exponent
  return "/".join(f"{what}{exponent}" for what, exponent, _ in over), 1, size


def _factor(left: _Unit, right: _Unit) -> fractions.Fraction | None:
  """Returns the size of `left` in units of `right`; None if kinds differ."""
  if left is None or right is None:
    return fractions.Fraction(1)
  if left[:2] != right[:2]:
    return None
  return (left[2] / right[2]) ** left[1]


_DECIMAL = r"(?:[0-9]++(?:\.[0-9]*+)?|\.[0-9]++)"
_NUMBER = re.compile(
    r"(?P<sign>[-+]?)(?:"
    r"(?P<repeating>[0-9]*\.[0-9]*)\\(?:over(?:line|bar)|bar)\{(?P<again>[0-9]+)\}"
    rf"|(?P<plain>{_DECIMAL})(?:[eE](?P<e>[-+]?[0-9]+))?"
    rf"|(?P<factor>{_DECIMAL}) ?(?:\\times|\\cdot|\*|x) ?10\^"
    r"(?:\{ ?(?P<power>[-+]?[0-9]+) ?\}|(?P<digit>[0-9]))"
    r"|10\^(?:\{ ?(?P<ten>[-+]?[0-9]+) ?\}|(?P<one>[0-9]))"
    rf"|(?:(?P<whole>[0-9]+) ?)?\\frac ?\{{ ?(?P<above>-?{_DECIMAL}) ?\}} ?"
    rf"\{{ ?(?P<below>-?{_DECIMAL}) ?\}}"
    rf"|(?:(?P<units>[0-9]+) )?(?P<top>{_DECIMAL}) ?/ ?(?P<bottom>{_DECIMAL})"
    r") ?(?P<percent>%?)"
)
_DIGIT_GROUPS = re.compile(r"[-+]?[0-9]{1,3}(?: [0-9]{3})+(?:\.[0-9]+)?%?")
# Minimum digits of a decimal that stands for a fraction, such as
# 0.0833333333333333 for 1/12.
_MIN_DIGITS = 8
# Value; unit in the last place if it is such a decimal, else 0; whether a
# percent.
_Number = tuple[fractions.Fraction, fractions.Fraction, bool]


def _number(text: str) -> _Number | None:
  """Returns the number that a text spells out; None for a formula."""
  text = text.strip("{} ") if text.startswith("{") else text
  text = text.replace(" ", "") if _DIGIT_GROUPS.fullmatch(text) else text
  text = re.sub(r"^([-+]) ", r"\1", text)
  match = _NUMBER.fullmatch(text)
  if match is None:
    return None
  powers = [match[name] for name in ("e", "power", "digit", "ten", "one")]
  power = int(next(filter(None, powers), 0))
  if abs(power) > _MAX_EXPONENT:
    return None
  digits = match["plain"] or match["factor"] or ""
  decimals = len(digits.partition(".")[2])
  is_long = decimals and len(digits.replace(".", "").lstrip("0")) >= _MIN_DIGITS
  try:
    if match["again"]:
      head, again = match["repeating"], match["again"]
      value = fractions.Fraction(f"0{head}0") + fractions.Fraction(
          int(again), (10 ** len(again) - 1) * 10 ** len(head.partition(".")[2])
      )
    elif match["below"] or match["bottom"]:
      value = fractions.Fraction(match["above"] or match["top"])
      value /= fractions.Fraction(match["below"] or match["bottom"])
      value += int(match["whole"] or match["units"] or 0)
    else:
      value = fractions.Fraction(digits or 1) * fractions.Fraction(10) ** power
  except ZeroDivisionError:
    return None
  value = -value if match["sign"] == "-" else value
  place = fractions.Fraction(10) ** (power - decimals) if is_long else 0
  return value, fractions.Fraction(place), bool(match["percent"])


def _same_number(
    left: _Number, right: _Number, factor: fractions.Fraction
) -> bool:
  (a, place, percent), (b, other, per_cent) = left, right
  a *= factor
  near = max(place * factor, other)
  # 50% is 0.5, but also 50 if the question asks for a percentage.
  scales = (1, 100) if percent != per_cent else (1,)
  for scale in scales:
    x, y = (a / scale, b) if percent else (a, b / scale)
    if x == y or abs(x - y) < near:
      return True
  return False


# ---- Formulas.


# Many completions of a prompt have the same answer.
@functools.lru_cache(maxsize=4096)
def _verify(reference: str, answer: str) -> bool:
  # Imports sympy, which takes half a second.
  import math_verify  # pylint: disable=g-import-not-at-top
  import sympy  # pylint: disable=g-import-not-at-top

  left, right = _parse(reference), _parse(answer)
  pair = [one[0] for one in (left, right) if one]
  if len(pair) == 2 and all(isinstance(x, sympy.Expr) for x in pair):
    is_equal = _equal_expressions(*pair)
    if is_equal is not None:
      return is_equal
  # The library's own timeout is an alarm, which cannot interrupt C code and
  # cannot be set in threads. The worker pool's deadline bounds the time
  # instead.
  return bool(math_verify.verify(left, right, timeout_seconds=None))


@functools.lru_cache(maxsize=1024)
def _parse(answer: str) -> list[Any]:
  """Returns the ways in which math-verify parses an answer, possibly []."""
  import math_verify  # pylint: disable=g-import-not-at-top

  # Silences the warning about the missing timeout.
  logging.getLogger("math_verify").setLevel(logging.ERROR)
  # LaTeX only: the parser of plain expressions calls Python's eval.
  config = math_verify.LatexExtractionConfig(boxed_match_priority=0)
  return math_verify.parse(
      f"\\boxed{{{answer.replace('°', '')}}}",
      [config],
      fallback_mode="no_fallback",
      parsing_timeout=None,
  )


def prepare() -> None:
  """Imports sympy."""
  _parse("0")


_POINTS = (1, 2, -1)  # x and √x² differ at the negative point.
_DIGITS = 50


def _equal_expressions(left: Any, right: Any) -> bool | None:
  """Compares expressions by their values at some points; None without values.

  Reason: `math-verify` rounds to some decimals, so that all small numbers would
  be equal.
  """
  import sympy  # pylint: disable=g-import-not-at-top

  symbols = sorted(left.free_symbols | right.free_symbols, key=str)
  near = 1e-8 if left.has(sympy.Float) or right.has(sympy.Float) else 1e-40
  compared = False
  for point in _POINTS if symbols else _POINTS[:1]:
    values = {
        s: sympy.I
        if str(s) == "i"
        else point
        * sympy.Rational(101 + zlib.crc32(f"{s}{point}".encode()) % 997, 499)
        for s in symbols
    }
    try:
      pair = [
          sympy.N(x.subs(values), _DIGITS, maxn=4 * _DIGITS)
          for x in (left, right)
      ]
      if not all(x.is_number and x.is_finite for x in pair):
        return None
      if point < 0 and not all(x.is_real for x in pair):
        continue
      a, b = pair
      compared = True
      if abs(a - b) > near * max(abs(a), abs(b)):
        return False
    except (TypeError, ValueError, ArithmeticError, RecursionError):
      return None
  return True if compared else None
