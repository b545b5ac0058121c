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

    <|python_tag|>{"name": "calculate",             Llama 3; as the whole turn
     "parameters": {"expression": "3*4"}}           also without the tag

    <|channel|>commentary to=functions.calculate    gpt-oss (harmony)
     <|constrain|>json<|message|>{"expression": "3*4"}<|call|>

A turn has one or more calls. For models without a template, its last line may
be a call, `calculate: 3*4`, with the text of the only argument or a JSON object
of all. Calls in a thinking part (`<think>`, or harmony's channel `analysis`) do
not count. A malformed call has an error in place of its arguments, so that it
does not run with wrong ones.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
import dataclasses
import json
import math
import os
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
# A message of harmony; its recipient stands before or behind the channel.
_MESSAGE = re.compile(
    r"(?:<\|start\|>)?(?P<head>[^<]*<\|channel\|>[^<]*"
    r"(?:<\|constrain\|>[^<]*)?)<\|message\|>(?P<body>.*?)"
    r"(?:<\|end\|>|<\|call\|>|<\|return\|>|(?=<\|start\|>)|\Z)",
    re.DOTALL,
)
_RECIPIENT = re.compile(r"\bto=(?:functions\.)?([^\s<]+)")
_ANALYSIS = re.compile(r"<\|channel\|>\s*analysis\b")
# What Llama's template writes after a call.
_LLAMA_ENDS = ("", "<|eom_id|>", "<|eot_id|>")
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
class ParsedTurn:
  """Parts of a turn.

  reasoning: thinking part, without its tags.
  content: text between the thinking part and the first call in a chat
    template's form.
  rest: text from that call on; of harmony, the bodies of all calls.
  calls: parsed calls, in their order.
  is_chat: whether the calls are in a chat template's form.
  """

  reasoning: str
  content: str
  rest: str
  calls: Sequence[ParsedCall]
  is_chat: bool


@dataclasses.dataclass(frozen=True)
class _Form:
  """A form of calls between tags.

  name: models that use the form.
  opens, closes: texts around a call.
  begins: text with which a call of the form begins, after white space.
  read: function (turn, start, parameters) -> name, arguments and end; raises
    `_Error`.
  """

  name: str
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
    parameters: known tools, from `parameters_of`; calls without tags must name
      one of them.
  """
  if is_harmony(text):
    return _in_harmony(text).calls, True
  answer, calls = "", _whole_turn(text, parameters)
  if not calls:
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


def read_turn(text: str, parameters: Parameters) -> ParsedTurn:
  """Returns the parts of a turn; see `find`."""
  if is_harmony(text):
    return _in_harmony(text)
  calls, is_chat = find(text, parameters)
  end = calls[0].start if calls and is_chat else len(text)
  # Without its opening tag, the template has opened the thinking part.
  reasoning, closed, content = text[:end].rpartition(_THOUGHT)
  if not closed and content.lstrip().startswith(_THINK):
    reasoning, content = content, ""  # The turn was cut off.
  reasoning = reasoning.strip().removeprefix(_THINK)
  return ParsedTurn(
      reasoning.strip(), content.strip(), text[end:], calls, is_chat
  )


def is_harmony(text: str) -> bool:
  """Returns whether a turn consists of harmony's messages."""
  return _MESSAGE.match(text) is not None


def check_template(chat_text: Callable[..., str]) -> None:
  """Checks that calls in a chat template's form can be parsed.

  A template that writes no calls passes: messages then name the form.

  Args:
    chat_text: function (messages, asks, tools) -> text of a chat.

  Raises:
    ValueError: `find` does not parse the template's calls.
  """
  name, arguments = "look_up", {"word": "value"}
  parameters = {"type": "object", "properties": {"word": {"type": "string"}}}
  function = {"name": name, "description": name, "parameters": parameters}
  tools = [{"type": "function", "function": function}]
  chat = [{"role": "user", "content": "question"}]
  for given in (arguments, json.dumps(arguments)):
    call = {"name": name, "arguments": given}
    # Some templates accept only ids of nine characters.
    calls = [{"id": "call00000", "type": "function", "function": call}]
    answer = {"role": "assistant", "content": "", "tool_calls": calls}
    try:
      before = chat_text(chat, asks=True, tools=tools)
      text = chat_text([*chat, answer], asks=False, tools=tools)
    except ValueError:
      continue
    turn = text[len(os.path.commonprefix([before, text])) :]
    parsed, is_chat = find(turn, parameters_of(tools))
    if (
        name not in turn
        or is_chat
        and [(call.name, call.arguments) for call in parsed]
        == [(name, arguments)]
    ):
      return
    raise ValueError(
        f"tools: the chat template writes a call as {turn.strip()!r}; must be a"
        f" form that is parsed: {', '.join(FORMS)}"
    )


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


def _in_harmony(text: str) -> ParsedTurn:
  """Returns the parts of a turn of harmony's messages."""
  reasoning, content, rest, calls = [], [], [], []
  for match in _messages(text):
    recipient = _RECIPIENT.search(match["head"])
    if recipient is not None:
      calls.append(_read_message(recipient[1], match))
      rest.append(match["body"])
    elif _ANALYSIS.search(match["head"]):
      reasoning.append(match["body"])
    else:
      content.append(match["body"])
  texts = ("\n".join(texts) for texts in (reasoning, content, rest))
  return ParsedTurn(*texts, calls, True)


def _messages(text: str) -> Iterator[re.Match]:
  """Yields the messages of a turn; skips text up to the next start of one."""
  at = 0
  while 0 <= at < len(text):
    match = _MESSAGE.match(text, at)
    if match is not None:
      yield match
      at = match.end()
    else:
      at = text.find("<|start|>", at + 1)


def _read_message(name: str, match: re.Match) -> ParsedCall:
  """Returns the call of a message of harmony."""
  start, body = match.start(), match["body"].strip()
  try:
    arguments, end = _decode(body, 0)
    if end < len(body):
      raise _Error("expected the end of the message after it", end)
    if not isinstance(arguments, dict):
      raise _Error("arguments: must be a JSON object", end)
  except _Error as error:
    example = "<|channel|>commentary to=functions.NAME<|message|>{…}"
    return ParsedCall("", {}, f"{error}; a call is {example}", start)
  return ParsedCall(name, arguments, start=start)


def _whole_turn(text: str, parameters: Parameters) -> list[ParsedCall]:
  """Returns the call of a turn that is Llama's JSON of a known tool, or []."""
  is_thinking = not text.lstrip().startswith("{")
  answer = text.partition(_THOUGHT)[2] if is_thinking else text
  start = len(text) - len(answer.lstrip())
  if not text.startswith("{", start):
    return []
  try:
    name, arguments, _ = _read_llama(text, start, parameters)
  except _Error:
    return []
  if name not in parameters:
    return []
  return [ParsedCall(name, arguments, start=start)]


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
      forms = [form for form in _FORMS if form.closes == tag]
      message = _expected(f"{tag} ends no call", forms)
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


def _decode(text: str, start: int) -> tuple[Any, int]:
  """Returns the JSON value at a character, and its end."""
  try:
    call, end = _JSON.raw_decode(text, start)
    # Half a surrogate pair can be escaped, but is not text.
    json.dumps(call, ensure_ascii=False).encode()
  except json.JSONDecodeError as error:
    raise _Error(f"not JSON: {error.msg}", error.pos) from error
  except (ValueError, RecursionError) as error:
    raise _Error(f"not JSON: {error}", start) from error
  return call, end


def _read_json(
    text: str, start: int, parameters: Parameters, key: str = "arguments"
) -> tuple[str, dict[str, Any], int]:
  del parameters  # JSON values carry their types.
  call, end = _decode(text, start)
  if not {"name"} <= {*call} <= {"name", key}:
    keys = ", ".join(map(json.dumps, call)) or "none"
    raise _Error(f'expected the keys "name" and "{key}", not {keys}', end)
  name, given = call["name"], call.get(key, {})
  if isinstance(given, str):  # Some templates write arguments as text.
    try:
      given = _JSON.decode(given)
    except (ValueError, RecursionError):
      pass  # Not an object.
  if not isinstance(name, str) or not name:
    raise _Error("name: must be a text", end)
  if not isinstance(given, dict):
    raise _Error(f"{key}: must be a JSON object", end)
  return name, given, end


def _read_llama(
    text: str, start: int, parameters: Parameters
) -> tuple[str, dict[str, Any], int]:
  name, given, end = _read_json(text, start, parameters, "parameters")
  if text[end:].strip() not in _LLAMA_ENDS:
    raise _Error("expected the end of the turn after it", end)
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
        "Hermes (Qwen)",
        "<tool_call>",
        "{",
        "</tool_call>",
        _read_json,
        '<tool_call>{"name": NAME, "arguments": {…}}</tool_call>',
    ),
    _Form(
        "Qwen3-Coder",
        "<tool_call>",
        "<function=",
        "</tool_call>",
        _read_tags,
        "<tool_call><function=NAME><parameter=NAME>VALUE</parameter></function>"
        "</tool_call>",
    ),
    _Form(
        "Llama 3",
        "<|python_tag|>",
        "{",
        "",
        _read_llama,
        '<|python_tag|>{"name": NAME, "parameters": {…}}',
    ),
)
# Names of all forms that are parsed.
FORMS = (*(form.name for form in _FORMS), "harmony (gpt-oss)")
_CLOSES = frozenset(form.closes for form in _FORMS if form.closes)
_TAG = re.compile(
    "|".join(
        map(
            re.escape,
            {_THINK, _THOUGHT, *_CLOSES, *(form.opens for form in _FORMS)},
        )
    )
)
