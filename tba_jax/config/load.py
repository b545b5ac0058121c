# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Builds a config from the command line: file, arguments and overrides.

All errors are `ConfigError`s, with which a program exits with status 2.
"""

from collections.abc import Iterator, Mapping, Sequence
import contextlib
import difflib
import inspect
import os
import re
from typing import Any

import ml_collections

from tba_jax.config import other_names
from tba_jax.config import settings
from tba_jax.config import variants
from tba_jax.system import named_paths
from tba_jax.system import ramps
from tba_jax.system import user_code
from tba_jax.tasks import task_table

_OVERRIDE = re.compile(
    r"^--?config\.(?P<key>[^=\s]+)(?:=(?P<value>.*))?$", re.S
)


class ConfigError(ValueError):
  """An unknown setting or an invalid value."""


def flatten(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
  """Returns `{"a.b": value}` of a nested mapping, in order."""
  out = {}
  for name, value in config.items():
    if isinstance(value, (Mapping, ml_collections.ConfigDict)):
      out.update(flatten(value, f"{prefix}{name}."))
    else:
      out[f"{prefix}{name}"] = value
  return out


def split_argv(argv: Sequence[str]) -> tuple[list[str], list[str]]:
  """Separates config overrides from other arguments: (rest, overrides).

  `--config.a.b=value` and `--config.a.b value` become `a.b=value`, and a bare
  `--config.a.b` becomes `a.b`. Arguments after `--` are left alone.
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
  """Loads a config file, applies the overrides and locks the config.

  Args:
    path_and_arg: `FILE` or `FILE:ARG,ARG…`; FILE may also name an experiment
      config, such as "countdown" or "gsm8k/tba".
    overrides: `KEY=VALUE` items for `apply_overrides`.

  Raises:
    ConfigError: missing file, invalid argument, unknown key, or value of the
      wrong type.
  """
  path, has_arg, arg = path_and_arg.partition(":")
  with _errors_of(path_and_arg):
    get_config = _get_config_fn(path)
    takes_arg = inspect.signature(get_config).parameters.values()
    if has_arg and not takes_arg:
      raise ConfigError(f"--config={path_and_arg}: {path} takes no arguments")
    if not has_arg and any(p.default is p.empty for p in takes_arg):
      raise ConfigError(
          f"--config={path}: get_config needs an argument: {path}:ARG"
      )
    config = get_config(arg) if has_arg else get_config()
  if not isinstance(config, ml_collections.ConfigDict) or "task" not in config:
    raise ConfigError(
        f"--config={path_and_arg}: get_config must return a complete config;"
        " start from tba_jax.config.settings.get_config()"
    )
  return apply_overrides(config, overrides)


@contextlib.contextmanager
def _errors_of(path_and_arg: str) -> Iterator[None]:
  """Turns errors of a config file into ConfigErrors with file and line."""
  try:
    yield
  except ConfigError:
    raise
  # A config file is user code, so it may raise anything or exit.
  except (Exception, SystemExit) as error:
    where = user_code.place_of(error) or path_and_arg
    what = "" if type(error) is ValueError else f"{type(error).__name__}: "
    raise ConfigError(
        f"--config={path_and_arg}: {what}{error} ({where})"
    ) from error


def apply_overrides(
    config: ml_collections.ConfigDict, overrides: Sequence[str]
) -> ml_collections.ConfigDict:
  """Applies overrides in place; returns the config, complete and locked.

  Missing fields of `config.task` get their defaults. Overriding `task.name`
  replaces all task fields by the defaults of the new task.

  Args:
    overrides: `key=value` items, with or without `--config.`; the last one
      wins. Values are parsed as the type of the current value; a bool without a
      value becomes true.

  Raises:
    ConfigError: unknown key, or value of the wrong type.
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
    is_auto = text == settings.AUTO and key in settings.SETTINGS
    if is_auto and settings.SETTINGS[key].auto:
      value = text
    else:
      value = _parse(key, text if has_value else "true", keys[key])
    _set(config, key, value)
  make_paths_absolute(config)
  config.lock()
  return config


def set_values(
    config: ml_collections.ConfigDict, values: Mapping[str, Any]
) -> ml_collections.ConfigDict:
  """Applies typed values in place; see `apply_overrides`.

  Leaves types and ranges to `validate`.

  Raises:
    ConfigError: unknown key.
  """
  _complete_task(config, values.get("task.name", config.task.name))
  keys = flatten(config)
  for key, value in values.items():
    if key not in keys:
      raise ConfigError(unknown_key(key, value, list(keys)))
    is_whole = isinstance(value, int) and not isinstance(value, bool)
    number = isinstance(keys[key], float) and is_whole
    _set(config, key, float(value) if number else value)
  make_paths_absolute(config)
  config.lock()
  return config


def _set(config: ml_collections.ConfigDict, key: str, value: Any) -> None:
  *sections, name = key.split(".")
  section = config
  for part in sections:
    section = section[part]
  with config.unlocked(), section.ignore_type():  # A number or a string.
    section[name] = value


# Special values of settings that otherwise take a path.
_NAMES = ("", "scratch", "sft", "task", "command", "reward_model", "policy",
          "synthetic", "words")  # fmt: skip


def make_paths_absolute(config: ml_collections.ConfigDict) -> None:
  """Makes relative paths to existing files absolute, in place.

  Later programs may read the run's config from another working directory.
  """
  for key, value in flatten(config).items():
    if isinstance(value, str) and value not in _NAMES:
      *sections, name = key.split(".")
      section = config
      for part in sections:
        section = section[part]
      if settings.names_files(key):
        section[name] = named_paths.absolute(value)
      elif sections == ["task"] and os.path.isfile(value):  # Custom task.
        section[name] = os.path.abspath(value)


def are_same_files(key: str, a: Any, b: Any) -> bool:
  """Returns whether two file settings agree up to the files' folders."""
  names = lambda text: re.sub(r"[^\s,:*\[\]'\"]*/", "", str(text))
  return settings.names_files(key) and names(a) == names(b)


def are_moved_files(key: str, before: Any, now: Any) -> bool:
  """Returns whether a setting's files were moved to another folder.

  Hub names are not absolute paths, so they never count as moved.
  """
  if not are_same_files(key, before, now):
    return False
  paths = [
      m[0].removesuffix("[") for m in named_paths.PATH.finditer(str(before))
  ]
  paths = [path for path in paths if "/" in path]
  return not any(os.path.exists(p) or not os.path.isabs(p) for p in paths)


def complete(config: ml_collections.ConfigDict) -> ml_collections.ConfigDict:
  """Returns a saved config with missing keys set to their defaults.

  Raises:
    ConfigError: a section holds a plain value.
  """
  config = config.copy_and_resolve_references()
  out = settings.get_config()
  # Validation reports values of the wrong type.
  with out.unlocked(), out.ignore_type():
    for name, value in config.items():
      is_section = isinstance(value, ml_collections.ConfigDict)
      if name in settings.SECTIONS and not is_section:
        raise ConfigError(f"config.{name} = {value!r}: must be a section")
      default = out.get(name)
      if name != "task" and isinstance(default, type(value)) and is_section:
        out[name] = ml_collections.ConfigDict({**default, **value})
      else:
        out[name] = value
  return out


def _complete_task(config: ml_collections.ConfigDict, name: str) -> None:
  """Fills in the fields of the named task in `config.task`."""
  fields = task_table.fields(name)
  if fields is None:
    return  # Validation reports the unknown task.
  if name == config.task.name:
    fields |= dict(config.task)
  with config.unlocked():
    config.task = ml_collections.ConfigDict({**fields, "name": name})


def _parse(key: str, text: str, default: Any) -> Any:
  if settings.is_over_steps(key):
    if ":" in text:
      return text
    default = settings.SETTINGS[key].default
  try:
    return variants.parse_text(f"config.{key}", text, default)
  except ValueError as error:
    raise ConfigError(str(error)) from error


def unknown_key(key: str, value: Any, known: Sequence[str]) -> str:
  """Returns the error message for an unknown key."""
  message = f"config.{key} = {value!r}: there is no such key"
  if answer := other_names.answer(key):
    return f"{message}; {answer}"
  whole = re.sub(r"_(final|decay_steps|stop_steps)$", "", key)
  if whole != key and settings.is_over_steps(whole):
    return f"{message}; it is part of config.{whole} = {ramps.FORM}"
  inside = [name for name in known if name.startswith(f"{key}.")]
  if inside:
    return f"{message}, it is a section; its keys: {', '.join(inside)}"
  close = difflib.get_close_matches(key, known, n=1, cutoff=0.6)
  # A correct name in the wrong section is also likely.
  last = key.rpartition(".")[2]
  close += [name for name in known if name.rpartition(".")[2] == last]
  if close:
    close = [f"config.{name}" for name in dict.fromkeys(close)]
    return f"{message}; did you mean {' or '.join(close[:3])}?"
  section = key.rpartition(".")[0]
  siblings = [k for k in known if section and k.startswith(f"{section}.")]
  names = siblings or dict.fromkeys(k.partition(".")[0] for k in known)
  return f"{message}; must be one of {', '.join(names)}"


def _get_config_fn(path: str) -> Any:
  """Imports a config file and returns its `get_config`."""
  try:
    module = variants.import_config(path)
  except FileNotFoundError as error:
    if variants.find_config(path) is not None:
      raise  # A file that the config itself reads.
    raise ConfigError(
        f"--config={path}: there is no such file; there are"
        f" {', '.join(variants.config_names())}"
    ) from error
  if not hasattr(module, "get_config"):
    raise ConfigError(f"--config={path}: it defines no get_config")
  return module.get_config
