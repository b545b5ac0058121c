# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Builds a task from its name: a key of `TASKS`, or `MODULE:CLASS`.

Every process of a run builds the task, so a user's module has to be importable
in each (PYTHONPATH, or the folder that `train` starts in).
"""

from collections.abc import Iterator, Mapping, Sequence
import importlib
import pathlib
import re
from typing import Any

import ml_collections

from tba_jax.models import folders
from tba_jax.models import hf_hub
from tba_jax.tasks import base

# Imported when they are used, lest a run load the packages of all of them.
TASKS: Mapping[str, str] = {
    "arithmetic": "tba_jax.tasks.arithmetic:Arithmetic",
    "chat": "tba_jax.tasks.chat:Chat",
    "countdown": "tba_jax.tasks.countdown:Countdown",
    "countdown_sparse": "tba_jax.tasks.countdown:CountdownSparse",
    "environment": "tba_jax.tasks.environment:Environment",
    "gsm8k": "tba_jax.tasks.gsm8k:Gsm8k",
    "ifbench": "tba_jax.tasks.ifbench:IfBench",
    "instructions": "tba_jax.tasks.instructions:Instructions",
    "math": "tba_jax.tasks.math:Math",
    "custom": "tba_jax.tasks.own:Own",
    "preference": "tba_jax.tasks.preference:Preference",
    "reasoning_gym": "tba_jax.tasks.reasoning_gym:ReasoningGym",
    "red_team": "tba_jax.tasks.red_team:RedTeam",
    "tldr": "tba_jax.tasks.tldr:Tldr",
}


def find(name: Any) -> type[base.Task]:
  """Returns the class that `config.task.name` names."""
  path = TASKS.get(name, name) if isinstance(name, str) else name
  module, colon, attribute = str(path).partition(":")
  if not colon:
    raise ValueError(
        f"config.task.name={name!r}: allowed {sorted(TASKS)}, or 'MODULE:CLASS'"
        " of a task of your own"
    )
  try:
    cls = getattr(importlib.import_module(module), attribute)
  except Exception as error:  # User code may raise anything.
    raise ValueError(
        f"config.task.name={name!r}: allowed a class that can be imported,"
        f" from a folder in PYTHONPATH; {type(error).__name__}: {error}"
    ) from error
  if not (isinstance(cls, type) and issubclass(cls, base.Task)):
    raise ValueError(
        f"config.task.name={name!r}: allowed a subclass of"
        " tba_jax.tasks.base.Task"
    )
  return cls


def facts(name: Any) -> type[base.Task]:
  """Returns the class of a task for its facts; `base.Task` if unknown."""
  try:
    return find(name)
  except ValueError:
    return base.Task


def fields(name: Any) -> dict[str, Any] | None:
  """Returns the fields of a task with their defaults; None if unknown."""
  try:
    return dict(find(name).FIELDS)
  except ValueError:
    return None


def with_defaults(task: Mapping[str, Any]) -> dict[str, Any]:
  """Returns `config.task` with the defaults of fields that it leaves out."""
  return {**find(task["name"]).FIELDS, **task}


def make_task(config_task: ml_collections.ConfigDict) -> base.Task:
  """Returns the task of `config.task`: a name, and fields over its defaults.

  Raises ValueError for an unknown name or field, or a value not allowed.
  """
  given = dict(config_task)
  name = given.pop("name", None)
  task_class = find(name)
  for field, value in given.items():
    if field not in task_class.FIELDS:
      raise ValueError(
          f"config.task.{field}={value!r}: not a field of the task {name!r};"
          f" allowed {sorted(task_class.FIELDS)}"
      )
  values = {**task_class.FIELDS, **given}
  if "split_seed" in values:
    base.check_integer("split_seed", values["split_seed"])
  return task_class(**values)


class _Words:
  """Tokenizer of a task's own words for lengths of texts: all ids are 0."""

  def __init__(self, task: base.Task):
    self._words = re.compile(task.tokenizer_pattern, re.S)

  def encode(self, text: str) -> list[int]:
    return [0] * len(self._words.findall(text))

  def encode_prompt(
      self, prompt: base.Prompt, tools: Sequence[Any] = ()
  ) -> list[int]:
    """Returns the ids of a prompt; ValueError if it is of messages."""
    del tools  # Only messages have them.
    if not isinstance(prompt, str):
      raise ValueError(
          "prompts of messages need a tokenizer with a chat template: that of"
          " a pretrained model, or config.tokenizer.source"
      )
    return self.encode(prompt)


def print_data(
    config: ml_collections.ConfigDict, *, shows_prompt: bool = False
) -> None:
  """Prints rows used and left out of a task's data, and warnings.

  Args:
    config: config of the run.
    shows_prompt: whether to print the first training prompt in full, as a
      pretrained model reads it; a held-out one where there is no other. None of
      an environment.

  Raises:
    ValueError: the data, the tokenizer or the first prompt cannot be read.
  """
  folder = tokenizer_folder(config)
  reads_data = find(config.task.name).reads_data
  if not reads_data and (folder == "task" or not _has_tokenizer(folder)):
    return
  task = make_task(config.task)
  if folder == "task":
    task.warn_of_unseen_words()
  tokenizer = prompt_tokenizer(config, task)
  if task.report is not None:
    task.drop_long(tokenizer, config.sampling.max_prompt_tokens)
    for line in task.report.lines():
      print(f"data: {line}", flush=True)
  # An environment says its prompts in a process of its own.
  if folder != "task" and not task.has_turns:
    split = base.TRAIN if task.num_prompts(base.TRAIN) else base.HELD_OUT
    for line in _prompt_lines(task.prompt(split, 0), split, tokenizer):
      if shows_prompt:
        print(line, flush=True)


def tokenizer_folder(config: ml_collections.ConfigDict) -> str:
  """Returns the folder of the policy's tokenizer; "task": the task's words."""
  start = config.sft.init if config.init == "sft" else config.init
  folder = config.tokenizer.source
  if folder == "task" and start != "scratch":
    folder = str(pathlib.Path(start).expanduser())
  return folder


def prompt_tokenizer(config: ml_collections.ConfigDict, task: base.Task) -> Any:
  """Returns a tokenizer that encodes prompts as the policy's does.

  Of a task's own words it is a light one, which knows lengths alone.

  Raises:
    ValueError: the tokenizer cannot be read.
  """
  folder = tokenizer_folder(config)
  if folder == "task":
    return _Words(task)
  # Takes seconds to import.
  from tba_jax.models import tokenizer as tokenizer_lib  # pylint: disable=g-import-not-at-top

  return tokenizer_lib.load(
      folder, bos=config.tokenizer.bos, chat=config.tokenizer.chat
  )


def _has_tokenizer(folder: str) -> bool:
  path = hf_hub.find(folder, weights=False)
  return folders.has_tokenizer(path)


def _prompt_lines(
    prompt: base.Prompt, split: str, tokenizer: Any
) -> Iterator[str]:
  """Yields a prompt as the model reads it; raises ValueError if it cannot."""
  ids = tokenizer.encode_prompt(prompt)
  how = "a text, as it is"
  if tokenizer.prompt_text(prompt) != prompt:
    how = "in the chat template"
  elif tokenizer.chat_template:
    how += ": the tokenizer has a chat template, for prompts of messages"
  yield f"prompt: the first of {split}, {how}, {len(ids)} tokens:"
  yield tokenizer.decode(ids)
  yield f"prompt: its ids: {' '.join(map(str, ids))}"
