# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Guess a number by higher or lower: an environment of several turns.

`configs/guess.py` trains on it; docs/guides/agents.md has the interface.
"""

import random

NUMBERS = 32


class Guess:
  """A number from 1 to 32 to be guessed; each guess but the right one costs.

  words: vocabulary of a model from scratch.
  """

  words = (*map(str, range(1, NUMBERS + 1)), "guess:", "higher:", "lower:")

  def reset(self, seed: int) -> str:
    self._random = random.Random(seed)
    self._number = self._random.randint(1, NUMBERS)
    self._low, self._high = 1, NUMBERS
    return "guess:"

  def step(self, text: str) -> tuple[str, float, bool, dict]:
    if not text.isdecimal() or not 1 <= int(text) <= NUMBERS:
      return "", -1.0, True, {"success": False}
    guess = int(text)
    if guess == self._number:
      return "", 1.0, True, {"success": True}
    if guess < self._number:
      self._low = max(self._low, guess + 1)
      return "higher:", -0.125, False, {}
    self._high = min(self._high, guess - 1)
    return "lower:", -0.125, False, {}

  def demonstrate(self) -> str:
    """Returns a guess of a player who follows the hints half of the time."""
    follows = self._random.random() < 0.5
    low, high = (self._low, self._high) if follows else (1, NUMBERS)
    return str(self._random.randint(low, high))
