# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Tool calls in a turn of the policy, in the forms of chat templates.

    <tool_call>                                     Hermes, Qwen
    {"name": "calculate", "arguments": {"expression": "3*4"}}
    </tool_call>

    <tool_call>                                     Qwen3-Coder, Qwen3.5
    <function=calculate>
    <parameter=expression>
    3*4
    </parameter>
    </function>
    </tool_call>

A turn has one or more calls. For models without a template, its last line may
be a call, `calculate: 3*4`, with the text of the only argument or a JSON object
of all. Calls in a thinking part (`<think>`) do not count. A malformed call has
an error in place of its arguments, so that it does not run with wrong ones.
"""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import json
import math
import re
from typing import Any

TYPES = {
    str: "string",
    int: "integer",
    float: "number",
    bool: "boolean",
    list: "array",
    dict: "object",
    type(None): "null",
}
# JSON schemas of a tool's parameters, by tool.
Parameters = Mapping[str, Mapping[str, Mapping[str, Any]]]

_LINE = re.compile(r"([A-Za-z_]\w*): ?(.*)\Z")
_THINK, _THOUGHT = "<think>", "</think>"
_SPACE = re.compile(r"\s*")
_FUNCTION = re.compile(r"<function=([^<>\n]+)>\s*")
# A text may contain the end tag.
_PARAMETER = re.compile(
    r"<parameter=([^<>\n]+)>\n?(.*?)\n?</parameter>\s*"
    r"(?=<parameter=|</function>)",
    re.DOTALL,
)
# Python's spelling of JSON values, which templates use that write values as
# text.
_LITERALS = {"True": True, "False": False, "None": None}


@dataclasses.dataclass(frozen=True)
class ParsedCall:
  """A call of a tool.

  name: called tool; "" after an error.
  arguments: values by name; of a call on a line, the text of the only argument.
  error: problem with the call's form; "" = none.
  start: characters of the turn before the call.
  """

  name: str
  arguments: Mapping[str, Any] | str
  error: str = ""
  start: int = 0


@dataclasses.dataclass(frozen=True)
class _Form:
  """A form of calls.

  opens, closes: texts around a call.
  begins: text with which a call of the form begins, after white space.
  read: function (turn, start, parameters) -> name, arguments and end; raises
    `_Error`.
  example: a call of the form.
  """

  opens: str
  begins: str
  closes: str
  read: Callable[[str, int, Parameters], tuple[str, dict[str, Any], int]]
  example: str


class _Error(ValueError):
  """An error in a call's form, at a character of the turn."""

  def __init__(self, message: str, at: int):
    super().__init__(message)
    self.at = at


def find(text: str, parameters: Parameters) -> tuple[list[ParsedCall], bool]:
  """Returns the calls in a turn, and whether they use a chat template's tags.

  Args:
    text: the turn.
    parameters: known tools, from `parameters_of`; calls without tags must name
      one of them.
  """
  calls, answer = _in_chat(text, parameters)
  if calls:
    return calls, True
  match = _LINE.search(answer.rstrip().rpartition("\n")[2])
  if match is None or match[1] not in parameters:
    return [], False
  arguments = match[2].strip()
  if arguments.startswith("{"):
    try:
      return [ParsedCall(match[1], _JSON.decode(arguments))], False
    except (ValueError, RecursionError):
      pass  # The argument is a text.
  return [ParsedCall(match[1], arguments)], False


def parameters_of(schemas: Sequence[Mapping[str, Any]]) -> Parameters:
  """Returns the parameters of tools by their JSON schemas."""
  functions = [schema.get("function") or {} for schema in schemas]
  return {
      f["name"]: (f.get("parameters") or {}).get("properties") or {}
      for f in functions
      if "name" in f
  }


def read_text(text: str, form: Mapping[str, Any]) -> Any:
  """Parses an argument: JSON if it fits the schema, otherwise the text."""
  if form.get("type") == "string":
    return text
  try:
    value = _LITERALS[text] if text in _LITERALS else _JSON.decode(text)
  except (ValueError, RecursionError):
    return text
  return value if fits(value, form) else text


def fits(value: Any, form: Mapping[str, Any]) -> bool:
  """Returns whether a value fits a schema; objects are not checked inside."""
  if value is None and form.get("nullable"):
    return True
  if "anyOf" in form:
    return any(fits(value, one) for one in form["anyOf"])
  if "enum" in form:
    return any(
        type(one) is type(value) and one == value for one in form["enum"]
    )
  kind = form.get("type")
  if isinstance(kind, list):
    return any(fits(value, {**form, "type": one}) for one in kind)
  if kind == "number":  # JSON has no NaN, but Python reads it.
    return type(value) is int or (type(value) is float and math.isfinite(value))
  if kind is not None and TYPES.get(type(value)) != kind:
    return False
  if kind != "array" or "items" not in form:
    return True
  return all(fits(one, form["items"]) for one in value)


def _in_chat(text: str, parameters: Parameters) -> tuple[list[ParsedCall], str]:
  """Returns the calls between tags, and the text after the thinking part."""
  calls: list[ParsedCall] = []
  at = start = 0
  while match := _TAG.search(text, at):
    tag, at = match[0], match.end()
    if tag == _THINK:
      end = text.find(_THOUGHT, at)
      if end < 0:
        return calls, text[start : match.start()]
      at = start = end + len(_THOUGHT)
    elif tag == _THOUGHT:  # The template opened the thinking part.
      calls, start = [], at
    elif tag in _CLOSES:
      message = _expected(f"{tag} ends no call", _FORMS)
      calls.append(ParsedCall("", {}, message, match.start()))
    else:
      call, at = _read(text, match, parameters)
      calls.append(call)
  return calls, text[start:]


def _read(
    text: str, opening: re.Match, parameters: Parameters
) -> tuple[ParsedCall, int]:
  """Returns the call of a tag, and the position after it."""
  start = _SPACE.match(text, opening.end()).end()
  forms = [form for form in _FORMS if form.opens == opening[0]]
  form = next((f for f in forms if text.startswith(f.begins, start)), None)
  try:
    if form is None:
      begins = " or ".join(f.begins for f in forms)
      raise _Error(f"expected {begins} after {opening[0]}", start)
    name, arguments, end = form.read(text, start, parameters)
    end = _SPACE.match(text, end).end()
    if not text.startswith(form.closes, end):
      raise _Error(f"expected {form.closes} after it", end)
    call = ParsedCall(name, arguments, start=opening.start())
    return call, end + len(form.closes)
  except _Error as error:
    message = _expected(str(error), [form] if form else forms)
    call = ParsedCall("", {}, message, opening.start())
    match = _TAG.search(text, error.at)
    if match is not None and match[0] in _CLOSES:
      return call, match.end()
    return call, error.at


def _expected(problem: str, forms: Sequence[_Form]) -> str:
  examples = " or ".join(form.example for form in forms)
  return f"{problem}; a call is {examples}"


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
  out = dict(pairs)
  if len(out) < len(pairs):
    raise ValueError("a name occurs twice in a JSON object")
  return out


def _no_number(text: str) -> Any:
  raise ValueError(f"{text} is not JSON")


# Not strict, since models write line breaks in strings unescaped.
_JSON = json.JSONDecoder(
    strict=False, object_pairs_hook=_unique, parse_constant=_no_number
)


def _read_json(
    text: str, start: int, parameters: Parameters
) -> tuple[str, dict[str, Any], int]:
  del parameters  # JSON values carry their types.
  try:
    call, end = _JSON.raw_decode(text, start)
    # Half a surrogate pair can be escaped, but is not text.
    json.dumps(call, ensure_ascii=False).encode()
  except json.JSONDecodeError as error:
    raise _Error(f"not JSON: {error.msg}", error.pos) from error
  except (ValueError, RecursionError) as error:
    raise _Error(f"not JSON: {error}", start) from error
  if not {"name"} <= {*call} <= {"name", "arguments"}:
    keys = ", ".join(map(json.dumps, call)) or "none"
    raise _Error(f'expected the keys "name" and "arguments", not {keys}', end)
  name, given = call["name"], call.get("arguments", {})
  if isinstance(given, str):  # Some templates write arguments as text.
    try:
      given = _JSON.decode(given)
    except (ValueError, RecursionError):
      pass  # Not an object.
  if not isinstance(name, str) or not name:
    raise _Error("name: must be a text", end)
  if not isinstance(given, dict):
    raise _Error("arguments: must be a JSON object", end)
  return name, given, end


def _read_tags(
    text: str, start: int, parameters: Parameters
) -> tuple[str, dict[str, Any], int]:
  function = _FUNCTION.match(text, start)
  if function is None:
    raise _Error("expected <function=NAME>", start)
  name, at = function[1].strip(), function.end()
  forms, arguments = parameters.get(name, {}), {}
  while match := _PARAMETER.match(text, at):
    key, at = match[1].strip(), match.end()
    if key in arguments:
      raise _Error(f"<parameter={key}> occurs twice", at)
    arguments[key] = read_text(match[2], forms.get(key, {}))
  if not text.startswith("</function>", at):
    raise _Error(
        "expected <parameter=NAME>, a value and </parameter>, or </function>",
        at,
    )
  rest = text[at:].partition("<tool_call>")[0]
  if rest.count("</tool_call>") > 1:
    # A value, or the text after the call, contains the tag that ends a call.
    last = at + rest.rindex("</tool_call>")
    raise _Error("</tool_call> occurs twice", last)
  return name, arguments, at + len("</function>")


_FORMS = (
    _Form(
        "<tool_call>",
        "{",
        "</tool_call>",
        _read_json,
        '<tool_call>{"name": NAME, "arguments": {…}}</tool_call>',
    ),
    _Form(
        "<tool_call>",
        "<function=",
        "</tool_call>",
        _read_tags,
        "<tool_call><function=NAME><parameter=NAME>VALUE</parameter></function>"
        "</tool_call>",
    ),
)
_CLOSES = frozenset(form.closes for form in _FORMS)
_TAG = re.compile(
    "|".join(
        map(
            re.escape,
            {_THINK, _THOUGHT, *_CLOSES, *(form.opens for form in _FORMS)},
        )
    )
)
