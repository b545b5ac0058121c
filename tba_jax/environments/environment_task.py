# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""A user's multi-turn environment, named in settings.

docs/guides/agents.md builds one: a class, or a function that makes an object,
with

    reset(seed) -> observation
    step(text) -> (observation, reward, done, info)

`environments/turns.py` runs it in separate processes, one per completion. The
first observation is the prompt, the reward of a completion the sum over its
turns.
"""

from collections.abc import Callable, Sequence
import functools
import importlib
import inspect
import math
import pathlib
import re
import string
from typing import Any, ClassVar

from tba_jax.environments import packages
from tba_jax.system import callables
from tba_jax.tasks import base


class EnvironmentTask(base.PromptSet):
  """Seeds of an environment, which provides prompts and rewards.

  source: FILE.py:CLASS or MODULE:CLASS of the environment; or textarena:NAME or
    gem:NAME of one of these packages.
  opponent: FILE.py:NAME or MODULE:NAME of the other player in a two-player
    textarena game: a function of the observed text, or a class of such
    functions; "" = a single-player game.
  train_prompts, test_prompts: number of seeds of each split. Training seeds are
    even, held-out seeds odd.
  max_turns: turns after which a completion ends.
  correct_threshold: minimum reward of a correct completion, unless the
    environment's last `info` has "success".
  """

  name: ClassVar[str] = "environment"
  FIELDS: ClassVar = {
      "source": "",
      "opponent": "",
      "train_prompts": 1000,
      "test_prompts": 200,
      "max_turns": 8,
      "correct_threshold": 1.0,
  }
  # A call of the user's code may hang.
  rewards_where: ClassVar = ("pool",)
  has_turns: ClassVar[bool] = True

  def __init__(self, **fields: Any):
    """Imports the environment's class; takes all of `FIELDS`."""
    for name in ("train_prompts", "test_prompts"):
      base.check_integer(name, fields[name], 1, 2**30)
    base.check_integer("max_turns", fields["max_turns"], 1, 2**30)
    if not math.isfinite(fields["correct_threshold"]):
      raise ValueError(
          f"config.task.correct_threshold={fields['correct_threshold']!r}:"
          " must be a finite number"
      )
    self.max_turns, self.correct_threshold = (
        fields["max_turns"],
        fields["correct_threshold"],
    )
    self._source, self._opponent = fields["source"], fields["opponent"]
    # A program without episodes may lack a class that another program lends.
    if not callables.is_lent(self._source):
      self.make  # pylint: disable=pointless-statement
    self._num_prompts = {
        base.TRAIN: fields["train_prompts"],
        base.HELD_OUT: fields["test_prompts"],
    }

  @functools.cached_property
  def make(self) -> Callable[[], Any]:
    """The environment's class, or a function that makes one."""
    return packages.load(self._source, self._opponent)

  def num_prompts(self, split: str) -> int:
    base.check_split(split)
    return self._num_prompts.get(split, 0)

  def seed(self, split: str, index: int) -> int:
    """Returns the seed of a prompt's environment."""
    base.check_split(split)
    return 2 * index + (split == base.HELD_OUT)

  def is_held_out(self, seed: int) -> bool:
    return seed % 2 == 1

  @property
  def can_demonstrate(self) -> bool:
    """Whether the environment can demonstrate turns, for fine-tuning."""
    return hasattr(self.make, "demonstrate")

  def identity(self) -> list[str]:
    """Returns the source of the environment's file, or a package's version."""
    version = packages.version(self._source)
    if version:
      return [version]
    where, _, name = self._source.rpartition(":")
    if callables.is_lent(self._source):
      return [name]
    try:
      path = inspect.getfile(self.make)
    except TypeError:  # A callable object, such as a partial function.
      is_file = where.endswith(".py")
      path = where if is_file else importlib.import_module(where).__file__
    return [pathlib.Path(path).expanduser().read_text("utf-8")]

  @functools.cached_property
  def _words(self) -> Sequence[str]:
    words = getattr(self.make, "words", tuple(string.printable))
    if isinstance(words, str) or not all(
        isinstance(word, str) and word for word in words
    ):
      raise ValueError(
          f"config.task.source: its `words` are {words!r}: must be a list of"
          " non-empty texts"
      )
    return tuple(dict.fromkeys(words))

  def tokenizer_words(self) -> Sequence[str]:
    """Returns the environment's `words`, by default printable characters."""
    return self._words

  @property
  def tokenizer_pattern(self) -> str:
    longest_first = sorted(self._words, key=len, reverse=True)
    return "|".join([*map(re.escape, longest_first), r"[\s\S]"])

  @property
  def max_prompt_tokens(self) -> int:
    return 1  # An environment's texts are unknown before it runs.

  @property
  def max_completion_tokens(self) -> int:
    return 1
