# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""A task: numbered prompts in two splits, and the reward of a completion.

A prompt is either a text, which the model reads unchanged, or a list of
messages, which the model's chat template formats:

    [{"role": "system", "content": "Answer in one word."},
     {"role": "user", "content": "What is the capital of France?"}]

Roles are system, user and assistant (earlier turns); the last message is the
user's. The model reads the result of transformers'
`apply_chat_template(messages, add_generation_prompt=True)`, which
`--program=plan` shows, and the token that ends a turn in the template ends a
completion. A tokenizer without a template accepts only texts. With
`tokenizer.chat`, a text is treated as a user message. Rewards, and judges with
a tokenizer of their own, get the prompt as the task defines it.
"""

import abc
from collections.abc import Mapping, Sequence
import dataclasses
import decimal
import hashlib
import json
import numbers
import re
from typing import Any, ClassVar

import numpy as np

# {"role": …, "content": …} of each turn.
Messages = Sequence[Mapping[str, str]]
Prompt = str | Messages

TRAIN = "train"
HELD_OUT = "held_out"
VALIDATION = "validation"  # selects checkpoints; not every task has it
SPLITS = (TRAIN, HELD_OUT)
# Number of training prompts that processes compare to check their tasks.
_NUM_COMPARED = 64
# Rewards are stored as float32.
MAX_REWARD = float(np.finfo(np.float32).max)
ROLES = ("system", "user", "assistant")
# Part of a reward that the model at `reward.url` gives.
JUDGE = "judge"


class RewardError(Exception):
  """No reward for a completion; failures are counted by `cause`, one word."""

  def __init__(self, cause: str, message: str):
    super().__init__(message)
    self.cause = cause


@dataclasses.dataclass(frozen=True)
class Judgement:
  """Reward of a completion.

  reward: task units; NaN if the completion could not be judged, see
    `rewards/judges.py`.
  key: identity of a correct solution; None for a wrong completion.
  parts: unweighted terms of the reward, and metrics, by name.
  failure: cause of a missing reward, otherwise "".
  """

  reward: float
  key: str | None
  parts: Mapping[str, float] = dataclasses.field(default_factory=dict)
  failure: str = ""


def metrics_of(values: Any, what: str) -> dict[str, float]:
  """Returns the named numbers that user code returned, for `reward/NAME`.

  Args:
    values: mapping from name to number.
    what: source of the values, for messages.

  Raises:
    RewardError: the value is not such a mapping.
  """
  if not isinstance(values, Mapping) or not all(
      isinstance(name, str) and re.fullmatch(r"[\w.-]+", name)
      for name in values
  ):
    raise RewardError(
        "error",
        f"{what} returned {repr(values)[:80]} as metrics: must be a dict of"
        " numbers by name, of letters, digits and _ . -",
    )
  return {name: number(x, f"{what}: {name}") for name, x in values.items()}


def number(value: Any, what: str) -> float:
  """Returns a reward or a part of one as a float; used by all judges.

  A bool is 0 or 1. A text is not a number: an unparsed "1" is a bug in the
  reward's code.

  Args:
    value: a number, a bool, a NumPy scalar, or an array or tensor of one.
    what: source of the value, for the message.

  Raises:
    RewardError: the value is not a number, or not finite in float32.
  """
  try:
    item = value.item() if hasattr(value, "item") else value
    if isinstance(item, (numbers.Real, decimal.Decimal)):
      if abs(out := float(item)) <= MAX_REWARD:
        return out
  except (TypeError, ValueError, RuntimeError, OverflowError):
    pass
  raise RewardError(
      "nan", f"{what} returned {repr(value)[:80]}: must be a finite number"
  )


def judgement_of(reward: float, is_right: bool, completion: str) -> Judgement:
  """Returns a judgement; texts that differ only in white space share a key."""
  return Judgement(reward, " ".join(completion.split()) if is_right else None)


class PromptSet(abc.ABC):
  """Numbered prompts: the base class of all tasks.

  A pure function of its fields: every process sees the same prompts under the
  same indices. Thread-safe. Either a `Task`, or an `EnvironmentTask` whose
  prompts and rewards come from environments in other processes.

  name: key of the task in `tasks/task_table.py`.
  FIELDS: settings and their defaults: keywords of the constructor, and keys
    `config.task.<field>`.
  reads_data: whether the task reads files and has a `report`.
  rewards_where: allowed values of `config.reward.backend`; () allows all.
  packages: required packages, each with the extra that installs it.
  more_splits: additional held-out splits, evaluated before and after training.
  has_turns: whether environments answer completions, as in
    `environments/environment_task.py`.
  has_embeddings: whether the judge embeds completions, for the replay filter.
  max_reward: largest reward of a completion; None = unknown.
  report: `rows.DataReport`; None for generated data.
  """

  name: ClassVar[str]
  FIELDS: ClassVar[Mapping[str, Any]]
  reads_data: ClassVar[bool] = False
  rewards_where: ClassVar[tuple[str, ...]] = ()
  packages: ClassVar[Mapping[str, str]] = {}
  more_splits: ClassVar[tuple[str, ...]] = ()
  has_turns: ClassVar[bool] = False
  has_embeddings: ClassVar[bool] = False
  max_reward: ClassVar[float | None] = None
  report: Any = None

  @property
  def splits(self) -> Sequence[str]:
    return SPLITS

  @abc.abstractmethod
  def num_prompts(self, split: str) -> int:
    """Returns the number of prompts in a split."""

  def source_index(self, split: str, index: int) -> int:
    """Returns a prompt's index before `drop_long`."""
    del split
    return index

  @abc.abstractmethod
  def identity(self) -> list[Any]:
    """Returns values that processes compare to check that their tasks agree."""

  def digest(self) -> str:
    """Returns a digest of the number of training prompts and the identity."""
    facts = [self.num_prompts(TRAIN), self.identity()]
    text = json.dumps(facts, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]

  @abc.abstractmethod
  def tokenizer_words(self) -> Sequence[str]:
    """Returns the words of all prompts and completions, one token each."""

  def warn_of_unseen_words(self) -> None:
    """Adds a warning to `report` about words that training never sees."""

  @property
  @abc.abstractmethod
  def tokenizer_pattern(self) -> str:
    """Regular expression whose matches are the words of a text."""

  @property
  @abc.abstractmethod
  def max_prompt_tokens(self) -> int:
    """Number of tokens of the longest prompt."""

  @property
  @abc.abstractmethod
  def max_completion_tokens(self) -> int:
    """Tokens of the longest correct completion, including the stop token."""

  @property
  def has_reward(self) -> bool:
    """Whether the task has a reward; if not, a reward model is needed."""
    return True

  @property
  def has_judge(self) -> bool:
    """Whether the model at `reward.url` gives a part of the reward."""
    return False

  @property
  def part_weights(self) -> Mapping[str, float]:
    """Weights of the parts whose weighted sum is the reward, by name.

    The result is {} if the reward is not such a sum.
    """
    return {}

  def pairs(self, split: str) -> Sequence[tuple[Prompt, str, str]]:
    """Returns (prompt, chosen, rejected) to train a reward model."""
    raise ValueError(
        f"config.reward_model.{split}='task': the task {self.name!r} makes no"
        " pairs; name a source of them"
    )

  def pair_texts(self, fields: Mapping[str, Any]) -> tuple[Any, Any, Any]:
    """Returns a row's prompt, chosen and rejected, which may not be texts."""
    prompt = fields.get("prompt", fields.get("query", ""))
    return prompt, fields.get("chosen"), fields.get("rejected")

  def reward_of(self, prompt: Prompt, completion: str) -> float:
    """Returns the reward of a completion for any prompt."""
    raise ValueError(
        "config.reward_model.relabel='task': not supported by the task"
        f" {self.name!r}; must be '' or a gold model's folder"
    )

  @property
  def judges_groups(self) -> bool:
    """Whether `judge_group` judges a prompt's completions together."""
    return False

  def final_rewards(
      self, rewards_S: np.ndarray, ref_logprobs: np.ndarray, mask: np.ndarray
  ) -> np.ndarray:
    """Returns training rewards that depend on the reference's log-probs.

    Called only with `reference.role` "searcher".

    Args:
      rewards_S: [S] float32, rewards of a prompt's completions.
      ref_logprobs: [S, T] float32, log π_ref of their tokens, nats; NaN if
        unknown.
      mask: [S, T] bool, true on policy tokens.
    """
    del ref_logprobs, mask
    return rewards_S

  def drop_long(
      self, tokenizer: Any, max_prompt_tokens: int, max_answer_tokens: int = 0
  ) -> None:
    """Drops prompts and training answers that exceed the policy's limits.

    Args:
      tokenizer: object with `encode_prompt`, `encode` and `encode_answered`.
      max_prompt_tokens: maximum length of a prompt.
      max_answer_tokens: maximum length of a training prompt's reference
        completion, without the stop token; for messages, the tokens from the
        assistant's first turn on; 0 means no limit.

    Raises:
      ValueError: a split becomes empty.
    """


class Task(PromptSet):
  """Prompts and rewards. Completions are text without the stop token."""

  @abc.abstractmethod
  def prompt(self, split: str, index: int) -> Prompt:
    """Returns prompt `index`, a text or messages, see the module docstring."""

  def identity(self) -> list[Any]:
    """Returns evenly spaced prompts."""
    size = self.num_prompts(TRAIN)
    rows = range(0, size, max(1, size // _NUM_COMPARED))
    return [self.prompt(TRAIN, index) for index in rows]

  @abc.abstractmethod
  def solution_key(self, split: str, index: int, completion: str) -> str | None:
    """Returns the identity of a correct solution; None if it is wrong.

    Different spellings of a solution share a key. Must not raise, and must take
    bounded time on any completion.
    """

  @abc.abstractmethod
  def reference_completion(
      self, split: str, index: int, rng: np.random.Generator
  ) -> str:
    """Returns a correct completion drawn with `rng`, without the stop token."""

  def reward(self, split: str, index: int, completion: str) -> float:
    """Returns 1 for a correct completion, else 0; never raises."""
    return float(self.solution_key(split, index, completion) is not None)

  def judge(self, split: str, index: int, completion: str) -> Judgement:
    """Returns the reward and key together.

    May raise or hang if it runs user code; a worker pool counts that as a
    failure of this completion only.
    """
    key = self.solution_key(split, index, completion)
    if type(self).reward is Task.reward:  # A function of the key alone.
      return Judgement(float(key is not None), key)
    return Judgement(self.reward(split, index, completion), key)

  def judge_group(
      self,
      split: str,
      index: int,
      completions: Sequence[str],
      completion_ids: Sequence[Sequence[int]] = (),
  ) -> list[Judgement | RewardError]:
    """Returns the judgement of each completion, or an error without one.

    `completion_ids` are the tokens of each completion, with the stop token.
    """
    del completion_ids
    judged = []
    for completion in completions:
      try:
        judged.append(self.judge(split, index, completion))
      except RewardError as error:
        judged.append(error)
    return judged

  def judge_cut_off(self, split: str, index: int, completion: str) -> Judgement:
    """Returns the judgement of a completion without a stop token.

    By default, it is the same as with one.
    """
    return self.judge(split, index, completion)

  def prepare_judging(self) -> None:
    """Loads what `judge` needs, before a reward worker's deadlines start."""

  def explain(self, split: str, index: int, completion: str) -> str:
    """Returns a short reason why a completion is wrong; "" if there is none.

    Called only for displayed samples; takes bounded time.
    """
    del split, index, completion
    return ""


def are_messages(value: Any) -> bool:
  """Returns whether a value is one or more messages with known roles."""
  return (
      isinstance(value, Sequence)
      and not isinstance(value, str)
      and len(value) > 0
      and all(
          isinstance(m, Mapping)
          and m.get("role") in ROLES
          and isinstance(m.get("content"), str)
          for m in value
      )
  )


def reward_names(rewards: str) -> list[str]:
  """Returns the names that `task.rewards` lists, without their weights."""
  return [part.partition("*")[0].strip() for part in rewards.split(",")]


def plain_text(prompt: Prompt) -> str:
  """Returns a prompt's text without a template, with one line per message."""
  if isinstance(prompt, str):
    return prompt
  return "\n".join(f"{m['role']}: {m['content']}" for m in prompt)


def reference_text(task: Task, split: str, index: int) -> str:
  """Returns the reference completion that win-rates compare with."""
  return task.reference_completion(split, index, np.random.default_rng(0))


def split_while_training(task: PromptSet) -> str:
  """Returns the split to evaluate on during training.

  This is the validation split if the task has one, so that the test split is
  never used to select checkpoints.
  """
  return VALIDATION if VALIDATION in task.splits else HELD_OUT


def check_split(split: str, more: Sequence[str] = ()) -> None:
  """Raises ValueError for a split that is neither known nor one of `more`."""
  allowed = (*SPLITS, VALIDATION, *more)
  if split not in allowed:
    raise ValueError(f"split {split!r}: must be {list(allowed)}")


def check_choice(field: str, value: Any, allowed: Sequence[str]) -> None:
  """Raises ValueError unless `config.task.<field>` is one of `allowed`."""
  if value not in allowed:
    raise ValueError(
        f"config.task.{field}={value!r}: must be one of {sorted(allowed)}"
    )


def check_integer(
    field: str, value: Any, low: int = 0, high: int = 2**63 - 1
) -> None:
  """Raises ValueError unless `config.task.<field>` is an int in [low, high]."""
  is_integer = isinstance(value, int) and not isinstance(value, bool)
  if not is_integer or not low <= value <= high:
    raise ValueError(
        f"config.task.{field}={value!r}: must be an integer from {low} to"
        f" {high}"
    )


def check_fraction(field: str, value: Any) -> None:
  """Raises ValueError unless `config.task.<field>` is a number in (0, 1)."""
  is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
  if not is_number or not 0 < value < 1:
    raise ValueError(
        f"config.task.{field}={value!r}: must be a number above 0 and below 1"
    )
