# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Products of two numbers, which a calculator computes.

`configs/pretrained_turns.py` trains on it; docs/environments.md has the
interface.
"""

import random
import re

_PRODUCT = re.compile(r"(\d{1,9})[*x×](\d{1,9})")


class Products:
  """A product of numbers of two digits, too hard for a small model alone."""

  def reset(self, seed: int) -> str:
    rng = random.Random(seed)
    self._left, self._right = rng.randint(12, 99), rng.randint(12, 99)
    return (
        f"What is {self._left} * {self._right}? You have a calculator. To use"
        " it, answer only with a line such as\ncalculate: 3*4"
    )

  def calculate(self, expression: str) -> str:
    """Calculates a product.

    Args:
      expression: two numbers, such as 3*4
    """
    numbers = _PRODUCT.fullmatch(expression.replace(" ", ""))
    if numbers is None:
      raise ValueError("allowed two numbers, such as 3*4")
    return str(int(numbers[1]) * int(numbers[2]))

  def get_reward(self, text: str) -> float:
    """Returns 1 if the last number of the last turn is the product, else 0."""
    numbers = re.findall(r"\d+", text.replace(",", ""))
    return float(numbers[-1:] == [str(self._left * self._right)])
