# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""A task: numbered prompts in two splits, and the reward of a completion."""

import abc
from collections.abc import Callable, Mapping, Sequence
import dataclasses
from typing import Any, ClassVar

import numpy as np

TRAIN = "train"
HELD_OUT = "held_out"
# Of tasks that have one: prompts to choose a checkpoint by.
VALIDATION = "validation"
SPLITS = (TRAIN, HELD_OUT)
# Splits a text into whole numbers and single other characters.
NUMBER_PATTERN = r"[0-9]+|[^0-9]"


class RewardError(Exception):
  """A reward that could not be had, though nothing is wrong with the program.

  cause: one word, counted by it.
  """

  def __init__(self, cause: str, message: str):
    super().__init__(message)
    self.cause = cause


@dataclasses.dataclass(frozen=True)
class Judgement:
  """What a task says of a completion.

  reward: task units.
  key: identity of a right solution, None for a wrong completion.
  parts: the rewards that it is a sum of, by name, before they are weighted.
  failure: "" or in one word why there is no reward of the task's; `reward` is
    then the fallback.
  """

  reward: float
  key: str | None
  parts: Mapping[str, float] = dataclasses.field(default_factory=dict)
  failure: str = ""


class Task(abc.ABC):
  """Prompts plus reward.

  A task is a pure function of its fields: every process that builds it with the
  same fields sees the same prompts under the same indices. Nothing in it
  changes after construction, so threads may share it. Completions are text
  without the stop token.

  name: key of the task in `tasks/build.py`.
  FIELDS: the task's settings with their defaults, by name; each is a keyword of
    the constructor and a key `config.task.<field>`.
  """

  name: ClassVar[str]
  FIELDS: ClassVar[Mapping[str, Any]]

  @property
  def splits(self) -> Sequence[str]:
    """The names of the task's splits."""
    return SPLITS

  @abc.abstractmethod
  def num_prompts(self, split: str) -> int:
    """Returns how many prompts a split has."""

  def source_index(self, split: str, index: int) -> int:
    """Returns a prompt's index in the task that `config.task` makes.

    Another one only where prompts of that task were left out afterwards.
    """
    del split
    return index

  @abc.abstractmethod
  def prompt(self, split: str, index: int) -> str:
    """Returns the text of a prompt, 0 <= index < num_prompts(split)."""

  @abc.abstractmethod
  def solution_key(self, split: str, index: int, completion: str) -> str | None:
    """Returns the identity of a right solution, None for a wrong completion.

    Two completions with one key are the same solution, written differently.
    Never raises and never takes long, whatever the completion is.
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
    """Whether the task itself can judge; else a reward model has to."""
    return True

  def pairs(self, split: str) -> Sequence[tuple[str, str, str]]:
    """Returns (prompt, chosen, rejected) texts for a reward model to learn.

    Raises:
      ValueError: the task makes none.
    """
    raise ValueError(
        f"the task {self.name!r} makes no pairs; name a source of them in"
        f" config.reward_model.{split}"
    )

  def reward_of(self, prompt: str, completion: str) -> float:
    """Returns the reward of a completion of any text as prompt.

    Raises:
      ValueError: the task cannot tell.
    """
    raise ValueError(
        f"the task {self.name!r} has no reward of texts; allowed in"
        " config.reward_model.relabel: '' or a gold model's folder"
    )

  def reward(self, split: str, index: int, completion: str) -> float:
    """Returns 1 for a right completion, else 0; never raises."""
    return float(self.solution_key(split, index, completion) is not None)

  def judge(self, split: str, index: int, completion: str) -> Judgement:
    """Returns reward and key together; what `rewards/` calls.

    A task that runs code of others may raise here, or never return: in a pool
    of workers that costs the completion its reward, and nothing else.
    """
    return Judgement(
        self.reward(split, index, completion),
        self.solution_key(split, index, completion),
    )

  def leave_out_long(
      self, num_tokens: Callable[[str], int], max_tokens: int
  ) -> None:
    """Leaves out what fine-tuning would learn to write and that is too long.

    Nothing here; a task over rows has it done by `limited.py`.

    Args:
      num_tokens: of a text.
      max_tokens: that a reference completion may have, without a stop token.

    Raises:
      ValueError: nothing would be left.
    """
    del num_tokens, max_tokens

  def explain(self, split: str, index: int, completion: str) -> str:
    """Returns in a few words why a completion is wrong, for a person to read.

    "" where it is right, and where the task knows no reason. A pure function,
    bounded in time; it is called for the few completions that are shown, never
    for all that are trained on.
    """
    del split, index, completion
    return ""


def reference_text(task: Task, split: str, index: int) -> str:
  """Returns the completion that those of a prompt are compared with."""
  return task.reference_completion(split, index, np.random.default_rng(0))


def has_report(task: Task) -> bool:
  """Tells whether a task is made of rows of data, and reports on them."""
  return getattr(task, "report", None) is not None


def report_of(task: Task) -> Any:
  """Returns what was read of a task's data; None where code makes all of it."""
  rows = getattr(task, "report", None)
  return rows or getattr(task, "instructions_report", None)


def split_while_training(task: Task) -> str:
  """Returns the split to evaluate on while training.

  The validation split where there is one: what is chosen by it (a checkpoint,
  an end of training) must not be chosen by the test split.
  """
  return VALIDATION if VALIDATION in task.splits else HELD_OUT


def check_split(split: str) -> None:
  """Raises ValueError where `split` is no name of a split."""
  allowed = (*SPLITS, VALIDATION)
  if split not in allowed:
    raise ValueError(f"split {split!r}: allowed {list(allowed)}")


def check_integer(field: str, value: Any, low: int, high: int) -> None:
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


def number_words(max_number: int, symbols: str) -> list[str]:
  """Returns the words "0" … "max_number" and one word per symbol."""
  return [str(n) for n in range(max_number + 1)] + list(symbols)
