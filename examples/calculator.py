# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Countdown with a calculator: an environment whose method is a tool.

`configs/calculator.py` trains on it; docs/environments.md has the interface.
"""

import ast
import operator
import random

_OPERATIONS = {ast.Add: operator.add, ast.Sub: operator.sub,
               ast.Mult: operator.mul}  # fmt: skip
_MOST = 99
# Beginnings that a player tries.
TRIES = 3


class Countdown:
  """A number to be made of three others by +, - and *, each used once.

  The calculator tells the value of an expression; an answer without a call
  ends the episode, and is right if it uses the numbers and makes the target.

  words: vocabulary of a model from scratch.
  """

  words = (
      *map(str, range(_MOST + 1)),
      *("+", "-", "*", "(", ")", ",", ">", "calculate: ", "error", ":", "\n"),
  )

  def reset(self, seed: int) -> str:
    self._random = random.Random(seed)
    while True:
      self._numbers = [self._random.randint(1, 9) for _ in range(3)]
      if solutions := self._endings(self._begin()):
        break
    self._target = value_of(self._random.choice(solutions))
    self._begun: list[str] = []
    self._answer = ""
    return f"{','.join(map(str, self._numbers))}>{self._target}\n"

  def calculate(self, expression: str) -> str:
    """Calculates the value of an expression of numbers, +, - and *.

    Args:
      expression: a sum, product or both, such as (3+4)*2
    """
    value = value_of(expression)
    if value is None or not 0 <= value <= _MOST:
      return "error"
    return str(value)

  def get_reward(self, text: str) -> float:
    """Returns 1 for a right answer, else 0."""
    numbers = [int(n) for n in "".join(
        c if c.isdecimal() else " " for c in text
    ).split()]  # fmt: skip
    uses_them = sorted(numbers) == sorted(self._numbers)
    is_right = uses_them and value_of(text) == self._target
    # A comment would use numbers without their counting.
    return float(is_right and "#" not in text)

  def demonstrate(self) -> str:
    """Returns a turn of a player who begins with two numbers at random.

    Where the calculator's result and the third number make the target, the
    player has that calculated too, and answers; else another two are tried.
    """
    if self._answer:
      return self._answer
    if self._begun:
      begun = self._begun[-1]
      for ending in self._endings(begun):
        if value_of(ending) == self._target:
          self._answer = ending
          value = str(value_of(begun))
          return f"calculate: {ending.replace(f'({begun})', value)}"
    if len(self._begun) == TRIES:
      return self._random.choice(self._endings(begun) or [begun])
    self._begun.append(self._begin())
    return f"calculate: {self._begun[-1]}"

  def _begin(self) -> str:
    """Returns an operation of two of the numbers, at random."""
    left, right = self._random.sample(self._numbers, 2)
    return f"{left}{self._random.choice('+-*')}{right}"

  def _endings(self, begun: str) -> list[str]:
    """Returns expressions of all three numbers with a value from 1 to 99."""
    left, right = int(begun[0]), int(begun[2])
    others = self._numbers.copy()
    others.remove(left)
    others.remove(right)
    ways = [f"({begun}){sign}{others[0]}" for sign in "+-*"]
    ways.append(f"{others[0]}-({begun})")
    fits = lambda text, least: least <= value_of(text) <= _MOST
    return [way for way in ways if fits(begun, 0) and fits(way, 1)]


def value_of(expression: str) -> int | None:
  """Returns the value of an expression of +, - and *; None of another text."""
  try:
    return _value(ast.parse(expression.strip(), mode="eval").body)
  except (SyntaxError, ValueError, RecursionError, MemoryError):
    return None


def _value(node: ast.expr) -> int:
  if isinstance(node, ast.BinOp) and type(node.op) in _OPERATIONS:
    return _OPERATIONS[type(node.op)](_value(node.left), _value(node.right))
  if isinstance(node, ast.Constant) and type(node.value) is int:
    return node.value
  raise ValueError("allowed +, -, * and numbers")
