# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Chat: answers to instructions, rewarded by a reward model.

The data are conversations whose last message is a person's answer, such as
HuggingFaceH4/no_robots, on which Noukhovitch et al. 2024 (arXiv:2410.18252)
train a chatbot. A prompt is the conversation before that message, formatted by
a chat template up to the assistant's turn.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from tba_jax.tasks import base
from tba_jax.tasks import rows
from tba_jax.tasks import synthetic

TULU = "tulu"
MODEL = "model"


class Chat(synthetic.GoldReward):
  """Conversations, each with a person's answer.

  data: a folder or data set of the Hugging Face hub with the splits train and
    test; rows have `messages`, each with `role` and `content`, the last one the
    assistant's. "synthetic": generated requests to summarize small posts, with
    a scripted gold reward.
  template: "model", the chat template of the policy's own tokenizer; "tulu",
    for tokenizers without one; or the folder of another tokenizer, whose
    template is used.
  synthetic_prompts: number of generated requests, over both splits.
  synthetic_pairs: generated pairs of answers to train a reward model on; a
    fifth as many to test it.
  validation_prompts: training prompts held out to select checkpoints.
  split_seed: seed of that choice and of generated data.
  """

  name: ClassVar[str] = "chat"
  FIELDS: ClassVar = {
      "data": "",
      "template": MODEL,
      "synthetic_prompts": 3000,
      "synthetic_pairs": 8000,
      "overlap": "error",
      "validation_prompts": 0,
      "split_seed": 0,
  }

  def __init__(self, **fields: Any):
    """Reads the data; takes all of `FIELDS`."""
    self._lay_out = _make_template(fields["template"])
    super().__init__(fields)

  def _synthetic_rows(
      self, num_prompts: int, seed: int
  ) -> dict[str, list[rows.Row]]:
    turn = lambda role, text: {"role": role, "content": text}
    conversation = lambda fields: {
        "messages": [
            turn("user", f"POST: {fields['post']}"),
            turn("assistant", fields["summary"]),
        ]
    }
    made = super()._synthetic_rows(num_prompts, seed)
    return {
        split: [rows.Row(row.place, conversation(row.fields)) for row in some]
        for split, some in made.items()
    }

  def _make(self, fields: Mapping[str, Any]) -> tuple[base.Prompt, str] | str:
    messages = rows.messages_of("messages", fields.get("messages"))
    if messages is None or len(messages) < 2:
      return "no_prompt"
    *before, last = messages
    if last["role"] != "assistant" or not last["content"].strip():
      return "no_answer"
    if not before or before[-1]["role"] != "user":
      return "no_prompt"
    try:
      return self._lay_out(before), last["content"].strip()
    except ValueError:  # Rejected by the template.
      return "no_prompt"

  def pairs(self, split: str) -> Sequence[tuple[base.Prompt, str, str]]:
    return [(p, a.strip(), b.strip()) for p, a, b in super().pairs(split)]

  def pair_texts(self, fields: Mapping[str, Any]) -> tuple[Any, Any, Any]:
    """Also accepts conversations, either whole or continuing `prompt`."""
    prompt, *answers = super().pair_texts(fields)
    if not all(map(_is_list, answers)):
      return prompt, *answers
    before = [*prompt] if _is_list(prompt) else []
    if all([*answer[: len(before)]] == before for answer in answers):
      before = []  # The answers are whole chats.
    texts = [self._make({"messages": [*before, *answer]}) for answer in answers]
    if "no_answer" in texts:
      return "?", None, None  # The prompt does not matter.
    if "no_prompt" in texts:
      return "", None, None
    (text, chosen), (same, rejected) = texts
    return text if text == same else "", chosen, rejected


def tulu(messages: base.Messages) -> str:
  """Formats messages as open-instruct's template does.

  <|user|>⏎ … ⏎<|assistant|>⏎
  """
  text = "".join(f"<|{m['role']}|>\n{m['content']}\n" for m in messages)
  return f"{text}<|assistant|>\n"


def _make_template(template: str) -> Callable[[base.Messages], base.Prompt]:
  if template in (MODEL, TULU):
    return list if template == MODEL else tulu
  # Takes seconds to import.
  from tba_jax.models import tokenizer  # pylint: disable=g-import-not-at-top

  try:
    return tokenizer.load(template).chat_text
  except ValueError as error:
    raise ValueError(
        f"config.task.template={template!r}: must be {MODEL!r}, {TULU!r} or a"
        f" folder with a tokenizer; {error}"
    ) from error


def _is_list(value: Any) -> bool:
  return isinstance(value, Sequence) and not isinstance(value, str)
