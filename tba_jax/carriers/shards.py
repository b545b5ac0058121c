# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Carries params as Orbax shards on storage that trainer and searchers share.

A version is a folder of its own, on a file system or `gs://`, that is never
changed. Each process of the trainer writes the shards that its devices hold,
nobody gathers; a reader fetches those that its own devices need, on whatever
mesh. The folder counts once the manifest names it, after all shards are there.
The manifest has the place and a digest of each shard.

A reader says in the store (`x/reads/<reader>`) which folder it reads. A dropped
one is removed when no reader is left in it, or after a deadline.
"""

from collections.abc import Mapping, Sequence
from concurrent import futures
import errno
import math
import os
import secrets
import socket
import time
from typing import Any, TYPE_CHECKING

from absl import logging
from etils import epath
import jax
import numpy as np
import tensorstore as ts

from tba_jax import bucket_mirror
from tba_jax import processes
from tba_jax.carriers import base
from tba_jax.carriers import boxes
from tba_jax.carriers import directory
from tba_jax.carriers import orbax_folder
from tba_jax.transport import base as transports
from tba_jax.transport import wire

if TYPE_CHECKING:
  from tba_jax.carriers import shard_peers

_READS = "x/reads"
_MAX_THREADS = 4


class OrbaxShards(base.Carrier):
  """The carrier "orbax"."""

  name = "orbax"

  def __init__(
      self,
      path: str,
      *,
      run_id: str,
      secret: bytes,
      deadline_s: float,
      placement: base.Placement | None = None,
      peers: "shard_peers.Leader | None" = None,
  ):
    """Makes nothing yet.

    Args:
      path: of the run's folders, local or `gs://`, the same for all.
      run_id: the run.
      secret: key of the run's messages.
      deadline_s: of writing or reading one version, and of a reader that keeps
        a dropped one.
      placement: sharding of a leaf that is read, by its path; None = whole on
        the host.
      peers: the trainer's other processes, where this is its process 0.
    """
    if directory.is_remote(path):
      bucket_mirror.list_anew()
    self._path = path
    self._run_id = run_id
    self._secret = secret
    self._deadline_s = deadline_s
    self._placement = placement
    self._peers = peers
    self._reader = secrets.token_hex(8)
    self._folders: dict[str, str] = {}
    # Dropped folders that somebody may still read, and since when.
    self._dropped: dict[str, float] = {}
    threads = min(_MAX_THREADS, len(processes.available_cores()))
    self._pool = futures.ThreadPoolExecutor(threads, "shards-hash")

  def pack(self, tag: str, leaves: Mapping[str, Any]) -> base.Packed:
    folder = f"{tag}.{secrets.token_hex(4)}"
    # The wait for peers, which names who is late, begins after our own part.
    deadline_s = self._deadline_s * (1 if self._peers is None else 2)
    try:
      shards = orbax_folder.within(
          deadline_s, lambda: self._write(tag, folder, leaves)
      )
    # What Orbax and TensorStore raise for a full disk is of many types.
    except Exception as error:
      self._dropped[folder] = time.monotonic()
      raise OSError(
          getattr(error, "errno", None) or errno.EIO,
          f"params could not be written to {self._path}/{folder} ({error});"
          " config.publish.directory names another place",
      ) from error
    if tag in self._folders:
      self._dropped[self._folders[tag]] = time.monotonic()
    self._folders[tag] = folder
    return base.Packed(tag, {"folder": folder, "shards": shards})

  def serve(
      self, transport: transports.Transport, packed: base.Packed | None
  ) -> None:
    if not self._dropped:
      return
    readers = self._readers(transport)
    for folder, since in list(self._dropped.items()):
      held = [who for key, (name, who) in readers.items() if name == folder]
      if held and time.monotonic() < since + self._deadline_s:
        continue
      if held:
        logging.warning(
            "params %s are removed: %s read them for over %.0f s",
            folder,
            ", ".join(held),
            self._deadline_s,
        )
      self._remove(folder)
      for key, (name, _) in readers.items():
        if name == folder:
          transport.delete(key)

  def drop(self, packed: base.Packed) -> None:
    folder = self._folders.pop(packed.tag, None)
    if folder is not None:
      self._dropped[folder] = time.monotonic()

  def clean(self, tag: str) -> None:
    path = epath.Path(self._path)
    for folder in path.iterdir() if path.exists() else ():
      if folder.name < tag:
        self._dropped[folder.name] = time.monotonic()

  def read(
      self,
      transport: transports.Transport,
      tag: str,
      carried: Mapping[str, Any],
      specs: base.Specs,
  ) -> dict[str, Any] | None:
    folder = str(carried["folder"])
    key = f"{_READS}/{self._reader}"
    message = {
        "run": self._run_id,
        "key": key,
        "folder": folder,
        "who": f"process {os.getpid()} of {socket.gethostname()}",
    }
    transport.put(key, wire.encode_message(message, self._secret))
    there = lambda: transport.get(f"p/{tag}/meta") is not None
    try:
      # The manifest goes first: where it stands now, our word was in time.
      if not there():
        return None
      return orbax_folder.within(
          self._deadline_s, lambda: self._read(folder, carried, specs)
      )
    except wire.WireError:
      if there():
        raise
      return None
    # TensorStore raises ValueError and others, also for a missing file.
    except (OSError, ValueError, RuntimeError, TypeError) as error:
      if not there():
        return None
      raise wire.WireError(
          "shards", f"params in {self._path}/{folder}: {error}"
      ) from error
    finally:
      transport.delete(key)

  def close(self) -> None:
    for folder in list(self._dropped):
      self._remove(folder)
    self._pool.shutdown(wait=False, cancel_futures=True)

  def _write(
      self, tag: str, folder: str, leaves: Mapping[str, Any]
  ) -> orbax_folder.Shards:
    """Writes all shards, with the other processes; returns where they are."""
    directory.prepare_shards(self._path)
    path = epath.Path(self._path) / folder
    path.mkdir(parents=True, exist_ok=True)
    if self._peers is not None:
      self._peers.begin(tag, str(path))
    shards = orbax_folder.write(path, leaves)
    parts = [] if self._peers is None else self._peers.collect()
    orbax_folder.merge(path)
    for part in parts:
      for name, found in part.items():
        shards[name] += found
    for name, leaf in leaves.items():
      check_cover(name, leaf.shape, [box for box, _ in shards[name]])
    return shards

  def _read(
      self, folder: str, carried: Mapping[str, Any], specs: base.Specs
  ) -> dict[str, Any]:
    """Returns the leaves, of shards that are what the manifest says."""
    path = epath.Path(self._path) / folder
    if not path.exists():
      raise FileNotFoundError(
          "it is not there: config.publish.directory must be the same place for"
          " trainer and searchers"
      )
    context = ts.Context()
    reads = []
    for i, (name, (shape, dtype)) in enumerate(specs.items()):
      shards = carried["shards"].get(name)
      if shards is None:
        raise wire.WireError("leaves", f"leaf {name} is not in {path}")
      check_cover(name, shape, [box for box, _ in shards])
      wanted = self._wanted(name, shape)
      needed = [
          (box, digest)
          for box, digest in shards
          if any(boxes.meet(box, part) for part in wanted)
      ]
      # All are opened before one is waited for.
      opening = needed and orbax_folder.open_array(path, i, context)
      reads.append((name, needed, opening))
    begun = []
    for name, needed, opening in reads:
      store = needed and opening.result()
      begun += [
          (name, box, digest, store[boxes.slices(box)].read())
          for box, digest in needed
      ]
    found, checks = {name: [] for name in specs}, []
    for name, box, digest, future in begun:
      data = future.result()
      found[name].append((box, data))
      checks.append(self._pool.submit(_check, name, data, digest))
    for check in checks:
      check.result()
    return {
        name: self._assemble(name, spec, found.pop(name))
        for name, spec in specs.items()
    }

  def _wanted(self, name: str, shape: Sequence[int]) -> list[boxes.Box]:
    """Returns the parts of a leaf that this process needs."""
    if self._placement is None:
      return [boxes.of((), shape)]
    places = self._placement(name).addressable_devices_indices_map(tuple(shape))
    return [boxes.of(index, shape) for index in places.values()]

  def _assemble(
      self,
      name: str,
      spec: tuple[tuple[int, ...], np.dtype],
      found: Sequence[tuple[boxes.Box, np.ndarray]],
  ) -> Any:
    """Returns a leaf from its shards: on the host, or where it is placed."""
    shape, dtype = spec
    for _, data in found:
      if data.dtype != dtype:
        raise wire.WireError("leaves", f"leaf {name} is {data.dtype}")

    def cut(index: tuple[slice, ...]) -> np.ndarray:
      return boxes.cut(boxes.of(index, shape), dtype, found)

    if self._placement is None:
      return cut(())
    return jax.make_array_from_callback(shape, self._placement(name), cut)

  def _readers(
      self, transport: transports.Transport
  ) -> dict[str, tuple[str, str]]:
    """Returns folder and name of each reader, by its key."""
    readers = {}
    for key, data in transport.list(_READS).items():
      try:
        said = wire.decode_placed(data, self._secret, self._run_id, key)
        readers[key] = str(said["folder"]), str(said["who"])
      except (wire.WireError, KeyError):
        transport.delete(key)
    return readers

  def _remove(self, folder: str) -> None:
    del self._dropped[folder]
    try:
      (epath.Path(self._path) / folder).rmtree(missing_ok=True)
    except OSError as error:
      logging.warning("params %s are not removed: %s", folder, error)


def check_cover(
    name: str, shape: Sequence[int], parts: Sequence[boxes.Box]
) -> None:
  """Raises a WireError that names a leaf whose shards do not fill it."""
  filled, size = boxes.filled(shape, parts), math.prod(shape)
  if filled != size:
    raise wire.WireError(
        "leaves", f"leaf {name}: its shards have {filled} of {size} elements"
    )


def _check(name: str, data: np.ndarray, digest: str) -> None:
  base.check_digest(name, base.flat_bytes(data).data, digest)
