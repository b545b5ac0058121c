# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Two steps of arithmetic with one digit, what made-up problems are made of."""

from collections.abc import Sequence
import operator

import numpy as np

# Of the solutions that are the answer alone.
TERSE_SHARE = 0.5

_OPERATIONS = {"+": operator.add, "-": operator.sub, "*": operator.mul}
_DRAWN = "++--*"
# What a tiny model learns within a minute.
_MAX_VALUE = 9


def pick(rng: np.random.Generator, items: Sequence[str]) -> str:
  """Returns one of the items; `rng.choice` takes ten times as long."""
  return items[rng.integers(len(items))]


def chain(
    rng: np.random.Generator,
) -> list[tuple[int, str, int, int]] | None:
  """Returns two steps (value, operation, number, result), one from the other.

  None where a result would leave 1 to `_MAX_VALUE`.
  """
  value = int(rng.integers(2, _MAX_VALUE + 1))
  steps = []
  for _ in range(2):
    operation = pick(rng, _DRAWN)
    number = int(rng.integers(2, 4) if operation == "*" else rng.integers(1, 9))
    result = _OPERATIONS[operation](value, number)
    if not 1 <= result <= _MAX_VALUE:
      return None
    steps.append((value, operation, number, result))
    value = result
  return steps
