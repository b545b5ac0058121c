# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Callables of a Python program, only for its own worker processes.

`tba_jax.train(reward=f)` pickles `f`, including its closure, into a private
folder of this machine. A setting names it as FILE.callable:NAME, in place of
FILE.py:NAME. The file is locked for as long as the program lends it, and is not
loaded without the lock: a run cannot go on without the program. No pickle is
ever read from a store, the network or a run directory.
"""

import functools
import inspect
import io
import json
import os
import pathlib
import re
import stat
import sys
import types
from typing import Any

from tba_jax.system import processes

SUFFIX = ".callable"
# File name that cloudpickle gives to all code.
_NO_FILE = "<dynamic-code>"


def is_lent(text: str) -> bool:
  """Returns whether a setting's value, FILE:NAME, names a lent callable."""
  return text.rpartition(":")[0].endswith(SUFFIX)


def name_of(value: Any) -> str:
  """Returns a one-word name for any callable, even a lambda or an object."""
  inner = value
  while isinstance(inner, functools.partial):
    inner = inner.func
  name = getattr(inner, "__name__", type(inner).__name__)
  return re.sub(r"\W", "", name) or "function"


class Loan:
  """Callables that this process lends to others, until `close`."""

  def __init__(self, folder: pathlib.Path):
    """Takes a folder that is private to this user; see `make_private`."""
    self._folder = folder
    self._files: list[tuple[pathlib.Path, int]] = []

  def add(self, argument: str, value: Any) -> str:
    """Writes a callable; returns the setting's value that names it.

    Args:
      value: function, class or object.

    Raises:
      ValueError: part of it cannot be pickled; the error names the part.
    """
    name = name_of(value)
    try:
      data = _pickled(value)
    except Exception as error:  # Objects raise errors of any type.
      raise ValueError(
          f"{argument}={name}: cannot be sent to worker processes:"
          f" {_culprit(value)}{type(error).__name__}: {error}; make what cannot"
          " be pickled inside the function, when it is first called"
      ) from error
    path = self._folder / f"{name}{SUFFIX}"
    # Folders from which its modules were imported.
    folders = [os.path.abspath(folder) for folder in sys.path]
    path.unlink(missing_ok=True)
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    self._files.append((path, fd))
    processes.try_lock(fd)
    with open(os.dup(fd), "wb") as file:
      file.write(json.dumps(folders).encode() + b"\n" + data)
    return f"{path}:{name}"

  def close(self) -> None:
    """Removes the files."""
    files, self._files = self._files, []
    for path, fd in files:
      path.unlink(missing_ok=True)
      os.close(fd)


def load(path: str, name: str) -> Any:
  """Returns the callable of a file that a running program lends.

  Raises:
    ValueError: no program lends it, or the file is not private to this user.
  """
  import cloudpickle  # pylint: disable=g-import-not-at-top

  gone = (
      f"{name} is a function of a Python program, which does not lend it now;"
      f" continue from Python, with {name} as the same argument of"
      " tba_jax.train(…, workdir=…)"
  )
  try:
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
  except OSError as error:
    raise ValueError(gone) from error
  with open(fd, "rb") as file:
    status = os.fstat(fd)
    mode = stat.S_IMODE(status.st_mode)
    if status.st_uid != os.getuid() or mode & 0o077:
      raise ValueError(f"{path}: must be a file of this user alone")
    if processes.try_lock(fd, shared=True):
      raise ValueError(gone)
    folders = json.loads(file.readline())
    sys.path += [folder for folder in folders if folder not in sys.path]
    return cloudpickle.loads(file.read())


def _pickled(value: Any) -> bytes:
  """Returns a pickle whose code keeps its file name, for error messages."""
  import cloudpickle  # pylint: disable=g-import-not-at-top

  class Pickler(cloudpickle.Pickler):

    def reducer_override(self, obj: Any) -> Any:
      if not isinstance(obj, types.CodeType):
        return super().reducer_override(obj)
      make, arguments = self.dispatch_table[types.CodeType](obj)
      file = obj.co_filename
      return make, tuple(file if a == _NO_FILE else a for a in arguments)

  out = io.BytesIO()
  Pickler(out).dump(value)
  return out.getvalue()


def _culprit(value: Any) -> str:
  """Returns the variable or attribute that cannot be pickled."""
  parts: dict[str, Any] = {}
  if inspect.isfunction(value):
    variables = inspect.getclosurevars(value)
    parts = {**variables.globals, **variables.nonlocals}
  elif hasattr(value, "__dict__") and not inspect.isclass(value):
    parts = dict(vars(value))
  for name, part in parts.items():
    try:
      _pickled(part)
    except Exception:  # Objects raise errors of any type.
      return f"its {name!r}, a {type(part).__name__}: "
  return ""
