# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""From the command line to a config: the file, its arguments, its overrides.

Every error names the key, the value and what is allowed, and is a
`ConfigError`, so that the program can end with status 2 before any device is
touched. This module imports no JAX.
"""

import ast
from collections.abc import Mapping, Sequence
import difflib
import importlib.util
import inspect
import pathlib
import re
from typing import Any

import ml_collections

from tba_jax.config import settings
from tba_jax.tasks import build

# A config as one flat mapping. No JAX here.


def flatten(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
  """Returns `{"a.b": value}` of a nested mapping, in its order."""
  out = {}
  for name, value in config.items():
    if isinstance(value, (Mapping, ml_collections.ConfigDict)):
      out.update(flatten(value, f"{prefix}{name}."))
    else:
      out[f"{prefix}{name}"] = value
  return out


_OVERRIDE = re.compile(
    r"^--?config\.(?P<key>[^=\s]+)(?:=(?P<value>.*))?$", re.S
)


class ConfigError(ValueError):
  """A setting that does not exist or has a value that is not allowed."""


def split_argv(argv: Sequence[str]) -> tuple[list[str], list[str]]:
  """Returns the arguments without the overrides, and the overrides.

  `--config.a.b=value` and `--config.a.b value` are overrides; each comes back
  as `a.b=value`, and one without a value as `a.b`. What follows `--` is left
  alone.

  Args:
    argv: as `sys.argv`; the program's name may be in it.
  """
  rest, overrides = [], []
  items = list(argv)
  while items:
    item = items.pop(0)
    if item == "--":
      return [*rest, item, *items], overrides
    match = _OVERRIDE.match(item)
    if match is None:
      rest.append(item)
    elif match["value"] is not None or not items or items[0].startswith("--"):
      overrides.append(item.lstrip("-").removeprefix("config."))
    else:
      overrides.append(f"{match['key']}={items.pop(0)}")
  return rest, overrides


def load_config(
    path_and_arg: str, overrides: Sequence[str] = ()
) -> ml_collections.ConfigDict:
  """Returns the config of a file with the overrides applied, locked.

  Args:
    path_and_arg: `FILE` or `FILE:ARG,ARG…`. A relative file is looked for in
      the working directory, then beside the package.
    overrides: as `apply_overrides` takes them.

  Raises:
    ConfigError: no such file, a wrong argument of it, an unknown key, or a
      value of another type.
  """
  path, has_arg, arg = path_and_arg.partition(":")
  get_config = _get_config_fn(path)
  if has_arg and not inspect.signature(get_config).parameters:
    raise ConfigError(f"--config={path_and_arg}: {path} takes no arguments")
  try:
    config = get_config(arg) if has_arg else get_config()
  except ValueError as error:
    raise ConfigError(f"--config={path_and_arg}: {error}") from error
  if not isinstance(config, ml_collections.ConfigDict) or "task" not in config:
    raise ConfigError(
        f"--config={path_and_arg}: its get_config returns no whole config;"
        " begin with that of tba_jax/config/settings.py"
    )
  return apply_overrides(config, overrides)


def apply_overrides(
    config: ml_collections.ConfigDict, overrides: Sequence[str]
) -> ml_collections.ConfigDict:
  """Sets keys of a config in place; returns it, complete and locked.

  The task's own fields that the config leaves out are written into it with
  their defaults. Another `task.name` brings the fields of that task in place of
  the old one's.

  Args:
    config: of a config file.
    overrides: `key=value` each, with or without `--config.` before it; a later
      one wins. The key's present value gives the type. A bool alone is true.

  Raises:
    ConfigError: an unknown key, or a value of another type.
  """
  items = [
      item.removeprefix("--").removeprefix("config.") for item in overrides
  ]
  names = [i.partition("=")[2] for i in items if i.startswith("task.name=")]
  _complete_task(config, names[-1] if names else config.task.name)
  keys = flatten(config)
  for item in items:
    key, has_value, text = item.partition("=")
    if key not in keys:
      raise ConfigError(unknown_key(key, text, keys))
    if not has_value and not isinstance(keys[key], bool):
      raise ConfigError(f"config.{key}: needs a value, config.{key}=…")
    value = parse_value(key, text if has_value else "true", keys[key])
    *sections, name = key.split(".")
    section = config
    for part in sections:
      section = section[part]
    section[name] = value
  config.lock()
  return config


def complete(config: ml_collections.ConfigDict) -> ml_collections.ConfigDict:
  """Returns a saved config with the defaults of the keys that it lacks.

  A run that an older version started has no settings of what came later.
  """
  out = settings.get_config()
  with out.unlocked():
    for name, value in config.items():
      if name != "task" and isinstance(value, ml_collections.ConfigDict):
        section = out.get(name, ml_collections.ConfigDict())
        out[name] = ml_collections.ConfigDict({**section, **value})
      else:
        out[name] = value
  return out


def _complete_task(config: ml_collections.ConfigDict, name: str) -> None:
  """Writes the fields of the named task into `config.task`."""
  fields = build.fields(name)
  if fields is None:
    return  # The validation names it.
  if name == config.task.name:
    fields |= dict(config.task)
  with config.unlocked():
    config.task = ml_collections.ConfigDict({**fields, "name": name})


def parse_value(key: str, text: str, default: Any) -> Any:
  """Returns `text` as a value of the default's type.

  Raises:
    ConfigError: it is not one.
  """
  if isinstance(default, bool):
    allowed = {"true": True, "1": True, "false": False, "0": False}
    if text.lower() not in allowed:
      raise ConfigError(f"config.{key} = {text!r}: allowed true or false")
    return allowed[text.lower()]
  if isinstance(default, str):
    return text
  try:
    if isinstance(default, int):
      return int(text)
    if isinstance(default, float):
      return float(text)
    value = ast.literal_eval(text)
  except (ValueError, SyntaxError) as error:
    raise ConfigError(
        f"config.{key} = {text!r}: allowed {type_name(default)}"
    ) from error
  if default is not None and not isinstance(value, type(default)):
    raise ConfigError(f"config.{key} = {text!r}: allowed {type_name(default)}")
  return value


def unknown_key(key: str, value: Any, known: Sequence[str]) -> str:
  """Returns the message for a key that no config has."""
  message = f"config.{key} = {value!r}: there is no such key"
  inside = [name for name in known if name.startswith(f"{key}.")]
  if inside:
    return f"{message}, it is a section; its keys: {', '.join(inside)}"
  close = difflib.get_close_matches(key, known, n=1, cutoff=0.6)
  # A right name in a wrong section is nearer to the reader's mind.
  last = key.rpartition(".")[2]
  close += [name for name in known if name.rpartition(".")[2] == last]
  if close:
    close = [f"config.{name}" for name in dict.fromkeys(close)]
    return f"{message}; did you mean {' or '.join(close[:3])}?"
  section = key.rpartition(".")[0]
  beside = [k for k in known if section and k.startswith(f"{section}.")]
  names = beside or dict.fromkeys(k.partition(".")[0] for k in known)
  return f"{message}; allowed: {', '.join(names)}"


def type_name(default: Any) -> str:
  """Returns how the messages call the type of a setting."""
  if isinstance(default, bool):
    return "true or false"
  if isinstance(default, int):
    return "a whole number"
  if isinstance(default, float):
    return "a number"
  if isinstance(default, str):
    return "a text"
  return f"a {type(default).__name__}"


def _get_config_fn(path: str) -> Any:
  """Imports a config file and returns its `get_config`."""
  root = pathlib.Path(__file__).parents[2]
  candidates = [pathlib.Path(path), root / path]
  found = next((p for p in candidates if p.is_file()), None)
  if found is None:
    have = ", ".join(
        f"configs/{p.name}"
        for p in sorted((root / "configs").glob("*.py"))
        if p.stem != "__init__" and not p.stem.startswith("common")
    )
    raise ConfigError(
        f"--config={path}: there is no such file; there is {have}"
    )
  spec = importlib.util.spec_from_file_location(f"config_{found.stem}", found)
  if spec is None or spec.loader is None:
    raise ConfigError(f"--config={path}: not a Python file")
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  if not hasattr(module, "get_config"):
    raise ConfigError(f"--config={path}: it defines no get_config")
  return module.get_config
