# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""The spool directory of a store's host: private to its user, one host each."""

import fcntl
import os
import pathlib
import stat


def prepare(spool: pathlib.Path) -> None:
  """Makes the directory with mode 0700 where it is not there, and checks it.

  Raises:
    ValueError: it is a link, another user's, or others may enter it.
  """
  spool.parent.mkdir(parents=True, exist_ok=True)
  try:
    spool.mkdir(mode=0o700)
  except FileExistsError:
    pass
  info = os.lstat(spool)
  if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.geteuid():
    raise ValueError(
        f"store.spool_dir={spool}: allowed is a directory of this user"
        f" (uid {os.geteuid()}), no link"
    )
  if info.st_mode & 0o077:
    raise ValueError(
        f"store.spool_dir={spool} has mode {stat.S_IMODE(info.st_mode):04o};"
        " allowed is 0700 (whoever enters it reaches the store)"
    )


def lock(spool: pathlib.Path) -> int:
  """Returns a descriptor that holds the spool's lock while it is open.

  Raises:
    RuntimeError: another process holds it; its pid is named.
  """
  fd = os.open(spool / "host.lock", os.O_RDWR | os.O_CREAT, 0o600)
  try:
    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
  except BlockingIOError as error:
    holder = os.pread(fd, 32, 0).decode(errors="replace").strip()
    os.close(fd)
    raise RuntimeError(
        f"store.spool_dir={spool} is held by another store host, process"
        f" {holder or 'unknown'}; one run has one store"
    ) from error
  os.ftruncate(fd, 0)
  os.pwrite(fd, str(os.getpid()).encode(), 0)
  return fd
