# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Copies of the files of a folder in a bucket, which cannot append or rename.

Files go to the bucket as they change, whole; the last copy is made when the
folder is let go. Not copied are what is of this host alone (sockets, secrets,
locks, params in flight) and checkpoints, which are written to the bucket and
nowhere else. No JAX here.
"""

import base64
from collections.abc import Iterator
import hashlib
import logging
import os
import pathlib
import threading
import time
from typing import Any

from etils import epath
import fsspec

# A file is copied at most so often, and for at most this share of the time.
EVERY_S = 15.0
_SHARE = 0.05
_TICK_S = 1.0
_CLOSE_S = 300.0
_OF_HOST = frozenset(("spool", "params", "checkpoints", "secret"))
_SEGMENTS = "replay"
# What views and reports read.
_LOGS = (".json", ".jsonl", ".csv", ".log", ".txt", ".html")


def list_anew() -> None:
  """Has this process ask a bucket whenever it lists, also by etils and Orbax.

  A list that is kept lacks what others write, TensorStore in this process among
  them. To be called before the first look.
  """
  fsspec.config.conf.setdefault("gcs", {})["use_listings_cache"] = False


def absolute(directory: str) -> epath.Path:
  """Returns an absolute path of this host, or the path of a URL as it is."""
  if "://" not in directory:
    return epath.Path(directory).absolute()
  list_anew()
  return epath.Path(directory)


def open_filesystem(url: str) -> tuple[fsspec.AbstractFileSystem, str]:
  """Returns the file system of a URL, and the path on it."""
  list_anew()
  return fsspec.core.url_to_fs(url)


def is_copied(name: str) -> bool:
  """Tells whether a file belongs into the bucket, by its path in the folder."""
  parts = name.split("/")
  return not _OF_HOST.intersection(parts) and not any(
      part.startswith(".") or part.endswith(".partial") for part in parts
  )


def fetch(url: str, folder: pathlib.Path, *, logs_only: bool = False) -> None:
  """Makes a folder what its copy in a bucket is.

  Args:
    url: of the copy; there need not be one.
    folder: whose files change; of those that the bucket does not have, the ones
      that it would have are removed.
    logs_only: leave out models and whatever else no view reads.

  Raises:
    OSError: the bucket cannot be read.
  """
  fs, root = open_filesystem(url)
  try:
    there = dict(_remote(fs, root))
    for name in sorted(_local(folder)):
      if name not in there:
        (folder / name).unlink(missing_ok=True)
    for name, info in there.items():
      wanted = not logs_only or name.endswith(_LOGS)
      if wanted and not _is_equal(folder / name, info):
        _fetch_file(fs, f"{root}/{name}", folder / name)
  # gcsfs raises errors of its own and of aiohttp.
  except Exception as error:
    raise OSError(f"{url} cannot be read: {error}") from error


class Mirror:
  """Keeps the copy of a folder up to date, in a thread, until it is closed."""

  def __init__(
      self, folder: pathlib.Path, url: str, *, every_s: float = EVERY_S
  ):
    """Reads what is there, and begins.

    Args:
      folder: of this host; nobody else copies to `url`.
      url: of its copy.
      every_s: between two copies of one file, at least.

    Raises:
      OSError: the bucket cannot be read.
    """
    self._folder = folder
    self._url = url
    self._every_s = every_s
    self._fs, self._root = open_filesystem(url)
    try:
      self._there = dict(_remote(self._fs, self._root))
    except Exception as error:
      raise OSError(f"{url} cannot be read: {error}") from error
    # By name: what was copied, (mtime in ns, bytes), and when the next may be.
    self._copied: dict[str, tuple[int, int]] = {}
    self._next: dict[str, float] = {}
    self._closed = threading.Event()
    self._failure: OSError | None = None
    self._thread = threading.Thread(
        target=self._run, name="bucket-mirror", daemon=True
    )
    self._thread.start()

  def close(self) -> None:
    """Makes the last copy of all that has changed.

    Raises:
      OSError: a file could not be copied; the message names it.
    """
    self._closed.set()
    self._thread.join(_CLOSE_S)
    if self._thread.is_alive():
      raise OSError(
          f"{self._folder} is not copied to {self._url} within {_CLOSE_S:.0f} s"
      )
    if self._failure is not None:
      raise self._failure

  def _run(self) -> None:
    told = 0.0
    while not self._closed.wait(_TICK_S):
      self._copy_all(last=False)
      if self._failure is not None and time.monotonic() > told:
        told = time.monotonic() + 60
        logging.warning("%s; it is tried again", self._failure)
    self._copy_all(last=True)

  def _copy_all(self, *, last: bool) -> None:
    """Copies what has changed, and removes what is no longer here."""
    self._failure = None
    found = _local(self._folder)
    if not last:
      # Its end may be half a record; closed ones never change.
      segments = sorted(n for n in found if n.startswith(f"{_SEGMENTS}/"))
      for name in segments[-1:]:
        del found[name]
    for name, stamp in found.items():
      due = last or time.monotonic() >= self._next.get(name, 0.0)
      if due and self._copied.get(name) != stamp:
        self._try(name, stamp)
    for name in [n for n in self._copied if n not in found]:
      self._try(name, None)

  def _try(self, name: str, stamp: tuple[int, int] | None) -> None:
    """Copies a file, or removes its copy; a failure is kept for the caller."""
    begun, path = time.monotonic(), self._folder / name
    target = f"{self._root}/{name}"
    try:
      if stamp is None:
        if self._fs.exists(target):
          self._fs.rm_file(target)
        del self._copied[name]
        return
      before = self._there.pop(name, None)
      if before is None or not _is_equal(path, before):
        self._fs.put_file(str(path), target)
      self._copied[name] = stamp
    except FileNotFoundError:
      if path.exists():
        self._failure = OSError(f"{path} could not be copied to {self._url}")
    # gcsfs raises errors of its own and of aiohttp.
    except Exception as error:
      self._failure = OSError(
          f"{path} could not be copied to {self._url}: {error!r}"
      )
    took = time.monotonic() - begun
    self._next[name] = time.monotonic() + max(self._every_s, took / _SHARE)


def send(folder: pathlib.Path, url: str, names: list[str]) -> None:
  """Copies single files of a folder, those of them that are there.

  Raises:
    OSError: the bucket cannot be written.
  """
  fs, root = open_filesystem(url)
  for name in names:
    if (folder / name).exists():
      try:
        fs.put_file(str(folder / name), f"{root}/{name}")
      except Exception as error:
        raise OSError(f"{url}/{name} cannot be written: {error}") from error


def _local(folder: pathlib.Path) -> dict[str, tuple[int, int]]:
  """Returns the files that belong into the bucket: change time and bytes."""
  found = {}
  for parent, folders, files in os.walk(folder):
    folders[:] = [name for name in folders if is_copied(name)]
    for file in files:
      path = pathlib.Path(parent, file)
      name = path.relative_to(folder).as_posix()
      try:
        status = path.stat()
      except FileNotFoundError:  # Just replaced or removed.
        continue
      if is_copied(name) and path.is_file():
        found[name] = status.st_mtime_ns, status.st_size
  return found


def _remote(
    fs: fsspec.AbstractFileSystem, root: str
) -> Iterator[tuple[str, dict[str, Any]]]:
  """Yields name and description of the files of a copy."""
  for path, info in fs.find(root, detail=True).items():
    name = path.removeprefix(root).lstrip("/")
    if name and not name.endswith("/") and is_copied(name):
      yield name, info


def _is_equal(path: pathlib.Path, info: dict[str, Any]) -> bool:
  """Tells whether a file is what a bucket says of its copy."""
  try:
    if "md5Hash" not in info or path.stat().st_size != info["size"]:
      return False
    with path.open("rb") as file:
      digest = hashlib.file_digest(file, "md5").digest()
  except FileNotFoundError:
    return False
  return base64.b64encode(digest).decode() == info["md5Hash"]


def _fetch_file(
    fs: fsspec.AbstractFileSystem, source: str, path: pathlib.Path
) -> None:
  """Writes a file as a whole or not at all."""
  path.parent.mkdir(parents=True, exist_ok=True)
  partial = path.parent / f".{path.name}.fetched"
  fs.get_file(source, str(partial))
  partial.replace(path)
