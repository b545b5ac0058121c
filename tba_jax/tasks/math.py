# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
r"""MATH: competition problems, rewarded for the answer in the last \boxed.

Hendrycks et al. 2021 (arXiv:2103.03874); tested on MATH-500, the 500 of its
test problems that Lightman et al. 2023 (arXiv:2305.20050) chose. The settings
are those of TBA' in Bartoldson et al. 2025 (arXiv:2503.18929): reward 1 where
the answer is right, else 0. Comparing may take for ever, so it needs
`reward.where="pool"`.
"""

from collections.abc import Iterable, Iterator, Mapping
import fractions
import functools
import logging
import re
import string
from typing import Any, ClassVar

import numpy as np

from tba_jax.tasks import base
from tba_jax.tasks import digits
from tba_jax.tasks import rows as rows_lib
from tba_jax.tasks import rows_task

# Reads and compares the boxed answers of solutions in LaTeX.
#
# An answer is right where its text is the reference's, but for how it is set,
# or
# where the library `math-verify` finds both equal: 1/2 and 0.5, x+1 and 1+x.
#
# Texts are a policy's, to be rewarded. All but `equal` take any string, never
# raise, and take time linear in its length. `equal` calls on sympy, which may
# take for ever: it belongs in a process that may be killed.


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


# Small problems in the format of MATH, written by code.
#
# They are no part of MATH and say nothing of a model's mathematics: two steps
# of
# mental arithmetic, or the sum of two fractions whose answer is in lowest terms
# while the solution's is not, so that comparing has something to do.
#
# {"problem": "Let $x=4$. What is $(x+5)-3$?", "answer": "6",
# "solution": "$4+5=9$, $9-3=6$, so \\boxed{6}."}
# {"problem": "What is $\\frac{1}{8}+\\frac{3}{8}$?",
# "answer": "\\frac{1}{2}",
# "solution": "$1+3=4$, so \\boxed{\\frac{4}{8}}."}
#
# Half of the solutions are the box alone, as in `made_up.py`.


_FRACTION_SHARE = 0.1
_MAX_DENOMINATOR = 20
_HELD_OUT_SHARE = 0.2


def made_up_splits(
    num_prompts: int, seed: int
) -> dict[str, list[rows_lib.Row]]:
  """Returns rows of the train and held-out split, no problem twice.

  Args:
    num_prompts: over both splits.
    seed: of the problems.
  """
  cut = round(num_prompts * _HELD_OUT_SHARE)
  rows = list(_problems(num_prompts, seed))
  return {base.TRAIN: rows[cut:], base.HELD_OUT: rows[:cut]}


def _problems(num_prompts: int, seed: int) -> Iterator[rows_lib.Row]:
  rng = np.random.default_rng([seed, 0x3A7])
  seen: set[str] = set()
  while len(seen) < num_prompts:
    make = _fractions if rng.random() < _FRACTION_SHARE else _integers
    made = make(rng)
    if made is not None and made["problem"] not in seen:
      seen.add(made["problem"])
      yield rows_lib.Row(f"made up:{len(seen)}", made)


def _integers(rng: np.random.Generator) -> dict[str, str] | None:
  """Returns a row; None where a value would become too large or too small."""
  steps = digits.chain(rng)
  if steps is None:
    return None
  (first, one, second, _), (_, other, third, value) = steps
  name = rng.choice(list(string.ascii_lowercase))
  work = ", ".join(f"${v}{o}{n}={result}$" for v, o, n, result in steps)
  work = "" if rng.random() < digits.TERSE_SHARE else f"{work}, so "
  return {
      "problem": (
          f"Let ${name}={first}$. What is"
          f" $({name}{one}{second}){other}{third}$?"
      ),
      "solution": f"{work}\\boxed{{{value}}}.",
      "answer": str(value),
  }


def _fractions(rng: np.random.Generator) -> dict[str, str] | None:
  """Returns a row; None where the sum would not be below 1."""
  below = int(rng.integers(3, _MAX_DENOMINATOR))
  one, other = (int(n) for n in rng.integers(1, 9, size=2))
  if one + other >= min(below, 10):
    return None
  least = fractions.Fraction(one + other, below)
  return {
      "problem": f"What is ${_frac(one, below)}+{_frac(other, below)}$?",
      "solution": (
          f"${one}+{other}={one + other}$, so"
          f" \\boxed{{{_frac(one + other, below)}}}."
      ),
      "answer": _frac(least.numerator, least.denominator),
  }


def _frac(above: int, below: int) -> str:
  return f"\\frac{{{above}}}{{{below}}}"


MADE_UP = "made_up"
_ASK = "Please reason step by step, and put your final answer within \\boxed{}."
FORMATS = {
    # The chat template of Qwen2.5's base models, written out.
    "qwen": (
        "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
        f"<|im_start|>user\n{{problem}}\n{_ASK}<|im_end|>\n"
        "<|im_start|>assistant\n"
    ),
    "plain": f"Problem:\n{{problem}}\n{_ASK}\n\nSolution:\n",
    "bare": "{problem}\n",
}
OVERLAPS = ("error", "leave_out")


class Math(rows_task.RowsTask):
  r"""Problems with worked solutions whose answer is boxed.

  train, test: sources of the splits, as `tba_jax/tasks/rows.py` reads them, of
    rows with `problem` and `solution`; the answer is the field `answer`, or
    what the solution's last \boxed holds. "made_up" for both: small problems
    that code writes, for trials and tests without the data.
  made_up_prompts: how many of those, over both splits.
  prompt_format: "qwen" (a chat), "plain" or "bare", the problem alone.
  overlap: what to do with training problems that the test split has: "error",
    or "leave_out", which counts them.
  validation_prompts: training problems set apart to choose a checkpoint by.
  split_seed: of that choice, and of made-up problems.
  """

  name: ClassVar[str] = "math"
  FIELDS: ClassVar = {
      "train": "",
      "test": "",
      "made_up_prompts": 4000,
      "prompt_format": "qwen",
      "overlap": "error",
      "validation_prompts": 0,
      "split_seed": 0,
  }

  def __init__(
      self,
      *,
      train: str,
      test: str,
      made_up_prompts: int,
      prompt_format: str,
      overlap: str,
      validation_prompts: int,
      split_seed: int,
  ):
    """Reads the data.

    Raises:
      ValueError: a field is not allowed, the data is not there, a split is
        empty, or training and test problems overlap.
    """
    for field, value, allowed in (
        ("prompt_format", prompt_format, FORMATS),
        ("overlap", overlap, OVERLAPS),
    ):
      if value not in allowed:
        raise ValueError(
            f"config.task.{field}={value!r}: allowed {sorted(allowed)}"
        )
    base.check_integer("made_up_prompts", made_up_prompts, 100, 5000)
    base.check_integer("validation_prompts", validation_prompts, 0, 2**31)
    base.check_integer("split_seed", split_seed, 0, 2**63 - 1)
    self._format = FORMATS[prompt_format]
    report = rows_lib.Report()
    splits = rows_task.read_splits(
        _sources(train, test, made_up_prompts, split_seed), self._make, report
    )
    if overlap == "leave_out":
      rows_lib.leave_out_shared(
          splits, base.TRAIN, test=base.HELD_OUT, report=report
      )
    rows_task.cut_validation(splits, validation_prompts, split_seed)
    super().__init__(splits, report)

  def _make(self, fields: Mapping[str, Any]) -> tuple[str, str] | str:
    """Returns prompt and answer of a row, or what is wrong with it."""
    problem, solution = fields.get("problem"), fields.get("solution")
    if not isinstance(problem, str) or not problem.strip():
      return "no_prompt"
    if not isinstance(solution, str) or not solution.strip():
      return "no_answer"
    answer = fields.get("answer")
    if answer is None:
      answer = last_boxed(solution)
      if answer is None:
        return "no_box"
    if not isinstance(answer, str) or not normalized(answer):
      return "no_answer"
    return self._format.replace("{problem}", problem), answer

  def completion_of(self, example: rows_lib.Example) -> str:
    return example.fields["solution"]

  def judge(self, split: str, index: int, completion: str) -> base.Judgement:
    found = last_boxed(completion)
    reference = self.example(split, index).answer
    if found is None or not equal(reference, found):
      return base.Judgement(0.0, None)
    # White space is no other way to solve it.
    return base.Judgement(1.0, " ".join(completion.split()))

  def explain(self, split: str, index: int, completion: str) -> str:
    """Returns why it is wrong where the texts say so; nothing is worked out."""
    found = last_boxed(completion)
    if found is None:
      return "has no closed \\boxed{} with an answer in it"
    reference = self.example(split, index).answer
    if equal_as_texts(reference, found) is False:
      return f"boxes {found[: MAX_CHARS]}, not {reference}"
    return ""


def _sources(
    train: str, test: str, made_up_prompts: int, split_seed: int
) -> Mapping[str, Iterable[rows_lib.Row]]:
  """Returns the rows of both splits."""
  if MADE_UP in (train, test):
    if train != test:
      raise ValueError(
          f"config.task.train={train!r}, config.task.test={test!r}: allowed"
          f" {MADE_UP!r} for both, or for neither"
      )
    return made_up_splits(made_up_prompts, split_seed)
  sources = {}
  for split, field, source in (
      (base.TRAIN, "train", train),
      (base.HELD_OUT, "test", test),
  ):
    sources[split] = rows_lib.read_rows(f"config.task.{field}", source)
  return sources
