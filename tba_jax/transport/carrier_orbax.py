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

from collections.abc import Callable, Mapping, Sequence
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
from tba_jax.transport import base
from tba_jax.transport import carrier
from tba_jax.transport import carrier_files
from tba_jax.transport import jax_kv
from tba_jax.transport import wire

# Boxes: where in an array a piece of it lies. NumPy alone.


# [start, stop] of each axis, in numbers that JSON has.
Box = list[list[int]]


def box_of(index: Sequence[slice], shape: Sequence[int]) -> Box:
  """Returns an index as numbers; axes that it leaves out are whole."""
  whole = [slice(None)] * (len(shape) - len(index))
  return [
      list(part.indices(size)[:2])
      for part, size in zip([*index, *whole], shape, strict=True)
  ]


def box_slices(box: Box) -> tuple[slice, ...]:
  """Returns a box as an index."""
  return tuple(slice(start, stop) for start, stop in box)


def box_size(box: Box) -> int:
  """Returns the number of elements of a box."""
  return math.prod(stop - start for start, stop in box)


def intersect(box: Box, other: Box) -> bool:
  """Tells whether two boxes have an element in common."""
  return box_size(box) > 0 and all(
      max(a, c) < min(b, d) for (a, b), (c, d) in zip(box, other, strict=True)
  )


def filled_from(shape: Sequence[int], parts: Sequence[Box]) -> int:
  """Returns how many elements of an array disjoint boxes have; -1 outside."""
  for box in parts:
    if len(box) != len(shape) or not all(
        0 <= start <= stop <= length
        for (start, stop), length in zip(box, shape, strict=True)
    ):
      return -1
  return sum(box_size(box) for box in parts)


def cut_box(
    box: Box, dtype: np.dtype, pieces: Sequence[tuple[Box, np.ndarray]]
) -> np.ndarray:
  """Returns the array in a box from the pieces that meet it.

  Args:
    box: what is wanted.
    dtype: of the pieces.
    pieces: box and array; together they have all of `box`.

  Returns:
    A view where one piece has it all, else a new array.
  """
  out = np.empty([stop - start for start, stop in box], dtype)
  for place, data in pieces:
    if not intersect(place, box):
      continue
    both = [
        [max(a, c), min(b, d)]
        for (a, b), (c, d) in zip(place, box, strict=True)
    ]
    part = data[box_slices(_within(both, place))]
    if both == box:
      return np.asarray(part)
    out[box_slices(_within(both, box))] = part
  return out


def _within(box: Box, outer: Box) -> Box:
  """Returns a box as counted from the start of another one."""
  return [
      [a - start, b - start]
      for (a, b), (start, _) in zip(box, outer, strict=True)
  ]


# A folder of arrays that Orbax writes, by several processes where there are.
#
# Each process writes the shards that its devices hold; one of them then makes
# one
# folder of all. Any part of an array can be read alone, by TensorStore, which
# is
# what Orbax writes with.


# Sharding of a leaf that is read, by its path.
Placement = Callable[[str], jax.sharding.Sharding]

# By leaf: place and digest of each shard.
Shards = dict[str, list[tuple[Box, str]]]

_MAX_WRITE_THREADS = 4


def write_folder(path: epath.Path, leaves: Mapping[str, Any]) -> Shards:
  """Writes the shards of this process; returns where they are, with digests.

  `ocp.Checkpointer` is not used: it counts its operations, in all processes
  alike, which those of another thread would disturb.

  Args:
    path: folder, which is there; local or `gs://`.
    leaves: by path, in the order of all; global `jax.Array` where there are
      several processes. Ones without elements are not written.

  Raises:
    OSError, ValueError, RuntimeError: of Orbax and TensorStore.
  """
  tree = {
      _key(i): leaf if isinstance(leaf, jax.Array) else np.asarray(leaf)
      for i, leaf in enumerate(leaves.values())
      if math.prod(leaf.shape)
  }
  threads = min(_MAX_WRITE_THREADS, len(processes.available_cores()))
  with futures.ThreadPoolExecutor(threads, "shards-hash") as pool:
    digests = {
        name: [(box, pool.submit(_digest, data)) for box, data in _shards(leaf)]
        for name, leaf in leaves.items()
    }
    if tree:
      _handler().save(path, args=ocp.args.PyTreeSave(tree))
    return {
        name: [(box, future.result()) for box, future in found]
        for name, found in digests.items()
    }


def merge_folder(path: epath.Path) -> None:
  """Makes one folder of what all processes have written into it."""
  _handler().finalize(path)


def open_array(path: epath.Path, i: int, context: ts.Context) -> ts.Future:
  """Opens the i-th array of a folder; the future has a `ts.TensorStore`."""
  text = f"{os.fspath(path)}/"
  # A path need not be a URL; that of an object store is one.
  base_spec = text if "://" in text else {"driver": "file", "path": text}
  kvstore = {"driver": "ocdbt", "base": base_spec, "path": f"{_key(i)}/"}
  return ts.open(
      {"driver": "zarr", "kvstore": kvstore}, open=True, context=context
  )


def within_deadline(deadline_s: float, call: Callable[[], Any]) -> Any:
  """Returns what a call gives; it is left alone where that takes too long.

  Storage that hangs would hang its caller, and who waits for that one.

  Raises:
    TimeoutError: it took more than `deadline_s`.
  """
  done: futures.Future = futures.Future()

  def run() -> None:
    try:
      done.set_result(call())
    except BaseException as error:  # Who waits for it raises it.
      done.set_exception(error)

  threading.Thread(target=run, name="storage", daemon=True).start()
  try:
    return done.result(deadline_s)
  except TimeoutError as error:
    if done.done():
      raise
    raise TimeoutError(f"not done within {deadline_s:.0f} s") from error


def _handler() -> ocp.PyTreeCheckpointHandler:
  # Compressing params costs more time than it saves bytes.
  return ocp.PyTreeCheckpointHandler(use_ocdbt=True, use_compression=False)


def _key(i: int) -> str:
  return f"{i:06d}"


def _shards(leaf: Any) -> list[tuple[Box, Any]]:
  """Returns place and data of shards; of equal ones, only the first."""
  if not math.prod(leaf.shape):
    return []
  if not isinstance(leaf, jax.Array):
    return [(box_of((), leaf.shape), leaf)]
  return [
      (box_of(shard.index, leaf.shape), shard.data)
      for shard in leaf.addressable_shards
      if shard.replica_id == 0
  ]


def _digest(data: Any) -> str:
  return carrier.digest(carrier.flat_bytes(data).data)


_READS = "x/reads"


class OrbaxShards(carrier.Carrier):
  """The carrier "orbax"."""

  name = "orbax"

  def __init__(
      self,
      path: str,
      *,
      run_id: str,
      secret: bytes,
      deadline_s: float,
      placement: Placement | None = None,
      peers: "Leader | None" = None,
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
    if carrier_files.is_remote(path):
      bucket.list_anew()
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
    threads = min(_MAX_WRITE_THREADS, len(processes.available_cores()))
    self._pool = futures.ThreadPoolExecutor(threads, "shards-hash")

  def pack(self, tag: str, leaves: Mapping[str, Any]) -> carrier.Packed:
    folder = f"{tag}.{secrets.token_hex(4)}"
    # The wait for peers, which names who is late, begins after our own part.
    deadline_s = self._deadline_s * (1 if self._peers is None else 2)
    try:
      shards = within_deadline(
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
    return carrier.Packed(tag, {"folder": folder, "shards": shards})

  def serve(
      self, transport: base.Transport, packed: carrier.Packed | None
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

  def drop(self, packed: carrier.Packed) -> None:
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
      transport: base.Transport,
      tag: str,
      carried: Mapping[str, Any],
      specs: carrier.Specs,
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
      return within_deadline(
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

  def _write(self, tag: str, folder: str, leaves: Mapping[str, Any]) -> Shards:
    """Writes all shards, with the other processes; returns where they are."""
    carrier_files.prepare_shards(self._path)
    path = epath.Path(self._path) / folder
    path.mkdir(parents=True, exist_ok=True)
    if self._peers is not None:
      self._peers.begin(tag, str(path))
    shards = write_folder(path, leaves)
    parts = [] if self._peers is None else self._peers.collect()
    merge_folder(path)
    for part in parts:
      for name, found in part.items():
        shards[name] += found
    for name, leaf in leaves.items():
      check_cover(name, leaf.shape, [box for box, _ in shards[name]])
    return shards

  def _read(
      self, folder: str, carried: Mapping[str, Any], specs: carrier.Specs
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
          if any(intersect(box, part) for part in wanted)
      ]
      # All are opened before one is waited for.
      opening = needed and open_array(path, i, context)
      reads.append((name, needed, opening))
    begun = []
    for name, needed, opening in reads:
      store = needed and opening.result()
      begun += [
          (name, box, digest, store[box_slices(box)].read())
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

  def _wanted(self, name: str, shape: Sequence[int]) -> list[Box]:
    """Returns the parts of a leaf that this process needs."""
    if self._placement is None:
      return [box_of((), shape)]
    places = self._placement(name).addressable_devices_indices_map(tuple(shape))
    return [box_of(index, shape) for index in places.values()]

  def _assemble(
      self,
      name: str,
      spec: tuple[tuple[int, ...], np.dtype],
      found: Sequence[tuple[Box, np.ndarray]],
  ) -> Any:
    """Returns a leaf from its shards: on the host, or where it is placed."""
    shape, dtype = spec
    for _, data in found:
      if data.dtype != dtype:
        raise wire.WireError("leaves", f"leaf {name} is {data.dtype}")

    def cut(index: tuple[slice, ...]) -> np.ndarray:
      return cut_box(box_of(index, shape), dtype, found)

    if self._placement is None:
      return cut(())
    return jax.make_array_from_callback(shape, self._placement(name), cut)

  def _readers(self, transport: base.Transport) -> dict[str, tuple[str, str]]:
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


def check_cover(name: str, shape: Sequence[int], parts: Sequence[Box]) -> None:
  """Raises a WireError that names a leaf whose shards do not fill it."""
  filled, size = filled_from(shape, parts), math.prod(shape)
  if filled != size:
    raise wire.WireError(
        "leaves", f"leaf {name}: its shards have {filled} of {size} elements"
    )


def _check(name: str, data: np.ndarray, digest: str) -> None:
  carrier.check_digest(name, carrier.flat_bytes(data).data, digest)


# How the processes of one trainer write a version of params together.
#
# Process 0 decides which versions are written. Of each it tells the others the
# folder, and waits for what they say they have written there: place and digest
# of
# their shards. All this goes through the key-value store of the trainer's own
# coordinator, between threads that no step waits for.


_PREFIX = "tba_shards"
# Of one wait in the client, which cannot be interrupted.
_LOOK_S = 1.0


class Leader:
  """Process 0's end; one thread uses it."""

  def __init__(
      self,
      client: jax_kv.Client,
      num_processes: int,
      *,
      secret: bytes,
      deadline_s: float,
  ):
    """Says nothing yet.

    Args:
      client: of the trainer's coordinator.
      num_processes: of the trainer.
      secret: key of the messages.
      deadline_s: in which each process must have written a version.
    """
    self._client = client
    self._others = range(1, num_processes)
    self._secret = secret
    self._deadline_s = deadline_s
    self._count = -1
    self._tag = ""

  def begin(self, tag: str, path: str) -> None:
    """Has each of the others write its shards of a version into a folder.

    Args:
      tag: of the version.
      path: of the folder, which is there.
    """
    self._count += 1
    self._tag = tag
    for process in self._others:
      header = {"count": self._count, "tag": tag, "path": path}
      self._client.key_value_set_bytes(
          _ask_key(process, self._count),
          wire.encode(header, {}, self._secret),
      )

  def collect(self) -> list[Shards]:
    """Returns what each of them has written, in the order of the processes.

    Raises:
      OSError: one could not, or did not within the deadline; it is named.
    """
    until = time.monotonic() + self._deadline_s
    return [self._answer(process, until) for process in self._others]

  def close(self) -> None:
    """Has nothing to end: the publisher's thread does all of it."""

  def _answer(self, process: int, until: float) -> Shards:
    key = _answer_key(process, self._count)
    left_ms = int(1e3 * max(until - time.monotonic(), 0.001))
    try:
      data = self._client.blocking_key_value_get_bytes(key, left_ms)
      self._client.key_value_delete(key)
      header, _ = wire.decode(data, self._secret)
    except (jax_kv.KvError, wire.WireError) as error:
      raise OSError(
          f"process {process} of the trainer has not written its shards of"
          f" version {self._tag} within {self._deadline_s:.0f} s: {error}"
      ) from error
    if header["error"]:
      raise OSError(f"process {process} of the trainer: {header['error']}")
    return header["shards"]


class Helper:
  """The end of another process; its thread writes what process 0 asks for."""

  def __init__(
      self,
      client: jax_kv.Client,
      process: int,
      copy: Callable[[Any], Mapping[str, Any]],
      *,
      secret: bytes,
      deadline_s: float,
  ):
    """Starts the thread.

    Args:
      client: of the trainer's coordinator.
      process: this one.
      copy: returns what is published of params, by path.
      secret: key of the messages.
      deadline_s: in which a version that is asked for must be here.
    """
    self._client = client
    self._process = process
    self._copy = copy
    self._secret = secret
    self._deadline_s = deadline_s
    # In the order in which they came; process 0 asks in that order.
    self._held: list[tuple[int, Mapping[str, Any]]] = []
    self._changed = threading.Condition()
    self._stop = threading.Event()
    self._thread = threading.Thread(
        target=self._run, name="shards", daemon=True
    )
    self._thread.start()

  def submit(self, version: int, params: Any) -> None:
    """Keeps a copy of a version, on its devices, until it is written."""
    leaves = self._copy(params)
    with self._changed:
      self._held.append((version, leaves))
      self._changed.notify_all()

  def forget(self, version: int) -> None:
    """Lets go of a version, the older of two: process 0 asks for it no more."""
    with self._changed:
      self._take(version)

  def close(self) -> None:
    """Ends the thread; what it was not asked for is dropped."""
    self._stop.set()
    self._thread.join(timeout=2 * _LOOK_S)

  def _run(self) -> None:
    count = 0
    while not self._stop.is_set():
      key = _ask_key(self._process, count)
      try:
        data = self._client.blocking_key_value_get_bytes(
            key, int(1e3 * _LOOK_S)
        )
      except jax_kv.KvError as error:
        if jax_kv.error_code(error) == "DEADLINE_EXCEEDED":
          continue
        # The role hears of it too, and ends.
        logging.warning("no more shards are written: %s", error)
        return
      answer = {"error": "", "shards": {}}
      try:
        answer["shards"] = self._write(data)
      # Process 0 raises it, whatever it is.
      except Exception as error:
        answer["error"] = f"its shards could not be written: {error}"
      self._client.key_value_set_bytes(
          _answer_key(self._process, count),
          wire.encode(answer, {}, self._secret),
      )
      self._client.key_value_delete(key)
      count += 1

  def _write(self, data: bytes) -> Shards:
    header, _ = wire.decode(data, self._secret)
    version = int(header["tag"].rpartition(".")[2])
    with self._changed:
      found = self._changed.wait_for(
          lambda: any(held == version for held, _ in self._held),
          self._deadline_s,
      )
      if not found:
        raise TimeoutError(f"version {version} did not come to be")
      leaves = self._take(version)
    return write_folder(epath.Path(header["path"]), leaves)

  def _take(self, version: int) -> Mapping[str, Any]:
    at = [held for held, _ in self._held].index(version)
    return self._held.pop(at)[1]


def _ask_key(process: int, count: int) -> str:
  return f"{_PREFIX}/ask/{process}/{count:012d}"


def _answer_key(process: int, count: int) -> str:
  return f"{_PREFIX}/done/{process}/{count:012d}"
