# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Arithmetic: sums such as `12+7=`, completed by `19`.

Learned in seconds, for tests and first runs. Digits and signs are tokens, so
that learning generalizes to unseen sums. Each sum has one correct completion;
`countdown` has several.
"""

from collections.abc import Callable, Mapping, Sequence
import operator
from typing import ClassVar

import numpy as np

from tba_jax.tasks import answers
from tba_jax.tasks import base

MAX_RESULT = 99
OPERATIONS: Mapping[str, Callable[[int, int], int]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
}


class Arithmetic(base.Task):
  """Sums, differences and products of two numbers.

  Operands range from 0 to `max_number`, results from 0 to 99. A sum and its
  swapped form are in the same split.

  operations: any of "+", "-" and "*", as one string.
  max_number: the largest operand.
  held_out_fraction: share of the sums held out from training.
  split_seed: seed of the split and of the order of prompts.
  """

  name: ClassVar[str] = "arithmetic"
  max_reward: ClassVar[float | None] = 1.0
  FIELDS: ClassVar = {
      "operations": "+-*",
      "max_number": 20,
      "held_out_fraction": 0.15,
      "split_seed": 0,
  }

  def __init__(
      self,
      *,
      operations: str,
      max_number: int,
      held_out_fraction: float,
      split_seed: int,
  ):
    if (
        not isinstance(operations, str)
        or not operations
        or len(set(operations)) != len(operations)
        or not set(operations) <= set(OPERATIONS)
    ):
      raise ValueError(
          f"config.task.operations={operations!r}: must be one or more of"
          f" {''.join(OPERATIONS)!r}, each once"
      )
    base.check_integer("max_number", max_number, 0, MAX_RESULT)
    base.check_fraction("held_out_fraction", held_out_fraction)
    sums = [
        (operation, a, b)
        for operation in operations
        for a in range(max_number + 1)
        for b in range(a + 1)
        if 0 <= OPERATIONS[operation](a, b) <= MAX_RESULT
    ]
    self._max_digits = len(str(max_number))
    rng = np.random.default_rng(split_seed)
    rng.shuffle(sums)
    num_held_out = round(held_out_fraction * len(sums))
    self._sums = {}
    for split, mine in (
        (base.TRAIN, sums[num_held_out:]),
        (base.HELD_OUT, sums[:num_held_out]),
    ):
      if not mine:
        raise ValueError(
            f"config.task.held_out_fraction={held_out_fraction} of"
            f" {len(sums)} sums leaves the split {split!r} without prompts"
        )
      swapped = [(o, b, a) for o, a, b in mine if o != "-" and a != b]
      prompts = mine + swapped
      rng.shuffle(prompts)
      self._sums[split] = prompts

  def num_prompts(self, split: str) -> int:
    base.check_split(split)
    return len(self._sums[split])

  def prompt(self, split: str, index: int) -> str:
    base.check_split(split)
    operation, a, b = self._sums[split][index]
    return f"{a}{operation}{b}="

  def solution_key(self, split: str, index: int, completion: str) -> str | None:
    answer = answers.after_thinking(completion)
    is_right = answers.parse_integer(answer) == self._result(split, index)
    return answer if is_right else None

  def explain(self, split: str, index: int, completion: str) -> str:
    number = answers.parse_integer(answers.after_thinking(completion))
    right = self._result(split, index)
    if number is None:
      return "is not a whole number from 0, such as 7 or 19"
    return "" if number == right else f"gives {number}, not {right}"

  def reference_completion(
      self, split: str, index: int, rng: np.random.Generator
  ) -> str:
    """Returns the result; `rng` is not used."""
    return str(self._result(split, index))

  def _result(self, split: str, index: int) -> int:
    base.check_split(split)
    operation, a, b = self._sums[split][index]
    return OPERATIONS[operation](a, b)

  def tokenizer_words(self) -> Sequence[str]:
    return [*"0123456789", *OPERATIONS, "="]

  @property
  def tokenizer_pattern(self) -> str:
    return "."

  @property
  def max_prompt_tokens(self) -> int:
    return 2 * self._max_digits + 2  # two numbers, the operation and "="

  @property
  def max_completion_tokens(self) -> int:
    return 3  # two digits and the stop token
