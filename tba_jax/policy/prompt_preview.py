# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""What the policy will read: its tokenizer, the task's data, the first prompt.

Does not import JAX.
"""

from collections.abc import Iterator, Mapping, Sequence
import pathlib
import re
from typing import Any

import ml_collections

from tba_jax.chat_api import tool_calls
from tba_jax.models.hf import folders
from tba_jax.models.hf import hf_hub
from tba_jax.tasks import base
from tba_jax.tasks import task_table


class _Words:
  """Tokenizer of a task's vocabulary, for lengths only: all ids are 0."""

  def __init__(self, task: base.PromptSet):
    self._words = re.compile(task.tokenizer_pattern, re.S)

  def encode(self, text: str) -> list[int]:
    return [0] * len(self._words.findall(text))

  def encode_prompt(
      self, prompt: base.Prompt, tools: Sequence[Any] = ()
  ) -> list[int]:
    """Returns the ids of a prompt; raises ValueError for a chat prompt."""
    del tools  # Only chat prompts have them.
    if not isinstance(prompt, str):
      raise ValueError(
          "chat prompts need a tokenizer with a chat template; choose a"
          " pretrained model with one, or set config.tokenizer.source"
      )
    return self.encode(prompt)


def print_data(
    config: ml_collections.ConfigDict,
    *,
    shows_prompt: bool = False,
    shows_ids: bool = False,
) -> None:
  """Prints rows used and left out of a task's data, and warnings.

  Args:
    shows_prompt: whether to print the first training prompt (held-out if there
      is no other) as a pretrained model reads it. An environment's prompt is
      shown during validation (`learning/dry_run.py`).
    shows_ids: whether to also print its ids.

  Raises:
    ValueError: the data, the tokenizer or the first prompt cannot be read.
  """
  folder = tokenizer_folder(config)
  reads_data = task_table.find(config.task.name).reads_data
  if not reads_data and (folder == "task" or not has_tokenizer(folder)):
    return
  task = task_table.make_task(config.task)
  if folder == "task":
    task.warn_of_unseen_words()
  tokenizer = prompt_tokenizer(config, task)
  if task.report is not None:
    task.drop_long(tokenizer, config.sampling.max_prompt_tokens)
    for line in task.report.lines():
      print(f"data: {line}", flush=True)
  # Environments make their prompts in separate processes.
  if folder != "task" and not task.has_turns:
    split = base.TRAIN if task.num_prompts(base.TRAIN) else base.HELD_OUT
    shown = prompt_lines(task.prompt(split, 0), split, tokenizer)
    for line in [*shown][: 3 if shows_ids else 2]:
      if shows_prompt:
        print(line, flush=True)


def tokenizer_folder(config: ml_collections.ConfigDict) -> str:
  """Returns the folder of the policy's tokenizer; "task": the task's words."""
  start = config.sft.init if config.init == "sft" else config.init
  folder = config.tokenizer.source
  if folder == "task" and start != "scratch":
    folder = str(pathlib.Path(start).expanduser())
  return folder


def prompt_tokenizer(
    config: ml_collections.ConfigDict, task: base.PromptSet
) -> Any:
  """Returns a tokenizer that encodes prompts as the policy's does.

  For a task's vocabulary it is lightweight and only counts tokens.

  Raises:
    ValueError: the tokenizer cannot be read.
  """
  folder = tokenizer_folder(config)
  if folder == "task":
    return _Words(task)
  # Takes seconds to import.
  from tba_jax.models import tokenizer as tokenizer_lib  # pylint: disable=g-import-not-at-top

  return tokenizer_lib.load_configured(folder, config.tokenizer)


def has_tokenizer(folder: str) -> bool:
  """Returns whether a model's folder has a tokenizer; raises ValueError."""
  path = hf_hub.find(folder, weights=False)
  return folders.has_tokenizer(path)


def prompt_lines(
    prompt: base.Prompt,
    split: str,
    tokenizer: Any,
    tools: Sequence[Mapping[str, Any]] = (),
) -> Iterator[str]:
  """Yields a prompt as the model reads it: how, its text, and its ids.

  Args:
    prompt: a text or messages.
    tokenizer: the policy's.

  Raises:
    ValueError: the tokenizer cannot encode the prompt, or the prompt does not
      name a tool, which the model then would not know, or the chat template
      writes calls in a form that is not parsed.
  """
  if tools and tokenizer.chat_template:
    tool_calls.check_template(tokenizer.chat_text)
  ids = tokenizer.encode_prompt(prompt, tools)
  _check_tools(tokenizer.decode(ids), tools)
  how = "a text, as it is"
  if tokenizer.prompt_text(prompt) != prompt:
    how = "in the chat template"
  elif tokenizer.chat_template:
    how += ": the tokenizer has a chat template, for chat prompts"
  yield f"prompt: the first of {split}, {how}, {len(ids)} tokens:"
  yield tokenizer.decode(ids)
  yield f"prompt: its ids: {' '.join(map(str, ids))}"


def _check_tools(text: str, tools: Sequence[Mapping[str, Any]]) -> None:
  """Raises ValueError for a tool whose name is not in a prompt's text."""
  names = [str(tool.get("function", tool).get("name")) for tool in tools]
  unknown = [name for name in names if name not in text]
  if unknown:
    raise ValueError(
        f"the policy does not see the tools {', '.join(unknown)}: its chat"
        " template writes none, nor does the first prompt name them. Name them"
        " there, with an example of a call, or take a model whose template"
        " writes `tools` (config.tokenizer.source may name the folder of one"
        " with a chat_template.jinja that does)"
    )
