# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Tools of an environment: their schemas, and calls in a turn of the policy.

A tool is a function or method with type hints; `tool_calls` defines the forms
of calls. The argument of a call on a line is read as JSON unless its type hint
is str.
"""

from collections.abc import Callable, Mapping, Sequence
import inspect
import json
import re
import types
import typing
from typing import Any

from tba_jax.chat_api import tool_calls
from tba_jax.environments import agent_environment

# Methods of an environment that are not tools.
_OWN = frozenset(("reset", "close", "get_reward", "demonstrate"))
_ARGUMENT = re.compile(r"\s*(\w+)\s*(?:\([^)]*\))?:\s*(.+)")
# Kinds of parameters that a call can pass by name.
_KINDS = (
    inspect.Parameter.POSITIONAL_OR_KEYWORD,
    inspect.Parameter.KEYWORD_ONLY,
)
# Names of schema types in messages to the policy.
_NOUNS = {
    "string": "a text",
    "integer": "an integer",
    "number": "a number",
    "boolean": "true or false",
    "array": "a list",
    "object": "a JSON object",
    "null": "null",
}


class ToolEnvironment:
  """Makes an environment of an object whose public methods are tools.

  A turn without a call is the last. A turn's reward is its increase of the
  object's `get_reward()` or, without that method, of its attribute `reward`. If
  the method has a parameter, only `get_reward(text)` of the last turn counts.
  """

  def __init__(self, inner: Any):
    """Finds the tools: `tools` if defined, else the public methods."""
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
    self._parameters = tool_calls.parameters_of(self.schemas)
    self._reward = 0.0
    for name in ("close", "demonstrate"):
      if hasattr(inner, name):
        setattr(self, name, getattr(inner, name))

  def reset(self, seed: int) -> Any:
    return self._inner.reset(seed=seed)

  def step(self, text: str) -> tuple[Any, float, bool, dict[str, Any]]:
    """Calls the tools of a turn; returns their results or errors."""
    calls, is_chat = tool_calls.find(text, self._parameters)
    results = [(call.name, self._call(call)) for call in calls]
    reward = self._added_reward(text, is_last=not calls)
    if not is_chat:
      return "".join(f"{out}\n" for _, out in results), reward, not calls, {}
    messages = [
        {"role": "tool", "name": name, "content": out} for name, out in results
    ]
    return messages or "", reward, not calls, {}

  def _call(self, call: tool_calls.ParsedCall) -> str:
    """Returns a tool's result or error as text."""
    try:
      if call.error:
        raise ValueError(call.error)
      if call.name not in self._tools:
        allowed = ", ".join(self._tools)
        raise ValueError(f"no tool {call.name!r}; there are {allowed}")
      tool, given = self._tools[call.name], call.arguments
      if isinstance(given, str):
        forms = self._parameters[call.name]
        if len(forms) > 1:
          raise ValueError(f"give a JSON object with {', '.join(forms)}")
        if given and not forms:
          raise ValueError(f"{call.name} has no arguments: give none")
        given = {
            name: tool_calls.read_text(given, form)
            for name, form in forms.items()
            if given
        }
      inspect.signature(tool).bind(**given)
      self._check_types(call.name, given)
      out = tool(**given)
      return out if isinstance(out, str) else json.dumps(out, default=str)
    except Exception as error:  # The policy's call runs the user's code.
      return f"error: {error}"

  def _check_types(self, tool: str, given: Mapping[str, Any]) -> None:
    """Raises ValueError if an argument is not of its parameter's type."""
    forms = self._parameters[tool]
    for name, value in given.items():
      if not tool_calls.fits(value, forms[name]):
        raise ValueError(f"{name}: must be {_noun(forms[name])}")

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


def plays(environment: Any) -> bool:
  """Returns whether an environment or its class plays an agent."""
  return hasattr(environment, "play") and not hasattr(environment, "reset")


def wrap(environment: Any) -> Any:
  """Returns an environment, wrapped to have `step` if it has tools or plays."""
  if hasattr(environment, "step"):
    return environment
  if plays(environment):
    return agent_environment.AgentEnvironment(environment)
  return ToolEnvironment(environment)


def schema(tool: Callable[..., Any]) -> dict[str, Any]:
  """Returns the JSON schema of a tool, for chat templates.

  Descriptions come from its docstring: the first paragraph, and the lines
  `name: text` below `Args:`.

  Raises:
    ValueError: a parameter has no name, or no type hint that is supported.
  """
  hints = typing.get_type_hints(tool)
  lines = inspect.cleandoc(tool.__doc__ or "").split("\n")
  described = _described_arguments(lines)
  properties, required = {}, []
  for name, parameter in inspect.signature(tool).parameters.items():
    if parameter.kind not in _KINDS:
      raise ValueError(
          f"tool {tool.__name__}: parameter {str(parameter)!r} has no name that"
          " a call could give; give it a name"
      )
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
  if kind not in tool_calls.TYPES:
    allowed = ", ".join(
        k.__name__ for k in tool_calls.TYPES if k is not type(None)
    )
    raise ValueError(
        f"type {hint}: must be {allowed}, Literal, and unions of them"
    )
  out = {"type": tool_calls.TYPES[kind]}
  if kind is list and arguments:
    out["items"] = _type_schema(arguments[0])
  return out


def _noun(form: Mapping[str, Any]) -> str:
  """Returns in words the values that `tool_calls.fits` accepts."""
  if "anyOf" in form:
    noun = " or ".join(_noun(one) for one in form["anyOf"])
  elif "enum" in form:
    noun = f"one of {', '.join(map(json.dumps, form['enum']))}"
  else:
    noun = _NOUNS[form["type"]]
    noun += f", each {_noun(form['items'])}" if "items" in form else ""
  return noun + " or null" * form.get("nullable", False)
