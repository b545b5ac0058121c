# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Two steps of arithmetic with one digit, what made-up problems are made of."""

import operator

import numpy as np

# Of the solutions that are the answer alone.
TERSE_SHARE = 0.5

_OPERATIONS = {"+": operator.add, "-": operator.sub, "*": operator.mul}
# What a tiny model learns within a minute.
_MAX_VALUE = 9


def chain(
    rng: np.random.Generator,
) -> list[tuple[int, str, int, int]] | None:
  """Returns two steps (value, operation, number, result), one from the other.

  None where a result would leave 1 to `_MAX_VALUE`.
  """
  value = int(rng.integers(2, _MAX_VALUE + 1))
  steps = []
  for operation in rng.choice(list(_OPERATIONS), size=2, p=[0.4, 0.4, 0.2]):
    number = int(rng.integers(2, 4) if operation == "*" else rng.integers(1, 9))
    result = _OPERATIONS[operation](value, number)
    if not 1 <= result <= _MAX_VALUE:
      return None
    steps.append((value, str(operation), number, result))
    value = result
  return steps
