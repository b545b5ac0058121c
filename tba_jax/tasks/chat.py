# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Chat: answers to instructions, rewarded by a reward model.

The data are conversations whose last message is a person's answer, such as
HuggingFaceH4/no_robots, which Noukhovitch et al. 2024 (arXiv:2410.18252) train
a chatbot on. A prompt is the conversation before that message, laid out by a
chat template as text, up to where the assistant begins.
"""

from collections.abc import Callable, Mapping, Sequence
import pathlib
from typing import Any, ClassVar

from tba_jax.tasks import base
from tba_jax.tasks import rows as rows_lib
from tba_jax.tasks import rows_task
from tba_jax.tasks import tldr_made_up

MADE_UP = "made_up"
TULU = "tulu"
_ROLES = ("system", "user", "assistant")

Messages = Sequence[Mapping[str, str]]


class Chat(rows_task.RowsTask):
  """Conversations with a person's last answer.

  data: a folder with train.jsonl and test.jsonl, or one of Hugging Face
    `datasets` with these splits; a row has `messages`, each with `role` and
    `content`, the last one the assistant's; or "made_up": requests to sum up
    small posts that code writes, with a scripted gold reward.
  template: a folder with a tokenizer, whose chat template lays messages out, or
    "tulu", for tokenizers without one.
  made_up_prompts: how many of those requests, over both splits.
  made_up_pairs: pairs of answers made of them, for a reward model to learn
    from; a fifth as many to measure it.
  validation_prompts: training prompts set apart to choose a checkpoint by.
  split_seed: of that choice, and of what is made up.
  """

  name: ClassVar[str] = "chat"
  FIELDS: ClassVar = {
      "data": "",
      "template": TULU,
      "made_up_prompts": 3000,
      "made_up_pairs": 8000,
      "validation_prompts": 0,
      "split_seed": 0,
  }

  def __init__(
      self,
      *,
      data: str,
      template: str,
      made_up_prompts: int,
      made_up_pairs: int,
      validation_prompts: int,
      split_seed: int,
  ):
    """Reads the data.

    Raises:
      ValueError: a field is not allowed, the data or the template is not there,
        a split is empty, or training and test prompts overlap.
    """
    base.check_integer("made_up_prompts", made_up_prompts, 20, 8000)
    base.check_integer("made_up_pairs", made_up_pairs, 5, 1_000_000)
    base.check_integer("validation_prompts", validation_prompts, 0, 2**31)
    base.check_integer("split_seed", split_seed, 0, 2**63 - 1)
    self._lay_out = _make_template(template)
    self._made_up = data == MADE_UP
    self._pairs, self._seed = made_up_pairs, split_seed
    report = rows_lib.Report()
    splits = rows_task.read_splits(
        _made_up(made_up_prompts, split_seed)
        if self._made_up
        else _sources(data),
        self._make,
        report,
    )
    rows_task.cut_validation(splits, validation_prompts, split_seed)
    super().__init__(splits, report)

  def _make(self, fields: Mapping[str, Any]) -> tuple[str, str] | str:
    """Returns prompt and answer of a row, or what is wrong with it."""
    messages = fields.get("messages")
    if not _are_messages(messages):
      return "no_prompt"
    *before, last = messages
    if last["role"] != "assistant" or not last["content"].strip():
      return "no_answer"
    if not before or before[-1]["role"] != "user":
      return "no_prompt"
    try:
      return self._lay_out(before), last["content"].strip()
    except ValueError:  # The template refuses it.
      return "no_prompt"

  @property
  def has_reward(self) -> bool:
    return self._made_up

  def pairs(self, split: str) -> Sequence[tuple[str, str, str]]:
    if not self._made_up:
      return super().pairs(split)
    held_out = split == base.HELD_OUT
    found = tldr_made_up.pairs(
        [e.prompt for e in self._splits[split]],
        self._pairs // 5 if held_out else self._pairs,
        self._seed * 2 + held_out,
    )
    return [(p, chosen.strip(), other.strip()) for p, chosen, other in found]

  def reward_of(self, prompt: str, completion: str) -> float:
    if not self._made_up:
      return super().reward_of(prompt, completion)
    return tldr_made_up.gold(prompt, completion)

  def judge(self, split: str, index: int, completion: str) -> base.Judgement:
    """Returns the scripted reward; right is what beats the reference."""
    if not self._made_up:
      raise base.RewardError(
          "no_reward",
          "the task has no reward of its own: config.reward.where='model'",
      )
    example = self.example(split, index)
    reward = tldr_made_up.gold(example.prompt, completion)
    is_right = reward > tldr_made_up.gold(example.prompt, example.answer)
    return base.Judgement(
        reward, " ".join(completion.split()) if is_right else None
    )


def tulu(messages: Messages) -> str:
  """Returns messages as open-instruct's template lays them out.

  <|user|>⏎ … ⏎<|assistant|>⏎
  """
  said = "".join(f"<|{m['role']}|>\n{m['content']}\n" for m in messages)
  return f"{said}<|assistant|>\n"


def _make_template(template: str) -> Callable[[Messages], str]:
  if template == TULU:
    return tulu
  # Seconds to import, so only where it is needed.
  from tba_jax.models import tokenizer  # pylint: disable=g-import-not-at-top

  try:
    return tokenizer.load(template).chat_text
  except ValueError as error:
    raise ValueError(
        f"config.task.template={template!r}: allowed {TULU!r} or a folder with"
        f" a tokenizer; {error}"
    ) from error


def _are_messages(value: Any) -> bool:
  return (
      isinstance(value, Sequence)
      and len(value) > 1
      and all(
          isinstance(m, Mapping)
          and m.get("role") in _ROLES
          and isinstance(m.get("content"), str)
          for m in value
      )
  )


def _made_up(num_prompts: int, seed: int) -> dict[str, Any]:
  """Returns made-up posts as conversations."""
  make = lambda row: rows_lib.Row(
      row.place,
      {
          "messages": [
              {"role": "user", "content": f"POST: {row.fields['post']}"},
              {"role": "assistant", "content": row.fields["summary"]},
          ]
      },
  )
  made = tldr_made_up.splits(num_prompts, seed)
  return {split: [make(row) for row in rows] for split, rows in made.items()}


def _sources(data: str) -> dict[str, Any]:
  """Returns the rows of both splits of a folder."""
  folder = pathlib.Path(data).expanduser()
  if not data or not folder.is_dir():
    raise ValueError(
        f"config.task.data={data!r}: allowed a folder with train.jsonl and"
        f" test.jsonl, one of Hugging Face `datasets`, or {MADE_UP!r}"
    )
  lines = (folder / "train.jsonl").is_file()
  return {
      split: rows_lib.read_rows(
          "config.task.data",
          str(folder / f"{name}.jsonl") if lines else f"{folder}[{name}]",
      )
      for split, name in ((base.TRAIN, "train"), (base.HELD_OUT, "test"))
  }
