# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""GSM8K with a calculator: word problems whose sums a tool computes.

The published solutions mark what a calculator computes, `48/2 = <<48/2=24>>24`;
a demonstration calls the tool there (Cobbe et al. 2021, arXiv:2110.14168).
`Gsm8k` has the published problems: set GSM8K to the folder of train.jsonl and
test.jsonl, `reward.env_vars=GSM8K` and `reward.readable` to the folder.
`MadeUp` has problems in their format that a small model can learn.
docs/guides/agents.md has the interface.
"""

import ast
import functools
import json
import operator
import os
import pathlib
import re

from tba_jax.tasks import answers
from tba_jax.tasks import base
from tba_jax.tasks import synthetic

# Variable of the folder with train.jsonl and test.jsonl, as published.
FOLDER = "GSM8K"
SYNTHETIC_PROBLEMS = 4000
_OPERATIONS = {ast.Add: operator.add, ast.Sub: operator.sub,
               ast.Mult: operator.mul, ast.Div: operator.truediv}  # fmt: skip
_CALCULATED = re.compile(r"<<([^=<>]+)=[^<>]*>>")


@functools.cache
def published(held_out: bool) -> list[dict[str, str]]:
  """Returns the problems of a split, from the folder that `FOLDER` names."""
  folder = os.environ.get(FOLDER)
  if not folder:
    raise ValueError(f"set {FOLDER} to the folder with train.jsonl")
  path = pathlib.Path(folder, "test.jsonl" if held_out else "train.jsonl")
  return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


@functools.cache
def small(held_out: bool) -> list[dict[str, str]]:
  """Returns made-up problems of a split, with numbers of one digit."""
  split = base.HELD_OUT if held_out else base.TRAIN
  rows = synthetic.gsm8k_splits(SYNTHETIC_PROBLEMS, 0)[split]
  return [dict(row.fields) for row in rows]


class Gsm8k:
  """A problem, to be answered with `#### number` after any number of sums.

  problems: function from whether a split is held out to its problems.
  """

  problems = staticmethod(published)

  def reset(self, seed: int) -> str:
    held_out, index = seed % 2, seed // 2
    problems = self.problems(bool(held_out))
    self._problem = problems[index % len(problems)]
    parts = _CALCULATED.split(self._problem["answer"])
    # Text and sums by turns; the text after the last sum has the answer.
    self._turns = [
        f"{text}\ncalculate: {expression}".lstrip("\n")
        for text, expression in zip(parts[::2], parts[1::2])
    ]
    self._turns.append(parts[-1])
    return self._problem["question"] + "\n"

  def calculate(self, expression: str) -> str:
    """Calculates the value of an expression of numbers, +, -, * and /.

    Args:
      expression: sum or product, such as 12/60*50
    """
    return value_of(expression)

  def get_reward(self, text: str) -> float:
    """Returns 1 for the right number after `####`, else 0."""
    right = answers.number_after_hashes(self._problem["answer"])
    said = answers.number_after_hashes(answers.after_thinking(text))
    return float(said == right)

  def demonstrate(self) -> str:
    """Returns a turn of the published solution."""
    return self._turns.pop(0)


class MadeUp(Gsm8k):
  """Problems that a small model can learn.

  words: vocabulary of a model from scratch.
  """

  problems = staticmethod(small)
  words = (
      *map(str, range(10)), *"+-*=?,.\n", " ", "calculate: ", "error", "#### ",
      "Ann", "Ben", "Eva", "Tom", " has ", " eggs", " keys", " nuts", " pens",
      " buys ", " finds ", " gets ", " loses ", " sells ", " then ",
      " times as many", " How many",
  )  # fmt: skip


def value_of(expression: str) -> str:
  """Returns the value of an expression as text; "error" of another text."""
  try:
    value = _value(ast.parse(expression.strip(), mode="eval").body)
    return f"{round(value, 6):.10g}"
  except (SyntaxError, ArithmeticError, ValueError, RecursionError):
    return "error"


def _value(node: ast.expr) -> float:
  if isinstance(node, ast.BinOp) and type(node.op) in _OPERATIONS:
    return _OPERATIONS[type(node.op)](_value(node.left), _value(node.right))
  if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
    return -_value(node.operand)
  if isinstance(node, ast.Constant) and type(node.value) in (int, float):
    return node.value
  raise ValueError("must be +, -, *, / and numbers")
