# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Small word problems in the format of GSM8K, written by code.

They are no part of GSM8K and say nothing of a model's mathematics: two steps of
mental arithmetic in a handful of phrases, for trials and tests of the pipeline
where neither data nor a pretrained model is at hand.

    {"question": "Ann has 4 pens. Ann buys 5, then loses 3. How many pens?",
     "answer": "4+5=<<4+5=9>>9\\n9-3=<<9-3=6>>6\\n#### 6"}

Half of the solutions are the answer alone. A small model that learned from both
kinds guesses as often as it works a problem out; a reward for right answers
teaches it to write the steps.
"""

from collections.abc import Iterator

import numpy as np

from tba_jax.tasks import answers
from tba_jax.tasks import base
from tba_jax.tasks import examples as examples_lib

_NAMES = ("Ann", "Ben", "Eva", "Tom")
_THINGS = ("pens", "nuts", "eggs", "keys")
_PHRASES = {
    "+": ("buys {}", "finds {}"),
    "-": ("loses {}", "sells {}"),
    "*": ("gets {} times as many",),
}
# One digit: what a tiny model learns within a minute.
_MAX_VALUE = 9
TERSE_SHARE = 0.5
_HELD_OUT_SHARE = 0.2


def splits(num_prompts: int, seed: int) -> dict[str, list[examples_lib.Row]]:
  """Returns rows of the train and held-out split, no question twice.

  Args:
    num_prompts: over both splits.
    seed: of the problems.
  """
  cut = round(num_prompts * _HELD_OUT_SHARE)
  rows = list(_problems(num_prompts, seed))
  return {base.TRAIN: rows[cut:], base.HELD_OUT: rows[:cut]}


def _problems(num_prompts: int, seed: int) -> Iterator[examples_lib.Row]:
  rng = np.random.default_rng([seed, 0x6A8])
  seen: set[str] = set()
  while len(seen) < num_prompts:
    made = _problem(rng)
    if made is not None and made["question"] not in seen:
      seen.add(made["question"])
      yield examples_lib.Row(f"made up:{len(seen)}", made)


def chain(
    rng: np.random.Generator,
) -> list[tuple[int, str, int, int]] | None:
  """Returns two steps (value, operation, number, result), one from the other.

  None where a result would leave 1 to `_MAX_VALUE`.
  """
  value = int(rng.integers(2, _MAX_VALUE + 1))
  steps = []
  for operation in rng.choice(list(_PHRASES), size=2, p=[0.4, 0.4, 0.2]):
    number = int(rng.integers(2, 4) if operation == "*" else rng.integers(1, 9))
    result = answers.apply_operation(str(operation), value, number)
    if not 1 <= result <= _MAX_VALUE:
      return None
    steps.append((value, str(operation), number, result))
    value = result
  return steps


def _problem(rng: np.random.Generator) -> dict[str, str] | None:
  """Returns a row; None where a value would leave 1 to `_MAX_VALUE`."""
  name, thing = rng.choice(_NAMES), rng.choice(_THINGS)
  steps = chain(rng)
  if steps is None:
    return None
  lines, told = [], []
  for value, operation, number, result in steps:
    step = f"{value}{operation}{number}"
    lines.append(f"{step}=<<{step}={result}>>{result}")
    told.append(str(rng.choice(_PHRASES[operation])).format(number))
  first, value = steps[0][0], steps[-1][-1]
  if rng.random() < TERSE_SHARE:
    lines = []
  return {
      "question": (
          f"{name} has {first} {thing}. {name} {told[0]}, then {told[1]}. How"
          f" many {thing}?"
      ),
      "answer": "\n".join([*lines, f"#### {value}"]),
  }
