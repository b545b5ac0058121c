# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
r"""MATH: competition problems, rewarded for the answer in the last \boxed.

Hendrycks et al. 2021 (arXiv:2103.03874); tested on MATH-500, 500 of its test
problems chosen by Lightman et al. 2023 (arXiv:2305.20050). Settings of TBA' in
Bartoldson et al. 2025 (arXiv:2503.18929): reward 1 for a correct answer, else
0.

An answer is correct if its text equals the reference's up to typesetting, or if
the library `math-verify` finds them equal: 1/2 and 0.5, x+1 and 1+x. That calls
sympy, which may never return, so the task needs `reward.where="pool"`.
"""

from collections.abc import Mapping, Sequence
import fractions
import functools
import logging
import re
from typing import Any, ClassVar

from tba_jax.tasks import answers
from tba_jax.tasks import base
from tba_jax.tasks import made_up
from tba_jax.tasks import rows
from tba_jax.tasks import rows_task

MAX_CHARS = 400  # longer answers are compared as texts only

_NUMBER = re.compile(r"[-+]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)")
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
  """Removes typesetting but for spaces."""
  plain = _TYPESETTING.sub("", _SEPARATOR.sub(",", answer))
  return _TEXT.sub(r"\1", _FRACTION.sub(r"\\frac", plain)).strip()


def _joined(plain: str) -> str:
  """Removes spaces and a final full stop."""
  return _SPACE.sub("", plain).strip().removesuffix(".")


def equal(reference: str, answer: str) -> bool:
  """Returns whether an answer equals the reference, both without their box.

  Raises ImportError if it takes `math-verify` and that is not installed.
  """
  decided = equal_as_texts(reference, answer)
  return _verify(reference, answer) if decided is None else decided


def equal_as_texts(reference: str, answer: str) -> bool | None:
  """Compares as texts, in linear time; returns None if that is undecided."""
  left, right = normalized(reference), normalized(answer)
  if not left or not right or left == right:
    return left == right != ""
  if max(len(reference), len(answer)) > MAX_CHARS:
    return False
  if _joined(_plain(reference)) == _joined(_plain(answer)):
    return True
  plain = _NUMBER.fullmatch(left) and _NUMBER.fullmatch(right)
  if plain and "%" not in reference + answer:
    return fractions.Fraction(left) == fractions.Fraction(right)
  return None


# Many completions of a prompt give the same answer.
@functools.lru_cache(maxsize=4096)
def _verify(reference: str, answer: str) -> bool:
  # Imports sympy, which takes half a second.
  import math_verify  # pylint: disable=g-import-not-at-top

  # The library's own timeout is an alarm, which C code outlasts and threads
  # cannot set. The deadline of the worker pool bounds it instead.
  return bool(
      math_verify.verify(
          _parse(reference), _parse(answer), timeout_seconds=None
      )
  )


@functools.lru_cache(maxsize=1024)
def _parse(answer: str) -> list[Any]:
  """Returns math-verify's parses of an answer, [] if there are none."""
  import math_verify  # pylint: disable=g-import-not-at-top

  # Silences the warning that no timeout is set.
  logging.getLogger("math_verify").setLevel(logging.ERROR)
  # LaTeX only: the parser of plain expressions calls Python's eval.
  config = math_verify.LatexExtractionConfig(boxed_match_priority=0)
  return math_verify.parse(
      f"\\boxed{{{answer}}}",
      [config],
      fallback_mode="no_fallback",
      parsing_timeout=None,
  )


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


class Math(rows_task.RowsTask):
  r"""Problems with worked solutions that box their answer.

  train, test: sources of the splits, as in docs/your_task.md; rows have
    `problem` and `solution`; the answer is the field `answer`, or the contents
    of the solution's last \boxed. "made_up" for both: small generated problems.
  made_up_prompts: number of generated problems, over both splits.
  prompt_format: "qwen" (a chat), "plain" or "bare", the problem alone.
  validation_prompts: training problems held out to select checkpoints.
  split_seed: seed of that choice and of generated problems.
  """

  name: ClassVar[str] = "math"
  # Nothing else bounds the time of sympy.
  rewards_where: ClassVar[tuple[str, ...]] = ("pool",)
  packages: ClassVar[Mapping[str, str]] = {"math_verify": "math"}
  FIELDS: ClassVar = {
      "train": "",
      "test": "",
      "made_up_prompts": 4000,
      "prompt_format": "qwen",
      "overlap": "error",
      "validation_prompts": 0,
      "split_seed": 0,
  }

  def __init__(self, **fields: Any):
    """Reads the data; takes all of `FIELDS`."""
    base.check_choice("prompt_format", fields["prompt_format"], FORMATS)
    self._format = FORMATS[fields["prompt_format"]]
    train, test, seed = fields["train"], fields["test"], fields["split_seed"]
    base.check_integer("made_up_prompts", fields["made_up_prompts"], 100, 5000)
    if train == test == made_up.MADE_UP:
      sources = made_up.math_splits(fields["made_up_prompts"], seed)
    elif made_up.MADE_UP in (train, test):
      raise ValueError(
          f"config.task.train={train!r}, config.task.test={test!r}: allowed"
          f" {made_up.MADE_UP!r} for both, or for neither"
      )
    else:
      sources = {
          base.TRAIN: rows.Source("config.task.train", train),
          base.HELD_OUT: rows.Source("config.task.test", test),
      }
    super().__init__(
        sources,
        validation_prompts=fields["validation_prompts"],
        split_seed=seed,
        overlap=fields["overlap"],
    )

  def _used_fields(self) -> Mapping[str, Sequence[str]]:
    return {"": ("problem", "solution")}

  def _make(self, fields: Mapping[str, Any]) -> tuple[str, str] | str:
    problem = rows.text_of(fields, "problem")
    solution = rows.text_of(fields, "solution")
    if problem is None:
      return "no_prompt"
    if solution is None:
      return "no_answer"
    answer = fields.get("answer")
    if answer is None:
      answer = answers.last_boxed(solution)
      if answer is None:
        return "no_box"
    if isinstance(answer, (int, float)) and not isinstance(answer, bool):
      answer = str(answer)
    if not isinstance(answer, str) or not normalized(answer):
      return "no_answer"
    return self._format.replace("{problem}", problem), answer

  def completion_of(self, example: rows_task.Example) -> str:
    return example.fields["solution"]

  def prepare_judging(self) -> None:
    _parse("0")  # Imports sympy.

  def judge(self, split: str, index: int, completion: str) -> base.Judgement:
    answer = answers.last_boxed(completion)
    reference = self.example(split, index).answer
    is_right = answer is not None and equal(reference, answer)
    return base.judgement_of(float(is_right), is_right, completion)

  def explain(self, split: str, index: int, completion: str) -> str:
    """Returns why it is wrong, from the texts alone; never calls sympy."""
    answer = answers.last_boxed(completion)
    if answer is None:
      return "has no closed \\boxed{} with an answer in it"
    reference = self.example(split, index).answer
    if equal_as_texts(reference, answer) is False:
      return f"boxes {answer[:MAX_CHARS]}, not {reference}"
    return ""
