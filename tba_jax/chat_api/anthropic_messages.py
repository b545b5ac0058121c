# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Anthropic's Messages as chat completions, see `dialects.py`.

    system                       message of the role `system`
    blocks text, thinking        text and `reasoning_content` of a message
    block tool_use               call of an assistant's message
    block tool_result            message of the role `tool`
    tools[i].input_schema        parameters of a function

Thinking is always returned. Its `signature` names the reply and is not
checked. The sampling settings of earlier major versions (`temperature`,
`top_p`, `top_k`) are accepted.

Source: package `anthropic`, major 2, whose client works unchanged.
"""

from collections.abc import Iterator, Mapping
import json
from typing import Any

from anthropic import types
from anthropic.types import message_create_params
import pydantic

from tba_jax.chat_api import completions
from tba_jax.chat_api import dialects

_TRANSLATED = frozenset(
    ("model", "messages", "system", "max_tokens", "stop_sequences", "stream")
    + ("tools", "tool_choice")
)
# Fields without effect: `thinking` is up to the model, and the server edits no
# contexts. The client has the latter three among its beta types.
_IGNORED = frozenset(
    ("cache_control", "diagnostics", "inference_geo", "metadata")
    + ("output_config", "service_tier", "speed", "thinking")
    + ("user_profile_id", "workspace_id")
)
_BETA = ("betas", "billing_policy", "context_management")
_ROLES = {
    "user": types.UserMessageParam,
    "assistant": types.AssistantMessageParam,
    "system": types.SystemMessageParam,
}
# Blocks of each role; the assistant's are in the order of a turn.
_BLOCKS = {
    "user": {
        "text": types.TextBlockParam,
        "tool_result": types.ToolResultBlockParam,
    },
    "assistant": {
        "thinking": types.ThinkingBlockParam,
        "text": types.TextBlockParam,
        "tool_use": types.ToolUseBlockParam,
    },
    "system": {"text": types.TextBlockParam},
}
_TOOL_CHOICES = {
    "auto": types.ToolChoiceAutoParam,
    "none": types.ToolChoiceNoneParam,
}
# Claude Code's first text of a system prompt, for the bill and not the model:
# it changes with each call.
_BILLING = "x-anthropic-billing-header:"
_REASONS = {
    "stop": "end_turn",
    "length": "max_tokens",
    "tool_calls": "tool_use",
}
_EVENT = pydantic.TypeAdapter(types.RawMessageStreamEvent)


def to_chat(body: Mapping[str, Any], *, counts: bool = False) -> dict[str, Any]:
  """Returns the chat completion's body of a request.

  Args:
    counts: whether it only asks for the number of tokens.

  Raises:
    ValueError: a part is wrong or not supported; the text names its place.
  """
  body = dialects.without_nulls(body)
  sampling = {k: body.pop(k) for k in dialects.SAMPLING if k in body}
  body = {k: v for k, v in body.items() if k not in _BETA}
  kind = message_create_params.MessageCreateParamsNonStreaming
  if counts:
    kind = types.MessageCountTokensParams
  elif body.get("stream"):
    kind = message_create_params.MessageCreateParamsStreaming
  dialects.check(kind, body)
  dialects.check_fields(body, _TRANSLATED, _IGNORED)
  if body.get("output_config", {}).get("format"):
    raise ValueError("output_config.format: must be left out")
  out = {"model": body["model"], "separate_reasoning": True, **sampling}
  for name, chat_name in (
      ("max_tokens", "max_tokens"),
      ("stop_sequences", "stop"),
      ("stream", "stream"),
  ):
    if name in body:
      out[chat_name] = body[name]
  out["messages"] = _messages(body)
  tools = body.get("tools", ())
  if tools:
    if not isinstance(tools, list):
      raise ValueError("tools: must be a list")
    out["tools"] = [_tool(tool, f"tools[{n}]") for n, tool in enumerate(tools)]
  if "tool_choice" in body:
    out["tool_choice"] = dialects.check_type(
        body["tool_choice"], _TOOL_CHOICES, "tool_choice"
    )
  return out


def _messages(body: Mapping[str, Any]) -> list[dict[str, Any]]:
  messages, out = body["messages"], []
  if not isinstance(messages, list) or not messages:
    raise ValueError("messages: must be a list with a message")
  if "system" in body:
    text = _text(body["system"], "system")
    out += [{"role": "system", "content": text}] if text else []
  called: set[str] = set()
  for n, message in enumerate(messages):
    place = f"messages[{n}]"
    role = message.get("role") if isinstance(message, dict) else None
    if not isinstance(role, str) or role not in _ROLES:
      raise ValueError(f"{place}.role = {role!r}: must be {', '.join(_ROLES)}")
    dialects.check(_ROLES[role], {**message, "content": ""}, place)
    if "content" not in message:
      raise ValueError(f"{place}.content: is missing, but needed")
    place = f"{place}.content"
    if role == "system":
      out.append({"role": role, "content": _text(message["content"], place)})
      continue
    blocks = dialects.parts_of(message["content"], place, "text")
    if role == "user":
      out += _from_user(blocks, place, called)
    else:
      out.append(_from_assistant(blocks, place))
      called |= {call["id"] for call in out[-1].get("tool_calls", ())}
  if out[-1]["role"] == "assistant":
    raise ValueError(
        f"messages[{len(messages) - 1}].role = 'assistant': must be user in the"
        " last message; the server does not continue an answer"
    )
  return out


def _text(value: Any, place: str) -> str:
  """Returns the text of a text or of text blocks."""
  texts = []
  for n, block in enumerate(dialects.parts_of(value, place, "text")):
    dialects.check_type(block, _BLOCKS["system"], f"{place}[{n}]")
    if not (place == "system" and block["text"].startswith(_BILLING)):
      texts.append(block["text"])
  return "".join(texts)


def _from_user(
    blocks: Any, place: str, called: set[str]
) -> list[dict[str, Any]]:
  """Returns the messages of a user's blocks: texts, and results of calls."""
  out: list[dict[str, Any]] = []
  for n, block in enumerate(blocks):
    here = f"{place}[{n}]"
    if dialects.check_type(block, _BLOCKS["user"], here) == "text":
      if not out or out[-1]["role"] != "user":
        out.append({"role": "user", "content": ""})
      out[-1]["content"] += block["text"]
      continue
    id = block["tool_use_id"]
    if id not in called:
      raise ValueError(
          f"{here}.tool_use_id = {id!r}: must be the id of a tool_use block"
          " before it"
      )
    text = _text(block.get("content", ""), f"{here}.content")
    # Chat templates have no field for it.
    text = "error: " * block.get("is_error", False) + text
    out.append({"role": "tool", "content": text, "tool_call_id": id})
  return out or [{"role": "user", "content": ""}]


def _from_assistant(blocks: Any, place: str) -> dict[str, Any]:
  kinds = [*_BLOCKS["assistant"]]
  texts, calls, last = {"thinking": "", "text": ""}, [], 0
  for n, block in enumerate(blocks):
    here = f"{place}[{n}]"
    kind = dialects.check_type(block, _BLOCKS["assistant"], here)
    if kinds.index(kind) < last:
      raise ValueError(
          f"{here}.type = {kind!r}: must come before {kinds[last]}, since a"
          " turn is thinking, text and calls in this order"
      )
    last = kinds.index(kind)
    if kind != "tool_use":
      texts[kind] += block[kind]
      continue
    function = {"name": block["name"], "arguments": json.dumps(block["input"])}
    calls.append({"id": block["id"], "type": "function", "function": function})
  out: dict[str, Any] = {"role": "assistant", "content": texts["text"]}
  if texts["thinking"]:
    out["reasoning_content"] = texts["thinking"]
  if calls:
    out["tool_calls"] = calls
  return out


def _tool(tool: Any, place: str) -> dict[str, Any]:
  dialects.check_type(tool, {"custom": types.ToolParam}, place, "custom")
  function = {"name": tool["name"], "parameters": tool["input_schema"]}
  if "description" in tool:
    function["description"] = tool["description"]
  return {"type": "function", "function": function}


def reply(body: Mapping[str, Any], answer: Mapping[str, Any]) -> dict[str, Any]:
  """Returns the message of a chat completion, with its token ids."""
  del body
  (choice,), usage = answer["choices"], answer["usage"]
  message, content = choice["message"], []
  id = f"msg_{answer['id'].partition('-')[2]}"
  if message.get("reasoning_content"):
    content.append(
        {
            "type": "thinking",
            "thinking": message["reasoning_content"],
            "signature": id,
        }
    )
  if message["content"]:
    content.append({"type": "text", "text": message["content"]})
  for call in message.get("tool_calls", ()):
    function = call["function"]
    content.append(
        {
            "type": "tool_use",
            "id": call["id"],
            "name": function["name"],
            "input": json.loads(function["arguments"]),
        }
    )
  stop, reason = choice["stop_reason"], _REASONS[choice["finish_reason"]]
  if stop is not None and reason == "end_turn":
    reason = "stop_sequence"
  made = types.Message.model_validate(
      {
          "id": id,
          "type": "message",
          "role": "assistant",
          "model": answer["model"],
          "content": content,
          "stop_reason": reason,
          "stop_sequence": stop if reason == "stop_sequence" else None,
          "usage": {
              "input_tokens": usage["prompt_tokens"],
              "output_tokens": usage["completion_tokens"],
          },
          **completions.recorded(answer),
      }
  )
  return made.model_dump(mode="json", exclude_unset=True)


def count(num_tokens: int) -> dict[str, Any]:
  """Returns the reply to a request for the number of tokens."""
  return types.MessageTokensCount(input_tokens=num_tokens).model_dump()


def events(whole: Mapping[str, Any]) -> Iterator[str]:
  """Yields the server-sent events of a message."""
  end = {k: whole[k] for k in ("stop_reason", "stop_sequence")}
  usage = whole["usage"]
  start = {**whole, **dict.fromkeys(end), "content": []}
  start["usage"] = {**usage, "output_tokens": 0}
  yield _event(type="message_start", message=start)
  yield dialects.event({"type": "ping"})
  for n, block in enumerate(whole["content"]):
    empty, deltas = _parts(block)
    yield _event(type="content_block_start", index=n, content_block=empty)
    for delta in deltas:
      yield _event(type="content_block_delta", index=n, delta=delta)
    yield _event(type="content_block_stop", index=n)
  yield _event(type="message_delta", delta=end, usage=usage)
  yield _event(type="message_stop")


def _parts(
    block: Mapping[str, Any],
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
  """Returns a block without its content, and the deltas that add it."""
  kind = block["type"]
  if kind == "tool_use":
    text = json.dumps(block["input"])
    delta = {"type": "input_json_delta", "partial_json": text}
    return {**block, "input": {}}, [delta]
  deltas = [{"type": f"{kind}_delta", kind: block[kind]}]
  empty = {**block, kind: ""}
  if kind == "thinking":
    signature = {"signature": block["signature"]}
    deltas.append({"type": "signature_delta", **signature})
    empty["signature"] = ""
  return empty, deltas


def _event(**data: Any) -> str:
  made = _EVENT.validate_python(data)
  return dialects.event(made.model_dump(mode="json", exclude_unset=True))
