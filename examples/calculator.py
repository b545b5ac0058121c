# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Countdown with a calculator: an environment whose method is a tool.

`configs/calculator.py` trains on it; docs/guides/agents.md has the interface.
"""

import ast
import operator
import random

_OPERATIONS = {ast.Add: operator.add, ast.Sub: operator.sub,
               ast.Mult: operator.mul}  # fmt: skip
_MOST = 30
# Expressions that a player tries.
TRIES = 4


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
    self._numbers = [self._random.randint(1, 6) for _ in range(3)]
    self._target = value_of(self._random.choice(self._expressions()))
    self._tried: list[str] = []
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
    parsed = _parse(text)
    if parsed is None:
      return 0.0
    numbers = [n.value for n in ast.walk(parsed) if isinstance(n, ast.Constant)]
    is_right = sorted(numbers) == sorted(self._numbers) and (
        _value(parsed) == self._target
    )
    return float(is_right)

  def demonstrate(self) -> str:
    """Returns a turn of a player who has expressions calculated at random.

    The first that makes the target is answered; after `TRIES` the last one is.
    """
    if self._tried and (
        value_of(self._tried[-1]) == self._target or len(self._tried) == TRIES
    ):
      return self._tried[-1]
    self._tried.append(self._random.choice(self._expressions()))
    return f"calculate: {self._tried[-1]}"

  def _expressions(self) -> list[str]:
    """Returns those that begin with one operation, with values of 1 to 30."""
    found: list[str] = []
    while not found:
      left, right, other = self._random.sample(self._numbers, 3)
      begun = f"({left}{self._random.choice('+-*')}{right})"
      ways = [f"{begun}{sign}{other}" for sign in "+-*"] + [f"{other}-{begun}"]
      found = [way for way in ways if 1 <= value_of(way) <= _MOST]
    return found


def value_of(expression: str) -> int | None:
  """Returns the value of an expression of +, - and *; None of another text."""
  parsed = _parse(expression)
  return None if parsed is None else _value(parsed)


def _parse(text: str) -> ast.expr | None:
  """Returns an expression of numbers, +, - and *; None of another text."""
  try:
    parsed = ast.parse(text.strip(), mode="eval").body
    _value(parsed)
  except (SyntaxError, ValueError, RecursionError, MemoryError):
    return None
  return parsed


def _value(node: ast.expr) -> int:
  if isinstance(node, ast.BinOp) and type(node.op) in _OPERATIONS:
    return _OPERATIONS[type(node.op)](_value(node.left), _value(node.right))
  if isinstance(node, ast.Constant) and type(node.value) is int:
    return node.value
  raise ValueError("must be +, -, * and numbers")
