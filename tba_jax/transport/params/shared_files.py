# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Carries params as immutable files, in shared memory or on a shared disk.

A version is a folder, renamed into place when complete, with one file per
thread that writes and reads. A file holds leaves, aligned to 64 bytes, and then
the tags of their pieces (`seal.py`). Readers on the same host map the file and
share its pages, which stay when it is removed; on a remote file system they
read it into memory.

The files are in a private directory of the run: in `publish.directory`, by
default in `/dev/shm`, else in the run directory.
"""

from collections.abc import Iterator, Mapping, Sequence
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
from tba_jax.transport.params import seal as seal_lib
from tba_jax.transport.params import version

_ALIGN = 64
_MAX_THREADS = 4
_MEMORY = pathlib.Path("/dev/shm")
# File systems where a removed file stays readable while it is mapped; on a
# remote one the reader gets SIGBUS.
_LOCAL_TYPES = ("tmpfs", "ramfs", "ext4", "ext3", "ext2", "xfs", "btrfs",
                "zfs", "f2fs", "overlay")  # fmt: skip


def files_directory(
    setting: str, workdir: pathlib.Path, run_id: str
) -> pathlib.Path:
  """Returns the directory of a run's params; it may not exist yet.

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
    # A later mount hides an earlier mount at the same point.
    if inside and len(point) >= len(best):
      best, kind = point, name
  return kind in _LOCAL_TYPES


class SharedFiles(carrier.Carrier):
  """The carrier "files"; `path` is shared by all processes of the run.

  Args:
    secret: key of the run's messages.
  """

  name = "files"
  schema = {"salt": str, "files": [[str]]}

  def __init__(self, path: pathlib.Path, *, run_id: str, secret: bytes):
    self._path = path
    self._run_id = run_id
    self._secret = secret
    self._threads = min(_MAX_THREADS, len(processes.available_cores()))
    # Copies and seals release the GIL.
    self._pool = futures.ThreadPoolExecutor(self._threads, "params-files")

  @classmethod
  def make(cls, place: carrier.CarrierPlace) -> "SharedFiles":
    path = files_directory(place.directory, place.workdir, place.run_id)
    return cls(path, run_id=place.run_id, secret=place.secret)

  def write(
      self, tag: str, leaves: Mapping[str, Any]
  ) -> tuple[dict[str, Any], Any]:
    prepare_directory(self._path)
    path = self._path / f"{tag}.params"
    temporary = self._path / f".{tag}.{os.getpid()}"
    salt = seal_lib.make_salt()
    seal = seal_lib.Seal(self._secret, self._run_id, tag, salt)
    specs = version.specs_of(leaves)
    files = _share_out(specs, self._threads)
    first = _first_pieces(specs)

    def write(number: int) -> None:
      with (temporary / str(number)).open("wb", buffering=0) as file:
        _write_file(file, files[number], leaves, specs, seal, first)
        os.fsync(file.fileno())

    try:
      shutil.rmtree(temporary, ignore_errors=True)
      temporary.mkdir(mode=0o700)
      for _ in self._pool.map(write, range(len(files))):
        pass
      # After a restore, the same version may be published again.
      remove_directory(path)
      temporary.replace(path)
    except OSError as error:
      remove_directory(temporary)
      raise OSError(
          error.errno or errno.EIO,
          f"params could not be written to {path} ({error.strerror});"
          " config.publish.directory names another place",
      ) from error
    return {"salt": salt, "files": files}, None

  def drop(self, packed: carrier.PackedVersion) -> None:
    remove_directory(self._path / f"{packed.tag}.params")

  def clean(self, tag: str) -> None:
    for path in [*self._path.glob("*.params"), *self._path.glob(".*.*.*")]:
      if path.name.removeprefix(".") < tag:
        remove_directory(path)

  def read(
      self,
      transport: byte_store.Transport,
      tag: str,
      carried: Mapping[str, Any],
      specs: version.Specs,
  ) -> dict[str, np.ndarray] | None:
    path, files = self._path / f"{tag}.params", carried["files"]
    missing = specs.keys() - {name for names in files for name in names}
    if missing:
      raise wire.WireError(
          "leaves", f"leaf {', '.join(sorted(missing))} is not in {path}"
      )
    seal = seal_lib.Seal(self._secret, self._run_id, tag, carried["salt"])
    first = _first_pieces(specs)
    try:
      opened = [
          self._pool.submit(_open, path / str(number), _size(names, specs))
          for number, names in enumerate(files)
      ]
      datas = [future.result() for future in opened]
    except FileNotFoundError:
      # A drop deletes the manifest first.
      if transport.get(f"p/{tag}/meta") is None:
        return None
      raise wire.WireError(
          "missing",
          f"{path} is not there: config.publish.directory must be the same"
          " place for trainer and searchers",
      ) from None
    leaves, checks = {}, []
    for names, data in zip(files, datas, strict=True):
      view = memoryview(data)
      tags = view[_end(names, specs) :]
      for name, offset, size in _places(names, specs):
        leaves[name] = carrier.as_leaf(data, specs[name], offset)
        for start in range(0, size, seal_lib.PIECE_BYTES):
          piece = view[offset + start : offset + size][: seal_lib.PIECE_BYTES]
          number = first[name] + start // seal_lib.PIECE_BYTES
          checks.append(
              (name, number, piece, bytes(tags[: seal_lib.TAG_BYTES]))
          )
          tags = tags[seal_lib.TAG_BYTES :]
    for _ in self._pool.map(lambda check: seal.check(*check), checks):
      pass
    return {name: leaves[name] for name in specs}

  def close(self) -> None:
    self._pool.shutdown(wait=False, cancel_futures=True)


def _share_out(specs: version.Specs, num_files: int) -> list[list[str]]:
  """Returns the names of the leaves in each file, of about the same size."""
  files: list[list[str]] = [[] for _ in range(num_files)]
  sizes = [0] * num_files
  by_size = sorted(specs, key=lambda name: -version.leaf_bytes(*specs[name]))
  for name in by_size:
    smallest = sizes.index(min(sizes))
    files[smallest].append(name)
    sizes[smallest] += version.leaf_bytes(*specs[name])
  return files


def _first_pieces(specs: version.Specs) -> dict[str, int]:
  """Returns the number of each leaf's first piece."""
  first, number = {}, 0
  for name, spec in specs.items():
    first[name] = number
    number += seal_lib.num_pieces(version.leaf_bytes(*spec))
  return first


def _write_file(
    file: BinaryIO,
    names: Sequence[str],
    leaves: Mapping[str, Any],
    specs: version.Specs,
    seal: seal_lib.Seal,
    first: Mapping[str, int],
) -> None:
  """Writes leaves at their places, and then the tags of their pieces."""
  tags, position = [], 0
  for name, offset, size in _places(names, specs):
    _write_all(file, memoryview(bytes(offset - position)))
    # Leaves are copied from the device one at a time.
    data = carrier.flat_bytes(leaves[name])
    for number, piece in enumerate(seal_lib.pieces(data), first[name]):
      _write_all(file, memoryview(piece))
      tags.append(seal.sign(number, piece))
    position = offset + size
  _write_all(file, memoryview(b"".join(tags)))


def _open(path: pathlib.Path, num_bytes: int) -> mmap.mmap | bytes:
  """Returns the bytes of a file, mapped if that is safe.

  Raises:
    FileNotFoundError: the file does not exist, or no longer does.
    WireError: the file does not have `num_bytes`.
  """
  with path.open("rb") as file:
    size = os.fstat(file.fileno()).st_size
    if size != num_bytes:
      raise wire.WireError(
          "truncated", f"{path} has {size} bytes of {num_bytes}"
      )
    if not size or not is_local(path):
      try:
        return file.read()
      except OSError as error:
        # Removed by another host meanwhile.
        if error.errno == errno.ESTALE:
          raise FileNotFoundError(path) from error
        raise
    return mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ)


def _places(
    names: Sequence[str], specs: version.Specs
) -> Iterator[tuple[str, int, int]]:
  """Yields name, offset in their file and size in bytes of each leaf."""
  offset = 0
  for name in names:
    offset += -offset % _ALIGN
    size = version.leaf_bytes(*specs[name])
    yield name, offset, size
    offset += size


def _end(names: Sequence[str], specs: version.Specs) -> int:
  """Returns the offset at which a file's leaves end, and its tags begin."""
  return max((at + size for _, at, size in _places(names, specs)), default=0)


def _size(names: Sequence[str], specs: version.Specs) -> int:
  """Returns the size of a file in bytes."""
  sizes = (version.leaf_bytes(*specs[name]) for name in names)
  tags = seal_lib.TAG_BYTES * sum(map(seal_lib.num_pieces, sizes))
  return _end(names, specs) + tags


def _write_all(file: BinaryIO, data: memoryview) -> None:
  while data:
    data = data[file.write(data) :]
