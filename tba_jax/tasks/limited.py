# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""A task over rows without the prompts that are too long for the policy.

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
  ):
    """Measures every prompt.

    Args:
      task: whose prompts are measured.
      num_tokens: of a prompt, as the policy's tokenizer encodes it.
      max_prompt_tokens: that a prompt may have.

    Raises:
      ValueError: a split would be left without prompts.
    """
    self._task = task
    self.name = task.name
    self.report: examples_lib.Report = task.report
    self._kept: dict[str, list[int]] = {}
    for split in task.splits:
      kept = self._kept[split] = []
      for index in range(task.num_prompts(split)):
        if num_tokens(task.prompt(split, index)) <= max_prompt_tokens:
          kept.append(index)
        else:
          place = task.example(split, index).place
          self.report.leave_out(split, "too_long", place)
      self.report.used[split] = len(kept)
      if not kept:
        raise ValueError(
            f"config.sampling.max_prompt_tokens={max_prompt_tokens}: every"
            f" prompt of the split {split!r} is longer"
        )

  @property
  def splits(self) -> Sequence[str]:
    return tuple(self._kept)

  def num_prompts(self, split: str) -> int:
    base.check_split(split)
    return len(self._kept.get(split, ()))

  def source_index(self, split: str, index: int) -> int:
    return self._kept[split][index]

  def prompt(self, split: str, index: int) -> str:
    return self._task.prompt(split, self._kept[split][index])

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
