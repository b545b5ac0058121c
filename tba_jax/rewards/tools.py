# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Tools of an environment: their schemas, and calls in a turn of the policy.

A tool is a function or method with type hints. A turn calls tools as chat
templates of Hermes and Qwen have it,

    <tool_call>
    {"name": "calculate", "arguments": {"expression": "3*4"}}
    </tool_call>

once or more, or, for models without a template, as its last line:

    calculate: 3*4

where the only argument is the text, or a JSON object has all of them. The text
is read as JSON unless the type hint is str.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
import inspect
import json
import math
import re
import types
import typing
from typing import Any

# Methods of an environment that are no tools.
_OWN = frozenset(("reset", "close", "get_reward", "demonstrate"))
_CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
_LINE = re.compile(r"([A-Za-z_]\w*): ?(.*)\Z")
_ARGUMENT = re.compile(r"\s*(\w+)\s*(?:\([^)]*\))?:\s*(.+)")
_TYPES = {
    str: "string",
    int: "integer",
    float: "number",
    bool: "boolean",
    list: "array",
    dict: "object",
    type(None): "null",
}
# Types of a schema, as the policy is told of them.
_NOUNS = {
    "string": "a text",
    "integer": "an integer",
    "number": "a number",
    "boolean": "true or false",
    "array": "a list",
    "object": "a JSON object",
    "null": "null",
}


class Environment:
  """A class whose public methods are tools, in the shape of an environment.

  A turn without a call is the last one. The reward is the environment's
  `get_reward()`, or its attribute `reward`, of which each turn gets what it
  adds; or `get_reward(text)` of the last turn.
  """

  def __init__(self, inner: Any):
    """Finds the tools: those of `tools`, or the public methods."""
    self._inner = inner
    listed = getattr(inner, "tools", None)
    if listed is None:
      methods = dict(inspect.getmembers(inner, inspect.ismethod))
      listed = [
          method
          for name, method in methods.items()
          if not name.startswith("_") and name not in _OWN
      ]
    self._tools = {tool.__name__: tool for tool in listed}
    self.schemas = [schema(tool) for tool in listed]
    functions = [made["function"] for made in self.schemas]
    # Schemas of the parameters, by tool.
    self._parameters = {
        f["name"]: f["parameters"]["properties"] for f in functions
    }
    self._reward = 0.0
    for name in ("close", "demonstrate"):
      if hasattr(inner, name):
        setattr(self, name, getattr(inner, name))

  def reset(self, seed: int) -> Any:
    return self._inner.reset(seed=seed)

  def step(self, text: str) -> tuple[Any, float, bool, dict[str, Any]]:
    """Calls the tools of a turn; says their results, or why there is none."""
    calls, is_chat = find_calls(text, self._tools)
    results = [(name, self._call(name, given)) for name, given in calls]
    reward = self._added_reward(text, is_last=not calls)
    if not is_chat:
      return "".join(f"{out}\n" for _, out in results), reward, not calls, {}
    said = [
        {"role": "tool", "name": name, "content": out} for name, out in results
    ]
    return said or "", reward, not calls, {}

  def _call(self, name: str, given: Any) -> str:
    """Returns the text of a tool's result; an error is a result, too."""
    try:
      if name not in self._tools:
        allowed = ", ".join(self._tools)
        raise ValueError(f"no tool {name!r}; there are {allowed}")
      tool = self._tools[name]
      if not isinstance(given, Mapping):
        names = list(inspect.signature(tool).parameters)
        if len(names) > 1:
          raise ValueError(f"give a JSON object with {', '.join(names)}")
        forms = self._parameters[tool.__name__]
        given = {name: _read(given, forms[name]) for name in names if given}
      inspect.signature(tool).bind(**given)
      self._check_types(tool.__name__, given)
      out = tool(**given)
      return out if isinstance(out, str) else json.dumps(out, default=str)
    except Exception as error:  # A call of the policy, in the user's code.
      return f"error: {error}"

  def _check_types(self, tool: str, given: Mapping[str, Any]) -> None:
    """Raises ValueError if an argument is not of its parameter's type."""
    forms = self._parameters[tool]
    for name, value in given.items():
      if name in forms and not _fits(value, forms[name]):
        raise ValueError(f"{name}: allowed {_noun(forms[name])}")

  def _added_reward(self, text: str, *, is_last: bool) -> Any:
    get = getattr(self._inner, "get_reward", None)
    if get is not None and inspect.signature(get).parameters:
      return get(text) if is_last else 0.0
    if get is None and is_last and not hasattr(self._inner, "reward"):
      raise TypeError(
          f"{type(self._inner).__name__} has neither get_reward() nor reward"
      )
    whole = getattr(self._inner, "reward", 0.0) if get is None else get()
    added, self._reward = whole - self._reward, whole
    return added


def wrap(made: Any) -> Any:
  """Returns an environment: as it is, or with `step` if it has tools."""
  return made if hasattr(made, "step") else Environment(made)


def find_calls(
    text: str, names: Iterable[str]
) -> tuple[list[tuple[str, Any]], bool]:
  """Returns the calls in a turn, name and arguments, and whether of a chat.

  Arguments are a mapping, or the text of the only one. Of a call that is no
  JSON object the name is "", which no tool has.
  """
  chat = _CALL.findall(text)
  if chat:
    return [_read_call(body) for body in chat], True
  match = _LINE.search(text.rstrip().rpartition("\n")[2])
  if match is None or match[1] not in names:
    return [], False
  given = match[2].strip()
  if given.startswith("{"):
    try:
      return [(match[1], json.loads(given))], False
    except (ValueError, RecursionError):
      pass  # It is the text.
  return [(match[1], given)], False


def _read_call(body: str) -> tuple[str, Any]:
  try:
    call = json.loads(body)
    name, given = call["name"], call.get("arguments") or {}
    if isinstance(given, str):  # Some templates write them as text.
      given = json.loads(given)
  except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
    return "", {}
  return str(name), given if isinstance(given, dict) else {}


def schema(tool: Callable[..., Any]) -> dict[str, Any]:
  """Returns the JSON schema of a tool, as chat templates take it.

  Descriptions are those of its docstring: the first paragraph, and the lines
  `name: text` below `Args:`.

  Raises:
    ValueError: a parameter has no type hint, or one of another type.
  """
  hints = typing.get_type_hints(tool)
  lines = inspect.cleandoc(tool.__doc__ or "").split("\n")
  described = _described_arguments(lines)
  properties, required = {}, []
  for name, parameter in inspect.signature(tool).parameters.items():
    if name not in hints:
      raise ValueError(
          f"tool {tool.__name__}: parameter {name!r} has no type hint, which"
          " its schema needs"
      )
    try:
      properties[name] = _type_schema(hints[name])
    except ValueError as error:
      raise ValueError(f"tool {tool.__name__}: {name}: {error}") from error
    if name in described:
      properties[name]["description"] = described[name]
    if parameter.default is inspect.Parameter.empty:
      required.append(name)
  paragraph = "\n".join(lines).partition("\n\n")[0]
  about = " ".join(paragraph.partition("Args:")[0].split())
  return {
      "type": "function",
      "function": {
          "name": tool.__name__,
          "description": about,
          "parameters": {
              "type": "object",
              "properties": properties,
              "required": required,
          },
      },
  }


def _described_arguments(lines: Sequence[str]) -> dict[str, str]:
  if "Args:" not in lines:
    return {}
  out, last = {}, ""
  for line in lines[lines.index("Args:") + 1 :]:
    if not line.startswith(" "):
      break
    if match := _ARGUMENT.fullmatch(line):
      last, out[match[1]] = match[1], match[2].strip()
    elif last:
      out[last] += f" {line.strip()}"
  return out


def _type_schema(hint: Any) -> dict[str, Any]:
  origin, arguments = typing.get_origin(hint), typing.get_args(hint)
  if origin is typing.Literal:
    return {**_type_schema(type(arguments[0])), "enum": list(arguments)}
  if origin in (typing.Union, types.UnionType):
    kinds = [a for a in arguments if a is not type(None)]
    nullable = {"nullable": True} if len(kinds) < len(arguments) else {}
    if len(kinds) == 1:
      return {**_type_schema(kinds[0]), **nullable}
    return {"anyOf": [_type_schema(kind) for kind in kinds], **nullable}
  kind = origin or hint
  if kind not in _TYPES:
    allowed = ", ".join(k.__name__ for k in _TYPES if k is not type(None))
    raise ValueError(
        f"type {hint}: allowed {allowed}, Literal, and unions of them"
    )
  out = {"type": _TYPES[kind]}
  if kind is list and arguments:
    out["items"] = _type_schema(arguments[0])
  return out


def _read(text: str, form: Mapping[str, Any]) -> Any:
  """Returns the argument that a text is: JSON if that fits, else the text."""
  if form.get("type") == "string":
    return text
  try:
    value = json.loads(text)
  except (ValueError, RecursionError):
    return text
  return value if _fits(value, form) else text


def _fits(value: Any, form: Mapping[str, Any]) -> bool:
  """Tells whether a value is of a type; the inside of objects is not read."""
  if value is None and form.get("nullable"):
    return True
  if "anyOf" in form:
    return any(_fits(value, one) for one in form["anyOf"])
  if "enum" in form:
    return any(
        type(one) is type(value) and one == value for one in form["enum"]
    )
  if form["type"] == "number":  # JSON has no NaN, but Python reads it.
    return type(value) is int or (type(value) is float and math.isfinite(value))
  if _TYPES.get(type(value)) != form["type"]:
    return False
  return "items" not in form or all(_fits(v, form["items"]) for v in value)


def _noun(form: Mapping[str, Any]) -> str:
  """Returns what `_fits` takes, in words."""
  if "anyOf" in form:
    noun = " or ".join(_noun(one) for one in form["anyOf"])
  elif "enum" in form:
    noun = f"one of {', '.join(map(json.dumps, form['enum']))}"
  else:
    noun = _NOUNS[form["type"]]
    noun += f", each {_noun(form['items'])}" if "items" in form else ""
  return noun + " or null" * form.get("nullable", False)
