# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Carries params as Orbax shards on storage shared by trainer and searchers.

A version is an immutable folder on a file system or `gs://`. Each process of
the trainer writes its devices' shards; a reader puts them together on its host.
The manifest has each shard's box and digest.

A reader announces in the store (`x/reads/<reader>`) which folder it reads. A
dropped folder is removed when it has no reader, or after a deadline.

With several processes, process 0 asks the others for their shards
(`peers.py`).
"""

from collections.abc import Callable, Mapping
from concurrent import futures
import errno
import math
import os
import secrets
import socket
import threading
import time
from typing import Any

from absl import logging
from etils import epath
import jax
import numpy as np
import orbax.checkpoint as ocp
import tensorstore as ts

from tba_jax.system import bucket
from tba_jax.system import processes
from tba_jax.transport import byte_store
from tba_jax.transport import wire
from tba_jax.transport.params import boxes
from tba_jax.transport.params import carrier
from tba_jax.transport.params import pace as pace_lib
from tba_jax.transport.params import shared_files
from tba_jax.transport.params import version

# Path of a leaf -> (box, digest) of each shard.
Shards = dict[str, list[tuple[boxes.Box, str]]]

_MAX_THREADS = 4
# Key prefix in the store of the run.
_READS = "x/reads"


def write_folder(path: epath.Path, leaves: Mapping[str, Any]) -> Shards:
  """Writes this process's shards; returns their boxes and digests.

  Avoids `ocp.Checkpointer`, which requires the same sequence of operations in
  all processes, across threads.

  Args:
    path: existing folder, local or `gs://`.
    leaves: arrays by path, in the same order in all processes. Empty arrays are
      not written.

  Raises:
    OSError, ValueError, RuntimeError: Orbax or TensorStore failed.
  """
  tree = {
      _key(i): leaf if isinstance(leaf, jax.Array) else np.asarray(leaf)
      for i, leaf in enumerate(leaves.values())
      if math.prod(leaf.shape)
  }
  threads = min(_MAX_THREADS, len(processes.available_cores()))
  with futures.ThreadPoolExecutor(threads, "shards-hash") as pool:
    digests = {
        name: [
            (box, pool.submit(_digest, data))
            for box, data in boxes.shards_of(leaf)
        ]
        for name, leaf in leaves.items()
    }
    if tree:
      _handler().save(path, args=ocp.args.PyTreeSave(tree))
    return {
        name: [(box, future.result()) for box, future in sums]
        for name, sums in digests.items()
    }


def open_array(path: epath.Path, i: int, context: ts.Context) -> ts.Future:
  """Returns a future of the `ts.TensorStore` of a folder's i-th array."""
  spec = {"driver": "zarr", "kvstore": bucket.ocdbt(path, _key(i))}
  return ts.open(spec, open=True, context=context)


def within_deadline(
    pace: pace_lib.Pace, num_bytes: float, call: Callable[[], Any]
) -> Any:
  """Returns the result of a call, which may hang.

  Raises:
    TimeoutError: the call took longer than the pace allows; its thread is
      abandoned.
  """
  deadline_s = pace.deadline_s(num_bytes)
  began = time.monotonic()
  done: futures.Future = futures.Future()

  def run() -> None:
    try:
      done.set_result(call())
    except BaseException as error:  # Raised below.
      done.set_exception(error)

  # The library must not return from the call during the exit.
  name = f"{processes.LEFT_BEHIND}_storage"
  threading.Thread(target=run, name=name, daemon=True).start()
  try:
    result = done.result(deadline_s)
  except TimeoutError as error:
    if done.done():
      raise
    pace.missed()
    raise TimeoutError(
        f"not done within {deadline_s:.0f} s (config.store.deadline_s, and"
        f" {num_bytes / 1e6:.0f} MB at the slowest rate that is expected; the"
        " next version gets more)"
    ) from error
  pace.done(num_bytes, time.monotonic() - began)
  return result


def _handler() -> ocp.PyTreeCheckpointHandler:
  # Compression costs more time than it saves.
  return ocp.PyTreeCheckpointHandler(use_ocdbt=True, use_compression=False)


def _key(i: int) -> str:
  return f"{i:06d}"


def _digest(data: Any) -> str:
  return carrier.digest(carrier.flat_bytes(data).data)


class OrbaxShards(carrier.Carrier):
  """The carrier "orbax".

  Args:
    path: directory for the run's folders, local or `gs://`, the same for all
      processes.
    secret: key of the run's messages.
    deadline_s: longest time to write or read an empty version, and for its
      readers to finish after a drop; larger versions get more, by `pace.Pace`.
    peers: `peers.Leader` of a trainer with several processes.
  """

  name = "orbax"
  schema = {"folder": str, "shards": {"*": list}}

  @classmethod
  def make(cls, place: carrier.CarrierPlace) -> "OrbaxShards":
    return cls(
        shared_files.shards_directory(
            place.directory, place.workdir, place.run_id
        ),
        run_id=place.run_id,
        secret=place.secret,
        deadline_s=place.deadline_s,
        peers=place.peers,
    )

  def __init__(
      self,
      path: str,
      *,
      run_id: str,
      secret: bytes,
      deadline_s: float,
      peers: Any = None,
  ):
    if bucket.is_remote(path):
      bucket.relist()
    self._path = path
    self._run_id = run_id
    self._secret = secret
    self._writing = pace_lib.Pace(deadline_s)
    self._reading = pace_lib.Pace(deadline_s)
    self._num_bytes = 0
    self._peers = peers
    self._reader = secrets.token_hex(8)
    self._folders: dict[str, str] = {}
    # Dropped folders that may still have readers -> time of the drop.
    self._dropped: dict[str, float] = {}
    threads = min(_MAX_THREADS, len(processes.available_cores()))
    self._pool = futures.ThreadPoolExecutor(threads, "shards-hash")

  def write(
      self, tag: str, leaves: Mapping[str, Any]
  ) -> tuple[dict[str, Any], Any]:
    folder = f"{tag}.{secrets.token_hex(4)}"
    self._num_bytes = version.num_bytes(version.specs_of(leaves))
    # The wait for peers, whose error names a late peer, follows our own writes.
    share = 1 if self._peers is None else 2
    try:
      shards = within_deadline(
          self._writing, share * self._num_bytes,
          lambda: self._write(tag, folder, leaves),
      )  # fmt: skip
    # Orbax and TensorStore raise many types of errors for a full disk.
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
    return {"folder": folder, "shards": shards}, None

  def serve(
      self,
      transport: byte_store.Transport,
      packed: carrier.PackedVersion | None,
  ) -> None:
    if not self._dropped:
      return
    readers = self._readers(transport)
    limit_s = self._reading.deadline_s(self._num_bytes)
    for folder, since in list(self._dropped.items()):
      readers_of_folder = [
          who for key, (name, who) in readers.items() if name == folder
      ]
      if readers_of_folder and time.monotonic() < since + limit_s:
        continue
      if readers_of_folder:
        logging.warning(
            "params %s are removed: %s read them for over %.0f s",
            folder,
            ", ".join(readers_of_folder),
            limit_s,
        )
      self._remove(folder)
      for key, (name, _) in readers.items():
        if name == folder:
          transport.delete(key)

  def drop(self, packed: carrier.PackedVersion) -> None:
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
      transport: byte_store.Transport,
      tag: str,
      carried: Mapping[str, Any],
      specs: version.Specs,
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
      # A drop deletes the manifest first: if it still exists, the drop will see
      # our entry.
      if not there():
        return None
      return within_deadline(
          self._reading,
          version.num_bytes(specs),
          lambda: self._read(folder, carried, specs),
      )
    except wire.WireError:
      if there():
        raise
      return None
    # TensorStore raises ValueError and others for a missing file.
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

  def _write(self, tag: str, folder: str, leaves: Mapping[str, Any]) -> Shards:
    """Writes all shards, together with the peers."""
    shared_files.prepare_shards(self._path)
    path = epath.Path(self._path) / folder
    path.mkdir(parents=True, exist_ok=True)
    if self._peers is not None:
      self._peers.begin(tag, path=str(path))
    shards = write_folder(path, leaves)
    parts = []
    if self._peers is not None:
      parts = self._peers.collect(self._num_bytes)
    _handler().finalize(path)
    for part in parts:
      for name, entries in part["shards"].items():
        shards[name] += entries
    for name, leaf in leaves.items():
      boxes.check_cover(name, leaf.shape, [box for box, _ in shards[name]])
    return shards

  def _read(
      self, folder: str, carried: Mapping[str, Any], specs: version.Specs
  ) -> dict[str, Any]:
    """Returns the leaves, from shards whose digests match the manifest."""
    path = epath.Path(self._path) / folder
    if not path.exists():
      raise FileNotFoundError(
          "it is not there: config.publish.directory must be the same place for"
          " trainer and searchers"
      )
    context = ts.Context()
    # Open all, then begin all reads, then wait: latencies overlap.
    opened = []
    for i, (name, (shape, _)) in enumerate(specs.items()):
      shards = carried["shards"].get(name)
      if shards is None:
        raise wire.WireError("leaves", f"leaf {name} is not in {path}")
      boxes.check_cover(name, shape, [box for box, _ in shards])
      if shards:
        opened.append((name, shards, open_array(path, i, context)))
    begun = [
        (name, box, digest, opening.result()[boxes.box_slices(box)].read())
        for name, shards, opening in opened
        for box, digest in shards
    ]
    pieces_by_name, checks = {name: [] for name in specs}, []
    for name, box, digest, reading in begun:
      data = reading.result()
      pieces_by_name[name].append((box, data))
      checks.append(self._pool.submit(_check, name, data, digest))
    for check in checks:
      check.result()
    leaves = {}
    for name, (shape, dtype) in specs.items():
      pieces = pieces_by_name.pop(name)
      for _, data in pieces:
        if data.dtype != dtype:
          raise wire.WireError("leaves", f"leaf {name} is {data.dtype}")
      leaves[name] = boxes.cut_box(boxes.box_of((), shape), dtype, pieces)
    return leaves

  def _readers(
      self, transport: byte_store.Transport
  ) -> dict[str, tuple[str, str]]:
    """Returns folder and description of each reader, by key."""
    readers = {}
    for key, data in transport.list(_READS).items():
      try:
        entry = wire.decode_placed(
            data, self._secret, self._run_id, key, {"folder": str, "who": str}
        )
        readers[key] = entry["folder"], entry["who"]
      except wire.WireError:
        transport.delete(key)
    return readers

  def _remove(self, folder: str) -> None:
    del self._dropped[folder]
    try:
      (epath.Path(self._path) / folder).rmtree(missing_ok=True)
    except OSError as error:
      logging.warning("params %s are not removed: %s", folder, error)


def _check(name: str, data: np.ndarray, digest: str) -> None:
  carrier.check_digest(name, carrier.flat_bytes(data).data, digest)
