# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
r"""Small problems in the format of MATH, written by code.

They are no part of MATH and say nothing of a model's mathematics: two steps of
mental arithmetic, or the sum of two fractions whose answer is in lowest terms
while the solution's is not, so that comparing has something to do.

    {"problem": "Let $x=4$. What is $(x+5)-3$?", "answer": "6",
     "solution": "$4+5=9$, $9-3=6$, so \\boxed{6}."}
    {"problem": "What is $\\frac{1}{8}+\\frac{3}{8}$?",
     "answer": "\\frac{1}{2}",
     "solution": "$1+3=4$, so \\boxed{\\frac{4}{8}}."}

Half of the solutions are the box alone, as in `made_up.py`.
"""

from collections.abc import Iterator
import fractions
import string

import numpy as np

from tba_jax.tasks import base
from tba_jax.tasks import digits
from tba_jax.tasks import examples as examples_lib

_FRACTION_SHARE = 0.1
_MAX_DENOMINATOR = 20
_HELD_OUT_SHARE = 0.2


def splits(num_prompts: int, seed: int) -> dict[str, list[examples_lib.Row]]:
  """Returns rows of the train and held-out split, no problem twice.

  Args:
    num_prompts: over both splits.
    seed: of the problems.
  """
  cut = round(num_prompts * _HELD_OUT_SHARE)
  rows = list(_problems(num_prompts, seed))
  return {base.TRAIN: rows[cut:], base.HELD_OUT: rows[:cut]}


def _problems(num_prompts: int, seed: int) -> Iterator[examples_lib.Row]:
  rng = np.random.default_rng([seed, 0x3A7])
  seen: set[str] = set()
  while len(seen) < num_prompts:
    make = _fractions if rng.random() < _FRACTION_SHARE else _integers
    made = make(rng)
    if made is not None and made["problem"] not in seen:
      seen.add(made["problem"])
      yield examples_lib.Row(f"made up:{len(seen)}", made)


def _integers(rng: np.random.Generator) -> dict[str, str] | None:
  """Returns a row; None where a value would become too large or too small."""
  steps = digits.chain(rng)
  if steps is None:
    return None
  (first, one, second, _), (_, other, third, value) = steps
  name = rng.choice(list(string.ascii_lowercase))
  work = ", ".join(f"${v}{o}{n}={result}$" for v, o, n, result in steps)
  work = "" if rng.random() < digits.TERSE_SHARE else f"{work}, so "
  return {
      "problem": (
          f"Let ${name}={first}$. What is"
          f" $({name}{one}{second}){other}{third}$?"
      ),
      "solution": f"{work}\\boxed{{{value}}}.",
      "answer": str(value),
  }


def _fractions(rng: np.random.Generator) -> dict[str, str] | None:
  """Returns a row; None where the sum would not be below 1."""
  below = int(rng.integers(3, _MAX_DENOMINATOR))
  one, other = (int(n) for n in rng.integers(1, 9, size=2))
  if one + other >= min(below, 10):
    return None
  least = fractions.Fraction(one + other, below)
  return {
      "problem": f"What is ${_frac(one, below)}+{_frac(other, below)}$?",
      "solution": (
          f"${one}+{other}={one + other}$, so"
          f" \\boxed{{{_frac(one + other, below)}}}."
      ),
      "answer": _frac(least.numerator, least.denominator),
  }


def _frac(above: int, below: int) -> str:
  return f"\\frac{{{above}}}{{{below}}}"
