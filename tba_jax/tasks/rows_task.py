# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""A task over rows of data: what GSM8K and a user's own task have in common."""

from collections.abc import Callable, Iterable, Mapping, Sequence
import functools
import pathlib
import re
from typing import Any

import numpy as np

from tba_jax.system import jsonl
from tba_jax.tasks import base
from tba_jax.tasks import rows as rows_lib

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

  def __init__(self, splits: Mapping[str, list[rows_lib.Example]], report: Any):
    """Takes the examples.

    Raises:
      ValueError: a split is empty or overlaps the test split.
    """
    rows_lib.check_splits(splits, test=base.HELD_OUT, report=report)
    self._splits = splits
    # A part of "train" may have become "validation".
    report.used.update({split: len(found) for split, found in splits.items()})
    self.report = report

  @property
  def splits(self) -> Sequence[str]:
    return tuple(self._splits)

  def example(self, split: str, index: int) -> rows_lib.Example:
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

  def completion_of(self, example: rows_lib.Example) -> str:
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
    sources: Mapping[str, Iterable[rows_lib.Row]],
    make: Any,
    report: rows_lib.Report,
) -> dict[str, list[rows_lib.Example]]:
  """Returns the examples of each split; see `examples_lib.examples`."""
  return {
      split: rows_lib.examples(report, split, rows, make)
      for split, rows in sources.items()
  }


def cut_validation(
    splits: dict[str, list[rows_lib.Example]], num_prompts: int, seed: int
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


# A task over rows without what is too long for the policy.
#
# Only the tokenizer knows how long a prompt is, so this comes after the task is
# made; `source_index` leads back, for the workers that have no tokenizer.


class Limited(base.Task):
  """The prompts of a task that fit, under new indices without gaps.

  report: of the task, with the prompts that were left out here.
  """

  def __init__(
      self,
      task: RowsTask,
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
    self.report: rows_lib.Report = task.report
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


# Tells what was read of a task's data, and what was left out and why.
#
# Nothing to tell of a task that is not made of rows. No JAX here.


FILE = "data.json"


def write_data_report(
    task: base.Task,
    workdir: pathlib.Path,
    on_event: Callable[[str, str], None],
) -> None:
  """Writes WORKDIR/data.json, and an event for each line.

  Args:
    task: as the policy sees it: prompts that are too long are known.
    workdir: of the run.
    on_event: receives ("data", line).
  """
  report = base.report_of(task)
  if report is not None:
    jsonl.atomic_write_json(workdir / FILE, report.to_json())
    for line in report.lines():
      on_event("data", line)


def show_data(task: base.Task) -> None:
  """Prints the lines of the report."""
  report = base.report_of(task)
  if report is not None:
    for line in report.lines():
      print(f"data: {line}", flush=True)
