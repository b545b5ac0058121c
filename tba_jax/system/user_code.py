# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Loads functions named in settings: FILE.py:FUNCTION or MODULE:FUNCTION."""

import ast
from collections.abc import Callable
import importlib
import importlib.util
import pathlib
import sys
from typing import Any


def load_function(key: str, text: str, others: str = "") -> Callable[..., Any]:
  """Runs a function's file or module, and returns the function.

  Args:
    key: of the setting, for messages.
    text: its value.
    others: other values that the setting allows, for messages.

  Raises:
    ValueError: it cannot be imported, or is not a function.
  """
  where, colon, name = text.rpartition(":")
  if not colon:
    allowed = f"{others}, " if others else ""
    raise ValueError(
        f"{key}={text!r}: allowed {allowed}FILE.py:FUNCTION or MODULE:FUNCTION"
    )
  try:
    if where.endswith(".py"):
      path = pathlib.Path(where).expanduser()
      # Another module may have the file's name.
      own_name = f"file {path}"
      spec = importlib.util.spec_from_file_location(own_name, path)
      # Dataclasses and pickle look up their module.
      module = sys.modules[own_name] = importlib.util.module_from_spec(spec)
      spec.loader.exec_module(module)
    else:
      module = importlib.import_module(where)
    function = getattr(module, name)
  # User code may raise anything.
  except (Exception, SystemExit) as error:
    raise ValueError(f"{key}={text!r}: {error!r}") from error
  if not callable(function):
    raise ValueError(f"{key}={text!r}: is not a function")
  return function


def problem_of_file(text: str) -> str:
  """Returns an error in FILE.py:FUNCTION, or "", without running the file."""
  where, _, name = text.rpartition(":")
  path = pathlib.Path(where).expanduser()
  try:
    tree = ast.parse(path.read_text("utf-8"), str(path))
  except (OSError, SyntaxError, ValueError) as error:
    return f"allowed FILE.py:FUNCTION; {error}"
  names = {node.name for node in tree.body if hasattr(node, "name")}
  names |= {
      target.id
      for node in tree.body
      if isinstance(node, ast.Assign)
      for target in node.targets
      if isinstance(target, ast.Name)
  }
  return "" if name in names else f"{path} defines no {name!r}"
