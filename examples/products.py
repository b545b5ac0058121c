# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Products of two numbers, which a calculator computes.

`configs/pretrained_turns.py` trains on it; docs/guides/agents.md has the
interface.
"""

import json
import random
import re

_PRODUCT = re.compile(r"(\d{1,9})[*x×](\d{1,9})")


def _shown(left: int, right: int) -> list[dict[str, str]]:
  """Returns a question and the turns of who calls the calculator for it."""
  arguments = {"expression": f"{left}*{right}"}
  call = json.dumps({"name": "calculate", "arguments": arguments})
  said = (
      ("user", f"What is {left} * {right}?"),
      ("assistant", f"<tool_call>{call}</tool_call>"),
      ("tool", f"{left * right}"),
      ("assistant", f"The answer is {left * right}."),
  )
  return [{"role": role, "content": text} for role, text in said]


class Products:
  """A product of numbers of two digits, too hard for a small model alone.

  Two questions come before it, with a call and an answer each: a model that
  was never taught to call tools does what it has been shown.
  """

  def reset(self, seed: int) -> list[dict[str, str]]:
    rng = random.Random(seed)
    self._left, self._right = rng.randint(12, 99), rng.randint(12, 99)
    question = f"What is {self._left} * {self._right}?"
    return [
        *_shown(21, 13),
        *_shown(45, 32),
        {"role": "user", "content": question},
    ]

  def calculate(self, expression: str) -> str:
    """Calculates a product.

    Args:
      expression: two numbers, such as 3*4
    """
    numbers = _PRODUCT.fullmatch(expression.replace(" ", ""))
    if numbers is None:
      raise ValueError("must be two numbers, such as 3*4")
    return str(int(numbers[1]) * int(numbers[2]))

  def get_reward(self, text: str) -> float:
    """Returns 1 if the last number of the last turn is the product, else 0."""
    numbers = re.findall(r"\d+", text.replace(",", ""))
    return float(numbers[-1:] == [str(self._left * self._right)])
