# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""OpenAI's Responses as chat completions, see `dialects.py`.

    instructions                 message of the role `system`
    item message                 message
    item reasoning               `reasoning_content` of the assistant's message
    item function_call           call of that message
    item function_call_output    message of the role `tool`

The server stores no responses: each request has the whole history. With
`include=["reasoning.encrypted_content"]` thinking also comes as base64, for
clients that return no other.

Source: package `openai`, major 3, whose client works unchanged.
"""

import base64
import binascii
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from openai.types import responses
from openai.types.responses import response_create_params
from openai.types.responses import response_input_item_param

from tba_jax.chat_api import completions
from tba_jax.chat_api import dialects

_TRANSLATED = frozenset(
    ("model", "input", "instructions", "max_output_tokens", "tools")
    + ("tool_choice", "stream")
)
# Fields without effect, once their values are checked. Codex sends
# `client_metadata`, which the client does not know.
_IGNORED = frozenset(
    ("client_metadata", "include", "max_tool_calls", "metadata")
    + ("parallel_tool_calls", "prompt_cache_key", "prompt_cache_options")
    + ("prompt_cache_retention", "reasoning", "safety_identifier")
    + ("service_tier", "store", "stream_options", "text", "truncation", "user")
)
_ENCRYPTED = "reasoning.encrypted_content"
_ITEMS = {
    "message": responses.EasyInputMessageParam,
    "reasoning": responses.ResponseReasoningItemParam,
    "function_call": responses.ResponseFunctionToolCallParam,
    "function_call_output": response_input_item_param.FunctionCallOutput,
}
# Order of the items of an assistant's turn.
_ORDER = ("reasoning", "message", "function_call")
_PARTS = {
    "input_text": responses.ResponseInputTextParam,
    "output_text": responses.ResponseOutputTextParam,
}
# Fields that belong to the API's storage of an item.
_OF_STORE = frozenset(("id", "status"))


def to_chat(body: Mapping[str, Any]) -> dict[str, Any]:
  """Returns the chat completion's body of a request.

  Raises:
    ValueError: a part is wrong or not supported; the text names its place.
  """
  body = dialects.without_nulls(body)
  sampling = {k: body.pop(k) for k in dialects.SAMPLING if k in body}
  tools = _tools(body.get("tools", []))
  # Items are checked one by one, for their places.
  items, fields = body.get("input"), {**body, "tools": []}
  if isinstance(items, list):
    fields["input"] = []
  fields.pop("client_metadata", None)
  kind = response_create_params.ResponseCreateParamsNonStreaming
  if body.get("stream"):
    kind = response_create_params.ResponseCreateParamsStreaming
  dialects.check(kind, fields)
  if body.get("previous_response_id"):
    raise ValueError(
        "previous_response_id: must be left out, because the server stores no"
        " responses; send the whole history in input"
    )
  dialects.check_fields(body, _TRANSLATED, _IGNORED)
  format = body.get("text", {}).get("format", {"type": "text"})
  for is_right, problem in (
      ("model" in body, "model: is missing, but needed"),
      ("input" in body, "input: is missing, but needed"),
      (
          set(body.get("include", ())) <= {_ENCRYPTED},
          f"include: must be [{_ENCRYPTED!r}], or left out",
      ),
      (
          body.get("truncation", "disabled") == "disabled",
          "truncation: must be 'disabled'; the server cuts no input",
      ),
      (format["type"] == "text", "text.format.type: must be 'text'"),
      (
          body.get("tool_choice") in (None, "auto", "none"),
          "tool_choice: must be 'auto' or 'none'",
      ),
  ):
    if not is_right:
      raise ValueError(problem)
  out: dict[str, Any] = {
      "model": body["model"],
      "separate_reasoning": True,
      **sampling,
      "messages": _messages(items, body.get("instructions", "")),
  }
  for name, chat_name in (
      ("max_output_tokens", "max_tokens"),
      ("stream", "stream"),
      ("tool_choice", "tool_choice"),
  ):
    if name in body:
      out[chat_name] = body[name]
  if tools:
    out["tools"] = tools
  return out


def _tools(tools: Any) -> list[dict[str, Any]]:
  if not isinstance(tools, list):
    raise ValueError("tools: must be a list")
  out = []
  for n, tool in enumerate(tools):
    if isinstance(tool, dict):
      tool = {"strict": None, "parameters": None, **tool}
    kinds = {"function": responses.FunctionToolParam}
    dialects.check_type(tool, kinds, f"tools[{n}]")
    function = {
        k: tool[k] for k in ("name", "description", "parameters") if tool.get(k)
    }
    out.append({"type": "function", "function": function})
  return out


def _messages(items: Any, instructions: str) -> list[dict[str, Any]]:
  out: list[dict[str, Any]] = []
  if instructions:
    out.append({"role": "system", "content": instructions})
  if isinstance(items, str):
    return [*out, {"role": "user", "content": items}]
  if not items:
    raise ValueError("input: must be a text or a list with an item")
  called: set[str] = set()
  last = len(_ORDER)  # Place in its turn of the assistant's last item.
  for n, item in enumerate(items):
    place = f"input[{n}]"
    kind = _check_item(item, place)
    if kind == "function_call_output":
      if item.get("call_id") not in called:
        raise ValueError(
            f"{place}.call_id = {item.get('call_id')!r}: must be the call_id of"
            " a function_call before it"
        )
      text = _text(item["output"], f"{place}.output")
      out.append(
          {"role": "tool", "content": text, "tool_call_id": item["call_id"]}
      )
      last = len(_ORDER)
      continue
    if kind == "message" and item["role"] != "assistant":
      text = _text(item["content"], f"{place}.content")
      out.append({"role": item["role"], "content": text})
      last = len(_ORDER)
      continue
    at = _ORDER.index(kind)
    if at < last or (at == last and kind != "function_call"):
      out.append({"role": "assistant", "content": ""})
    last = at
    if kind == "message":
      out[-1]["content"] = _text(item["content"], f"{place}.content")
    elif kind == "reasoning":
      out[-1]["reasoning_content"] = _reasoning(item, place)
    else:
      called.add(item["call_id"])
      function = {"name": item["name"], "arguments": item["arguments"]}
      call = {"id": item["call_id"], "type": "function", "function": function}
      out[-1].setdefault("tool_calls", []).append(call)
  return out


def _check_item(item: Any, place: str) -> str:
  """Returns the type of an item, after a check."""
  if not isinstance(item, dict):
    raise ValueError(f"{place} = {item!r}: must be an object"[:500])
  kind = item.get("type", "message")
  item = {k: v for k, v in item.items() if k not in _OF_STORE}
  if kind == "message" and isinstance(item.get("content"), list):
    item["content"] = ""  # Its parts are checked one by one.
  elif kind == "reasoning":
    item["id"] = ""  # Codex leaves it out.
    for name in ("summary", "content"):
      if not isinstance(item.get(name, []), list):
        raise ValueError(f"{place}.{name}: must be a list")
  elif kind == "function_call_output" and isinstance(item.get("output"), list):
    item["output"] = ""
  return dialects.check_type(item, _ITEMS, place, "message")


def _text(value: Any, place: str) -> str:
  """Returns the text of a text or of text parts."""
  parts = dialects.parts_of(value, place, "input_text")
  for n, part in enumerate(parts):
    if isinstance(part, dict) and part.get("type") == "output_text":
      part = {"annotations": [], **part}
    dialects.check_type(part, _PARTS, f"{place}[{n}]")
  return "".join(part["text"] for part in parts)


def _reasoning(item: Mapping[str, Any], place: str) -> str:
  texts = []
  for name in ("content", "summary"):
    for n, part in enumerate(item.get(name, ())):
      if not isinstance(part, dict) or not isinstance(part.get("text"), str):
        raise ValueError(f"{place}.{name}[{n}]: must have a text")
      texts.append(part["text"])
  if texts or not item.get("encrypted_content"):
    return "".join(texts)
  try:
    return base64.b64decode(item["encrypted_content"], validate=True).decode()
  except (binascii.Error, ValueError) as error:
    raise ValueError(
        f"{place}.encrypted_content: must be from this server, or left out"
    ) from error


def reply(body: Mapping[str, Any], answer: Mapping[str, Any]) -> dict[str, Any]:
  """Returns the response of a chat completion, with its token ids."""
  (choice,), usage = answer["choices"], answer["usage"]
  is_whole = choice["finish_reason"] != "length"
  id = answer["id"].partition("-")[2]
  status = "completed" if is_whole else "incomplete"
  reason = None if is_whole else {"reason": "max_output_tokens"}
  tools = [
      {"strict": None, "parameters": None, **tool}
      for tool in body.get("tools") or ()
  ]
  made = responses.Response.model_validate(
      {
          "id": f"resp_{id}",
          "object": "response",
          "created_at": answer["created"],
          "model": answer["model"],
          "status": status,
          "error": None,
          "incomplete_details": reason,
          "instructions": body.get("instructions"),
          "max_output_tokens": body.get("max_output_tokens"),
          "metadata": body.get("metadata") or {},
          "output": _output(body, choice["message"], id, status),
          "parallel_tool_calls": body.get("parallel_tool_calls") is not False,
          "previous_response_id": None,
          "temperature": body.get("temperature"),
          "tool_choice": body.get("tool_choice") or "auto",
          "tools": tools,
          "top_p": body.get("top_p"),
          # Tokens of thinking are not counted apart.
          "usage": {
              "input_tokens": usage["prompt_tokens"],
              "input_tokens_details": {
                  "cache_write_tokens": 0,
                  "cached_tokens": 0,
              },
              "output_tokens": usage["completion_tokens"],
              "output_tokens_details": {"reasoning_tokens": 0},
              "total_tokens": usage["total_tokens"],
          },
          **completions.recorded(answer),
      }
  )
  return made.model_dump(mode="json", exclude_unset=True, by_alias=True)


def _output(
    body: Mapping[str, Any], message: Mapping[str, Any], id: str, status: str
) -> list[dict[str, Any]]:
  """Returns the items of an assistant's message."""
  out: list[dict[str, Any]] = []
  text, calls = message["content"] or "", message.get("tool_calls", ())
  if message.get("reasoning_content"):
    thought = message["reasoning_content"]
    part = {"type": "reasoning_text", "text": thought}
    item = {"type": "reasoning", "id": f"rs_{id}", "summary": []}
    item |= {"content": [part], "status": status}
    if _ENCRYPTED in (body.get("include") or ()):
      code = base64.b64encode(thought.encode()).decode()
      item["encrypted_content"] = code
    out.append(item)
  if text or not calls:
    part = {"type": "output_text", "text": text, "annotations": []}
    item = {"type": "message", "id": f"msg_{id}", "role": "assistant"}
    out.append({**item, "content": [part], "status": status})
  for n, call in enumerate(calls):
    item = {"type": "function_call", "id": f"fc_{id}_{n}", "status": status}
    out.append({**item, "call_id": call["id"], **call["function"]})
  return out


def events(whole: Mapping[str, Any]) -> Iterator[str]:
  """Yields the server-sent events of a response."""
  start = {**whole, "status": "in_progress", "output": []}
  start |= {"usage": None, "incomplete_details": None}
  parts: list[tuple[Any, dict[str, Any]]] = [
      (responses.ResponseCreatedEvent, {"response": start}),
      (responses.ResponseInProgressEvent, {"response": start}),
  ]
  for n, item in enumerate(whole["output"]):
    at = {"output_index": n}
    empty = {**item, "status": "in_progress"}
    field = "arguments" if item["type"] == "function_call" else "content"
    empty[field] = "" if field == "arguments" else []
    parts.append(
        (responses.ResponseOutputItemAddedEvent, {**at, "item": empty})
    )
    parts += _deltas(item, {**at, "item_id": item["id"]})
    parts.append((responses.ResponseOutputItemDoneEvent, {**at, "item": item}))
  is_whole = whole["status"] == "completed"
  last = responses.ResponseCompletedEvent
  if not is_whole:
    last = responses.ResponseIncompleteEvent
  parts.append((last, {"response": whole}))
  for n, (kind, data) in enumerate(parts):
    (name,) = kind.model_fields["type"].annotation.__args__
    made = kind.model_validate({**data, "type": name, "sequence_number": n})
    yield dialects.event(
        made.model_dump(mode="json", exclude_unset=True, by_alias=True)
    )


def _deltas(
    item: Mapping[str, Any], at: Mapping[str, Any]
) -> Sequence[tuple[Any, dict[str, Any]]]:
  """Returns the events that add an item's content."""
  if item["type"] == "function_call":
    text, name = item["arguments"], {"name": item["name"]}
    return [
        (
            responses.ResponseFunctionCallArgumentsDeltaEvent,
            {**at, "delta": text},
        ),
        (
            responses.ResponseFunctionCallArgumentsDoneEvent,
            {**at, "arguments": text, **name},
        ),
    ]
  (part,) = item["content"]
  at, text, more = {**at, "content_index": 0}, part["text"], {}
  delta = responses.ResponseReasoningTextDeltaEvent
  done = responses.ResponseReasoningTextDoneEvent
  if item["type"] == "message":
    delta = responses.ResponseTextDeltaEvent
    done = responses.ResponseTextDoneEvent
    more = {"logprobs": []}
  empty = {**part, "text": ""}
  return [
      (responses.ResponseContentPartAddedEvent, {**at, "part": empty}),
      (delta, {**at, "delta": text, **more}),
      (done, {**at, "text": text, **more}),
      (responses.ResponseContentPartDoneEvent, {**at, "part": part}),
  ]
