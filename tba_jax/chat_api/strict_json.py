# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Messages of HTTP APIs: strict types, and errors of one line.

A text is not accepted as a number, nor a boolean as an integer. A closed
message rejects an unknown field unless its value requests nothing (null, 0,
false, []).
"""

from collections.abc import Callable
import json
import re
import reprlib
from typing import Annotated, Any, ClassVar, TypeVar

import pydantic
import pydantic_core

# Most stop strings of a completion; decoding searches it for each of them.
_MOST_STOPS = 64
_SHOWN = 500  # Most characters of an error.
# Start of an error: OpenAI's code, and words by which agents know it. They do
# not repeat such a call.
TOO_LONG = (
    "context_length_exceeded: this model's maximum context length is reached"
)

_M = TypeVar("_M", bound="Message")


def parse_json(body: bytes) -> dict[str, Any]:
  """Returns the JSON object of a body; ValueError if it is not one."""
  try:
    value = pydantic_core.from_json(body, allow_inf_nan=False)
  except ValueError as error:
    raise ValueError(f"the body is not JSON: {error}") from error
  if not isinstance(value, dict):
    raise ValueError("the body must be a JSON object")
  return value


def to_json(reply: Any) -> bytes:
  """Returns the JSON of a reply; NaN and infinities become null."""
  return pydantic_core.to_json(reply, inf_nan_mode="null")


def in_one_form(body: bytes) -> bytes:
  """Returns a body with sorted keys, so that retries have the same bytes."""
  return json.dumps(parse_json(body), sort_keys=True, allow_nan=False).encode()


def read(kind: type[_M], value: Any) -> _M:
  """Returns the message of a JSON object, or of its bytes.

  Raises:
    ValueError: a field is missing, invalid or unknown; one line names it.
  """
  if isinstance(value, bytes):
    value = parse_json(value)
  try:
    return kind.model_validate(value)
  except pydantic.ValidationError as error:
    raise ValueError(one_line(error, value)) from error


def one_line(error: pydantic.ValidationError, value: Any) -> str:
  """Returns the first problem of a message: KEY = VALUE: must be …"""
  first = error.errors(include_url=False, include_context=False)[0]
  key = ""
  for part in first["loc"]:
    if isinstance(part, int):
      key, value = f"{key}[{part}]", value[part]
    # Other parts name the types of a union.
    elif isinstance(value, dict) and (
        part in value or first["type"] == "missing"
    ):
      key, value = f"{key}.{part}".removeprefix("."), value.get(part)
  text = first["msg"].removeprefix("Value error, ")
  text = re.sub(r"^\w+ should", "must", text)
  if first["type"] in ("model_type", "dict_type"):
    text = "must be an object"
  if first["type"] == "missing":
    text = f"{key}: is missing, but needed"
  elif not isinstance(first["input"], dict):
    text = f"{key} = {reprlib.repr(first['input'])}: {text}"
  elif key:
    text = f"{key}: {text}"
  return text[:_SHOWN]


def must(test: Callable[[Any], bool], text: str) -> pydantic.AfterValidator:
  """Returns the validator of a rule that types do not express."""

  def check(value: Any) -> Any:
    if not test(value):
      raise ValueError(f"must be {text}")
    return value

  return pydantic.AfterValidator(check)


def texts_or_ids(value: Any) -> tuple[str, ...] | tuple[int, ...]:
  """Returns stop strings or stop token ids; [] = no ids."""
  items = (value,) if isinstance(value, str) else value
  if isinstance(items, list | tuple) and len(items) <= _MOST_STOPS:
    if all(isinstance(text, str) and text for text in items):
      return tuple(items)
  if isinstance(items, list):
    if all(type(i) is int and 0 <= i < 2**31 for i in items):
      return tuple(items)
  raise ValueError(
      f"must be a text, a list of texts, up to {_MOST_STOPS} and none empty, or"
      " a list of token ids"
  )


Count = Annotated[int, pydantic.Field(ge=1, lt=2**31)]
# Logits divided by a smaller temperature overflow float32.
Temperature = Annotated[
    float, must(lambda t: t == 0 or 1e-3 <= t <= 100, "0, or .001 to 100")
]
TopP = Annotated[float, pydantic.Field(ge=1e-6, le=1)]
TopK = Annotated[int, pydantic.Field(ge=-1, lt=2**31)]


class Message(pydantic.BaseModel):
  """A request, or a part of one."""

  model_config = pydantic.ConfigDict(
      strict=True, frozen=True, allow_inf_nan=False, protected_namespaces=()
  )
  is_closed: ClassVar[bool] = True
  # Values of unsupported fields that request nothing.
  nothing: ClassVar[dict[str, Any]] = {}

  @pydantic.model_validator(mode="before")
  @classmethod
  def _known(cls, value: Any) -> Any:
    """Returns the known non-null fields; if closed, rejects unknown fields."""
    if not isinstance(value, dict):
      return value
    fields = {f.alias or name: f for name, f in cls.model_fields.items()}
    unknown = sorted(
        name
        for name, item in value.items()
        if name not in fields
        and name != "type"
        and item not in (None, 0, False, [])
        and item != cls.nothing.get(name)
    )
    if unknown and cls.is_closed:
      raise ValueError(
          f"{', '.join(unknown)}: not supported by this server; fields are"
          f" {', '.join(fields)}"
      )
    return {
        name: value[name]
        for name, field in fields.items()
        if name in value and (value[name] is not None or field.is_required())
    }


class OpenMessage(Message):
  """A request whose unknown fields are ignored."""

  is_closed = False
