# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Loads functions named in settings: FILE.py:FUNCTION or MODULE:FUNCTION.

Functions of a Python program are named FILE.callable:NAME (`callables.py`).
"""

import ast
from collections.abc import Callable
import importlib
import importlib.util
import inspect
import os
import pathlib
import sys
import sysconfig
import traceback
from typing import Any

from tba_jax.system import callables

# Folders of files that are not user code.
_LIBRARIES = (
    f"{pathlib.Path(__file__).parents[1]}{os.sep}",
    f"{sysconfig.get_path('stdlib')}{os.sep}",
    "<",
)
# Most characters of an error in a message.
_MAX_ERROR = 300


def load_function(
    key: str, text: str, allowed_values: str = ""
) -> Callable[..., Any]:
  """Runs a function's file or module, and returns the function.

  Args:
    key: name of the setting, for messages.
    allowed_values: other values that the setting allows, for messages.

  Raises:
    ValueError: the name cannot be imported, or is not a function.
  """
  where, colon, name = text.rpartition(":")
  if not colon:
    allowed = f"{allowed_values}, " if allowed_values else ""
    raise ValueError(
        f"{key}={text!r}: must be {allowed}FILE.py:FUNCTION or MODULE:FUNCTION"
    )
  try:
    if callables.is_lent(text):
      return callables.load(where, name)
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
    is_lent = callables.is_lent(text) and type(error) is ValueError
    what = str(error) if is_lent else describe(error)
    if where.endswith(".py"):
      what = problem_of_file(text) or what
    raise ValueError(f"{key}={text!r}: {what}") from error
  if not callable(function):
    raise ValueError(f"{key}={text!r}: is not a function")
  return function


def describe(error: BaseException, function: Any = None) -> str:
  """Returns an error of user code in one line, with its place in that code.

  Args:
    function: called function; its definition is the place if no line of user
      code raised the error.
  """
  # Further lines, as in JAX's errors, are explanations.
  text = str(error).strip().partition("\n")[0][:_MAX_ERROR]
  kind = type(error).__name__
  what = f"{kind}: {text}" if text else kind
  place = place_of(error) or (place_of_function(function) if function else "")
  return f"{place}: {what}" if place else what


def place_of(error: BaseException) -> str:
  """Returns FILE:LINE of the innermost line of user code; "" without one."""
  if isinstance(error, SyntaxError) and error.filename:
    return f"{error.filename}:{error.lineno}"
  place = ""
  for frame in traceback.extract_tb(error.__traceback__):
    is_user_code = not frame.filename.startswith(_LIBRARIES)
    if is_user_code and "site-packages" not in frame.filename:
      place = f"{frame.filename}:{frame.lineno}"
  return place


def place_of_function(function: Any) -> str:
  """Returns FILE:LINE of a function's definition; "" if it is unknown."""
  try:
    code = inspect.unwrap(function).__code__
  except (AttributeError, ValueError):  # An object with `__call__`.
    code = getattr(getattr(type(function), "__call__", None), "__code__", None)
  return f"{code.co_filename}:{code.co_firstlineno}" if code else ""


def problem_of_file(text: str) -> str:
  """Returns an error in FILE.py:FUNCTION, or "", without running the file."""
  where, _, name = text.rpartition(":")
  path = pathlib.Path(where).expanduser()
  if not path.is_file():
    return f"{path}: there is no such file"
  try:
    tree = ast.parse(path.read_bytes(), str(path))
  except SyntaxError as error:
    return f"{path}:{error.lineno or 1}: {error.msg}"
  except (OSError, ValueError) as error:
    return f"{path}: cannot be read as Python: {error}"
  names = set()
  for node in ast.walk(tree):
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
      names.add(node.id)
    elif isinstance(node, ast.alias):
      names.add(node.asname or node.name)
    elif hasattr(node, "name"):
      names.add(node.name)
  if name in names:
    return ""
  kinds = ast.FunctionDef, ast.ClassDef
  defined = [n.name for n in tree.body if isinstance(n, kinds)]
  return (
      f"{path} defines no {name!r}; it defines"
      f" {', '.join(defined) or 'no function or class'}"
  )
