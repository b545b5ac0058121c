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

import base64
from collections.abc import Iterator
import contextlib
import dataclasses
import fcntl
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

from tba_jax.system import jsonl
from tba_jax.system import processes

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
    pass

    folder = pathlib.Path(workdir)
    found = [path for pattern in patterns for path in folder.glob(pattern)]
    names = [p.relative_to(folder).as_posix() for p in found if p.is_file()]
    copy_file(folder, marker["url"], names)
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
    pass
    pass

    self._url = marker["url"]
    self._lease = Lease(self._url)
    with _alone(folder):
      seen = self._lease.look()
      if seen.token != marker["token"]:
        raise HeldError(
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
    self._mirror = Mirror(folder, self._url)
    self._closed = threading.Event()
    self._lost = LostError
    self._thread = threading.Thread(
        target=self._renew,
        args=(RENEW_S,),
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
  pass
  pass

  marker = jsonl.read_json(folder / _MARKER)
  token = Lease(url).look().token
  if marker is not None and marker["token"] == token:
    if logs_only or not marker["logs_only"]:
      return
  fetch(url, folder, logs_only=logs_only)
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


# Who works in a folder of a bucket: an object that its holder keeps writing.
#
# A bucket has no locks, but a write may ask that the object is still the one
# that
# was read. No JAX here.


NAME = ".lease.json"
# A holder writes so often, and is gone where nothing came for so long.
RENEW_S = 15.0
GONE_S = 90.0
_LOOK_S = 1.0


class HeldError(ValueError):
  """Somebody else works there; the message names who."""


class LostError(RuntimeError):
  """Somebody else has taken the lease; what is here must not go on."""


@dataclasses.dataclass(frozen=True)
class State:
  """What an object says.

  claim: how often the folder was taken so far.
  token: of the last who took it.
  holder: who works there, for messages; "" = nobody.
  generation: of the object.
  """

  claim: int = 0
  token: str = ""
  holder: str = ""
  generation: bytes = b""


class Lease:
  """The lease of one folder; one thread at a time uses it."""

  def __init__(self, url: str):
    """Takes nothing yet.

    Args:
      url: of the folder, as TensorStore opens it.

    Raises:
      OSError: the bucket cannot be read.
    """
    self._url = url
    self._beat = 0
    self._mine = State()
    self._store = _call(url, lambda: ts.KvStore.open(f"{url}/").result())

  def look(self) -> State:
    """Returns what stands there now.

    Raises:
      OSError: the bucket cannot be read.
    """
    read = _call(self._url, lambda: self._store.read(NAME).result())
    try:
      saved = json.loads(read.value) if read.value else {}
      claim, token = int(saved.get("claim", 0)), str(saved.get("token", ""))
      holder = str(saved.get("holder", ""))
    except (ValueError, AttributeError) as error:
      raise OSError(f"{self._url}/{NAME} is damaged: {error!r}") from error
    return State(claim, token, holder, read.stamp.generation)

  def take(self, token: str, *, gone_s: float = GONE_S) -> State:
    """Takes the lease; waits to see that a holder that says nothing is gone.

    Args:
      token: that this host took it with the last time: its own processes do not
        run any more, so there is nothing to wait for.
      gone_s: how long to watch a holder of another host.

    Returns:
      What stands there from now on.

    Raises:
      HeldError: the holder lives, or was faster.
      OSError: the bucket cannot be read or written.
    """
    seen = self.look()
    if seen.holder and seen.token != token:
      seen = self._watch(seen, gone_s)
    who = f"process {os.getpid()} of {socket.gethostname()}"
    mine = State(seen.claim + 1, secrets.token_hex(8), who)
    if not self._write(mine, seen.generation):
      raise HeldError(f"{self._url}: {self.look().holder} was faster")
    return self._mine

  def renew(self) -> None:
    """Says that this process still works there.

    Raises:
      LostError: it is somebody else's.
      OSError: the bucket cannot be written now.
    """
    if not self._write(self._mine, self._mine.generation):
      found = self.look()
      raise LostError(
          f"{self._url}: {found.holder or 'another process'} has taken it over:"
          f" this process had said nothing for {GONE_S:.0f} s"
      )

  def release(self) -> None:
    """Says that nobody works there any more; raises as `renew`."""
    self._mine = dataclasses.replace(self._mine, holder="")
    self.renew()

  def _watch(self, seen: State, gone_s: float) -> State:
    """Returns what stands there once a holder is gone; else raises."""
    until = time.monotonic() + gone_s
    while time.monotonic() < until:
      time.sleep(min(_LOOK_S, gone_s))
      if (now := self.look()).generation != seen.generation:
        if not now.holder:
          return now
        raise HeldError(f"{self._url}: {now.holder} already runs there")
    return seen

  def _write(self, state: State, generation: bytes) -> bool:
    """Writes where the object is still of a generation; False: it is not."""
    self._beat += 1
    saved = {
        "claim": state.claim,
        "token": state.token,
        "holder": state.holder,
        "beat": self._beat,
    }
    data = json.dumps(saved).encode()
    write = lambda: self._store.write(NAME, data, if_equal=generation).result()
    written = _call(self._url, write).generation
    if not written:
      # Where the first answer was lost, the second try found our own write.
      read = _call(self._url, lambda: self._store.read(NAME).result())
      if read.value != data:
        return False
      written = read.stamp.generation
    self._mine = dataclasses.replace(state, generation=written)
    return True


def _call(url: str, call: Any) -> Any:
  try:
    return call()
  # TensorStore raises ValueError, RuntimeError, … for whatever a service says.
  except Exception as error:
    raise OSError(f"{url} cannot be used: {error}") from error


# Copies of the files of a folder in a bucket, which cannot append or rename.
#
# Files go to the bucket as they change, whole; the last copy is made when the
# folder is let go. Not copied are what is of this host alone (sockets, secrets,
# locks, params in flight) and checkpoints, which are written to the bucket and
# nowhere else. No JAX here.


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


def copy_file(folder: pathlib.Path, url: str, names: list[str]) -> None:
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
