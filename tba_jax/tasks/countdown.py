# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Countdown: reach a target from given numbers; there are several ways.

The prompt `7,3,12,4>17` asks for 17 from 7, 3, 12 and 4; a correct completion
is a chain of steps that uses every number exactly once, for instance
`4*3=12,12+12=24,24-7=17`. A step replaces two of the remaining values by its
result. The larger operand comes first, results are in 1 … 99, and the last one
is the target. Sorted steps identify a solution: the order of independent steps
does not count.

All pairs of a multiset of numbers and a target are enumerated; pairs with at
least `min_solutions` distinct solutions are kept, so that diversity can be
measured. Every distinct order of the numbers is a prompt; all targets and
orders of a multiset are in the same split.
"""

from collections.abc import Sequence
import itertools
import math
import re
from typing import Any, ClassVar

import numpy as np

from tba_jax.tasks import answers
from tba_jax.tasks import arithmetic
from tba_jax.tasks import base

MAX_VALUE = 99  # the largest number with a token
# Keeps the enumeration within a few seconds and a few hundred MB.
_MAX_CHAINS = 1_000_000
# Bits of a step's code: two for the operation, seven for each operand.
_STEP_BITS = 16
_STEP_LENGTH = len("99*99=99,")  # the longest step
_SYMBOLS = "".join(arithmetic.OPERATIONS)
_STEP = re.compile(r"([0-9]+)([+*-])([0-9]+)=([0-9]+)")


class Countdown(base.Task):
  """Problems of reaching a target from given numbers with `+`, `-` and `*`.

  numbers: count of numbers in a prompt, 2 to 4.
  max_number: maximum of the given numbers.
  max_target: maximum of the targets.
  min_solutions: minimum number of distinct solutions of a prompt.
  held_out_fraction: share of the multisets held out from training.
  split_seed: seed of the split, and of the order of prompts and numbers.
  """

  name: ClassVar[str] = "countdown"
  max_reward: ClassVar[float | None] = 1.0
  FIELDS: ClassVar = {
      "numbers": 4,
      "max_number": 12,
      "max_target": 99,
      "min_solutions": 12,
      "held_out_fraction": 0.15,
      "split_seed": 0,
  }

  def __init__(
      self,
      *,
      numbers: int,
      max_number: int,
      max_target: int,
      min_solutions: int,
      held_out_fraction: float,
      split_seed: int,
  ):
    """Enumerates the pairs; takes a third of a second with the defaults."""
    base.check_integer("numbers", numbers, 2, 4)
    base.check_integer("max_number", max_number, 1, MAX_VALUE)
    base.check_integer("max_target", max_target, 1, MAX_VALUE)
    base.check_integer("min_solutions", min_solutions, 1, 10_000)
    base.check_fraction("held_out_fraction", held_out_fraction)
    num_chains = math.comb(max_number + numbers - 1, numbers) * math.prod(
        math.comb(k, 2) * len(_SYMBOLS) for k in range(2, numbers + 1)
    )
    if num_chains > _MAX_CHAINS:
      raise ValueError(
          f"config.task.max_number={max_number}: with config.task.numbers="
          f"{numbers} there are up to {num_chains} chains of steps; must be at"
          f" most {_MAX_CHAINS}"
      )
    self._num_numbers = numbers
    multisets_MxN = np.array(
        list(
            itertools.combinations_with_replacement(
                range(1, max_number + 1), numbers
            )
        )
    )
    self._enumerate(multisets_MxN, max_target, min_solutions)
    self._split(multisets_MxN, held_out_fraction, split_seed)

  def _enumerate(
      self, multisets_MxN: np.ndarray, max_target: int, min_solutions: int
  ) -> None:
    """Groups chains by solution and solutions by pair; selects the pairs."""
    row, steps, target = _chains(multisets_MxN)
    keep = target <= max_target
    row, steps, target = row[keep], steps[keep], target[keep]
    # Different choices among equal numbers give the same chain.
    first = np.unique(_pack(row, steps, _STEP_BITS), return_index=True)[1]
    row, steps, target = row[first], steps[first], target[first]
    # The multiset and steps determine the target (the only value that is not
    # consumed), so a solution's key omits it.
    solution = _pack(row, np.sort(steps, axis=1), _STEP_BITS)
    pair = row * (MAX_VALUE + 1) + target
    order = np.argsort(solution, kind="stable")
    order = order[np.argsort(pair[order], kind="stable")]
    # Offsets: the first chain of each solution and the first solution of each
    # pair, followed by the end.
    self._steps = steps[order]
    self._chain_start = _starts(solution[order])
    pair_of_solution = pair[order][self._chain_start[:-1]]
    self._solution_start = _starts(pair_of_solution)
    pairs = pair_of_solution[self._solution_start[:-1]]
    num_solutions = np.diff(self._solution_start)
    rich = np.flatnonzero(self._is_selected(num_solutions, min_solutions))
    self._pair_row, self._pair_target = np.divmod(pairs, MAX_VALUE + 1)
    self._rich_pairs = rich

  def _is_selected(self, num_solutions: np.ndarray, limit: int) -> np.ndarray:
    """Returns a mask of the pairs with enough solutions to be kept."""
    return num_solutions >= limit

  def _split(
      self, multisets_MxN: np.ndarray, held_out_fraction: float, seed: int
  ) -> None:
    """Assigns the pairs to splits and shuffles prompts and their numbers."""
    rng = np.random.default_rng(seed)
    num_held_out = round(held_out_fraction * len(multisets_MxN))
    held_out = np.zeros(len(multisets_MxN), bool)
    held_out[rng.permutation(len(multisets_MxN))[:num_held_out]] = True
    numbers, pairs = _orders(multisets_MxN[self._pair_row], self._rich_pairs)
    # Pairs come in rounds: every pair with one order of its numbers, then every
    # pair with a second order, and so on. Thus a split's first prompts are as
    # diverse as possible, and a mean over them weights all pairs equally.
    by_pair = np.lexsort((rng.random(len(pairs)), pairs))
    starts = _starts(pairs[by_pair])
    turn = np.empty_like(by_pair)
    turn[by_pair] = np.arange(len(pairs)) - np.repeat(
        starts[:-1], np.diff(starts)
    )
    order = np.lexsort((rng.random(len(pairs)), turn))
    numbers, pairs = numbers[order], pairs[order]
    is_held_out = held_out[self._pair_row[pairs]]
    self._pairs, self._numbers = {}, {}
    for split, mine in (
        (base.TRAIN, ~is_held_out),
        (base.HELD_OUT, is_held_out),
    ):
      if not mine.any():
        raise ValueError(
            f"config.task.min_solutions and config.task.held_out_fraction="
            f"{held_out_fraction} leave the split {split!r} without prompts"
        )
      self._pairs[split] = pairs[mine]
      self._numbers[split] = numbers[mine]

  def _target(self, split: str, index: int) -> int:
    return int(self._pair_target[self._pairs[split][index]])

  def num_prompts(self, split: str) -> int:
    base.check_split(split)
    return len(self._pairs[split])

  def num_solutions(self, split: str, index: int) -> int:
    """Returns the number of distinct solutions of a prompt."""
    base.check_split(split)
    pair = self._pairs[split][index]
    return int(self._solution_start[pair + 1] - self._solution_start[pair])

  def prompt(self, split: str, index: int) -> str:
    base.check_split(split)
    numbers = ",".join(map(str, self._numbers[split][index]))
    return f"{numbers}>{self._target(split, index)}"

  def solution_key(self, split: str, index: int, completion: str) -> str | None:
    base.check_split(split)
    numbers = self._numbers[split][index].tolist()
    answer = answers.after_thinking(completion)
    return solution_key(numbers, self._target(split, index), answer)

  def explain(self, split: str, index: int, completion: str) -> str:
    base.check_split(split)
    numbers = self._numbers[split][index].tolist()
    answer = answers.after_thinking(completion)
    return explain(numbers, self._target(split, index), answer)

  def reference_completion(
      self, split: str, index: int, rng: np.random.Generator
  ) -> str:
    """Returns a uniformly drawn solution with steps in a random valid order."""
    base.check_split(split)
    pair = self._pairs[split][index]
    solution = rng.integers(*self._solution_start[pair : pair + 2])
    chain = rng.integers(*self._chain_start[solution : solution + 2])
    return _chain_text(self._steps[chain])

  def correct_completions(self, split: str, index: int) -> list[str]:
    """Returns all correct completions: each valid order of each solution."""
    base.check_split(split)
    pair = self._pairs[split][index]
    first, end = self._chain_start[self._solution_start[pair : pair + 2]]
    return [_chain_text(steps) for steps in self._steps[first:end]]

  def tokenizer_words(self) -> Sequence[str]:
    return [*map(str, range(MAX_VALUE + 1)), *"+-*=,>;"]

  @property
  def tokenizer_pattern(self) -> str:
    return r"[0-9]+|[^0-9]"

  @property
  def max_prompt_tokens(self) -> int:
    return 2 * self._num_numbers + 1

  @property
  def max_completion_tokens(self) -> int:
    # Five tokens per step, and a comma or the stop token.
    return 6 * (self._num_numbers - 1)


def solution_key(
    numbers: Sequence[int], target: int, completion: str
) -> str | None:
  """Returns the sorted steps of a correct completion, else None."""
  if explain(numbers, target, completion):
    return None
  return ",".join(sorted(completion.split(",")))


def explain(numbers: Sequence[int], target: int, completion: str) -> str:
  """Returns the first error of a completion; "" if it is correct.

  Correct means: one step fewer than numbers, separated by commas; each step
  canonical and true, with the larger operand first, both operands among the
  remaining values and a result from 1 to 99; and the last result is the target.
  """
  if not isinstance(completion, str) or not completion:
    return "is empty"
  num_steps = len(numbers) - 1
  max_length = _STEP_LENGTH * num_steps
  if len(completion) > max_length:
    return f"has {len(completion)} characters, a solution up to {max_length}"
  remaining = list(numbers)
  for count, text in enumerate(completion.split(","), 1):
    if count > num_steps:
      return f"has more than {num_steps} steps"
    wrong = _apply_step(text, remaining, numbers)
    if wrong:
      return f"step {count}: {wrong}"
  if len(remaining) > 1:
    return f"ends with {_listed(remaining)} left over"
  return "" if remaining == [target] else f"gives {remaining[0]}, not {target}"


def _apply_step(text: str, remaining: list[int], numbers: Sequence[int]) -> str:
  """Replaces operands in `remaining` with the result, or returns the error."""
  match = _STEP.fullmatch(text)
  values = [answers.parse_integer(match[i]) for i in (1, 3, 4)] if match else []
  if not match or None in values:
    return f'"{text}" is not of the form 4*3=12'
  (a, b, result), operation = values, match[2]
  right = arithmetic.OPERATIONS[operation](a, b)
  if right != result:
    return f"{a}{operation}{b} is {right}, not {result}"
  if not 1 <= result <= MAX_VALUE:
    return f"{result} is not from 1 to {MAX_VALUE}"
  if a < b:
    return f"the larger of {a} and {b} has to stand first"
  for operand in (a, b):
    if operand not in remaining:
      if operand in numbers:
        return f"uses {operand} once too often"
      return f"uses {operand}, which is not among {_listed(remaining)}"
    remaining.remove(operand)
  remaining.append(result)
  return ""


def _listed(values: Sequence[int]) -> str:
  return ", ".join(map(str, values)) or "what is left"


def _chains(
    multisets_MxN: np.ndarray,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
  """Returns all chains of steps: multiset rows, steps [..., N - 1], results."""
  row = np.arange(len(multisets_MxN))
  values = multisets_MxN
  steps = np.zeros((len(row), 0), np.int64)
  while values.shape[1] > 1:
    parts = []
    for i, j in itertools.combinations(range(values.shape[1]), 2):
      a = np.maximum(values[:, i], values[:, j])
      b = np.minimum(values[:, i], values[:, j])
      rest = np.delete(values, (i, j), axis=1)
      for code, operation in enumerate(_SYMBOLS):
        result = arithmetic.OPERATIONS[operation](a, b)
        keep = (result >= 1) & (result <= MAX_VALUE)
        step = (code << 14) | (a << 7) | b
        parts.append(
            (
                row[keep],
                np.column_stack([rest, result])[keep],
                np.column_stack([steps, step])[keep],
            )
        )
    row, values, steps = (np.concatenate(part) for part in zip(*parts))
  return row, steps, values[:, 0]


def _orders(
    numbers_QxN: np.ndarray, pairs: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
  """Returns the distinct orders of the pairs' numbers, with each one's pair."""
  permutations = np.array(
      list(itertools.permutations(range(numbers_QxN.shape[1])))
  )
  numbers = numbers_QxN[pairs][:, permutations].reshape(
      -1, numbers_QxN.shape[1]
  )
  pairs = np.repeat(pairs, len(permutations))
  first = np.unique(_pack(pairs, numbers, 7), return_index=True)[1]
  return numbers[first], pairs[first]


def _pack(row: np.ndarray, columns: np.ndarray, bits: int) -> np.ndarray:
  """Returns one int64 per row, equal exactly if row and columns are equal.

  Columns hold numbers of `bits` bits; the total must fit in 63 bits.
  """
  key = row.astype(np.int64)
  for column in columns.T:
    key = (key << bits) | column
  return key


def _starts(sorted_keys: np.ndarray) -> np.ndarray:
  """Returns the start of each run of equal keys, followed by the end."""
  changes = np.flatnonzero(np.diff(sorted_keys)) + 1
  return np.concatenate([[0], changes, [len(sorted_keys)]])


def _chain_text(steps_N: np.ndarray) -> str:
  return ",".join(map(_step_text, steps_N.tolist()))


def _step_text(step: int) -> str:
  """Returns the text of a step, given its code."""
  operation = _SYMBOLS[step >> 14]
  a, b = (step >> 7) & 127, step & 127
  return f"{a}{operation}{b}={arithmetic.OPERATIONS[operation](a, b)}"


class CountdownSparse(Countdown):
  """Countdown with targets that have few solutions, so that search matters.

  Random valid steps are correct once in 200 completions (once in 24 with three
  numbers and one solution): most groups have no reward, and solutions that were
  found must be replayed.

  max_solutions: maximum number of distinct solutions of a prompt.
  """

  name: ClassVar[str] = "countdown_sparse"
  FIELDS: ClassVar = {
      "numbers": 4,
      "max_number": 12,
      "max_target": 99,
      "max_solutions": 2,
      "held_out_fraction": 0.15,
      "split_seed": 0,
  }

  def __init__(self, *, max_solutions: int, **fields: Any):
    base.check_integer("max_solutions", max_solutions, 1, 10_000)
    super().__init__(min_solutions=max_solutions, **fields)

  def _is_selected(self, num_solutions: np.ndarray, limit: int) -> np.ndarray:
    return num_solutions <= limit
