# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Preference: texts of a small random language, with a known reward.

A controlled stand-in for learning from preferences. Supervised fine-tuning
learns the language, a Markov chain over letters with random lengths. The reward
is a known function without model error. If a policy trades the language for
reward, this shows as KL to the reference policy and as perplexity under it.

The prompt `ab:` asks for letters that score well with "a" and "b". With random
scores u in [-1, 1], fixed by `split_seed`, the completion y_1 … y_n has

    r = 1/max_letters Σ_t (u[a, y_t] + u[b, y_t]) / 2

which is largest for max_letters copies of the best letter.
"""

from collections.abc import Sequence
import string
from typing import ClassVar

import numpy as np

from tba_jax.tasks import base

_PROMPT_END = ":"
# Dirichlet concentration of the chain; below 1, few letters can follow each.
_CONCENTRATION = 0.5
_STOP_SHARE = 0.08  # probability that a text ends after a letter
_RIGHT_SHARE = 0.5  # Minimum share of the best reward if correct.


class Preference(base.Task):
  """Prompts of two letters; the reward is a sum of letter scores.

  num_letters: size of the alphabet.
  max_letters: longest text of the language; completions may be longer.
  held_out_fraction: share of the prompts held out from training.
  split_seed: seed of the language, the scores, the split and the order of
    prompts.
  """

  name: ClassVar[str] = "preference"
  FIELDS: ClassVar = {
      "num_letters": 16,
      "max_letters": 10,
      "held_out_fraction": 0.15,
      "split_seed": 0,
  }

  def __init__(
      self,
      *,
      num_letters: int,
      max_letters: int,
      held_out_fraction: float,
      split_seed: int,
  ):
    base.check_integer("num_letters", num_letters, 2, 26)
    base.check_integer("max_letters", max_letters, 1, 1000)
    base.check_fraction("held_out_fraction", held_out_fraction)
    self._letters = string.ascii_lowercase[:num_letters]
    self._max_letters = max_letters
    rng = np.random.default_rng(split_seed)
    shape = (num_letters, num_letters)
    # Row: previous letter; column: next letter.
    self._next_AxA = rng.dirichlet(
        np.full(num_letters, _CONCENTRATION), size=num_letters
    )
    # Row: letter of the prompt; column: letter of the completion.
    self._scores_AxA = rng.uniform(-1, 1, size=shape)
    prompts = [a + b for a in self._letters for b in self._letters]
    rng.shuffle(prompts)
    num_held_out = round(held_out_fraction * len(prompts))
    self._prompts = {
        base.TRAIN: prompts[num_held_out:],
        base.HELD_OUT: prompts[:num_held_out],
    }
    for split, mine in self._prompts.items():
      if not mine:
        raise ValueError(
            f"config.task.held_out_fraction={held_out_fraction} of"
            f" {len(prompts)} prompts leaves the split {split!r} without any"
        )

  def num_prompts(self, split: str) -> int:
    base.check_split(split)
    return len(self._prompts[split])

  def prompt(self, split: str, index: int) -> str:
    base.check_split(split)
    return self._prompts[split][index] + _PROMPT_END

  def reward(self, split: str, index: int, completion: str) -> float:
    """Returns the mean score; characters other than letters count as -1."""
    scores_A = self._scores_of(split, index)
    letters = (self._letters.find(letter) for letter in completion)
    total = sum(-1.0 if i < 0 else scores_A[i] for i in letters)
    return float(total / self._max_letters)

  def best_reward(self, split: str, index: int) -> float:
    """Returns the largest reward of any text in the language."""
    return float(max(self._scores_of(split, index).max(), 0.0))

  def solution_key(self, split: str, index: int, completion: str) -> str | None:
    """Returns the completion if it has at least half of the best reward."""
    enough = _RIGHT_SHARE * self.best_reward(split, index)
    is_right = self.reward(split, index, completion) >= enough
    return completion if is_right else None

  def explain(self, split: str, index: int, completion: str) -> str:
    if self.solution_key(split, index, completion) is not None:
      return ""
    reward = self.reward(split, index, completion)
    best = self.best_reward(split, index)
    return f"liked by {reward:.2f}, less than half of the best, {best:.2f}"

  def reference_completion(
      self, split: str, index: int, rng: np.random.Generator
  ) -> str:
    """Returns a text of the language, regardless of its reward."""
    letter = self._letters.index(self.prompt(split, index)[1])
    text = ""
    for stop in rng.random(self._max_letters) < _STOP_SHARE:
      letter = rng.choice(len(self._letters), p=self._next_AxA[letter])
      text += self._letters[letter]
      if stop:
        break
    return text

  def tokenizer_words(self) -> Sequence[str]:
    return list(self._letters + _PROMPT_END)

  @property
  def tokenizer_pattern(self) -> str:
    return "."

  @property
  def max_prompt_tokens(self) -> int:
    return 3

  @property
  def max_completion_tokens(self) -> int:
    return self._max_letters + 1  # and the stop token

  def _scores_of(self, split: str, index: int) -> np.ndarray:
    """Returns each letter's mean score with the prompt's two letters."""
    first, second = (
        self._letters.index(letter)
        for letter in self.prompt(split, index).removesuffix(_PROMPT_END)
    )
    return (self._scores_AxA[first] + self._scores_AxA[second]) / 2
