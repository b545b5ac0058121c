# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Answers of OpenAI's chat and text completions.

Besides OpenAI's fields, an answer has `prompt_token_ids`, and each choice has
`token_ids`, `version`, the optimizer steps of the params that sampled it, and
`stop_reason`, the stop string that ended it. A streamed answer is sent as two
server-sent events per choice, once sampled: its text, then its finish reason.

Source: package `openai`, majors 2 and 3, whose client works unchanged.
"""

from collections.abc import Iterator, Mapping, Sequence
import json
from typing import Any

from tba_jax.chat_api import chat_requests
from tba_jax.chat_api import tool_calls


def answer(
    call: chat_requests.CompletionRequest, text: str, request_id: str
) -> dict[str, Any]:
  """Returns the assistant's message for a sampled text.

  Tool calls that `tool_calls.py` finds in a chat template's form
  become `tool_calls` if every one can be parsed; otherwise they stay in the
  text. The thinking part is separate if the call asks for it, and always in
  harmony, whose template accepts no channels in a text.
  """
  out = {"role": "assistant", "content": text}
  if call.chat is None:
    return out
  parameters = tool_calls.parameters_of(call.offered_tools)
  turn = tool_calls.read_turn(text, parameters)
  calls = turn.calls if turn.is_chat and call.offered_tools else ()
  if any(sampled.error for sampled in calls):
    calls = ()
  if call.separate_reasoning or tool_calls.is_harmony(text):
    rest = "" if calls else turn.rest
    out["content"] = f"{turn.content}\n{rest}".strip()
    if turn.reasoning:
      out["reasoning_content"] = turn.reasoning
  elif calls:
    out["content"] = text[: calls[0].start].strip()
  if calls:
    out["tool_calls"] = [
        {
            "id": f"call_{request_id.rpartition(':')[2]}_{n}",
            "type": "function",
            "function": {
                "name": sampled.name,
                "arguments": json.dumps(sampled.arguments),
            },
        }
        for n, sampled in enumerate(calls)
    ]
  return out


def completion(
    call: chat_requests.CompletionRequest,
    *,
    id: str,
    created_s: float,
    model: str,
    message: Mapping[str, Any],
    usage: tuple[int, int],
    stopped: bool,
    record: Mapping[str, Any] | None = None,
    tokens: Sequence[str] = (),
    prompt_ids: Sequence[int] = (),
    stop: str | None = None,
) -> dict[str, Any]:
  """Returns the answer to a call.

  Args:
    call: the agent's call.
    created_s: Unix time.
    message: result of `answer`.
    usage: number of tokens of the prompt, and of the answer.
    stopped: whether a stop token or stop string ended it.
    record: result of `episodes.Episode.end`; None leaves out all token ids.
    tokens: text of each sampled token.
    prompt_ids: token ids that the model saw.
    stop: text that ended it, if a stop string did.
  """
  is_chat = call.chat is not None
  reason = "stop" if stopped else "length"
  if "tool_calls" in message:
    reason = "tool_calls"
  what: dict[str, Any] = {"text": message["content"]}
  if is_chat:
    has_text = message["content"] or "tool_calls" not in message
    content = message["content"] if has_text else None
    what = {"message": {**message, "content": content, "refusal": None}}
  logprobs = None
  if call.has_logprobs:
    logprobs = _logprobs(is_chat, tokens, record["logprobs"])
  out = {
      "id": f"chatcmpl-{id}" if is_chat else f"cmpl-{id}",
      "object": "chat.completion" if is_chat else "text_completion",
      "created": int(created_s),
      "model": model,
      "choices": [
          {
              "index": 0,
              "finish_reason": reason,
              "stop_reason": stop,
              "logprobs": logprobs,
              **what,
          }
      ],
      "usage": {
          "prompt_tokens": usage[0],
          "completion_tokens": usage[1],
          "total_tokens": sum(usage),
      },
  }
  if record is not None:
    out["prompt_token_ids"] = list(prompt_ids)
    for name in ("token_ids", "version"):
      out["choices"][0][name] = record[name]
  return out


def recorded(answer: Mapping[str, Any]) -> dict[str, Any]:
  """Returns the fields of an answer with one choice that OpenAI's lack."""
  both = {**answer["choices"][0], **answer}
  names = ("prompt_token_ids", "token_ids", "version")
  return {name: both[name] for name in names if name in both}


def join(answers: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
  """Returns one answer with the choices of several to the same prompt."""
  choices = [
      {**answer["choices"][0], "index": n} for n, answer in enumerate(answers)
  ]
  usage = dict(answers[0]["usage"])
  for answer in answers[1:]:
    for key in ("completion_tokens", "total_tokens"):
      usage[key] += answer["usage"]["completion_tokens"]
  return {**answers[0], "choices": choices, "usage": usage}


def _logprobs(
    is_chat: bool, tokens: Sequence[str], logprobs: Sequence[float]
) -> dict[str, Any]:
  if not is_chat:
    return {"tokens": list(tokens), "token_logprobs": list(logprobs)}
  return {
      "content": [
          {
              "token": token,
              "logprob": logprob,
              # A token may be only part of a character.
              "bytes": None if "\ufffd" in token else list(token.encode()),
              "top_logprobs": [],
          }
          for token, logprob in zip(tokens, logprobs, strict=True)
      ],
      "refusal": None,
  }


def events(whole: Mapping[str, Any], *, has_usage: bool) -> Iterator[str]:
  """Yields the server-sent events of an answer."""
  base = {k: v for k, v in whole.items() if k not in ("choices", "usage")}
  if "message" in whole["choices"][0]:
    base["object"] = "chat.completion.chunk"
  parts = []
  for choice in whole["choices"]:
    first, last = _halves(choice)
    parts.append({**base, "choices": [first]})
    base.pop("prompt_token_ids", None)  # Sent only once.
    parts.append({**base, "choices": [last]})
  if has_usage:
    parts.append({**base, "choices": [], "usage": whole["usage"]})
  for part in parts:
    yield f"data: {json.dumps(part)}\n\n"
  yield "data: [DONE]\n\n"


def _halves(choice: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
  """Returns the two chunks of a choice: the text, then the finish reason."""
  text = {k: v for k, v in choice.items() if k != "message"}
  last = {
      "index": choice["index"],
      "finish_reason": choice["finish_reason"],
      "logprobs": None,
  }
  text["finish_reason"] = None
  if "message" not in choice:
    return text, {**last, "text": ""}
  delta = {k: v for k, v in choice["message"].items() if k != "refusal"}
  if "tool_calls" in delta:
    delta["tool_calls"] = [
        {"index": n, **call} for n, call in enumerate(delta["tool_calls"])
    ]
  return {**text, "delta": delta}, {**last, "delta": {}}
