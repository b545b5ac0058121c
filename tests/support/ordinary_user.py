# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Runs commands as an unprivileged user, even if the tests run as root."""

from collections.abc import Sequence
import os
import pathlib
import shutil
import stat
import sys

CHECKOUT = pathlib.Path(__file__).resolve().parents[2]
UID = 54321  # Unused on real systems.


class NotPossibleError(Exception):
  """No unprivileged user can run this Python, for the reason in the message."""


def give(folder: pathlib.Path) -> None:
  """Makes the user the owner of a folder and its contents."""
  if os.geteuid() == 0:
    for path in (folder, *folder.rglob("*")):
      os.chown(path, UID, UID, follow_symlinks=False)


def command(words: Sequence[str]) -> list[str]:
  """Returns the command that runs `words` as an unprivileged user.

  If only root can read Python's folder, bubblewrap makes it visible.

  Raises:
    NotPossibleError: bubblewrap is needed and missing.
  """
  if os.geteuid():
    return list(words)
  needed = [pathlib.Path(p) for p in (sys.prefix, sys.base_prefix, CHECKOUT)]
  private = {
      next(p for p in reversed(path.parents) if not _is_open(p))
      for path in needed
      if not all(map(_is_open, path.parents))
  }
  world = []
  if private:
    program = shutil.which("bwrap")
    if program is None:
      raise NotPossibleError(f"{min(private)}: only for root; bwrap is missing")
    world = [program, "--bind", "/", "/", "--dev-bind", "/dev", "/dev"]
    for folder in private:
      world += ["--tmpfs", str(folder)]
    inside = [p for p in needed if private & set(p.parents)]
    for parent in sorted({p for path in inside for p in path.parents}):
      world += ["--dir", str(parent)]
    for path in inside:
      world += ["--ro-bind", str(path), str(path)]
    world += ["--"]
  ids = [f"--reuid={UID}", f"--regid={UID}", "--clear-groups"]
  return [*world, "setpriv", *ids, *words]


def _is_open(folder: pathlib.Path) -> bool:
  return bool(folder.stat().st_mode & stat.S_IXOTH)
