# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""A task over rows of data: what GSM8K and a user's own task have in common."""

from collections.abc import Callable, Iterable, Mapping, Sequence
import functools
import re
from typing import Any

import numpy as np

from tba_jax.tasks import base
from tba_jax.tasks import examples as examples_lib

# Words with the space before them, and digits one by one, so that a small model
# can learn what they mean together.
WORD_PATTERN = r" ?[A-Za-z]+|[0-9]|#+|[^0-9A-Za-z#]"
_MAX_WORDS = 20_000


class RowsTask(base.Task):
  """Prompts and reference answers of rows, in two or three splits.

  "train" and "held_out" (the test split), and "validation" where there is one.
  A subclass reads the rows and knows the rewards.

  report: what was read, and what was left out and why.
  """

  def __init__(
      self, splits: Mapping[str, list[examples_lib.Example]], report: Any
  ):
    """Takes the examples.

    Raises:
      ValueError: a split is empty or overlaps the test split.
    """
    examples_lib.check_splits(splits, test=base.HELD_OUT, report=report)
    self._splits = splits
    # A part of "train" may have become "validation".
    report.used.update({split: len(found) for split, found in splits.items()})
    self.report = report

  @property
  def splits(self) -> Sequence[str]:
    return tuple(self._splits)

  def example(self, split: str, index: int) -> examples_lib.Example:
    """Returns the example behind a prompt."""
    base.check_split(split)
    return self._splits[split][index]

  def num_prompts(self, split: str) -> int:
    base.check_split(split)
    return len(self._splits.get(split, ()))

  def prompt(self, split: str, index: int) -> str:
    return self.example(split, index).prompt

  def solution_key(self, split: str, index: int, completion: str) -> str | None:
    return self.judge(split, index, completion).key

  def reward(self, split: str, index: int, completion: str) -> float:
    return self.judge(split, index, completion).reward

  def reference_completion(
      self, split: str, index: int, rng: np.random.Generator
  ) -> str:
    """Returns the row's own answer; nothing is drawn."""
    return self.completion_of(self.example(split, index))

  def shortened(
      self, split: str, index: int, fits: Callable[[str], bool]
  ) -> str | None:
    """Returns a shorter prompt that fits, None where the task makes none.

    Args:
      split, index: of a prompt that does not fit.
      fits: text -> whether it is short enough.
    """
    del split, index, fits
    return None

  def completion_of(self, example: examples_lib.Example) -> str:
    """Returns what supervised fine-tuning learns to write for an example."""
    return example.answer

  @functools.cached_property
  def _lengths(self) -> tuple[int, int, list[str]]:
    """Longest prompt and completion in words, and all words, sorted."""
    words: set[str] = set()
    longest = [0, 0]
    pattern = re.compile(WORD_PATTERN)
    for found in self._splits.values():
      for one in found:
        for i, text in enumerate((one.prompt, self.completion_of(one))):
          these = pattern.findall(text)
          words.update(these)
          longest[i] = max(longest[i], len(these))
    if len(words) > _MAX_WORDS:
      raise ValueError(
          f"config.tokenizer.source='task': the texts have {len(words)} words,"
          f" allowed up to {_MAX_WORDS}; name a folder with a tokenizer"
      )
    return longest[0], longest[1], sorted(words | set("0123456789"))

  def tokenizer_words(self) -> Sequence[str]:
    return self._lengths[2]

  @property
  def tokenizer_pattern(self) -> str:
    return WORD_PATTERN

  @property
  def max_prompt_tokens(self) -> int:
    return self._lengths[0]

  @property
  def max_completion_tokens(self) -> int:
    return self._lengths[1] + 1  # and the stop token


def read_splits(
    sources: Mapping[str, Iterable[examples_lib.Row]],
    make: Any,
    report: examples_lib.Report,
) -> dict[str, list[examples_lib.Example]]:
  """Returns the examples of each split; see `examples_lib.examples`."""
  return {
      split: examples_lib.examples(report, split, rows, make)
      for split, rows in sources.items()
  }


def cut_validation(
    splits: dict[str, list[examples_lib.Example]], num_prompts: int, seed: int
) -> None:
  """Moves examples from "train" to "validation", drawn with the seed.

  Raises:
    ValueError: none would be left to train on.
  """
  if not num_prompts:
    return
  found = splits[base.TRAIN]
  if num_prompts >= len(found):
    raise ValueError(
        f"config.task.validation_prompts={num_prompts}: allowed up to"
        f" {len(found) - 1}, less than the training prompts"
    )
  chosen = set(
      np.random.default_rng([seed, 0x7A1]).permutation(len(found))[:num_prompts]
  )
  splits[base.VALIDATION] = [e for i, e in enumerate(found) if i in chosen]
  splits[base.TRAIN] = [e for i, e in enumerate(found) if i not in chosen]
