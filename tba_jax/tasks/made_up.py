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

from tba_jax.tasks import base
from tba_jax.tasks import digits
from tba_jax.tasks import examples as examples_lib

_NAMES = ("Ann", "Ben", "Eva", "Tom")
_THINGS = ("pens", "nuts", "eggs", "keys")
_PHRASES = {
    "+": ("buys {}", "finds {}"),
    "-": ("loses {}", "sells {}"),
    "*": ("gets {} times as many",),
}
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


def _problem(rng: np.random.Generator) -> dict[str, str] | None:
  """Returns a row; None where a value is not of one digit."""
  steps = digits.chain(rng)
  if steps is None:
    return None
  name, thing = digits.pick(rng, _NAMES), digits.pick(rng, _THINGS)
  lines, told = [], []
  for value, operation, number, result in steps:
    step = f"{value}{operation}{number}"
    lines.append(f"{step}=<<{step}={result}>>{result}")
    told.append(digits.pick(rng, _PHRASES[operation]).format(number))
  first, value = steps[0][0], steps[-1][-1]
  if rng.random() < digits.TERSE_SHARE:
    lines = []
  return {
      "question": (
          f"{name} has {first} {thing}. {name} {told[0]}, then {told[1]}. How"
          f" many {thing}?"
      ),
      "answer": "\n".join([*lines, f"#### {value}"]),
  }
