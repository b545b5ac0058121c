# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""A task: numbered prompts in two splits, and the reward of a completion."""

import abc
from collections.abc import Mapping, Sequence
import dataclasses
from typing import Any, ClassVar

import numpy as np

TRAIN = "train"
HELD_OUT = "held_out"
VALIDATION = "validation"  # to choose a checkpoint by; not every task has it
SPLITS = (TRAIN, HELD_OUT)


class RewardError(Exception):
  """A completion has no reward; failures are counted by `cause`, one word."""

  def __init__(self, cause: str, message: str):
    super().__init__(message)
    self.cause = cause


@dataclasses.dataclass(frozen=True)
class Judgement:
  """Reward of a completion.

  reward: task units.
  key: identity of a right solution, None for a wrong completion.
  parts: unweighted terms of the reward, by name.
  failure: "" or the cause of a missing reward; `reward` is then the fallback.
  """

  reward: float
  key: str | None
  parts: Mapping[str, float] = dataclasses.field(default_factory=dict)
  failure: str = ""


class Task(abc.ABC):
  """Prompts plus reward.

  A pure function of its fields: every process that builds it with the same
  fields sees the same prompts under the same indices. Threads may share it.
  Completions are text without the stop token.

  name: key of the task in `tasks/build.py`.
  FIELDS: settings with their defaults; each is a keyword of the constructor
    and a key `config.task.<field>`.
  reads_data: whether it reads files and has a `report` of them.
  report: `rows.DataReport`, None for a task that code generates.
  """

  name: ClassVar[str]
  FIELDS: ClassVar[Mapping[str, Any]]
  reads_data: ClassVar[bool] = False
  report: Any = None

  @property
  def splits(self) -> Sequence[str]:
    return SPLITS

  @abc.abstractmethod
  def num_prompts(self, split: str) -> int:
    """Returns how many prompts a split has."""

  def source_index(self, split: str, index: int) -> int:
    """Returns a prompt's index before `drop_long` removed any."""
    del split
    return index

  @abc.abstractmethod
  def prompt(self, split: str, index: int) -> str:
    """Returns the text of a prompt, 0 <= index < num_prompts(split)."""

  @abc.abstractmethod
  def solution_key(self, split: str, index: int, completion: str) -> str | None:
    """Returns the identity of a right solution, None for a wrong completion.

    Two spellings of one solution have one key. Must not raise and must take
    bounded time, whatever the completion is.
    """

  @abc.abstractmethod
  def reference_completion(
      self, split: str, index: int, rng: np.random.Generator
  ) -> str:
    """Returns a right completion drawn with `rng`, without the stop token."""

  @abc.abstractmethod
  def tokenizer_words(self) -> Sequence[str]:
    """Returns every word of prompts and completions; a word is one token."""

  @property
  @abc.abstractmethod
  def tokenizer_pattern(self) -> str:
    """Regular expression whose matches split a text into words."""

  @property
  @abc.abstractmethod
  def max_prompt_tokens(self) -> int:
    """Tokens of the longest prompt."""

  @property
  @abc.abstractmethod
  def max_completion_tokens(self) -> int:
    """Tokens of the longest right completion, with the stop token."""

  @property
  def has_reward(self) -> bool:
    """Whether the task can judge; otherwise a reward model has to."""
    return True

  def pairs(self, split: str) -> Sequence[tuple[str, str, str]]:
    """Returns (prompt, chosen, rejected) texts to train a reward model on."""
    raise ValueError(
        f"config.reward_model.{split}='task': the task {self.name!r} makes no"
        " pairs; name a source of them"
    )

  def reward_of(self, prompt: str, completion: str) -> float:
    """Returns the reward of a completion of any prompt text."""
    raise ValueError(
        "config.reward_model.relabel='task': not supported by the task"
        f" {self.name!r}; allowed '' or a gold model's folder"
    )

  def reward(self, split: str, index: int, completion: str) -> float:
    """Returns 1 for a right completion, else 0; never raises."""
    return float(self.solution_key(split, index, completion) is not None)

  def judge(self, split: str, index: int, completion: str) -> Judgement:
    """Returns reward and key together.

    May raise or hang if it runs user code: a worker pool then counts one
    failure for this completion.
    """
    return Judgement(
        self.reward(split, index, completion),
        self.solution_key(split, index, completion),
    )

  def drop_long(
      self, tokenizer: Any, max_prompt_tokens: int, max_answer_tokens: int = 0
  ) -> None:
    """Drops prompts and training answers that exceed the policy's limits.

    Args:
      tokenizer: has `encode_prompt` and `encode`.
      max_prompt_tokens: longest prompt.
      max_answer_tokens: longest reference completion of a training prompt,
        without the stop token; 0 = no limit.

    Raises:
      ValueError: a split would be left empty.
    """

  def explain(self, split: str, index: int, completion: str) -> str:
    """Returns briefly why a completion is wrong, "" if right or unknown.

    Called only for samples that are shown; takes bounded time.
    """
    del split, index, completion
    return ""


def reference_text(task: Task, split: str, index: int) -> str:
  """Returns the reference that win-rates compare a completion with."""
  return task.reference_completion(split, index, np.random.default_rng(0))


def split_while_training(task: Task) -> str:
  """Returns the split to evaluate on while training.

  The validation split where there is one, so that no checkpoint is chosen by
  the test split.
  """
  return VALIDATION if VALIDATION in task.splits else HELD_OUT


def check_split(split: str) -> None:
  """Raises ValueError unless `split` is the name of a split."""
  allowed = (*SPLITS, VALIDATION)
  if split not in allowed:
    raise ValueError(f"split {split!r}: allowed {list(allowed)}")


def check_choice(field: str, value: Any, allowed: Sequence[str]) -> None:
  """Raises ValueError unless `config.task.<field>` is one of `allowed`."""
  if value not in allowed:
    raise ValueError(
        f"config.task.{field}={value!r}: allowed {sorted(allowed)}"
    )


def check_integer(
    field: str, value: Any, low: int = 0, high: int = 2**63 - 1
) -> None:
  """Raises ValueError unless `config.task.<field>` is an int in [low, high]."""
  is_integer = isinstance(value, int) and not isinstance(value, bool)
  if not is_integer or not low <= value <= high:
    raise ValueError(
        f"config.task.{field}={value!r}: allowed an integer from {low} to"
        f" {high}"
    )


def check_fraction(field: str, value: Any) -> None:
  """Raises ValueError unless `config.task.<field>` is a number in (0, 1)."""
  is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
  if not is_number or not 0 < value < 1:
    raise ValueError(
        f"config.task.{field}={value!r}: allowed a number above 0 and below 1"
    )
