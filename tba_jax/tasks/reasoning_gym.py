# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Problems from the package `reasoning_gym`, scored by the package.

The package generates over a hundred kinds of problems, from sums to puzzles
(Stojanovski et al. 2025, arXiv:2505.24760).
"""

from collections.abc import Iterator, Mapping
import dataclasses
import importlib
import json
import types
from typing import Any, ClassVar

from tba_jax.tasks import answers
from tba_jax.tasks import base
from tba_jax.tasks import rows
from tba_jax.tasks import rows_task

_PREFIX = "reasoning_gym:"
# A problem is a function of its index plus the seed.
_SEEDS = 1_000_000
_MAX_PROBLEMS = _SEEDS // 2


def _package(name: str = "reasoning_gym") -> types.ModuleType:
  """Imports the package, which takes seconds.

  Raises ValueError if it is missing.
  """
  try:
    return importlib.import_module(name)
  except ImportError as error:
    raise ValueError(
        f"config.task.source needs the package `reasoning_gym` ({error}): pip"
        " install 'tba_jax[reasoning_gym]'"
    ) from error


@dataclasses.dataclass(frozen=True)
class _Problems:
  """Problems from a data set of the package, as rows."""

  name: str
  data: Any

  def __str__(self) -> str:
    return f"config.task.source={self.name!r}"

  def __iter__(self) -> Iterator[rows.Row]:
    for number in range(len(self.data)):
      yield rows.Row(f"{self.name}:{number}", dict(self.data[number]))


class ReasoningGym(rows_task.RowsTask):
  """Problems from a data set of `reasoning_gym`.

  A solution is correct if the data set's scorer gives it 1; lower scores are
  rewards too.

  source: name of the data set, such as "reasoning_gym:chain_sum".
  arguments: JSON object with arguments of the data set, such as
    '{"min_terms": 2}'; the "datasets" of "composite" are a list of objects with
    "name", "weight" and "config".
  tags: whether the answer is the text between <answer> and </answer>, which a
    system message asks for, instead of the whole completion.
  train_prompts: number of training problems before duplicates are dropped.
  held_out_prompts: number of held-out problems before duplicates are dropped.
  split_seed: seed of the problems.
  """

  name: ClassVar[str] = "reasoning_gym"
  max_reward: ClassVar[float | None] = 1.0
  FIELDS: ClassVar = {
      "source": "reasoning_gym:chain_sum",
      "arguments": "{}",
      "tags": False,
      "train_prompts": 1000,
      "held_out_prompts": 200,
      "split_seed": 0,
  }
  packages: ClassVar = {"reasoning_gym": "reasoning_gym"}

  def __init__(
      self,
      *,
      source: str,
      arguments: str,
      tags: bool,
      train_prompts: int,
      held_out_prompts: int,
      split_seed: int,
  ):
    base.check_integer("train_prompts", train_prompts, 1, _MAX_PROBLEMS)
    base.check_integer("held_out_prompts", held_out_prompts, 1, _MAX_PROBLEMS)
    self._tags = tags
    name = source.removeprefix(_PREFIX)
    seed = _SEEDS * split_seed
    make = lambda size, seed: _make_data(name, arguments, size, seed)
    self._data = {
        base.TRAIN: make(train_prompts, seed),
        base.HELD_OUT: make(held_out_prompts, seed + _MAX_PROBLEMS),
    }
    super().__init__(
        {split: _Problems(name, data) for split, data in self._data.items()},
        overlap="leave_out",
    )

  def _make(self, fields: Mapping[str, Any]) -> tuple[Any, str] | str:
    prompt = question = fields["question"]
    if self._tags:
      system = _package("reasoning_gym.utils").SYSTEM_PROMPTS["default"]
      prompt = [
          {"role": "system", "content": system},
          {"role": "user", "content": question},
      ]
    # Some data sets can score answers but do not provide a solution.
    return prompt, fields["answer"] or ""

  def _what_differs(self, fields: Mapping[str, Any]) -> Any:
    return None  # The other fields only number the problems.

  def completion_of(self, example: rows_task.Example) -> str:
    return (
        f"<answer>{example.answer}</answer>" if self._tags else example.answer
    )

  def judge(self, split: str, index: int, completion: str) -> base.Judgement:
    answer = answers.after_thinking(completion).strip()
    if self._tags:
      answer = _package("reasoning_gym.utils").extract_answer(answer)
    score = 0.0
    if answer:
      try:
        entry = dict(self.example(split, index).fields)
        score = float(self._data[split].score_answer(answer, entry))
      except Exception:  # Scorers raise on texts that they cannot parse.
        score = 0.0
    return base.judgement_of(score, score >= 1, completion)

  def explain(self, split: str, index: int, completion: str) -> str:
    right = self.example(split, index).answer
    if not right or self.judge(split, index, completion).key is not None:
      return ""
    return f'wanted "{right}"'


def _make_data(name: str, arguments: str, size: int, seed: int) -> Any:
  """Returns a data set of the package.

  Raises ValueError for an unknown name or argument.
  """
  package = _package()
  known = importlib.import_module("reasoning_gym.factory").DATASETS
  if name not in known:
    raise ValueError(
        f"config.task.source={name!r}: must be one of"
        f" {', '.join(sorted(known))}"
    )
  key = f"config.task.arguments={arguments!r}"
  try:
    config = json.loads(arguments)
  except ValueError as error:
    raise ValueError(f"{key}: must be a JSON object; {error}") from error
  if not isinstance(config, dict):
    raise ValueError(f"{key}: must be a JSON object")
  try:
    if "datasets" in config:
      spec = importlib.import_module("reasoning_gym.composite").DatasetSpec
      config["datasets"] = [spec(**entry) for entry in config["datasets"]]
    return package.create_dataset(name, **config, size=size, seed=seed)
  except (AssertionError, TypeError, ValueError) as error:
    fields = [f.name for f in dataclasses.fields(known[name][1])]
    fields = [field for field in fields if field not in ("size", "seed")]
    raise ValueError(
        f"{key}: {error}; the arguments of {name} are {', '.join(fields)}"
    ) from error
