# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Run directories in a bucket (`--workdir=gs://…`).

A bucket has no appends, renames or locks, so a run works in a local folder
(0700, below the temporary directory), whose files an `Uploader` copies to the
bucket as they change. Checkpoints go to the bucket directly (`place`). A lock
object in the bucket excludes other hosts. The local folder is reused until
another host has worked in the bucket, then downloaded again. No JAX here.
"""

import base64
from collections.abc import Iterator
import contextlib
import dataclasses
import fcntl
import functools
import hashlib
import importlib.util
import json
import logging
import os
import pathlib
import re
import secrets
import socket
import sys
import threading
import time
from typing import Any

from etils import epath
import fsspec
import tensorstore as ts

from tba_jax.system import background
from tba_jax.system import jsonl
from tba_jax.system import processes

_URL = re.compile(r"gs://[a-z0-9][a-z0-9._-]*(/[^/]+)+")
_MODEL = re.compile(r"(.+?)(/checkpoints/\d+)?")
# Programs that only read, and no model files; and programs that reject URLs.
_VIEWS = ("plan", "report", "status")
_LOCAL_ONLY = ("benchmark", "replay", "serve", "sweep")

# File about the local folder: its URL, the lock's token when it was last in
# sync, and its content: "logs", "all", or "work" after a run has worked there.
_MARKER = ".bucket.json"
_MARKER_SCHEMA = {"url": str, "token": str, "content": str}

# The lock object. Its holder renews it, and is considered dead after `GONE_S`
# without a renewal.
NAME = ".lease.json"
_RENEW_S = 15.0
GONE_S = 90.0
POLL_S = 1.0
_LOCK_SCHEMA = {"token": str, "holder": str}

# Shortest time between two uploads of a file, and largest share of time spent
# on uploading it.
_EVERY_S = 15.0
_SHARE = 0.05
TICK_S = 1.0
_CLOSE_S = 300.0
# Not uploaded: host-local files, and files that are in the bucket already.
_OF_HOST = frozenset(("spool", "params", "checkpoints", "secret"))
_SEGMENTS = "replay/"
# Suffixes of the files that `_VIEWS` read.
_LOGS = (".json", ".jsonl", ".csv", ".log", ".txt", ".html")


def is_remote(path: str | os.PathLike[str]) -> bool:
  """Returns whether a path is a URL."""
  return "://" in os.fspath(path)


def ocdbt(folder: str | os.PathLike[str], key: str) -> dict[str, Any]:
  """Returns TensorStore's spec of an array in a folder that Orbax wrote."""
  text = os.fspath(folder)
  base = f"{text}/"
  if not is_remote(text):
    base = {"driver": "file", "path": f"{os.path.abspath(text)}/"}
  return {"driver": "ocdbt", "base": base, "path": f"{key}/"}


def absolute(directory: str) -> epath.Path:
  """Returns an absolute local path, or a URL unchanged."""
  if not is_remote(directory):
    return epath.Path(directory).absolute()
  relist()
  return epath.Path(directory)


def relist() -> None:
  """Turns off gcsfs's cache of listings, also for etils and Orbax.

  The cache misses files that other writers add, including TensorStore in this
  process. Call this before the first access.
  """
  fsspec.config.conf.setdefault("gcs", {})["use_listings_cache"] = False


def stage(workdir: str, program: str, *, key: str = "--workdir") -> str:
  """Returns the local folder of a run directory, downloaded from a bucket.

  Args:
    workdir: URL, or a path, which is returned unchanged.
    key: flag or setting of `workdir`, for messages.

  Raises:
    ValueError: the URL is not allowed, the program needs a path, or gcsfs is
      not installed.
    OSError: the bucket cannot be read.
  """
  if not is_remote(workdir):
    return workdir
  url = workdir.rstrip("/")
  if program in _LOCAL_ONLY:
    allowed = f"a path of this machine with --program={program}"
  elif not _URL.fullmatch(url):
    allowed = "a path, or gs://BUCKET/PATH"
  elif importlib.util.find_spec("gcsfs") is None:
    allowed = "a path; gs:// needs gcsfs: pip install 'tba_jax[gcs]'"
  else:
    return str(prepare(url, program))
  raise ValueError(f"{key}={workdir}: must be {allowed}")


def stage_model(path: str, *, key: str) -> str:
  """Returns the local path of a run or its checkpoint; as `stage` does."""
  if not is_remote(path):
    return path
  run, checkpoint = _MODEL.fullmatch(path.rstrip("/")).groups()
  return stage(run, "generate", key=key) + (checkpoint or "")


def prepare(url: str, program: str) -> pathlib.Path:
  """Returns the local folder of a URL, up to date; raises OSError."""
  # A searcher on the trainer's host needs a separate folder.
  name = "searcher" if program == "searcher" else "run"
  folder = processes.spool_directory("", url) / name
  folder.mkdir(mode=0o700, exist_ok=True)
  content = "logs" if program in _VIEWS else "all"
  with _alone(folder):
    marker, token = _marker(folder), Lock(url).read().token
    if marker is not None and marker["token"] == token:
      if content == "logs" or marker["content"] != "logs":
        return folder
    fetch(url, folder, logs_only=content == "logs")
    epoch = jsonl.read_json(folder / "epoch.json")
    # Programs that need the file refuse a damaged one.
    if not jsonl.schema_error(epoch, {"epoch": int}):
      # A host that died may have begun an epoch and not uploaded it.
      epoch = {**epoch, "epoch": epoch["epoch"] + 1}
      jsonl.atomic_write_json(folder / "epoch.json", epoch)
    _mark(folder, url, token, content)
  return folder


def place(path: pathlib.Path) -> str:
  """Returns a checkpoint folder's URL, or `path` without a bucket."""
  path = pathlib.Path(path)
  for parent in path.parents[:3]:
    marker = _marker(parent)
    if marker is not None:
      return f"{marker['url']}/{path.relative_to(parent).as_posix()}"
  return str(path)


def send(workdir: str | os.PathLike[str], *patterns: str) -> None:
  """Uploads files of a staged folder now; does nothing without a bucket.

  Raises:
    OSError: the bucket cannot be written.
  """
  folder = pathlib.Path(workdir)
  marker = _marker(folder)
  if marker is None:
    return
  url = marker["url"]
  paths = [path for pattern in patterns for path in folder.glob(pattern)]
  names = [p.relative_to(folder).as_posix() for p in paths if p.is_file()]
  fs, root = _filesystem(url)
  for name in names:
    with _access(f"{url}/{name}"):
      fs.put_file(str(folder / name), f"{root}/{name}")
  print(f"copied to {url}: {', '.join(names)}", file=sys.stderr)


def hold(lock: int, workdir: str | os.PathLike[str]) -> contextlib.ExitStack:
  """Locks a run directory in its bucket too, and uploads it until `close`.

  Under a supervisor, which does both, only the local lock is held. `close`
  raises OSError for a file that could not be uploaded; it stays in the folder.

  Args:
    lock: descriptor of `run_directory.lock`; closed at the end.
    workdir: local folder that `stage` returned.

  Raises:
    ValueError: a process of another host works there.
    OSError: the bucket cannot be used.
  """
  folder = pathlib.Path(workdir)
  with contextlib.ExitStack() as closing:
    closing.callback(os.close, lock)
    marker = _marker(folder)
    if marker is not None and processes.SUPERVISED not in os.environ:
      remote = _take(folder)
      closing.callback(remote.release)
      renewing = background.Thread(
          "bucket-lock", functools.partial(_renew, remote)
      )
      closing.callback(renewing.close)
      closing.callback(Uploader(folder, marker["url"]).close)
    return closing.pop_all()


def _take(folder: pathlib.Path) -> "Lock":
  """Takes the lock in a folder's bucket; raises as `hold` does."""
  marker = _marker(folder)
  url = marker["url"]
  lock = Lock(url)
  with _alone(folder):
    state = lock.read()
    if state.token != marker["token"]:
      raise ValueError(
          f"{url}: {state.holder or 'another process'} has worked there"
          " meanwhile; start again"
      )
    if state.holder:
      logging.warning("%s: %s has not released it", url, state.holder)
    # Processes that worked in this folder are dead, since we hold the local
    # lock. If the folder was only downloaded, its owner may live elsewhere.
    token = marker["token"] if marker["content"] == "work" else ""
    _mark(folder, url, lock.take(token).token, "work")
  return lock


@dataclasses.dataclass(frozen=True)
class LockState:
  """Content of the lock object.

  token: random id of the last holder.
  holder: description of the current holder; "" if released.
  generation: GCS generation number.
  """

  token: str = ""
  holder: str = ""
  generation: bytes = b""


class Lock:
  """Lock of a folder in a bucket, by conditional writes of an object."""

  def __init__(self, url: str):
    self._url = url
    self._state = LockState()
    with _access(url):
      self.store = ts.KvStore.open(f"{url}/").result()

  def read(self) -> LockState:
    """Returns the current state; raises OSError."""
    with _access(self._url):
      stored = self.store.read(NAME).result()
    generation = stored.stamp.generation
    if not stored.value:
      return LockState(generation=generation)
    saved = jsonl.parse_line(stored.value)
    if error := jsonl.schema_error(saved, _LOCK_SCHEMA):
      raise OSError(f"{self._url}/{NAME} is damaged: {error}")
    return LockState(saved["token"], saved["holder"], generation)

  def take(self, token: str, *, gone_s: float = GONE_S) -> LockState:
    """Takes the lock; waits to see whether another holder is alive.

    Args:
      token: id of a holder that is known to be dead.
      gone_s: longest wait for a renewal by another holder.

    Raises:
      ValueError: the holder is alive, or another process was faster.
      OSError: the bucket cannot be used.
    """
    state = self.read()
    until = time.monotonic() + (0.0 if state.token == token else gone_s)
    while state.holder and time.monotonic() < until:
      time.sleep(min(POLL_S, gone_s))
      now = self.read()
      if now.holder and now.generation != state.generation:
        raise ValueError(f"{self._url}: {now.holder} already runs there")
      state = now
    holder = f"process {os.getpid()} of {socket.gethostname()}"
    claim = LockState(secrets.token_hex(8), holder, state.generation)
    if not self._write(claim):
      raise ValueError(f"{self._url}: {self.read().holder} was faster")
    return self._state

  def renew(self) -> None:
    """Renews the lock.

    Raises:
      RuntimeError: another process has taken it.
      OSError: the bucket cannot be written.
    """
    if not self._write(self._state):
      raise RuntimeError(
          f"{self._url}: {self.read().holder or 'another process'} has taken it"
          f" over: this process had not renewed it for {GONE_S:.0f} s"
      )

  def release(self) -> None:
    """Releases the lock; raises as `renew` does."""
    self._state = dataclasses.replace(self._state, holder="")
    self.renew()

  def _write(self, state: LockState) -> bool:
    """Writes `state`; returns False if the object's generation differs."""
    # New random bytes, so that every renewal makes a new generation.
    saved = {
        "token": state.token,
        "holder": state.holder,
        "renewal": secrets.token_hex(8),
    }
    data = json.dumps(saved).encode()
    with _access(self._url):
      written = self.store.write(NAME, data, if_equal=state.generation).result()
      if not written.generation:
        # After a lost response, a retry finds our own write.
        stored = self.store.read(NAME).result()
        if stored.value != data:
          return False
        written = stored.stamp
    self._state = dataclasses.replace(state, generation=written.generation)
    return True


def _renew(lock: Lock, stop: threading.Event) -> None:
  while not stop.wait(_RENEW_S):
    try:
      lock.renew()
    except RuntimeError as lost:
      # This process and its children would disturb the new holder.
      print(f"error: {lost}", file=sys.stderr, flush=True)
      os._exit(1)  # pylint: disable=protected-access
    except OSError as error:
      logging.warning("%s; it is tried again", error)


class Uploader:
  """Copies the files of a folder to a bucket as they change, until `close`.

  Args:
    folder: local folder; nobody else uploads to `url`.
    url: URL of the folder's copy.
    every_s: shortest time between two uploads of a file.

  Raises:
    OSError: the bucket cannot be read.
  """

  def __init__(
      self, folder: pathlib.Path, url: str, *, every_s: float = _EVERY_S
  ):
    self._folder = folder
    self._url = url
    self._every_s = every_s
    self._fs, self._root = _filesystem(url)
    self._there = _remote(url)
    # Name -> (mtime in ns, size) as uploaded, and name -> time of the next
    # upload.
    self._uploaded: dict[str, tuple[int, int]] = {}
    self._due: dict[str, float] = {}
    self.failure: OSError | None = None
    self._worker = background.Thread("uploader", self._run, close_s=_CLOSE_S)

  def close(self) -> None:
    """Uploads changed files; raises OSError, naming a failed file."""
    try:
      self._worker.close()
    except TimeoutError as error:
      raise OSError(f"{self._folder} to {self._url}: {error}") from error
    if self.failure is not None:
      raise self.failure
    print(f"the run is in {self._url}", file=sys.stderr)

  def _run(self, stop: threading.Event) -> None:
    warned = -60.0
    while not stop.wait(TICK_S):
      self._upload_all(last=False)
      if self.failure is not None and time.monotonic() > warned + 60:
        warned = time.monotonic()
        logging.warning("%s; it is tried again", self.failure)
    self._upload_all(last=True)

  def _upload_all(self, *, last: bool) -> None:
    self.failure = None
    stamps = _local(self._folder)
    if not last:
      # The open segment may end in a partial record; closed ones never change.
      for name in sorted(n for n in stamps if n.startswith(_SEGMENTS))[-1:]:
        del stamps[name]
    for name, stamp in stamps.items():
      due = last or time.monotonic() >= self._due.get(name, 0.0)
      if due and self._uploaded.get(name) != stamp:
        self._upload(name, stamp)
    for name in [n for n in self._uploaded if n not in stamps]:
      self._remove(name)

  def _upload(self, name: str, stamp: tuple[int, int]) -> None:
    begun, path = time.monotonic(), self._folder / name
    try:
      if not _is_equal(path, self._there.pop(name, {})):
        self._fs.put_file(str(path), f"{self._root}/{name}")
      self._uploaded[name] = stamp
    except Exception as error:  # gcsfs raises many types, some from aiohttp.
      if not isinstance(error, FileNotFoundError) or path.exists():
        self._fail(name, error)
    took = time.monotonic() - begun
    self._due[name] = time.monotonic() + max(self._every_s, took / _SHARE)

  def _remove(self, name: str) -> None:
    try:
      if self._fs.exists(f"{self._root}/{name}"):
        self._fs.rm_file(f"{self._root}/{name}")
      del self._uploaded[name]
    except Exception as error:
      self._fail(name, error)

  def _fail(self, name: str, error: Exception) -> None:
    self.failure = OSError(
        f"{self._folder / name} could not be copied to {self._url}: {error!r}"
    )


def fetch(url: str, folder: pathlib.Path, *, logs_only: bool = False) -> None:
  """Makes a local folder equal to its copy in a bucket, if there is one.

  With `logs_only`, models and other large files are left out.

  Raises:
    OSError: the bucket cannot be read.
  """
  fs, root = _filesystem(url)
  there = _remote(url)
  for name in _local(folder):
    if name not in there:
      (folder / name).unlink(missing_ok=True)
  for name, info in there.items():
    path = folder / name
    if (logs_only and not name.endswith(_LOGS)) or _is_equal(path, info):
      continue
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.parent / f".{path.name}.fetched"
    with _access(f"{url}/{name}"):
      fs.get_file(f"{root}/{name}", str(partial))
    partial.replace(path)


def _filesystem(url: str) -> tuple[fsspec.AbstractFileSystem, str]:
  """Returns the file system of a URL and the path on it."""
  relist()
  return fsspec.core.url_to_fs(url)


@contextlib.contextmanager
def _access(url: str) -> Iterator[None]:
  """Turns the many error types of TensorStore and gcsfs into OSError."""
  try:
    yield
  except Exception as error:
    raise OSError(f"{url} cannot be used: {error}") from error


def _marker(folder: pathlib.Path) -> dict[str, Any] | None:
  return jsonl.read_object(folder / _MARKER, _MARKER_SCHEMA)


def _mark(folder: pathlib.Path, url: str, token: str, content: str) -> None:
  marker = {"url": url, "token": token, "content": content}
  jsonl.atomic_write_json(folder / _MARKER, marker)


@contextlib.contextmanager
def _alone(folder: pathlib.Path) -> Iterator[None]:
  """Waits for other processes of this host, then excludes them."""
  with open(folder.parent / f".{folder.name}.stage", "a") as file:
    fcntl.flock(file, fcntl.LOCK_EX)
    yield


def _is_uploaded(name: str) -> bool:
  parts = name.split("/")
  return not _OF_HOST.intersection(parts) and not any(
      part.startswith(".") or part.endswith(".partial") for part in parts
  )


def _local(folder: pathlib.Path) -> dict[str, tuple[int, int]]:
  """Returns mtime and size of the files to upload, by name."""
  stamps = {}
  for parent, folders, files in os.walk(folder):
    folders[:] = [name for name in folders if _is_uploaded(name)]
    for path in (pathlib.Path(parent, file) for file in files):
      name = path.relative_to(folder).as_posix()
      # The file may be replaced or removed meanwhile.
      with contextlib.suppress(FileNotFoundError):
        status = path.stat()
        if _is_uploaded(name) and path.is_file():
          stamps[name] = status.st_mtime_ns, status.st_size
  return stamps


def _remote(url: str) -> dict[str, dict[str, Any]]:
  """Returns the info of the files of a copy, by name; raises OSError."""
  fs, root = _filesystem(url)
  with _access(url):
    infos = fs.find(root, detail=True)
  names = {path.removeprefix(root).lstrip("/"): path for path in infos}
  return {
      name: infos[path]
      for name, path in names.items()
      if name and not name.endswith("/") and _is_uploaded(name)
  }


def _is_equal(path: pathlib.Path, info: dict[str, Any]) -> bool:
  """Returns whether a file equals an object, by size and MD5."""
  try:
    if "md5Hash" not in info or path.stat().st_size != info["size"]:
      return False
    with path.open("rb") as file:
      digest = hashlib.file_digest(file, "md5").digest()
  except FileNotFoundError:
    return False
  return base64.b64encode(digest).decode() == info["md5Hash"]
