# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""A run directory in a bucket (`gs://…`), and the folder that works for it.

A bucket has objects that are written whole: no appends, no renames, no locks.
So a run in a bucket works in a folder of this host (0700, below the temporary
directory), whose files are copied to the bucket as they change. Checkpoints go
to the bucket and nowhere else; `place` says where. Who works there says so in
an object (`bucket_lease`). The folder counts as long as nobody else has worked
there since; else it is made what the bucket has. No JAX here.
"""

from collections.abc import Iterator
import contextlib
import fcntl
import importlib.util
import logging
import os
import pathlib
import re
import sys
import threading
from typing import Any

from tba_jax import jsonl
from tba_jax import processes

_MARKER = ".bucket.json"
_URL = re.compile(r"gs://[a-z0-9][a-z0-9._-]*(/[^/]+)+")
_MODEL = re.compile(r"(.+?)(/checkpoints/\d+)?")
# They only look, and leave the files of models where they are.
_VIEWS = ("plan", "report", "status")
_NOT_THERE = ("benchmark", "sweep")


def is_remote(path: str | os.PathLike[str]) -> bool:
  """Tells whether a path is a URL."""
  return "://" in os.fspath(path)


def stage(workdir: str, program: str, *, key: str = "--workdir") -> str:
  """Returns the folder of this host that a program works in.

  That is `workdir` itself, where it is a path. For one in a bucket it is made
  what the bucket has, unless it is that already, or newer.

  Args:
    workdir: path or URL of a run directory.
    program: that is to work there.
    key: what `workdir` was given by, for messages.

  Raises:
    ValueError: a URL that is none of a bucket, or a program that works on
      paths alone, or gcsfs is not there.
    OSError: the bucket cannot be read.
  """
  if not is_remote(workdir):
    return workdir
  url = workdir.rstrip("/")
  if program in _NOT_THERE:
    raise ValueError(
        f"{key}={workdir}: allowed a path of this machine with"
        f" --program={program}"
    )
  if not _URL.fullmatch(url):
    raise ValueError(f"{key}={workdir}: allowed a path, or gs://BUCKET/PATH")
  if importlib.util.find_spec("gcsfs") is None:
    raise ValueError(
        f"{key}={workdir}: allowed a path without gcsfs; gs:// needs  pip"
        " install tba_jax[gcs]"
    )
  return str(prepare(url, program))


def prepare(url: str, program: str) -> pathlib.Path:
  """Returns the folder that stands for a URL, as `stage`, without its checks.

  Raises:
    OSError: the bucket cannot be read.
  """
  # A searcher has a store of another host; what it writes is its own.
  name = "searcher" if program == "searcher" else "run"
  folder = processes.spool_directory("", url) / name
  folder.mkdir(mode=0o700, exist_ok=True)
  with _alone(folder):
    _refresh(folder, url, logs_only=program in _VIEWS)
  return folder


def stage_model(path: str, *, key: str) -> str:
  """Returns the path of this host that stands for a run or its checkpoint.

  Args:
    path: of a folder, or the URL of a run or of one of its checkpoints.
    key: setting that holds it, for messages.

  Raises: as `stage`.
  """
  if not is_remote(path):
    return path
  run, checkpoint = _MODEL.fullmatch(path.rstrip("/")).groups()
  return stage(run, "generate", key=key) + (checkpoint or "")


def place(path: pathlib.Path) -> str:
  """Returns where a folder of checkpoints is: in the bucket, or `path`."""
  path = pathlib.Path(path)
  for parent in path.parents[:3]:
    marker = jsonl.read_json(parent / _MARKER)
    if marker is not None:
      return f"{marker['url']}/{path.relative_to(parent).as_posix()}"
  return str(path)


def send(workdir: str | os.PathLike[str], *patterns: str) -> None:
  """Copies files of a folder to its bucket; nothing where it has none.

  Args:
    workdir: what `stage` gave.
    *patterns: of the files, below `workdir`.

  Raises:
    OSError: the bucket cannot be written.
  """
  marker = jsonl.read_json(pathlib.Path(workdir) / _MARKER)
  if marker is not None:
    from tba_jax import bucket_mirror

    folder = pathlib.Path(workdir)
    found = [path for pattern in patterns for path in folder.glob(pattern)]
    names = [p.relative_to(folder).as_posix() for p in found if p.is_file()]
    bucket_mirror.send(folder, marker["url"], names)
    print(f"copied to {marker['url']}: {', '.join(names)}", file=sys.stderr)


class Hold:
  """A run directory that is this process's, until it is closed."""

  def __init__(self, lock: int, claim: "_Claim | None"):
    self._lock = lock
    self._claim = claim

  def close(self) -> None:
    """Copies what the bucket lacks, and lets others have the directory.

    Raises:
      OSError: not all could be copied; it is still in the folder.
    """
    try:
      if self._claim is not None:
        self._claim.close()
    finally:
      os.close(self._lock)


def hold(lock: int, workdir: str | os.PathLike[str]) -> Hold:
  """Takes a run directory also in its bucket, where it has one.

  From then on the bucket follows it. Where a supervisor has started this
  process, that one does so already.

  Args:
    lock: what `run_directory.lock` gave; closed with the hold.
    workdir: what `stage` gave.

  Raises:
    ValueError: a process of another host works there; it is named.
    OSError: the bucket cannot be used.
  """
  folder = pathlib.Path(workdir)
  marker = jsonl.read_json(folder / _MARKER)
  try:
    if marker is None or processes.SUPERVISED in os.environ:
      return Hold(lock, None)
    return Hold(lock, _Claim(folder, marker))
  except BaseException:
    os.close(lock)
    raise


class _Claim:
  """The lease of a folder in a bucket, and the thread that copies to it."""

  def __init__(self, folder: pathlib.Path, marker: dict[str, Any]):
    """Takes the lease, and begins to copy."""
    from tba_jax import bucket_lease
    from tba_jax import bucket_mirror

    self._url = marker["url"]
    self._lease = bucket_lease.Lease(self._url)
    with _alone(folder):
      seen = self._lease.look()
      if seen.token != marker["token"]:
        raise bucket_lease.HeldError(
            f"{self._url}: {seen.holder or 'another process'} has worked there"
            " meanwhile; start again"
        )
      if seen.holder:
        logging.warning("%s: %s has not let go of it", self._url, seen.holder)
      # Its lock is ours, so no process works in this folder any more; but it
      # may be one that has never worked there, only looked.
      own = marker["token"] if marker["worked"] else ""
      taken = self._lease.take(own)
      _write_marker(folder, self._url, taken.token, worked=True)
    self._mirror = bucket_mirror.Mirror(folder, self._url)
    self._closed = threading.Event()
    self._lost = bucket_lease.LostError
    self._thread = threading.Thread(
        target=self._renew,
        args=(bucket_lease.RENEW_S,),
        name="bucket-lease",
        daemon=True,
    )
    self._thread.start()

  def close(self) -> None:
    try:
      self._mirror.close()
      print(f"the run is in {self._url}", file=sys.stderr)
    finally:
      self._closed.set()
      self._thread.join()
      self._lease.release()

  def _renew(self, every_s: float) -> None:
    while not self._closed.wait(every_s):
      try:
        self._lease.renew()
      except self._lost as lost:
        # Whatever this process and its children do from now on would disturb
        # who works there now; they end with it.
        print(f"error: {lost}", file=sys.stderr, flush=True)
        os._exit(1)  # pylint: disable=protected-access
      except OSError as error:
        logging.warning("%s; it is tried again", error)


def _refresh(folder: pathlib.Path, url: str, *, logs_only: bool) -> None:
  """Makes a folder what the bucket has, where others have worked there."""
  from tba_jax import bucket_lease
  from tba_jax import bucket_mirror

  marker = jsonl.read_json(folder / _MARKER)
  token = bucket_lease.Lease(url).look().token
  if marker is not None and marker["token"] == token:
    if logs_only or not marker["logs_only"]:
      return
  bucket_mirror.fetch(url, folder, logs_only=logs_only)
  epoch = jsonl.read_json(folder / "epoch.json")
  if epoch is not None:
    # A host that is gone may have begun one that the bucket does not know.
    epoch = {**epoch, "epoch": epoch["epoch"] + 1}
    jsonl.atomic_write_json(folder / "epoch.json", epoch)
  _write_marker(folder, url, token, logs_only=logs_only)


def _write_marker(
    folder: pathlib.Path,
    url: str,
    token: str,
    *,
    worked: bool = False,
    logs_only: bool = False,
) -> None:
  """Writes which folder of which bucket this is, as of whose work.

  worked: whether the last who worked there did so in this folder.
  """
  jsonl.atomic_write_json(
      folder / _MARKER,
      {"url": url, "token": token, "worked": worked, "logs_only": logs_only},
  )


@contextlib.contextmanager
def _alone(folder: pathlib.Path) -> Iterator[None]:
  """Keeps other processes of this host from the same."""
  with open(folder.parent / f".{folder.name}.stage", "a") as file:
    fcntl.flock(file, fcntl.LOCK_EX)
    yield
