# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
r"""Parses the final number, or the \boxed answer, of a completion.

Completions are untrusted: every function here takes any string, never raises,
and runs in time linear in its length.
"""

import fractions
import math
import re
import unicodedata

_MAX_DIGITS = 9
_INTEGER = re.compile(r"0|[1-9][0-9]*")

# A sign that is not an operator, digits with or without decimals (also ".5"),
# and a short exponent.
_UNSIGNED = (
    r"(?:[0-9]++(?:\.[0-9]++)?|\.[0-9]++)(?:[eE][-+]?[0-9]{1,3}(?![0-9]))?"
)
_NUMBER = re.compile(rf"(?<![0-9A-Za-z.)])[-+]?{_UNSIGNED}|{_UNSIGNED}")
_MAX_NUMBER_CHARS = 40
_MAX_EXACT_DIGITS = 15  # Longer integers are not exact as floats.
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
  # Check the length first: int() takes quadratic time.
  if not isinstance(text, str) or len(text) > _MAX_DIGITS:
    return None
  return int(text) if _INTEGER.fullmatch(text) else None


_THINK = re.compile(r"<(/?)think(?:ing)?>", re.I)


def after_thinking(completion: str) -> str:
  """Returns a completion's answer: the text after its last `</think>`.

  The first `<think>` may be in the prompt. If a completion ends with its
  thoughts, its answer is the text before them; if its thoughts are not closed,
  its answer is "".
  """
  if not isinstance(completion, str):
    return completion
  tags = [*_THINK.finditer(completion)]
  if not tags:
    return completion
  if not tags[-1][1]:
    return ""
  after = completion[tags[-1].end() :]
  if after.strip() or tags[0][1]:
    return after
  return completion[: tags[0].start()]


def with_opening(prompt: str, completion: str) -> str:
  """Returns a completion with the `<think>` prepended that ends its prompt.

  A completion that closes its thoughts is returned unchanged: its answer is the
  same either way.
  """
  tags = [*_THINK.finditer(prompt.rstrip())]
  is_open = tags and not tags[-1][1] and tags[-1].end() == len(prompt.rstrip())
  if not is_open or any(tag[1] for tag in _THINK.finditer(completion)):
    return completion
  return tags[-1][0] + completion


# Digits of other scripts, and the separators of Arabic numbers.
_NOT_ASCII = re.compile(r"[^\x00-\x7f]")
_SEPARATORS = {"\u066b": ".", "\u066c": ",", "\u3002": "."}


def with_plain_digits(text: str) -> str:
  """Returns a text with ASCII digits: "１８", "١٨" and "१८" become "18"."""
  return _NOT_ASCII.sub(
      lambda m: _SEPARATORS.get(m[0]) or str(unicodedata.decimal(m[0], m[0])),
      text,
  )


def number_difference(answer: float | None, right: float | None) -> str:
  """Returns how a number differs from the correct one; "" if it does not."""
  if answer is None:
    return "no number found"
  if answer == right:
    return ""
  shown = (
      str(x) if isinstance(x, int) else f"{x:.12g}" for x in (answer, right)
  )
  return "read {}, wanted {}".format(*shown)


def without_calculator(text: str) -> str:
  """Removes calculator annotations such as `<<48/2=24>>` from a solution."""
  return _CALCULATOR.sub("", text)


def last_number(text: str) -> float | None:
  """Returns the last number of a text, or None.

  Commas between groups of three digits belong to the number; a sign after a
  digit, letter or bracket does not: "10-3" ends with 3, "1,080." with 1080.
  Returns None if the number is too long or too large for a float.
  `tba_last_number` treats commas and signs differently.
  """
  if not isinstance(text, str):
    return None
  last = None
  for last in _NUMBER.finditer(_THOUSANDS.sub("", text)):
    pass
  if last is None or len(last[0]) > _MAX_NUMBER_CHARS:
    return None
  return _number(last[0])


def _number(text: str) -> float | None:
  """Returns a number exactly: long integers are ints, all others floats."""
  digits = text.lstrip("+-")
  if digits.isdigit() and len(digits) > _MAX_EXACT_DIGITS:
    return int(text)
  value = float(text)
  return value if math.isfinite(value) else None


_TBA_NUMBER = re.compile(
    r"[+-]?\d++\.\d*|[+-]?\.\d+|[+-]?\d++e[-+]?\d+|[+-]?\d+"
)


def tba_last_number(text: str) -> float | None:
  """Returns the last number as TBA's GSM8K runs read it, or None.

  All commas are removed and a sign always belongs to the number: "10-3" ends
  with -3, "1,2" with 12. Too large a number is infinite.

  Source: `extract_prediction` in src/gsm8k_utils.py of bbartoldson/TBA, which
  compares in float32; we compare in float64.
  """
  if not isinstance(text, str):
    return None
  last = None
  for last in _TBA_NUMBER.finditer(text.replace(",", "")):
    pass
  return None if last is None else float(last[0])


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

  Without braces, they end at a dollar sign or the line end. Returns None if
  there is no box, or it is empty or never closed.
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
    (
        re.compile(r"[¼-¾⅐-⅞]"),
        lambda m: " " + unicodedata.normalize("NFKC", m[0]).replace("⁄", "/"),
    ),
    (re.compile(r"(?<=[0-9])['’_](?=[0-9]{3}(?![0-9]))"), ""),
    # 1,08,000 in India; 1.234,50 and 18,5 in Europe, but (3,5) is a pair.
    (
        re.compile(
            r"(?<![0-9.,])[0-9]{1,2}(?:,[0-9]{2}(?![0-9]))++,[0-9]{3}"
            r"(?![0-9]|,[0-9])"
        ),
        lambda m: m[0].replace(",", ""),
    ),
    (
        re.compile(
            r"(?<![0-9.,])[0-9]{1,3}(?:\.[0-9]{3})++,[0-9]{1,2}"
            r"(?![0-9]|[.,][0-9])"
        ),
        lambda m: m[0].replace(".", "").replace(",", "."),
    ),
    (
        re.compile(
            r"(?<![0-9.,(\[{])(?<![(\[{][-+])([0-9]++),([0-9]{1,2})"
            r"(?![0-9]|[.,][0-9])"
        ),
        r"\1.\2",
    ),
    (re.compile(r"(?<=[0-9]) and a half(?![a-z])", re.I), ".5"),
    (
        re.compile(
            r"\\(?:text(?:bf|it|rm|sf|tt)?|math(?:rm|bf|it|sf)|mbox)"
            r" ?\{([^{}]{0,200})\}"
        ),
        r" \1 ",
    ),
    (re.compile(r"\\pm(?![A-Za-z])"), "±"),
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
    # Hyphens before list items are not signs.
    (re.compile(r"\n[ \t]*-[ \t]+"), "\n"),
    (
        re.compile(r"(?<![A-Za-z])(?:minus|negative) {1,3}(?=[$.0-9])", re.I),
        "-",
    ),
)
# Full-width ASCII, as Chinese and Japanese keyboards write it.
_FULL_WIDTH = {code + 0xFEE0: code for code in range(0x21, 0x7F)}
# Beginnings of another text that a model continues with.
_RUN_ON = re.compile(
    r"</s>|<\|?(?:eos|im_end|eot_id|endoftext|end_of_text)\|?>"
    r"|(?<=\S)\s*?\n\s*?(?:Question|Problem|Q|Human|User)\s?:"
)
_ANSWER_IS = re.compile(
    r"(?:answer|antwort|réponse|respuesta|risposta|resposta)\s{0,3}"
    r"(?:(?:is|are|ist|lautet|est|es|è|é)(?![a-zà-ÿ])|[=:])|答案(?:是|为|為|:)",
    re.I,
)
_ANSWER_TAG = re.compile(
    r"<answer>((?:(?!</?answer>).)*+)</answer>", re.I | re.S
)
# What follows "answer is" if it corrects an answer that was marked earlier.
_DIRECTLY = re.compile(r"[\s:*$(]{0,9}[-+]?[$]?[.0-9]")
# Unevaluated expressions in a box, in addition to `_FORMULA`.
_LATEX_FORMULA = re.compile(
    r"\^\{|\\(?:sqrt|pi|theta)(?![a-zA-Z])|√|π"
    r"|[0-9](?:[abcijknpqrtuvwxyz]| [nxyz])(?![A-Za-z])"
)
_SENTENCE_END = re.compile(r"[.!?](?=\s|$)|\n")
_GROUPS = re.compile(r"(?<![0-9.,/])[0-9]{1,3}(?: [0-9]{3}(?![0-9/.]))++")
_DIGITS = r"(?:[0-9]++(?:\.[0-9]++)?|\.[0-9]++)"
_FORMULA = rf"{_DIGITS}(?:[ \t]?(?:\*\*|[-+*±^xX])[ \t]?\$?{_DIGITS})++"
# "18 = 9 * 2", a result stated before its calculation.
_REVERSED = re.compile(
    rf"(?<![0-9.])({_DIGITS})[ \t]?=[ \t]?{_FORMULA}(?=[ \t*$.)]*+(?:\n|$))"
)
_REFUSED = re.compile(
    r"(?:\b(?:and|but) )?\b(?:not|rather than|instead of)\s{1,3}"
    rf"(?:\*\*)?-?\$?{_DIGITS}(?:\*\*)?",
    re.I,
)
_ITEM = re.compile(r"^[ \t]*[\[(]?([0-9]{1,2})[\].)]{1,2}[ \t]+(?=\S)", re.M)
_SIGN = r"(?:(?<![0-9A-Za-z.)])[-+])?(?:\$\s?)?(?:(?<=\$)[-+])?"
# A sign followed by a space at the start of an answer.
_MINUS = re.compile(r"^([\s*$(]{0,9})-\s{1,3}(?=[$.0-9])")
# A result after its calculation: "20% of 50, which is 10".
_WORKED_OUT = re.compile(
    rf"[0-9](?:% of|[ \t]?(?:\*\*|[-+*^xX]))[ \t]?\$?{_DIGITS}"
    r"(?:,? (?:which|that) (?:is|equals|makes|gives)|, or)(?= [-$.0-9])"
)
# Several numbers, such as a pair, are not an answer.
_LIST = re.compile(
    rf"[\s*$(\[\\{{]*-?{_DIGITS}(?:\s*,\s*-?{_DIGITS})+[\s*$)\]\\}}.]*"
)
# Accounting notation: an amount in brackets by itself is negative.
_IN_BRACKETS = re.compile(rf"[\s*$]*\(\s*-?\$\s*{_DIGITS}\s*\)[\s*$.]*")
_SCALES = {
    "hundred": 1e2,
    "thousand": 1e3,
    "million": 1e6,
    "billion": 1e9,
    "trillion": 1e12,
}
_COARSE = (
    "(?:year|month|week|day|hour|hr|minute|min|foot|feet|yard|pound|dollar)s?"
)
_FINE = (
    "(?:month|week|day|hour|hr|minute|min|second|sec|inch|inche|ounce|cent)s?"
)
_VALUE = re.compile(
    # Not a quantity: a time or ratio, an ordinal, part of a name such as x3.
    r"(?P<other>(?<![0-9.])[0-9]{1,9}(?::[0-9]{1,9})++"
    rf"|{_DIGITS}(?:st|nd|rd|th)(?![A-Za-z])|(?<=[A-Za-z_]){_DIGITS})"
    # Unevaluated: 2^10, 9*2, 10 - 3, 2², √2; 2k, 5 dozen; 2 hours and 30
    # minutes.
    rf"|(?P<formula>(?:(?<![0-9A-Za-z.)])[-+])?(?:\$ ?)?"
    rf"(?:{_FORMULA}|{_DIGITS}[²³¹⁰⁴-⁹]|√ ?{_DIGITS}"
    rf"|{_DIGITS}(?:(?-i:[kKMB]|bn|mn)|[ \t]?dozens?)(?![A-Za-z])"
    rf"|{_DIGITS}[ \t]{_COARSE}(?:,? and|,)?[ \t]{_DIGITS}[ \t]{_FINE}))"
    rf"|(?P<sign>{_SIGN})"
    rf"(?:(?P<whole>[0-9]{{1,9}}) (?P<part>[0-9]{{1,9}}/[1-9][0-9]{{0,8}})"
    rf"|(?<!/)(?P<above>{_DIGITS})/(?P<below>-?{_DIGITS})"
    rf"|(?P<plain>{_UNSIGNED}))(?!/[0-9])"
    rf"(?:[ \t]?(?P<scale>{'|'.join(_SCALES)})(?![A-Za-z-]))?",
    re.I,
)
# Neither two alternatives nor two numbers together are an answer.
_EITHER = re.compile(
    r"[0-9%](?:[ \t]{1,3}[A-Za-z]{1,20})?[ \t*]{1,3}or[ \t*]{1,3}[-$]*[0-9]"
    r"|[0-9%][ \t*]{1,3}to[ \t*]{1,3}[-$]*[0-9]"
    r"|[0-9%](?:[ \t]{1,3}[A-Za-z]{1,20})?,?[ \t*]{1,3}and[ \t*]{1,3}"
    rf"[-$]*{_DIGITS}(?:[ \t]{{1,3}}[A-Za-z]{{1,20}})?[\s*$.)]*$"
)
# An aside, such as the sum "(9 eggs x $2)".
_ASIDE = re.compile(r"\([^()]{1,200}\)")
_REMARK = re.compile(
    r"\((?:see|step|steps|not|was|were|I|we|as|after|before|because|since)\b"
)
# A quantity repeated in other units: "12 eggs (1 dozen)".
_RESTATED = re.compile(
    rf"(?<![0-9.])({_DIGITS}(?: [A-Za-z]{{1,20}}){{1,2}}) "
    r"\((?:[a-z.]{1,15},? ){0,2}[~≈]?"
    rf"{_DIGITS}(?: [A-Za-z]{{1,20}}){{1,2}}\)"
)
_ONES = (
    "one two three four five six seven eight nine ten eleven twelve"
    " thirteen fourteen fifteen sixteen seventeen eighteen nineteen"
).split()
_TENS = "twenty thirty forty fifty sixty seventy eighty ninety".split()
_NUMERALS = {*_ONES, *_TENS, *_SCALES}


def final_answer(text: str) -> float | None:
  r"""Returns the number that a person would read as the answer, else None.

  In order of precedence: the number after the last `####`, in the last \boxed{}
  or between the last <answer> and </answer>, whichever comes later, unless a
  later "the answer is" is followed by another number; the number after the last
  "answer is" or "answer:"; the last number. Thoughts (see `after_thinking`) and
  text after an end token or a new "Question:" are ignored.

  Understands units, signs (-$5, ($5), −5), fractions (3/4, \frac{6}{2}, 2 1/2,
  ½), separators (11,050, 11{,}050, 1 234, 1,08,000, 1.234,50 and 18,5), scales
  (2 million), digits of all scripts, and numbers in words where they are the
  whole statement. Of an equation such as "5 + 3 = 8" or "20% of 50, which is
  10", the part after the last "=" or "which is" counts; of "8 = 5 + 3", the
  part before it. "Not 20 but 18" is 18, and "12 eggs (1 dozen)" is 12.

  Returns None if there is no single number: formulas (2^10, 9*2, \sqrt{2}, 5x
    in
  a box), lists (3, 5), "7 or 8", "2 hours and 30 minutes", and "5 dozen" or 2k,
  whose unit is ambiguous. Times, ordinals, names and the numbers of list items
  (15:03, 18th, x3) are skipped.
  """
  if not isinstance(text, str):
    return None
  text = with_plain_digits(after_thinking(text).translate(_FULL_WIDTH))
  for pattern, plain in _SPELLINGS:
    text = pattern.sub(plain, text)
  text = _RUN_ON.split(text, maxsplit=1)[0]
  text = _without_items(_REFUSED.sub("", text))
  statement = None
  for statement in _ANSWER_IS.finditer(text):
    pass
  after = text[statement.end() :] if statement else ""
  tag = None
  for tag in _ANSWER_TAG.finditer(text):
    pass
  tag_start = tag.start() if tag else -1
  marked = max(text.rfind(_HASHES), _last_box(text), tag_start)
  if marked >= 0 and not (
      statement and statement.start() > marked and _DIRECTLY.match(after)
  ):
    if marked == tag_start:
      return _stated(tag[1].strip())
    if not text.startswith(_HASHES, marked):
      box = last_boxed(text) or ""
      return None if _LATEX_FORMULA.search(box) else _stated(box)
    return _stated(text[marked + len(_HASHES) :].strip().partition("\n")[0])
  if statement is not None:
    sentence = _SENTENCE_END.split(after.lstrip(), maxsplit=1)[0]
    if re.search("[0-9]", sentence) or _in_words(sentence) is not None:
      return _stated(sentence)
  if _IN_BRACKETS.fullmatch(text) or _LIST.fullmatch(text):
    return _stated(text)
  text = _RESTATED.sub(r"\1", text)
  values = _values(_REVERSED.sub(r"\1", _without_asides(text)))
  return values[-1] if values else _in_words(text)


def _last_box(text: str) -> int:
  """Returns the start of the last box with contents, or -1."""
  start = -1
  if last_boxed(text) is not None:
    for box in _BOX.finditer(text):
      start = box.start()
  return start


def _stated(text: str) -> float | None:
  """Returns the number in a text that consists of the answer only."""
  text = _REVERSED.sub(r"\1", text)
  text = _WORKED_OUT.sub("=", text).rpartition("=")[2]
  text = _MINUS.sub(r"\1-", _THOUSANDS.sub("", text))
  values = _values(text)
  if not values:
    return _in_words(text)
  if _EITHER.search(text) or _LIST.fullmatch(text):
    return None
  return -abs(values[0]) if _IN_BRACKETS.fullmatch(text) else values[0]


def _without_items(text: str) -> str:
  """Removes the numbers of list items, which count from 1."""
  expected = {1}

  def keep(match: re.Match) -> str:
    number = int(match[1])
    if number not in expected:
      return match[0]
    expected.add(number + 1)
    return ""

  return _ITEM.sub(keep, text)


def _without_asides(text: str) -> str:
  """Removes sums and remarks in brackets after a number: "18 (9 x $2)"."""

  def keep(match: re.Match) -> str:
    is_aside = "=" not in match[0] and (
        len(_values(match[0])) > 1 or _REMARK.match(match[0])
    )
    return "" if is_aside else match[0]

  first = re.search("[0-9]", text)
  start = first.start() if first else len(text)
  return text[:start] + _ASIDE.sub(keep, text[start:])


def _in_words(text: str) -> float | None:
  """Returns a number in words, alone or with a unit: "twenty-five dollars"."""
  words = re.findall("[a-z]+", text.lower()) if len(text) < 100 else []
  if words[:1] == ["zero"]:
    return 0.0 if len(words) < 3 and not {*words[1:]} & _NUMERALS else None
  total = part = 0
  limit = math.inf  # The next scale must be smaller.
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
      # The last word may be a unit.
      is_unit = i and i == len(words) - 1 and word not in _NUMERALS
      return float(total + part) if is_unit else None
  return float(total + part) if words else None


def _values(text: str) -> list[float | None]:
  """Returns the numbers in a text; None for formulas and non-floats."""
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
    value = _number(match["plain"])
  if value is None:
    return None
  if match["scale"]:
    value *= _SCALES[match["scale"].lower()]
  if not math.isfinite(value):
    return None
  return -value if "-" in match["sign"] else value
