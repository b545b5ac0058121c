# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Versioned params from the trainer to whoever samples: published.

The trainer never waits for a reader: a thread with a transport of its own
writes them. `puller` is the other side, `versions` what lies between.
"""

from collections.abc import Callable, Mapping, Sequence
import contextlib
import dataclasses
import functools
import threading
import time
from typing import Any, TYPE_CHECKING

from absl import logging
import jax
import jax.numpy as jnp
import ml_collections
import numpy as np

from tba_jax import types
from tba_jax.config import relations
from tba_jax.monitor import run_directory
from tba_jax.system import polling
from tba_jax.transport import base
from tba_jax.transport import carrier as carrier_lib
from tba_jax.transport import carrier_files
from tba_jax.transport import carrier_orbax
from tba_jax.transport import carrier_store
from tba_jax.transport import wire

if TYPE_CHECKING:
  from tba_jax.training import cluster as cluster_lib


# One version of params: published whole, or never seen.
#
# Keys: `p/<epoch>.<version>/meta` holds the manifest, `p_cur` the newest tag,
# written last: the commit point. The leaves come by a carrier, which may use
# keys
# beside the manifest. A reader takes a version only where its manifest is
# authenticated, every leaf has the digests that the manifest says, and every
# leaf
# that the reader expects is there.


_FORMAT = 2

Specs = dict[str, tuple[tuple[int, ...], np.dtype]]


@dataclasses.dataclass
class Version:
  """One packed version, as the trainer holds it.

  epoch, version: its tag.
  carrier: that packed it.
  packed: by the carrier.
  specs: shape and dtype of every leaf by path.
  """

  epoch: int
  version: int
  carrier: "carrier_lib.Carrier"
  packed: "carrier_lib.Packed"
  specs: Specs


def tag_text(epoch: int, version: int) -> str:
  """Returns the key part of a version: bytewise order is numeric order."""
  return f"{epoch:08d}.{version:010d}"


def by_path(params: types.PyTree) -> dict[str, Any]:
  """Returns the leaves by path, in the order of the tree."""
  leaves = jax.tree_util.tree_flatten_with_path(params)[0]
  return {jax.tree_util.keystr(path): leaf for path, leaf in leaves}


def flatten(params: types.PyTree) -> dict[str, np.ndarray]:
  """Returns the leaves as host arrays by path, in the order of the tree.

  Blocks until the device has computed them.
  """
  return {
      name: np.asarray(jax.device_get(leaf))
      for name, leaf in by_path(params).items()
  }


def snapshot(params: types.PyTree, *, dtype: str) -> types.PyTree:
  """Returns a copy, with floats in the dtype that is published."""

  def copy(x: jax.Array) -> jax.Array:
    wanted = published_dtype(x.dtype, dtype)
    return x + 0 if wanted == x.dtype else x.astype(wanted)

  return jax.tree.map(copy, params)


def pack_version(
    carriers: Sequence["carrier_lib.Carrier"],
    leaves: Mapping[str, Any],
    *,
    epoch: int,
    version: int,
    on_event: Callable[[str, str], None],
) -> Version:
  """Returns a version ready to be sent; blocks until it is computed.

  Args:
    carriers: the first that has room takes it.
    leaves: arrays by path.
    epoch, version: the tag.
    on_event: called with (kind, message) where one has none.

  Raises:
    OSError: the last has no room, or no permission.
  """
  specs = {n: (tuple(x.shape), np.dtype(x.dtype)) for n, x in leaves.items()}
  for carrier in carriers:
    try:
      packed = carrier.pack(tag_text(epoch, version), leaves)
    except OSError as error:
      if carrier is carriers[-1]:
        raise
      on_event("carrier_full", f"{carrier.name}: {error}")
    else:
      return Version(epoch, version, carrier, packed, specs)
  raise ValueError("no carrier to pack with")


def send_version(
    transport: base.Transport,
    it: Version,
    *,
    run_id: str,
    secret: bytes,
    base_name: str = "",
) -> None:
  """Writes what lies in the store, then the manifest, then the pointer.

  Args:
    transport: of the calling thread.
    it: the version.
    run_id: the run.
    secret: key of the run's messages.
    base_name: of the params that adapters belong to; "" where all are there.

  Raises:
    TransportError: the store was lost on the way; readers never see the rest.
  """
  it.carrier.send(transport, it.packed)
  manifest = {
      "format": _FORMAT,
      "run": run_id,
      "epoch": it.epoch,
      "version": it.version,
      "carrier": it.carrier.name,
      "carried": it.packed.carried,
      "base": base_name,
      "leaves": [
          [name, list(shape), dtype.name]
          for name, (shape, dtype) in it.specs.items()
      ],
  }
  tag = tag_text(it.epoch, it.version)
  transport.put(f"p/{tag}/meta", wire.encode_message(manifest, secret))
  pointer = {"run": run_id, "epoch": it.epoch, "version": it.version}
  transport.put("p_cur", wire.encode_message(pointer, secret))


def drop_version(transport: base.Transport, it: Version) -> None:
  """Removes a version, its manifest before what its carrier holds."""
  transport.delete(f"p/{tag_text(it.epoch, it.version)}")
  it.carrier.drop(it.packed)


def read_pointer(
    transport: base.Transport, *, run_id: str, secret: bytes
) -> tuple[int, int] | None:
  """Returns the newest (epoch, version), None where there is none yet.

  Raises:
    WireError: the pointer is forged, torn, or of another run.
  """
  data = transport.get("p_cur")
  if data is None:
    return None
  pointer = wire.decode_message(data, secret)
  if pointer.get("run") != run_id:
    raise wire.WireError("run", f"pointer of run {pointer.get('run')!r}")
  return int(pointer["epoch"]), int(pointer["version"])


def read_version(
    transport: base.Transport,
    tag: tuple[int, int],
    *,
    carriers: Mapping[str, "carrier_lib.Carrier"],
    run_id: str,
    secret: bytes,
    expected: Specs,
    base_name: str = "",
) -> dict[str, np.ndarray] | None:
  """Returns the leaves of a version, None where it was collected meanwhile.

  Args:
    transport: of the calling thread.
    tag: (epoch, version), from the pointer.
    carriers: by name.
    run_id: the run that the version must be of.
    secret: key of the run's messages.
    expected: shape and dtype of every leaf that must be there.
    base_name: of the reader's params, where it adds adapters to some.

  Raises:
    WireError: torn, forged, adapters of another base, or not the expected
      leaves; it names which.
  """
  text = tag_text(*tag)
  data = transport.get(f"p/{text}/meta")
  if data is None:
    return None
  manifest = wire.decode_message(data, secret)
  if manifest.get("format") != _FORMAT:
    raise wire.WireError(
        "schema", f"params format {manifest.get('format')}, we read {_FORMAT}"
    )
  if (manifest["run"], manifest["epoch"], manifest["version"]) != (
      run_id,
      *tag,
  ):
    raise wire.WireError("run", f"p/{text} holds another version")
  if manifest.get("base", "") != base_name:
    raise wire.WireError(
        "base",
        f"adapters of the base {manifest.get('base', '')!r}, and config.init is"
        f" {base_name!r} here",
    )
  found = {
      name: (tuple(shape), np.dtype(dtype))
      for name, shape, dtype in manifest["leaves"]
  }
  if found != expected:
    wrong = sorted(
        name
        for name in {*found, *expected}
        if found.get(name) != expected.get(name)
    )
    raise wire.WireError("leaves", f"missing or of another shape: {wrong}")
  carrier = carriers.get(manifest["carrier"])
  if carrier is None:
    raise wire.WireError("carrier", f"unknown: {manifest['carrier']!r}")
  return carrier.read(transport, text, manifest["carried"], found)


def published_specs(expected: Specs, dtype: str) -> Specs:
  """Returns what is published: floats in `dtype`, "" = as they are."""
  return {
      name: (shape, published_dtype(leaf_dtype, dtype))
      for name, (shape, leaf_dtype) in expected.items()
  }


def published_dtype(leaf_dtype: Any, dtype: str) -> np.dtype:
  """Returns the dtype in which a leaf is published."""
  is_float = jnp.issubdtype(leaf_dtype, jnp.floating)
  return np.dtype(dtype if dtype and is_float else leaf_dtype)


def cast_leaf(
    leaves: dict[str, np.ndarray], specs: Specs
) -> dict[str, np.ndarray]:
  """Returns leaves in the dtypes of `specs`; those that fit are not copied."""
  return {
      name: leaf.astype(specs[name][1], copy=False)
      for name, leaf in leaves.items()
  }


def expected_leaves(
    params: types.PyTree,
) -> dict[str, tuple[tuple[int, ...], np.dtype]]:
  """Returns shape and dtype by path; params may be abstract."""
  return {
      jax.tree_util.keystr(path): (tuple(leaf.shape), np.dtype(leaf.dtype))
      for path, leaf in jax.tree_util.tree_flatten_with_path(params)[0]
  }


def unflatten(
    leaves: dict[str, np.ndarray], like: types.PyTree
) -> types.PyTree:
  """Returns the tree of `like` with the leaves found by path."""
  paths, treedef = jax.tree_util.tree_flatten_with_path(like)
  return jax.tree_util.tree_unflatten(
      treedef, [leaves[jax.tree_util.keystr(path)] for path, _ in paths]
  )


# Between two looks at what readers ask of a carrier.
SERVE_S = 0.05
# Between two looks whether the pointer is still ours.
_CURRENT_S = 0.5


class Publisher:
  """Publishes from a thread; the trainer pays for one copy on the device.

  Of versions submitted faster than they can be written, the newest is written.
  """

  def __init__(
      self,
      make_transport: Callable[[], base.Transport],
      *,
      epoch: int,
      run_id: str,
      secret: bytes,
      carriers: "Sequence[carrier_lib.Carrier]",
      dtype: str,
      keep_versions: int,
      on_event: Callable[[str, str], None],
      span: Callable[[str], contextlib.AbstractContextManager],
      base_name: str = "",
  ):
    """Starts the thread.

    Args:
      make_transport: makes the thread's own transport.
      epoch: the trainer's start count.
      run_id: the run.
      secret: key of the run's messages.
      carriers: of the leaves; the first that has room takes a version.
      dtype: of the published floats, "" = as they are.
      keep_versions: how many versions stay readable, at least 1.
      on_event: called with (kind, message) for what a user should know.
      span: notes the time of a body of the named kind, in the thread.
      base_name: as of `versions.send`.
    """
    self._make_transport = make_transport
    self._span = span
    self._epoch = epoch
    self._keys = {"run_id": run_id, "secret": secret}
    self._base_name = base_name
    self._keep = keep_versions
    self._on_event = on_event
    self._carriers = carriers
    self._copy = jax.jit(functools.partial(snapshot, dtype=dtype))
    self._wake = threading.Condition()
    self._next: tuple[int, types.PyTree] | None = None
    self._written = -1
    self._stop = False
    self._error: BaseException | None = None
    self._busy_s = 0.0
    self._thread = threading.Thread(
        target=self._run, name="publisher", daemon=True
    )
    self._thread.start()

  def submit(self, version: int, params: types.PyTree) -> int | None:
    """Takes a copy of the params; returns the version left out for it, if any.

    Raises:
      TransportError: the thread has ended, with its error as the cause.
    """
    self._check()
    snapshot = self._copy(params)
    with self._wake:
      replaced, self._next = self._next, (version, snapshot)
      self._wake.notify_all()
    return replaced and replaced[0]

  def wait(self, version: int, deadline_s: float) -> None:
    """Waits until `version` (or a later one) is readable.

    Raises:
      DeadlineExceededError: it was not within `deadline_s`.
    """
    with self._wake:
      done = self._wake.wait_for(
          lambda: self._written >= version or self._error is not None,
          deadline_s,
      )
    self._check()
    if not done:
      raise base.DeadlineExceededError(
          f"version {version} was not published within {deadline_s:.0f} s:"
          f" the store holds version {self._written}"
      )

  def close(self) -> None:
    """Ends the thread; what was not written yet is dropped."""
    with self._wake:
      self._stop = True
      self._wake.notify_all()
    self._thread.join(timeout=5.0)

  def _check(self) -> None:
    if (error := self._error) is not None:
      raise base.TransportError(f"publishing has ended: {error}") from error

  def _run(self) -> None:
    try:
      transport = self._make_transport()
      # Newest last; what is packed is sent again to a new store.
      kept: list[Version] = []
      looked = 0.0
      while True:
        with self._wake:
          self._wake.wait_for(
              lambda: self._next is not None or self._stop, timeout=SERVE_S
          )
          if self._stop:
            break
          pending, self._next = self._next, None
        try:
          if pending is not None:
            with self._span("publish"):
              self._pack(kept, *pending)
              # Not held while it waits: it is as large as the params.
              pending = None
              self._send(transport, kept)
            looked = time.monotonic()
          elif kept and time.monotonic() > looked + _CURRENT_S:
            looked = time.monotonic()
            # A replaced trainer that still writes, or a new store, moves it.
            if self._pointer(transport) != (self._epoch, kept[-1].version):
              with self._span("publish"):
                self._send(transport, kept)
          newest = kept[-1] if kept else None
          for carrier in self._carriers:
            mine = newest is not None and newest.carrier is carrier
            carrier.serve(transport, newest.packed if mine else None)
        except base.TransportError as error:
          self._on_event("store_lost", f"publisher: {error}")
          transport.reconnect()
          looked = 0.0
      for it in kept:
        it.carrier.drop(it.packed)
      transport.close()
    except Exception as error:  # The trainer's thread raises it.
      logging.exception("publisher ended")
      with self._wake:
        self._error = error
        self._wake.notify_all()
    for carrier in self._carriers:
      carrier.close()

  def _pointer(self, transport: base.Transport) -> tuple[int, int] | None:
    try:
      return read_pointer(transport, **self._keys)
    except wire.WireError as error:
      self._on_event("refused_version", f"the pointer is not ours: {error}")
      return None

  def _pack(
      self, kept: list[Version], version: int, params: types.PyTree
  ) -> None:
    found = pack_version(
        self._carriers,
        by_path(params),
        epoch=self._epoch,
        version=version,
        on_event=self._on_event,
    )
    if not kept:
      found.carrier.clean(found.packed.tag)
    # The same version again, after a restore.
    kept[:] = [it for it in kept if it.version != version] + [found]

  def _send(self, transport: base.Transport, kept: list[Version]) -> None:
    newest = kept[-1]
    send_version(transport, newest, base_name=self._base_name, **self._keys)
    with self._wake:
      self._written = max(self._written, newest.version)
      self._wake.notify_all()
    while len(kept) > self._keep:
      drop_version(transport, kept[0])
      # After the store has taken it: a lost one would leave the file.
      kept.pop(0)


# Versioned params from the trainer to whoever samples: pulled.
#
# A reader never waits for the trainer: it has a thread and a transport of its
# own, and keeps what it has until a newer version has come whole (see
# `versions`). `publication` is the other side.


# Between two looks at the pointer: while somebody waits for a version at least,
# and in all at most.
_WAITING_LOOK_S = 0.004
_LONGEST_LOOK_S = 1.0
# Of the age of a version: how much later the next one is seen at most.
_LOOK_SHARE = 0.05


@dataclasses.dataclass
class PullStats:
  """What a puller met: versions taken, and refused by reason."""

  taken: int = 0
  refused: int = 0
  last_refusal: str = ""


class Puller:
  """Holds the newest verified version; a thread looks for newer ones."""

  def __init__(
      self,
      make_transport: Callable[[], base.Transport],
      *,
      run_id: str,
      secret: bytes,
      expected: Specs,
      carriers: "Mapping[str, carrier_lib.Carrier]",
      dtype: str,
      every_s: float,
      on_event: Callable[[str, str], None],
      base_name: str = "",
  ):
    """Starts the thread.

    Args:
      make_transport: makes the thread's own transport.
      run_id: the run.
      secret: key of the run's messages.
      expected: shape and dtype of every leaf that is wanted.
      carriers: of the leaves, by name.
      dtype: in which floats are published, "" = as they are wanted.
      every_s: seconds between two looks at the pointer, at least, while nobody
        waits for a version.
      on_event: called with (kind, message).
      base_name: as of `versions.read_version`.
    """
    self._make_transport = make_transport
    self._keys = {"run_id": run_id, "secret": secret}
    published = published_specs(expected, dtype)
    self._wanted = {"expected": published, "base_name": base_name}
    self._expected = expected
    self._carriers = carriers
    self._pace = polling.PollInterval(
        floor_s=every_s,
        waiting_floor_s=_WAITING_LOOK_S,
        share=_LOOK_SHARE,
        cap_s=max(every_s, _LONGEST_LOOK_S),
    )
    self._on_event = on_event
    self.stats = PullStats()
    self._changed = threading.Condition()
    self._latest: tuple[tuple[int, int], dict[str, np.ndarray]] | None = None
    self._stop = threading.Event()
    self._error: BaseException | None = None
    self._thread = threading.Thread(
        target=self._run, name="puller", daemon=True
    )
    self._thread.start()

  def latest(self) -> tuple[tuple[int, int], dict[str, np.ndarray]] | None:
    """Returns ((epoch, version), leaves by path) or None before the first.

    Raises:
      TransportError: the thread has ended, with its error as the cause.
    """
    with self._changed:
      if self._error is not None:
        raise base.TransportError("pulling has ended") from self._error
      return self._latest

  def wait_for(
      self, version: int, timeout_s: float
  ) -> tuple[tuple[int, int], dict[str, np.ndarray]] | None:
    """Returns the newest version once it is `version`; None after a timeout.

    A version of -1 means any.
    """

    def ready() -> bool:
      if self._error is not None:
        return True
      if self._latest is None:
        return False
      return version < 0 or self._latest[0][1] == version

    with self._changed:
      if not ready() and self._pace.start_waiting():
        self._changed.notify_all()
      if not self._changed.wait_for(ready, timeout_s):
        return None
      self._pace.stop_waiting()
    return self.latest()

  def close(self) -> None:
    with self._changed:
      self._stop.set()
      self._changed.notify_all()
    self._thread.join(timeout=5.0)

  def _run(self) -> None:
    try:
      transport = self._make_transport()
      while not self._stop.is_set():
        taken = self.stats.taken
        try:
          self._look(transport)
        except base.TransportError as error:
          self._on_event("store_lost", f"puller: {error}")
          transport.reconnect()
        except wire.WireError as error:
          # The old version stays; a good one will overwrite the bad one.
          self.stats.refused += 1
          if str(error) != self.stats.last_refusal:
            self.stats.last_refusal = str(error)
            self._on_event("refused_version", str(error))
          self._stop.wait(0.2)
        with self._changed:
          self._pace.polled(self.stats.taken > taken)
          while not self._stop.is_set() and (due_s := self._pace.due_in_s()):
            self._changed.wait(due_s)
      transport.close()
    except Exception as error:  # The searcher's thread raises it.
      logging.exception("puller ended")
      with self._changed:
        self._error = error
        self._changed.notify_all()
    for carrier in self._carriers.values():
      carrier.close()

  def _look(self, transport: base.Transport) -> None:
    tag = read_pointer(transport, **self._keys)
    held = self._latest
    # An older epoch's pointer comes from a trainer that was replaced.
    if tag is None or (held is not None and tag <= held[0]):
      return
    started = time.perf_counter()
    keys = {"carriers": self._carriers, **self._wanted, **self._keys}
    leaves = read_version(transport, tag, **keys)
    if leaves is None:
      return
    # Beside the ones in use, which go when the reader swaps.
    leaves = cast_leaf(leaves, self._expected)
    ms = 1e3 * (time.perf_counter() - started)
    message = f"pulled version {tag_text(*tag)} in {ms:.1f} ms"
    logging.log_every_n_seconds(logging.INFO, message, 30)
    self.stats.taken += 1
    with self._changed:
      self._latest = (tag, leaves)
      self._changed.notify_all()


# Carriers of a config: which one the trainer writes with, all to read with.


# Up to here the store is as fast as a file, and needs no directory.
SMALL_BYTES = 4 << 20


def choose_carrier(
    setting: str,
    *,
    num_bytes: int,
    one_host: bool,
    directory: str,
    num_processes: int,
) -> str:
  """Returns the name of the carrier that a trainer writes with.

  Args:
    setting: `publish.carrier`; "auto" follows the rule below.
    num_bytes: of one version.
    one_host: whether all processes are on one host.
    directory: `publish.directory`.
    num_processes: of the trainer.

  Returns:
    The setting, or: "store" for small params; Orbax's shards where a directory
    is given that is in an object store, or that several processes of a trainer
    share with other hosts; files where all can read them; else the store
    again, which is slow for more than some 100 MB: give a directory then.
  """
  if setting != "auto":
    return setting
  if num_bytes <= SMALL_BYTES:
    return "store"
  if carrier_files.is_remote(directory):
    return "orbax"
  if one_host:
    return "files"
  if directory:
    return "orbax" if num_processes > 1 else "files"
  return "store"


def make_write_carriers(
    config: ml_collections.ConfigDict,
    run: run_directory.Run,
    specs: carrier_lib.Specs,
    peers: carrier_orbax.Leader | None = None,
) -> list[carrier_lib.Carrier]:
  """Returns the carriers to write with, each for where the one before is full.

  Args:
    config: reads `publish` and `store.address`.
    run: whose params they are.
    specs: of the published leaves.
    peers: from `make_peers`; then no process has all params, and none but
      "orbax" can carry them.
  """
  name = chosen_carrier(config, specs)
  names = [name]
  if config.publish.carrier == "auto" and name != "store" and peers is None:
    names.append("store")
  made = make_read_carriers(config, run, peers=peers)
  return [made[name] for name in names]


def make_peers(
    config: ml_collections.ConfigDict,
    specs: carrier_lib.Specs,
    cluster: "cluster_lib.Cluster",
    *,
    secret: bytes,
    copy: Callable[[Any], Mapping[str, Any]],
) -> carrier_orbax.Leader | carrier_orbax.Helper | None:
  """Returns what has a trainer's processes write their shards themselves.

  Args:
    config: reads `publish`, `store` and `trainer.num_processes`.
    specs: of the published leaves.
    cluster: this process among the others.
    secret: key of the run's messages.
    copy: returns what is published of params, by path.

  Returns:
    Process 0's end or another's; None where process 0 writes all.
  """
  if cluster.num_processes == 1 or chosen_carrier(config, specs) != "orbax":
    return None
  settings = {"secret": secret, "deadline_s": config.store.deadline_s}
  if cluster.leads:
    return carrier_orbax.Leader(
        cluster.client, cluster.num_processes, **settings
    )
  return carrier_orbax.Helper(cluster.client, cluster.process, copy, **settings)


def chosen_carrier(
    config: ml_collections.ConfigDict, specs: carrier_lib.Specs
) -> str:
  """Returns the name of the carrier that versions of `specs` go by."""
  return choose_carrier(
      config.publish.carrier,
      num_bytes=carrier_lib.num_bytes(specs),
      one_host=relations.is_one_host(config.store.address),
      directory=config.publish.directory,
      num_processes=config.trainer.num_processes,
  )


def make_read_carriers(
    config: ml_collections.ConfigDict,
    run: run_directory.Run,
    *,
    peers: carrier_orbax.Leader | None = None,
    placement: carrier_orbax.Placement | None = None,
) -> dict[str, carrier_lib.Carrier]:
  """Returns every carrier by name; the manifest says which one is needed.

  Args:
    config: reads `publish` and `store`.
    run: whose params they are.
    peers: of the trainer's other processes, from `make_peers`.
    placement: of leaves that come to devices; None = on one.
  """
  place = config.publish.directory, run.workdir, run.run_id
  made = (
      carrier_store.Chunks(),
      carrier_files.Files(carrier_files.files_directory(*place)),
      carrier_orbax.OrbaxShards(
          carrier_files.shards_directory(*place),
          run_id=run.run_id,
          secret=run.secret,
          deadline_s=config.store.deadline_s,
          placement=placement,
          peers=peers,
      ),
  )
  return {carrier.name: carrier for carrier in made}
