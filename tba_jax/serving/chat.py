# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""OpenAI's chat and text completions: requests to records, answers to JSON.

A request with a field that is not understood is refused by name. An answer also
has `prompt_token_ids`, and its choice `token_ids` and `version`, the optimizer
steps of the params that sampled it. Streamed, the same answer comes as
server-sent events: one with the text once it is sampled, and one with the
finish reason.

Source: package `openai`, majors 2 and 3, whose client is served unchanged.
"""

from collections.abc import Iterator, Mapping, Sequence
import dataclasses
import json
from typing import Any

from tba_jax.rewards import tool_calls
from tba_jax.serving import messages as messages_lib

_COMMON = (
    "model", "n", "stream", "stream_options", "temperature", "top_p", "top_k",
    "max_tokens", "seed", "stop", "logprobs",
    # They change nothing of the answer.
    "user", "metadata", "store", "service_tier", "prompt_cache_key",
    "safety_identifier",
)  # fmt: skip
_CHAT = (
    *_COMMON, "messages", "max_completion_tokens", "tools", "tool_choice",
    "parallel_tool_calls",
)  # fmt: skip
_TEXT = (*_COMMON, "prompt")
# Values of other fields that ask for nothing.
_DEFAULTS = {
    "best_of": 1, "logit_bias": {}, "modalities": ["text"],
    "response_format": {"type": "text"},
}  # fmt: skip
_ROLES = ("system", "developer", "user", "assistant", "tool")


@dataclasses.dataclass(frozen=True)
class Call:
  """A completion that an agent asks for.

  messages: messages of a chat, in one form whatever the agent's; None for a
    text.
  prompt: text or token ids; None for a chat.
  tools: JSON schemas of the tools that the assistant may call.
  temperature, top_p, top_k: settings of sampling, as in `decode.Settings`; a
    top_k of -1 is none.
  max_tokens: most tokens of the answer; None is as many as there is room for.
  seed: seed of sampling; None takes one of the request's.
  stop: texts that end the answer.
  stream: whether the answer comes as server-sent events.
  has_usage: whether the last of them tells the numbers of tokens.
  has_logprobs: whether the answer has log-probs.
  num_choices: completions of the prompt.
  """

  messages: Sequence[Mapping[str, Any]] | None
  prompt: str | Sequence[int] | None
  tools: Sequence[Mapping[str, Any]]
  temperature: float
  top_p: float
  top_k: int
  max_tokens: int | None
  seed: int | None
  stop: Sequence[str]
  stream: bool
  has_usage: bool
  has_logprobs: bool
  num_choices: int


def parse(
    body: Mapping[str, Any], model_name: str, *, most_choices: int = 1
) -> Call:
  """Returns the call of a body; one with `messages` is of a chat.

  Args:
    body: body of the request.
    model_name: name that the body must have.
    most_choices: most completions; an episode goes on with one.

  Raises:
    ValueError: a field is wrong, missing, or not understood; names it.
  """
  field, is_chat = messages_lib.field, "messages" in body
  body = {k: v for k, v in body.items() if _DEFAULTS.get(k, ...) != v}
  messages_lib.check_fields(body, _CHAT if is_chat else _TEXT)
  model = field(body, "model", str)
  if model != model_name:
    raise ValueError(f"model={model!r}: allowed {model_name!r}")
  num_choices = field(body, "n", int, 1)
  if not 1 <= num_choices <= most_choices:
    allowed = "1; play another episode"
    if most_choices > 1:
      allowed = f"1 to {most_choices}"
    raise ValueError(f"n={num_choices}: allowed {allowed}")
  stop = body.get("stop") or ()
  stop = (
      [stop] if isinstance(stop, str) else list(field(body, "stop", list, []))
  )
  tools = field(body, "tools", list, []) if is_chat else []
  choice = body.get("tool_choice") or "auto"
  if choice not in ("auto", "none"):
    raise ValueError(f"tool_choice={choice!r}: allowed 'auto' and 'none'")
  logprobs = body.get("logprobs")
  if logprobs not in (None, False, True, 0, 1):
    raise ValueError(
        f"logprobs={logprobs!r}: allowed only those of the sampled tokens"
    )
  most = field(body, "max_tokens", int, None)
  if is_chat:
    most = field(body, "max_completion_tokens", int, most)
  if most is not None and most < 1:
    raise ValueError(f"max_tokens={most}: allowed 1 or more")
  options = field(body, "stream_options", dict, {})
  return Call(
      messages=_messages(field(body, "messages", list)) if is_chat else None,
      prompt=None if is_chat else _prompt(body.get("prompt")),
      tools=() if choice == "none" else tools,
      temperature=field(body, "temperature", float, 1.0),
      top_p=field(body, "top_p", float, 1.0),
      top_k=field(body, "top_k", int, -1),
      max_tokens=most,
      seed=field(body, "seed", int, None),
      stop=tuple(stop),
      stream=field(body, "stream", bool, False),
      has_usage=field(options, "include_usage", bool, False),
      # Texts ask for a number of further tokens at each place, also for 0.
      has_logprobs=bool(logprobs) or (not is_chat and type(logprobs) is int),
      num_choices=num_choices,
  )


def _prompt(prompt: Any) -> str | list[int]:
  if isinstance(prompt, list) and len(prompt) == 1 and not _is_id(prompt[0]):
    prompt = prompt[0]
  if isinstance(prompt, str) and prompt:
    return prompt
  if isinstance(prompt, list) and prompt and all(map(_is_id, prompt)):
    return prompt
  raise ValueError("prompt: allowed one text, or a list of token ids")


def _is_id(value: Any) -> bool:
  return type(value) is int and 0 <= value < 2**31


def _messages(given: Sequence[Any]) -> list[dict[str, Any]]:
  if not given:
    raise ValueError("messages is empty: allowed one message or more")
  out = []
  for n, message in enumerate(given):
    if not isinstance(message, dict):
      raise ValueError(
          f"messages[{n}] is {type(message).__name__}: allowed an object with"
          " role and content"
      )
    try:
      out.append(_message(message))
    except (ValueError, LookupError, TypeError, AttributeError) as error:
      raise ValueError(f"messages[{n}]: {error}") from error
  return out


def _message(given: Mapping[str, Any]) -> dict[str, Any]:
  """Returns a message in one form, without what is null or of no effect."""
  role, content = given.get("role"), given.get("content")
  if role not in _ROLES:
    raise ValueError(f"role={role!r}: allowed {', '.join(_ROLES)}")
  if isinstance(content, list):
    if not all(part.get("type") == "text" for part in content):
      raise ValueError("content has a part that is not text")
    content = "".join(part["text"] for part in content)
  if not isinstance(content, str | None):
    raise ValueError("content: allowed a text, or parts that are texts")
  out = {"role": role, "content": content or ""}
  calls = [
      {
          "id": call.get("id"),
          "type": "function",
          "function": {
              "name": call["function"]["name"],
              "arguments": call["function"]["arguments"],
          },
      }
      for call in given.get("tool_calls") or ()
  ]
  if calls:
    out["tool_calls"] = calls
  for name in ("name", "tool_call_id"):
    if given.get(name) is not None:
      out[name] = given[name]
  return out


def for_template(message: Mapping[str, Any]) -> dict[str, Any]:
  """Returns a message as chat templates take it: arguments as objects."""
  out = dict(message)
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
  try:
    return json.loads(text)
  except (ValueError, TypeError):
    return text


def answer(call: Call, text: str, request_id: str) -> dict[str, Any]:
  """Returns the assistant's message for a sampled text, in one form.

  Calls of tools, as `rewards/tool_calls.py` has them, become `tool_calls` if
  all of them can be read; else they stay in the text.
  """
  if call.tools:
    parameters = tool_calls.parameters_of(call.tools)
    calls, is_chat = tool_calls.find(text, parameters)
    if is_chat and not any(made.error for made in calls):
      return {
          "role": "assistant",
          "content": text[: calls[0].start].strip(),
          "tool_calls": [
              {
                  "id": f"call_{request_id.rpartition(':')[2]}_{n}",
                  "type": "function",
                  "function": {
                      "name": made.name,
                      "arguments": json.dumps(made.arguments),
                  },
              }
              for n, made in enumerate(calls)
          ],
      }
  return {"role": "assistant", "content": text}


def completion(
    call: Call,
    *,
    id: str,
    created_s: float,
    model: str,
    message: Mapping[str, Any],
    tokens: Sequence[str],
    record: Mapping[str, Any],
    prompt_ids: Sequence[int],
) -> dict[str, Any]:
  """Returns the answer of a call.

  Args:
    call: the agent's call.
    id: id of the answer.
    created_s: Unix time.
    model: name of the model.
    message: result of `answer`.
    tokens: text of each sampled token.
    record: result of `episodes.Episode.end`.
    prompt_ids: token ids that the model saw.
  """
  is_chat, ids = call.messages is not None, record["token_ids"]
  reason = "stop" if record["stopped"] else "length"
  if "tool_calls" in message:
    reason = "tool_calls"
  choice: dict[str, Any] = {
      "index": 0,
      "finish_reason": reason,
      "logprobs": None,
      "token_ids": ids,
      "version": record["version"],
  }
  if is_chat:
    has_text = message["content"] or "tool_calls" not in message
    content = message["content"] if has_text else None
    choice["message"] = {**message, "content": content, "refusal": None}
  else:
    choice["text"] = message["content"]
  if call.has_logprobs:
    choice["logprobs"] = _logprobs(is_chat, tokens, record["logprobs"])
  return {
      "id": f"chatcmpl-{id}" if is_chat else f"cmpl-{id}",
      "object": "chat.completion" if is_chat else "text_completion",
      "created": int(created_s),
      "model": model,
      "choices": [choice],
      "usage": {
          "prompt_tokens": len(prompt_ids),
          "completion_tokens": len(ids),
          "total_tokens": len(prompt_ids) + len(ids),
      },
      "prompt_token_ids": list(prompt_ids),
  }


def join(answers: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
  """Returns answers of one prompt, from `completion`, as one with choices."""
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
              # A token may be a part of a character.
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
    base.pop("prompt_token_ids", None)  # Once is enough.
    parts.append({**base, "choices": [last]})
  if has_usage:
    parts.append({**base, "choices": [], "usage": whole["usage"]})
  for part in parts:
    yield f"data: {json.dumps(part)}\n\n"
  yield "data: [DONE]\n\n"


def _halves(choice: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
  """Returns the two chunks of a choice: the text, and why it ended."""
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
