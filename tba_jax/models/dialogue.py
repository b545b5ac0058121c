# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Token ids of a logged dialogue, as if the policy had sampled it.

Tokens are only ever appended: what the chat template would write differently
once more messages follow stays as the policy read it.
"""

from collections.abc import Mapping, Sequence
import dataclasses
import json
from typing import Any

from tba_jax.models import tokenizer as tokenizer_lib

Message = Mapping[str, Any]

# Names of the field of a thinking part in chat templates; gpt-oss's template
# reads `thinking`.
_REASONING = ("reasoning_content", "reasoning", "thinking")
# Content of an assistant turn, to find what the template writes after it.
_MARK = "\N{SECTION SIGN}turn\N{SECTION SIGN}"


@dataclasses.dataclass(frozen=True)
class Turn:
  """A turn of the assistant and what followed it.

  message: `role`, `content`, and optionally `reasoning_content` and
    `tool_calls` in the form of OpenAI's chat completions.
  answer: messages up to the assistant's next turn.
  is_sampled: whether a policy wrote it; False for copied context.
  """

  message: Message
  answer: Sequence[Message]
  is_sampled: bool = True


@dataclasses.dataclass(frozen=True)
class Encoded:
  """Token ids of an episode.

  prompt: tokens before the first turn.
  ids: tokens from the first turn to the last, with answers in between.
  sampled: whether each of `ids` is of a turn that a policy wrote.
  num_lost: tokens of turns that are not in `sampled`, because the chat template
    leaves out a part of them.
  """

  prompt: list[int]
  ids: list[int]
  sampled: list[bool]
  num_lost: int


def for_template(
    message: Message, *, reads_reasoning: bool = True
) -> dict[str, Any]:
  """Returns a message for chat templates: call arguments become objects.

  Args:
    message: `role`, `content`, and optionally `reasoning_content` and
      `tool_calls`.
    reads_reasoning: whether the template reads the field of a thinking part,
      under any of its names; otherwise the thinking part goes into the text.
  """
  out = dict(message)
  if "reasoning_content" in message:
    reasoning = out.pop("reasoning_content")
    if reads_reasoning:
      out.update(dict.fromkeys(_REASONING, reasoning))
    else:
      out["content"] = f"<think>\n{reasoning}\n</think>\n\n{out['content']}"
  if "tool_calls" in message:
    out["tool_calls"] = [
        {
            **call,
            "function": {
                **call["function"],
                "arguments": _arguments(call["function"]["arguments"]),
            },
        }
        for call in message["tool_calls"]
    ]
  return out


def _arguments(text: Any) -> Any:
  """Returns a call's arguments; the text itself if it is not valid JSON."""
  try:
    value = json.loads(text)
    json.dumps(value, ensure_ascii=False).encode()  # No half of a surrogate.
    return value
  except (ValueError, TypeError, RecursionError):
    return text


def first_observation(
    tokenizer: tokenizer_lib.Tokenizer, prompt: str | Sequence[Message]
) -> str | list[dict[str, Any]]:
  """Returns a logged prompt as an environment's observation.

  Without a chat template, messages become the texts of their contents.
  """
  if isinstance(prompt, str):
    return prompt
  if not tokenizer.chat_template:
    return _plain(prompt)
  reads = tokenizer.reads_reasoning
  return [for_template(m, reads_reasoning=reads) for m in prompt]


def encode(
    tokenizer: tokenizer_lib.Tokenizer,
    prompt: Sequence[Message],
    turns: Sequence[Turn],
    tools: Sequence[Mapping[str, Any]] = (),
    *,
    stopped: bool = True,
) -> Encoded:
  """Returns the ids of an episode's messages, as if it were sampled live.

  Without a chat template, messages are written as environments of texts do: a
  turn that calls a tool ends with `name: argument`, and results with a line
  break.

  Args:
    tokenizer: the policy's.
    prompt: messages before the first turn.
    tools: JSON schemas of the assistant's tools.
    stopped: whether the last turn was ended by its stop token.

  Raises:
    ValueError: the chat template rejects the messages.
  """
  first = first_observation(tokenizer, prompt)
  dialogue = tokenizer_lib.Dialogue(tokenizer, first, tools)
  # Each rendering takes milliseconds.
  context = ""
  if dialogue.chat:
    context = tokenizer.chat_text(dialogue.chat, tools=tools)
    before = tokenizer.encode(context)
  else:
    before = tokenizer.encode_prompt(first)
  stop_id = tokenizer.stop_id(first)
  ids, sampled, num_lost = [], [], 0
  for n, turn in enumerate(turns):
    if n and dialogue.chat:
      context = tokenizer.chat_text(dialogue.chat, tools=tools)
    text, is_whole = _turn_text(
        tokenizer, dialogue.chat, context, turn.message, tools
    )
    tokens = tokenizer.encode(text, ids or before)
    is_last = n == len(turns) - 1
    if stopped or not is_last:
      tokens.append(stop_id)
    ids += tokens
    is_learned = turn.is_sampled and is_whole
    sampled += [is_learned] * len(tokens)
    num_lost += len(tokens) * (turn.is_sampled and not is_whole)
    if not is_last:
      answer = first_observation(tokenizer, turn.answer)
      reply = dialogue.encode_answer(text, tokens, answer)
      ids += reply
      sampled += [False] * len(reply)
  return Encoded(before, ids, sampled, num_lost)


def _turn_text(
    tokenizer: tokenizer_lib.Tokenizer,
    chat: Sequence[Message],
    context: str,
    message: Message,
    tools: Sequence[Mapping[str, Any]],
) -> tuple[str, bool]:
  """Returns a turn's text, and whether it has all parts of the message."""
  content, calls = message["content"], message.get("tool_calls", ())
  reasoning = message.get("reasoning_content", "")
  if not tokenizer.chat_template:
    return _plain([message]), not reasoning
  written = _written(tokenizer, chat, context, message, tools)
  names = [call["function"]["name"] for call in calls]
  rest = _squeezed(written or "")
  for part in (reasoning, content):
    rest = rest.replace(_squeezed(part), "", 1)
  lacks_calls = any(rest.count(_squeezed(n)) < names.count(n) for n in names)
  if written is None or lacks_calls:
    # A template without calls is used with prompts that show Hermes's form.
    written_by_hand = "\n".join([content] * bool(content) + _hermes(calls))
    template = tokenizer.chat_template
    writes_calls = "tool_calls" in template or "tool_use" in template
    is_in_thought = context.rstrip().endswith("<think>")
    lacks_part = reasoning or is_in_thought or (calls and writes_calls)
    return written_by_hand, not lacks_part
  is_same = _squeezed(written) == _squeezed(content)
  if is_same and not calls and not reasoning:
    return content, True  # The template may strip it.
  has_parts = _squeezed(content) in _squeezed(written)
  return written, has_parts and _squeezed(reasoning) in _squeezed(written)


def _written(
    tokenizer: tokenizer_lib.Tokenizer,
    chat: Sequence[Message],
    context: str,
    message: Message,
    tools: Sequence[Mapping[str, Any]],
) -> str | None:
  """Returns what the chat template writes for a turn; None if it cannot."""
  reads = tokenizer.reads_reasoning
  turn = for_template(message, reads_reasoning=reads)
  text = tokenizer.chat_text([*chat, turn], asks=False, tools=tools)
  after = tokenizer.after_turn
  if not after:
    mark = {"role": "assistant", "content": _MARK}
    marked = tokenizer.chat_text([*chat, mark], asks=False, tools=tools)
    after = marked.rpartition(_MARK)[2]
  if not (text.startswith(context) and text.endswith(after)):
    return None
  return text[len(context) : len(text) - len(after)]


def _squeezed(text: str) -> str:
  return "".join(text.split())


def _hermes(calls: Sequence[Mapping[str, Any]]) -> list[str]:
  """Returns the texts of calls in the form of Hermes and Qwen."""
  texts = []
  for call in calls:
    function = call["function"]
    record = {
        "name": function["name"],
        "arguments": _arguments(function["arguments"]),
    }
    texts.append(f"<tool_call>{json.dumps(record)}</tool_call>")
  return texts


def _plain(messages: Sequence[Message]) -> str:
  """Returns messages as environments of texts write them."""
  out = []
  for message in messages:
    lines = [message["content"]] * bool(message["content"])
    for call in message.get("tool_calls", ()):
      function = call["function"]
      given = _arguments(function["arguments"])
      if isinstance(given, dict) and len(given) == 1:
        (value,) = given.values()
        given = value if isinstance(value, str) else json.dumps(value)
      elif not isinstance(given, str):
        given = json.dumps(given)
      lines.append(f"{function['name']}: {given}")
    ends = [""] * (message["role"] == "tool")
    out.append("\n".join([*lines, *ends]))
  return "".join(out)
