# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""A task over rows without what is too long for the policy.

Only the tokenizer knows how long a prompt is, so this comes after the task is
made; `source_index` leads back, for the workers that have no tokenizer.
"""

from collections.abc import Callable, Sequence

import numpy as np

from tba_jax.tasks import base
from tba_jax.tasks import examples as examples_lib
from tba_jax.tasks import rows_task


class Limited(base.Task):
  """The prompts of a task that fit, under new indices without gaps.

  report: of the task, with the prompts that were left out here.
  """

  def __init__(
      self,
      task: rows_task.RowsTask,
      *,
      num_tokens: Callable[[str], int],
      max_prompt_tokens: int,
      max_answer_tokens: int = 0,
  ):
    """Measures every prompt; one that is too long may be shortened by the task.

    Args:
      task: whose prompts are measured.
      num_tokens: of a prompt, as the policy's tokenizer encodes it.
      max_prompt_tokens: that a prompt may have.
      max_answer_tokens: that the answer of a training prompt may have, without
        a stop token; None = any number.

    Raises:
      ValueError: a split would be left without prompts.
    """
    self._task = task
    self.name = task.name
    self.report: examples_lib.Report = task.report
    self._kept: dict[str, list[int]] = {}
    self._prompts: dict[tuple[str, int], str] = {}
    fits = lambda text: num_tokens(text) <= max_prompt_tokens
    for split in task.splits:
      kept = self._kept[split] = []
      for index in range(task.num_prompts(split)):
        reason = self._measure(split, index, fits)
        if max_answer_tokens and split == base.TRAIN:
          answer = task.completion_of(task.example(split, index))
          if num_tokens(answer) > max_answer_tokens:
            reason = reason or "answer_too_long"
        if reason:
          place = task.example(split, index).place
          self.report.leave_out(split, reason, place)
        else:
          kept.append(index)
      self.report.used[split] = len(kept)
      if not kept:
        raise ValueError(
            f"config.sampling.max_prompt_tokens={max_prompt_tokens}: every"
            f" prompt of the split {split!r} is longer, or its answer is"
        )

  def _measure(
      self, split: str, index: int, fits: Callable[[str], bool]
  ) -> str:
    """Returns "" or why a prompt is left out; notes a shortened one."""
    if fits(self._task.prompt(split, index)):
      return ""
    shorter = self._task.shortened(split, index, fits)
    if shorter is None:
      return "too_long"
    self._prompts[split, index] = shorter
    return ""

  @property
  def splits(self) -> Sequence[str]:
    return tuple(self._kept)

  def num_prompts(self, split: str) -> int:
    base.check_split(split)
    return len(self._kept.get(split, ()))

  def source_index(self, split: str, index: int) -> int:
    return self._kept[split][index]

  def prompt(self, split: str, index: int) -> str:
    index = self._kept[split][index]
    return self._prompts.get((split, index)) or self._task.prompt(split, index)

  @property
  def has_reward(self) -> bool:
    return self._task.has_reward

  def pairs(self, split: str) -> Sequence[tuple[str, str, str]]:
    return self._task.pairs(split)

  def judge(self, split: str, index: int, completion: str) -> base.Judgement:
    return self._task.judge(split, self._kept[split][index], completion)

  def explain(self, split: str, index: int, completion: str) -> str:
    return self._task.explain(split, self._kept[split][index], completion)

  def solution_key(self, split: str, index: int, completion: str) -> str | None:
    return self.judge(split, index, completion).key

  def reward(self, split: str, index: int, completion: str) -> float:
    return self.judge(split, index, completion).reward

  def reference_completion(
      self, split: str, index: int, rng: np.random.Generator
  ) -> str:
    kept = self._kept[split][index]
    return self._task.reference_completion(split, kept, rng)

  def tokenizer_words(self) -> Sequence[str]:
    return self._task.tokenizer_words()

  @property
  def tokenizer_pattern(self) -> str:
    return self._task.tokenizer_pattern

  @property
  def max_prompt_tokens(self) -> int:
    return self._task.max_prompt_tokens

  @property
  def max_completion_tokens(self) -> int:
    return self._task.max_completion_tokens
