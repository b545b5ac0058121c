# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Carries params as immutable files, in shared memory or on a shared disk.

A version is one file, renamed into place when complete, with leaves aligned to
64 bytes. Readers on the same host map it, share its pages and keep them when
the file is removed; from a remote file system they read it.

The files are in a private directory of the run: in `publish.directory`, by
default in `/dev/shm`, else in the run directory.
"""

from collections.abc import Iterator, Mapping
from concurrent import futures
import errno
import mmap
import os
import pathlib
import shutil
from typing import Any, BinaryIO

import numpy as np

from tba_jax.system import bucket
from tba_jax.system import processes
from tba_jax.transport import byte_store
from tba_jax.transport import wire
from tba_jax.transport.params import carrier
from tba_jax.transport.params import version

_ALIGN = 64
_MAX_THREADS = 4
# Digests that may be pending during a write.
_AHEAD = 16
_MEMORY = pathlib.Path("/dev/shm")
# File systems where a removed file stays readable while it is mapped; on a
# remote one the reader gets SIGBUS.
_LOCAL_TYPES = ("tmpfs", "ramfs", "ext4", "ext3", "ext2", "xfs", "btrfs",
                "zfs", "f2fs", "overlay")  # fmt: skip


def files_directory(
    setting: str, workdir: pathlib.Path, run_id: str
) -> pathlib.Path:
  """Returns the directory of a run's params, which need not exist.

  `setting` is `publish.directory`; if it is in an object store, a local default
  is returned.
  """
  if setting and not bucket.is_remote(setting):
    return pathlib.Path(setting).expanduser().absolute() / f"params-{run_id}"
  if _MEMORY.is_dir() and os.access(_MEMORY, os.W_OK):
    return _MEMORY / f"tba_jax-{os.getuid()}" / f"params-{run_id}"
  return pathlib.Path(workdir).absolute() / "params"


def prepare_directory(path: pathlib.Path) -> None:
  """Makes a directory with mode 0700, or checks an existing one.

  Raises:
    ValueError: the directory is not private, see `processes.make_private`.
  """
  if path.parent.name == f"tba_jax-{os.getuid()}":
    processes.make_private(path.parent, "publish.directory")
  processes.make_private(path, "publish.directory")


def shards_directory(setting: str, workdir: pathlib.Path, run_id: str) -> str:
  """Returns the path or URL of a run's shards; like `files_directory`."""
  if bucket.is_remote(setting):
    return f"{setting.rstrip('/')}/params-{run_id}/shards"
  return str(files_directory(setting, workdir, run_id) / "shards")


def prepare_shards(place: str) -> None:
  """Makes the directory of shards, unless it is in an object store."""
  if not bucket.is_remote(place):
    path = pathlib.Path(place)
    prepare_directory(path.parent)
    path.mkdir(mode=0o700, exist_ok=True)


def remove_directory(path: pathlib.Path) -> None:
  """Removes a run's params; readers keep their mapped files."""
  shutil.rmtree(path, ignore_errors=True)


def is_local(path: pathlib.Path) -> bool:
  """Returns whether files there may be removed while mapped."""
  try:
    mounts = pathlib.Path("/proc/self/mounts").read_text()
  except OSError:
    return False
  best, kind = "", ""
  target = os.path.realpath(path)
  for line in mounts.splitlines():
    _, point, name = line.split(" ")[:3]
    point = point.replace("\\040", " ")
    inside = target == point or target.startswith(point.rstrip("/") + "/")
    # A later mount hides an earlier one at the same point.
    if inside and len(point) >= len(best):
      best, kind = point, name
  return kind in _LOCAL_TYPES


class SharedFiles(carrier.Carrier):
  """The carrier "files"; `path` is shared by all processes of the run."""

  name = "files"
  schema = {"num_bytes": int, "digests": {"*": [str]}}

  def __init__(self, path: pathlib.Path):
    self._path = path
    threads = min(_MAX_THREADS, len(processes.available_cores()))
    # Hashing releases the GIL.
    self._pool = futures.ThreadPoolExecutor(threads, "params-hash")

  @classmethod
  def make(cls, place: carrier.CarrierPlace) -> "SharedFiles":
    return cls(files_directory(place.directory, place.workdir, place.run_id))

  def write(
      self, tag: str, leaves: Mapping[str, Any]
  ) -> tuple[dict[str, Any], Any]:
    prepare_directory(self._path)
    path = self._path / f"{tag}.params"
    temporary = self._path / f".{tag}.{os.getpid()}"
    try:
      with temporary.open("wb", buffering=0) as file:
        carried = self._write(file, leaves)
        os.fsync(file.fileno())
      temporary.replace(path)
    except OSError as error:
      temporary.unlink(missing_ok=True)
      raise OSError(
          error.errno or errno.EIO,
          f"params could not be written to {path} ({error.strerror});"
          " config.publish.directory names another place",
      ) from error
    return carried, None

  def drop(self, packed: carrier.PackedVersion) -> None:
    (self._path / f"{packed.tag}.params").unlink(missing_ok=True)

  def clean(self, tag: str) -> None:
    for path in [*self._path.glob("*.params"), *self._path.glob(".*.*.*")]:
      if path.name.removeprefix(".") < tag:
        path.unlink(missing_ok=True)

  def read(
      self,
      transport: byte_store.Transport,
      tag: str,
      carried: Mapping[str, Any],
      specs: version.Specs,
  ) -> dict[str, np.ndarray] | None:
    path = self._path / f"{tag}.params"
    try:
      data = _open(path)
    except FileNotFoundError:
      # A drop deletes the manifest first.
      if transport.get(f"p/{tag}/meta") is None:
        return None
      raise wire.WireError(
          "missing",
          f"{path} is not there: config.publish.directory must be the same"
          " place for trainer and searchers",
      ) from None
    if len(data) != carried["num_bytes"]:
      raise wire.WireError(
          "truncated", f"{path} has {len(data)} bytes of {carried['num_bytes']}"
      )
    checks = []
    for name, offset, size in _places(specs):
      wanted = carried["digests"].get(name)
      leaf = memoryview(data)[offset : offset + size]
      starts = range(0, size, carrier.PIECE_BYTES)
      if wanted is None or len(wanted) != len(starts):
        raise wire.WireError("leaves", f"leaf {name} is not in {path}")
      for start, text in zip(starts, wanted, strict=True):
        piece = leaf[start : start + carrier.PIECE_BYTES]
        checks.append((name, piece, text))
    for _ in self._pool.map(lambda check: carrier.check_digest(*check), checks):
      pass
    return {
        name: carrier.as_leaf(data, specs[name], offset)
        for name, offset, _ in _places(specs)
    }

  def close(self) -> None:
    self._pool.shutdown(wait=False, cancel_futures=True)

  def _write(self, file: BinaryIO, leaves: Mapping[str, Any]) -> dict[str, Any]:
    """Writes all leaves in order; returns `carried`."""
    digests, pending, position = {}, [], 0
    for name, offset, size in _places(version.specs_of(leaves)):
      _write_all(file, memoryview(bytes(offset - position)))
      # Leaves are copied from the device one at a time.
      data = carrier.flat_bytes(leaves[name])
      digests[name] = []
      for piece in carrier.pieces(data):
        pending.append((name, self._pool.submit(carrier.digest, piece)))
        _write_all(file, memoryview(piece))
        while len(pending) > _AHEAD:
          done, future = pending.pop(0)
          digests[done].append(future.result())
      position = offset + size
    for done, future in pending:
      digests[done].append(future.result())
    return {"num_bytes": position, "digests": digests}


def _open(path: pathlib.Path) -> mmap.mmap | bytes:
  """Returns the bytes of a file, mapped if that is safe."""
  with path.open("rb") as file:
    size = os.fstat(file.fileno()).st_size
    if not size or not is_local(path):
      try:
        return file.read()
      except OSError as error:
        # Removed by the host that has it.
        if error.errno == errno.ESTALE:
          raise FileNotFoundError(path) from error
        raise
    return mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ)


def _places(specs: version.Specs) -> Iterator[tuple[str, int, int]]:
  """Yields name, offset in the file and size in bytes of each leaf."""
  offset = 0
  for name, spec in specs.items():
    offset += -offset % _ALIGN
    size = version.leaf_bytes(*spec)
    yield name, offset, size
    offset += size


def _write_all(file: BinaryIO, data: memoryview) -> None:
  while data:
    data = data[file.write(data) :]
