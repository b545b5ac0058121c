# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Shared parts of the dialects in which agents may call the server.

A dialect is a module with

    to_chat(body)          chat completion's body of a request; ValueError
    reply(body, answer)    reply, from the body and the chat completion
    events(reply)          server-sent events of the reply

so that a call is sampled and recorded as the chat completion that it equals.
Requests are checked by the types of the dialect's official client.
"""

from collections.abc import Collection, Mapping, Sequence
import functools
import json
from typing import Any

import pydantic

from tba_jax.chat_api import strict_json

# Fields of chat completions that a dialect may lack.
SAMPLING = ("temperature", "top_p", "top_k", "seed")
# Fields whose objects may contain nulls.
_FREE = frozenset(("arguments", "input_schema", "parameters", "output_schema"))


@functools.cache
def _adapter(kind: Any) -> pydantic.TypeAdapter:
  # A typed dictionary takes its settings from the type around it.
  settings = pydantic.ConfigDict(strict=True, extra="forbid")
  return pydantic.TypeAdapter(list[kind], config=settings)


def check(kind: Any, value: Any, place: str = "") -> None:
  """Checks a part of a request.

  Args:
    kind: the client's type of it. Its `Iterable` fields are not looked into.
    place: path of the part in the request.

  Raises:
    ValueError: a field is missing, unknown or wrong; one line names its place.
  """
  try:
    _adapter(kind).validate_python([value])
  except pydantic.ValidationError as error:
    text = strict_json.one_line(error, [value])
    text = text.removeprefix("[0]").removeprefix(".")
    text = text.replace("Extra inputs are not permitted", "not supported")
    is_whole = text.startswith((" = ", ": "))
    raise ValueError(
        f"{place}{'' if is_whole or not place else '.'}{text}"
    ) from error


def check_fields(
    body: Mapping[str, Any],
    translated: Collection[str],
    ignored: Collection[str],
) -> None:
  """Refuses fields of a request that the server does not serve.

  Args:
    ignored: fields without effect on the answer.
  """
  for name, value in body.items():
    if value and name not in translated and name not in ignored:
      raise ValueError(
          f"{name}: not supported by this server; must be left out"
      )


def check_type(
    part: Any, kinds: Mapping[str, Any], place: str, default: str = ""
) -> str:
  """Checks a part by the client's type for its `type`; returns the latter.

  Args:
    kinds: accepted types, by name.
    place: path of the part in the request.
    default: name for a part without `type`.
  """
  if not isinstance(part, dict):
    raise ValueError(f"{place} = {part!r}: must be an object"[:500])
  name = part.get("type", default)
  if not isinstance(name, str) or name not in kinds:
    raise ValueError(
        f"{place}.type = {name!r}: must be {' or '.join(kinds)}, which this"
        " server supports"
    )
  check(kinds[name], part, place)
  return name


def parts_of(value: Any, place: str, text_type: str) -> Sequence[Any]:
  """Returns the parts of a text or of a list of parts."""
  if isinstance(value, str):
    return [{"type": text_type, "text": value}]
  if not isinstance(value, list):
    raise ValueError(f"{place}: must be a text or a list")
  return value


def without_nulls(value: Any) -> Any:
  """Returns a request without its null fields, except in schemas and calls."""
  if isinstance(value, list):
    return [without_nulls(item) for item in value]
  if not isinstance(value, dict):
    return value
  is_call = value.get("type") == "tool_use"
  return {
      name: item
      if name in _FREE or (is_call and name == "input")
      else without_nulls(item)
      for name, item in value.items()
      if item is not None
  }


def event(data: Mapping[str, Any]) -> str:
  """Returns a server-sent event, named after its type."""
  return f"event: {data['type']}\ndata: {json.dumps(data)}\n\n"
