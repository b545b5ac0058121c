# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Carries params as immutable files: in memory of one host, or on shared disk.

A version is one file, written under another name and renamed when it is whole,
with each leaf at a multiple of 64 bytes, so that a CPU can use it in place.
Readers of one host map it: they share its pages, and keep them when the file is
removed. From a file system of another machine they read it.
"""

from collections.abc import Iterator, Mapping
from concurrent import futures
import errno
import mmap
import os
import pathlib
from typing import Any, BinaryIO

import numpy as np

from tba_jax import processes
from tba_jax.carriers import base
from tba_jax.carriers import directory
from tba_jax.transport import base as transports
from tba_jax.transport import wire

_ALIGN = 64
_MAX_THREADS = 4
# Pieces whose digest is under way while more are written.
_AHEAD = 16


class Files(base.Carrier):
  """The carrier "files"."""

  name = "files"

  def __init__(self, path: pathlib.Path):
    """Makes nothing yet.

    Args:
      path: directory of the run's params, the same for all of its processes.
    """
    self._path = path
    threads = min(_MAX_THREADS, len(processes.available_cores()))
    # Hashing lets other threads run; of one core it takes what is left.
    self._pool = futures.ThreadPoolExecutor(threads, "params-hash")

  def pack(self, tag: str, leaves: Mapping[str, Any]) -> base.Packed:
    directory.prepare(self._path)
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
    return base.Packed(tag, carried)

  def drop(self, packed: base.Packed) -> None:
    (self._path / f"{packed.tag}.params").unlink(missing_ok=True)

  def clean(self, tag: str) -> None:
    for path in [*self._path.glob("*.params"), *self._path.glob(".*.*.*")]:
      if path.name.removeprefix(".") < tag:
        path.unlink(missing_ok=True)

  def read(
      self,
      transport: transports.Transport,
      tag: str,
      carried: Mapping[str, Any],
      specs: base.Specs,
  ) -> dict[str, np.ndarray] | None:
    path = self._path / f"{tag}.params"
    try:
      data = _open(path)
    except FileNotFoundError:
      # The manifest goes first, so without it the version was dropped.
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
      starts = range(0, size, base.PIECE_BYTES)
      if wanted is None or len(wanted) != len(starts):
        raise wire.WireError("leaves", f"leaf {name} is not in {path}")
      for start, text in zip(starts, wanted, strict=True):
        piece = leaf[start : start + base.PIECE_BYTES]
        checks.append((name, piece, text))
    for _ in self._pool.map(lambda check: base.check_digest(*check), checks):
      pass
    return {
        name: base.as_leaf(data, specs[name], offset)
        for name, offset, _ in _places(specs)
    }

  def close(self) -> None:
    self._pool.shutdown(wait=False, cancel_futures=True)

  def _write(self, file: BinaryIO, leaves: Mapping[str, Any]) -> dict[str, Any]:
    """Writes all leaves, one after the other; returns what a reader needs."""
    digests, pending, position = {}, [], 0
    for name, offset, size in _places(base.specs_of(leaves)):
      _write_all(file, memoryview(bytes(offset - position)))
      # Of a device's memory, one leaf at a time is on the host.
      data = base.flat_bytes(leaves[name])
      digests[name] = []
      for piece in base.pieces(data):
        pending.append((name, self._pool.submit(base.digest, piece)))
        _write_all(file, memoryview(piece))
        while len(pending) > _AHEAD:
          done, future = pending.pop(0)
          digests[done].append(future.result())
      position = offset + size
    for done, future in pending:
      digests[done].append(future.result())
    return {"num_bytes": position, "digests": digests}


def _open(path: pathlib.Path) -> mmap.mmap | bytes:
  """Returns the bytes of a file, mapped where it is on this host."""
  with path.open("rb") as file:
    size = os.fstat(file.fileno()).st_size
    if not size or not directory.is_local(path):
      try:
        return file.read()
      except OSError as error:
        # Removed on its own machine while we read.
        if error.errno == errno.ESTALE:
          raise FileNotFoundError(path) from error
        raise
    return mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ)


def _places(specs: base.Specs) -> Iterator[tuple[str, int, int]]:
  """Yields name, offset in the file and size in bytes of each leaf."""
  offset = 0
  for name, spec in specs.items():
    offset += -offset % _ALIGN
    size = base.leaf_bytes(*spec)
    yield name, offset, size
    offset += size


def _write_all(file: BinaryIO, data: memoryview) -> None:
  while data:
    data = data[file.write(data) :]
