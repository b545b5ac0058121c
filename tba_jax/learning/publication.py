# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Versions of the params: published by the trainer, pulled by searchers.

In the store, `p/<epoch>.<version>/meta` is a version's manifest and `p_cur` a
pointer to the newest version, written last to commit it. The leaves are moved
by a carrier (`transport/carrier*.py`). A reader accepts a version only if its
manifest is authentic and has the expected leaves, and all digests match. For a
version that it cannot read it asks under `ask/params/<name>`: the trainer sends
it again, in case its keys were overwritten or deleted.

Among the leaves are those of the probe (`probe.py`), by which a searcher checks
what it has made of the others.
"""

import collections
from collections.abc import Callable, Mapping, Sequence
import dataclasses
import functools
import secrets
import threading
import time
from typing import Any

from absl import logging
import jax
import jax.numpy as jnp
import ml_collections
import numpy as np

from tba_jax import schedule
from tba_jax import types
from tba_jax.channels import messages
from tba_jax.channels import ports
from tba_jax.learning import cluster as cluster_lib
from tba_jax.learning import probe
from tba_jax.models import config as config_lib
from tba_jax.monitor import metrics
from tba_jax.monitor import recorder as recorder_lib
from tba_jax.monitor import run_directory
from tba_jax.system import bucket
from tba_jax.system import jsonl
from tba_jax.system import polling
from tba_jax.system import worker
from tba_jax.transport import base
from tba_jax.transport import carrier as carrier_lib
from tba_jax.transport import carrier_orbax
from tba_jax.transport import carriers as carriers_lib
from tba_jax.transport import kv_client
from tba_jax.transport import locator
from tba_jax.transport import wire

_FORMAT = 4
_POINTER = "p_cur"
_ASK = "ask/params"
_TAG_SCHEMA = {"epoch": int, "version": int}
_MANIFEST = {
    "format": int,
    "carrier": str,
    "carried": dict,
    "base": str,
    "leaves": list,
}
# (epoch, version): versions of a restarted trainer are newer than all before.
Tag = tuple[int, int]
Specs = carrier_lib.Specs


def connect(
    config: ml_collections.ConfigDict, run: run_directory.Run
) -> kv_client.KvTransport:
  """Returns a new client of the run's store."""
  return kv_client.KvTransport(
      run.finder,
      deadline_s=config.store.deadline_s,
      run_id=run.run_id,
      root=run.root,
      tls=run.tls,
  )


@dataclasses.dataclass
class Version:
  """A packed version in the trainer.

  carrier: carrier that packed it.
  packed: the carrier's data.
  specs: shape and dtype of every leaf, by path.
  """

  tag: Tag
  carrier: carrier_lib.Carrier
  packed: carrier_lib.Packed
  specs: Specs


def tag_text(tag: Tag) -> str:
  """Returns the tag as text for keys, which sorts like the tag."""
  return f"{tag[0]:08d}.{tag[1]:010d}"


def by_path(params: types.PyTree) -> dict[str, Any]:
  """Returns the leaves by path, in the order of the tree."""
  leaves = jax.tree_util.tree_flatten_with_path(params)[0]
  return {jax.tree_util.keystr(path): leaf for path, leaf in leaves}


def flatten(params: types.PyTree) -> dict[str, np.ndarray]:
  """Returns the leaves as host arrays by path; waits for the device."""
  return {
      name: np.asarray(leaf)
      for name, leaf in by_path(jax.device_get(params)).items()
  }


def unflatten(leaves: Mapping[str, Any], like: types.PyTree) -> types.PyTree:
  """Returns the tree of `like` with leaves given by path."""
  treedef = jax.tree.structure(like)
  return jax.tree.unflatten(treedef, [leaves[name] for name in by_path(like)])


def specs_of(params: types.PyTree) -> Specs:
  """Returns shape and dtype of the leaves, by path; params may be abstract."""
  return carrier_lib.specs_of(by_path(params))


@dataclasses.dataclass(frozen=True)
class Dtypes:
  """Dtypes of published floats; "" is that of the train state.

  matrices: leaves of two axes and more, beside the axis of stacked layers.
  vectors: the others: norms and biases.
  """

  matrices: str
  vectors: str

  def of(self, path: str, leaf: Any) -> np.dtype:
    """Returns the published dtype of a leaf with `shape` and `dtype`."""
    if probe.is_of(path) or not jnp.issubdtype(leaf.dtype, jnp.floating):
      return np.dtype(leaf.dtype)
    num_axes = len(leaf.shape) - path.startswith("['blocks']")
    wanted = self.matrices if num_axes > 1 else self.vectors
    return np.dtype(wanted or leaf.dtype)


def published_dtypes(
    config: ml_collections.ConfigDict, backend: str | None = None
) -> Dtypes:
  """Returns the dtypes that `publish.dtype` stands for.

  "auto" is the dtype that the trainer's device computes in. A sampler that
  computes in the same loses nothing: it casts matrices to it in any case,
  computes norms in float32, and merges adapters in float32.

  Args:
    config: reads `publish.dtype`, `model` and `lora`.
    backend: JAX backend of the trainer; None takes this process's.
  """
  dtype = config.publish.dtype
  if dtype != "auto":
    return Dtypes(dtype, dtype)
  return (
      Dtypes("", "") if config.lora.rank else computed_dtypes(config, backend)
  )


def computed_dtypes(
    config: ml_collections.ConfigDict, backend: str | None = None
) -> Dtypes:
  """Returns the narrowest dtypes that change no result of the model."""
  compute = config_lib.compute_dtype(
      config.model, backend or jax.default_backend()
  )
  return Dtypes(compute if compute == "bfloat16" else "", "")


def snapshot(params: types.PyTree, *, dtypes: Dtypes) -> types.PyTree:
  """Returns a copy of the params in the published dtypes."""

  def copy(path: Any, x: jax.Array) -> jax.Array:
    wanted = dtypes.of(jax.tree_util.keystr(path), x)
    return x + 0 if wanted == x.dtype else x.astype(wanted)

  return jax.tree_util.tree_map_with_path(copy, params)


def make_copy(
    config: ml_collections.ConfigDict,
) -> Callable[[types.PyTree], dict[str, Any]]:
  """Returns a jitted function from params to their `snapshot`, by path."""
  dtypes = published_dtypes(config)
  copy = jax.jit(functools.partial(snapshot, dtypes=dtypes))
  return lambda params: by_path(copy(params))


def pack_version(
    carriers: Sequence[carrier_lib.Carrier],
    leaves: Mapping[str, Any],
    tag: Tag,
    on_event: Callable[[str, str], None],
) -> Version:
  """Packs a version with the first carrier that has room; waits for the device.

  Raises:
    OSError: no carrier has room and permission.
  """
  for carrier in carriers:
    try:
      packed = carrier.pack(tag_text(tag), leaves)
      return Version(tag, carrier, packed, carrier_lib.specs_of(leaves))
    except OSError as error:
      if carrier is carriers[-1]:
        raise
      on_event("carrier_full", f"{carrier.name}: {error}")
  raise ValueError("no carrier to pack with")


def send_version(
    transport: base.Transport,
    it: Version,
    run: run_directory.Run,
    base_name: str = "",
) -> None:
  """Sends a version: the carrier's data, then the manifest, then the pointer.

  Args:
    transport: transport of the calling thread.
    it: version to send.
    run: run whose params are published.
    base_name: base params of adapters; "" without adapters.

  Raises:
    TransportError: the store was lost; readers do not see a partial version.
  """
  it.carrier.send(transport, it.packed)
  key = f"p/{tag_text(it.tag)}/meta"
  manifest = {
      "format": _FORMAT,
      "run": run.run_id,
      "key": key,
      "carrier": it.carrier.name,
      "carried": it.packed.carried,
      "base": base_name,
      "leaves": [
          [name, list(shape), dtype.name]
          for name, (shape, dtype) in it.specs.items()
      ],
  }
  transport.put(key, wire.encode_message(manifest, run.secret))
  transport.put(_POINTER, _encode_tag(run, _POINTER, it.tag))


def drop_version(transport: base.Transport, it: Version) -> None:
  """Removes a version, its manifest before the carrier's data."""
  transport.delete(f"p/{tag_text(it.tag)}")
  it.carrier.drop(it.packed)


def read_pointer(
    transport: base.Transport, run: run_directory.Run
) -> Tag | None:
  """Returns the newest tag, None before the first version.

  Raises:
    WireError: the pointer is invalid.
  """
  data = transport.get(_POINTER)
  if data is None:
    return None
  return _decode_tag(run, _POINTER, data)


def _encode_tag(run: run_directory.Run, key: str, tag: Tag) -> bytes:
  message = {"run": run.run_id, "key": key}
  message |= {"epoch": tag[0], "version": tag[1]}
  return wire.encode_message(message, run.secret)


def _decode_tag(run: run_directory.Run, key: str, data: bytes) -> Tag:
  """Returns the tag in a message; raises WireError."""
  message = wire.decode_placed(data, run.secret, run.run_id, key, _TAG_SCHEMA)
  return message["epoch"], message["version"]


def ask_again(
    transport: base.Transport, run: run_directory.Run, name: str, tag: Tag
) -> None:
  """Asks the trainer to send a version again; `name` is of the reader."""
  key = f"{_ASK}/{name}"
  transport.put(key, _encode_tag(run, key, tag))


def take_asked(
    transport: base.Transport,
    run: run_directory.Run,
    refusals: messages.Refusals,
) -> set[Tag]:
  """Returns the versions that readers ask for, and removes what they asked."""
  requests = transport.list(_ASK)
  asked = set()
  for key, data in requests.items():
    try:
      asked.add(_decode_tag(run, key, data))
    except wire.WireError as error:
      refusals.add(key, error)
  if requests:
    transport.delete(_ASK)
  return asked


def read_version(
    transport: base.Transport,
    tag: Tag,
    run: run_directory.Run,
    *,
    carriers: Mapping[str, carrier_lib.Carrier],
    expected: Specs,
    base_name: str = "",
) -> dict[str, np.ndarray] | None:
  """Returns the leaves of a version, None if it was dropped meanwhile.

  Args:
    transport: transport of the calling thread.
    tag: tag in the pointer.
    run: run of the reader.
    carriers: carriers by name.
    expected: shape and dtype of every leaf; any float stands for any other.
    base_name: base params of the reader's adapters; "" without adapters.

  Raises:
    WireError: the version is corrupt, forged, of another base, or has
      unexpected leaves.
  """
  key = f"p/{tag_text(tag)}/meta"
  data = transport.get(key)
  if data is None:
    return None
  manifest = wire.decode_placed(data, run.secret, run.run_id, key, _MANIFEST)
  if manifest["format"] != _FORMAT:
    raise wire.WireError(
        "schema", f"params format {manifest['format']}, allowed {_FORMAT}"
    )
  if manifest["base"] != base_name:
    raise wire.WireError(
        "base",
        f"adapters of the base {manifest['base']!r}; config.init is"
        f" {base_name!r} here",
    )
  try:
    stored = {
        name: (tuple(shape), np.dtype(dtype))
        for name, shape, dtype in manifest["leaves"]
    }
    if not all(isinstance(name, str) for name in stored):
      raise TypeError("a name is no string")
  except (TypeError, ValueError) as error:
    raise wire.WireError("schema", f"leaves: {error}") from error
  wrong = sorted(
      name
      for name in {*stored, *expected}
      if not _fits(stored.get(name), expected.get(name))
  )
  if wrong:
    raise wire.WireError("leaves", f"missing or of another shape: {wrong}")
  carrier = carriers.get(manifest["carrier"])
  if carrier is None:
    raise wire.WireError("carrier", f"unknown: {manifest['carrier']!r}")
  carried = manifest["carried"]
  if error := jsonl.schema_error(carried, carrier.schema, "carried"):
    raise wire.WireError("schema", error)
  try:
    return carrier.read(transport, tag_text(tag), carried, stored)
  except wire.WireError:
    raise
  except (KeyError, TypeError, ValueError) as error:
    # `carried` has unexpected content.
    raise wire.WireError("schema", f"carried: {error!r}") from error


def _fits(stored: Any, expected: Any) -> bool:
  """Returns whether a leaf's shape and dtype may stand for those expected."""
  if stored is None or expected is None or stored[0] != expected[0]:
    return False
  return stored[1] == expected[1] or all(
      jnp.issubdtype(dtype, jnp.floating) for _, dtype in (stored, expected)
  )


# Intervals of serving readers, and of checking the store's pointer.
SERVE_S = 0.05
_CHECK_S = 0.5
# Least time between two requests of a reader, and between sending a version
# twice because of them.
_ASK_EVERY_S = 0.5
# Reasons for refusing a version that sending it again would not change.
_LASTING = ("base", "carrier", "leaves")
_REPEAT_EVERY_S = 2.0
_CLOSE_S = 5.0


class Publisher:
  """Publishes versions from a thread; `submit` only copies params on devices.

  Versions that come faster than they can be written are skipped, but for an
  exact lag: then each is needed.
  """

  def __init__(
      self,
      config: ml_collections.ConfigDict,
      run: run_directory.Run,
      *,
      epoch: int,
      params: types.PyTree,
      base_name: str,
      peers: carrier_orbax.Leader | None,
      recorder: recorder_lib.Recorder,
  ):
    """Starts the thread.

    Args:
      config: reads `publish` and `store`.
      run: run whose params are published.
      epoch: the trainer's start count.
      params: tree like those that are published.
      base_name: base params of adapters; "" without adapters.
      peers: result of `make_peers`.
      recorder: recorder of spans and events.
    """
    self._connect = lambda: connect(config, run)
    self._run = run
    self._epoch = epoch
    self._base_name = base_name
    self._recorder = recorder
    self._refusals = messages.Refusals(recorder.event, kind="refused_version")
    lag_steps = schedule.make_schedule(config).lag_steps
    # A reader may be at the version before those that are needed.
    self._keep = max(config.publish.keep_versions, lag_steps + 2)
    self._may_skip = not lag_steps
    dtypes = published_dtypes(config)
    self._copy = jax.jit(functools.partial(snapshot, dtypes=dtypes))
    specs = specs_of(jax.eval_shape(self._copy, params))
    self._carriers = make_write_carriers(config, run, specs, peers)
    self._changed = threading.Condition()
    self._submitted: collections.deque[tuple[int, types.PyTree, Any]] = (
        collections.deque()
    )
    self._written = -1
    self._thread = worker.Worker(
        "publisher", self._serve, close_s=_CLOSE_S, wake=self._wake
    )

  def submit(
      self, version: int, params: types.PyTree, nonfinite: Any = 0
  ) -> int | None:
    """Copies the params; returns the pending version that is skipped, if any.

    Args:
      version: version of the params.
      params: params of the train state; may be donated afterwards.
      nonfinite: [] number, maybe on devices; the version is dropped unless it
        is 0.

    Raises:
      TransportError: the thread has ended, with its error as the cause.
    """
    base.check_thread(self._thread, "publishing")
    copy = self._copy(params)
    skipped = None
    with self._changed:
      if self._submitted and self._may_skip:
        skipped, _, _ = self._submitted.pop()
      self._submitted.append((version, copy, nonfinite))
      self._changed.notify_all()
    return skipped

  def wait(self, version: int, deadline_s: float) -> None:
    """Waits until `version` or a later one is readable.

    Raises:
      DeadlineExceededError: the version is not readable within `deadline_s`.
      TransportError: the thread has ended, with its error as the cause.
    """
    with self._changed:
      done = self._changed.wait_for(
          lambda: self._written >= version or self._thread.failed, deadline_s
      )
    base.check_thread(self._thread, "publishing")
    if not done:
      raise base.DeadlineExceededError(
          f"version {version} was not published within {deadline_s:.0f} s:"
          f" the store holds version {self._written}"
      )

  def close(self) -> None:
    """Ends the thread; a pending version is dropped."""
    base.close_thread(self._thread, "publishing")

  def _wake(self) -> None:
    with self._changed:
      self._changed.notify_all()

  def _serve(self, stop: threading.Event) -> None:
    try:
      self._publish_until(stop)
    finally:
      for carrier in self._carriers:
        carrier.close()

  def _publish_until(self, stop: threading.Event) -> None:
    transport = self._connect()
    # Newest last; kept to be sent again to a new store.
    kept: list[Version] = []
    checked = sent = 0.0
    while True:
      with self._changed:
        self._changed.wait_for(
            lambda: self._submitted or stop.is_set(), timeout=SERVE_S
        )
        if stop.is_set():
          break
        pending = self._submitted.popleft() if self._submitted else None
      try:
        if pending is not None and not float(np.asarray(pending[2])):
          with self._recorder.span("publish", lane="publish"):
            self._pack(kept, *pending[:2])
            pending = None  # Free the copy of the params before sending.
            self._send(transport, kept)
          checked = sent = time.monotonic()
        elif kept and time.monotonic() > checked + _CHECK_S:
          checked = time.monotonic()
          tag = kept[-1].tag
          asked = take_asked(transport, self._run, self._refusals)
          is_due = checked > sent + _REPEAT_EVERY_S
          # A replaced trainer that still writes, or a new store, changes it.
          if self._pointer(transport) != tag or (is_due and tag in asked):
            with self._recorder.span("publish", lane="publish"):
              # Older versions are waited for as well with an exact lag.
              for version in [] if self._may_skip else kept[:-1]:
                send_version(transport, version, self._run, self._base_name)
              self._send(transport, kept)
            sent = time.monotonic()
        newest = kept[-1] if kept else None
        for carrier in self._carriers:
          mine = newest is not None and newest.carrier is carrier
          carrier.serve(transport, newest.packed if mine else None)
      except base.TransportError as error:
        self._recorder.event("store_lost", f"publisher: {error}")
        transport.reconnect()
        checked = 0.0
    for old in kept:
      old.carrier.drop(old.packed)
    transport.close()

  def _pointer(self, transport: base.Transport) -> Tag | None:
    try:
      return read_pointer(transport, self._run)
    except wire.WireError as error:
      self._refusals.add(_POINTER, error)
      return None

  def _pack(
      self, kept: list[Version], version: int, params: types.PyTree
  ) -> None:
    tag = self._epoch, version
    new = pack_version(
        self._carriers, by_path(params), tag, self._recorder.event
    )
    if not kept:
      new.carrier.clean(new.packed.tag)
    # After a restore, the same version may be published again.
    kept[:] = [old for old in kept if old.tag != tag] + [new]

  def _send(self, transport: base.Transport, kept: list[Version]) -> None:
    newest = kept[-1]
    send_version(transport, newest, self._run, self._base_name)
    with self._changed:
      self._written = max(self._written, newest.tag[1])
      self._changed.notify_all()
    while len(kept) > self._keep:
      drop_version(transport, kept[0])
      kept.pop(0)  # Only now, in case the store is lost during the drop.


# Interval of reading the pointer: while a caller waits, and at most.
_PAUSE_S = 0.02
_WAITING_PAUSE_S = 0.004
# Polls of all searchers; 1600 took 23 % of the store's core.
_POLLS_PER_S = 800.0
_LONGEST_PAUSE_S = 1.0
# The interval as a share of the time since the last version.
_PAUSE_SHARE = 0.05


class Puller:
  """Keeps the newest verified version, which a thread pulls."""

  def __init__(
      self,
      config: ml_collections.ConfigDict,
      run: run_directory.Run,
      like: types.PyTree,
      *,
      events: metrics.EventLog,
      base_name: str = "",
  ):
    """Starts the thread.

    Args:
      config: reads `publish`, `search` and `store`.
      run: run whose params are pulled.
      like: tree of the trained params; may be abstract.
      events: log of lost stores and refused versions.
      base_name: base params of the reader's adapters; "" without adapters.
    """
    self._connect = lambda: connect(config, run)
    self._run = run
    self._wanted = specs_of(like)
    self._base_name = base_name
    self._carriers = make_read_carriers(config, run)
    floor_s = max(_PAUSE_S, config.search.num_searchers / _POLLS_PER_S)
    self._interval = polling.PollInterval(
        floor_s=floor_s,
        waiting_floor_s=_WAITING_PAUSE_S,
        share=_PAUSE_SHARE,
        cap_s=max(floor_s, _LONGEST_PAUSE_S),
    )
    self._events = events
    self._refusals = messages.Refusals(events.write, kind="refused_version")
    self._name = secrets.token_hex(8)
    self._next_ask = 0.0
    self.stats = ports.PullStats()
    self._changed = threading.Condition()
    self._latest: tuple[Tag, dict[str, np.ndarray]] | None = None
    # Versions that are or may be asked for with an exact lag, oldest first.
    self._lag_steps = schedule.make_schedule(config).lag_steps
    self._kept: dict[Tag, dict[str, np.ndarray]] = {}
    self._asked_version = -1
    self._thread = worker.Worker(
        "puller", self._serve, close_s=_CLOSE_S, wake=self._wake
    )

  def latest(self) -> tuple[Tag, dict[str, np.ndarray]] | None:
    """Returns (tag, leaves by path), None before the first version.

    Raises:
      TransportError: the thread has ended, with its error as the cause.
    """
    base.check_thread(self._thread, "pulling")
    return self._latest

  def wait_for(
      self, version: int, timeout_s: float
  ) -> tuple[Tag, dict[str, np.ndarray]] | None:
    """Returns `version` of the newest epoch; None after a timeout.

    -1 stands for the newest version. An older one is there while the trainer
    keeps it, for an exact lag. Raises as `latest`.
    """

    def find() -> tuple[Tag, dict[str, np.ndarray]] | None:
      latest = self._latest
      if latest is None or version in (-1, latest[0][1]):
        return latest
      tag = latest[0][0], version
      return (tag, self._kept[tag]) if tag in self._kept else None

    ready = lambda: self._thread.failed or find() is not None
    with self._changed:
      self._asked_version = version
      if not ready() and self._interval.start_waiting():
        self._changed.notify_all()
      if not self._changed.wait_for(ready, timeout_s):
        return None
      self._interval.stop_waiting()
      base.check_thread(self._thread, "pulling")
      return find()

  def close(self) -> None:
    base.close_thread(self._thread, "pulling")

  def _wake(self) -> None:
    with self._changed:
      self._changed.notify_all()

  def _serve(self, stop: threading.Event) -> None:
    try:
      self._pull_until(stop)
    finally:
      for carrier in self._carriers.values():
        carrier.close()

  def _pull_until(self, stop: threading.Event) -> None:
    transport = self._connect()
    while not stop.is_set():
      taken = self.stats.taken
      try:
        self._pull(transport)
      except base.TransportError as error:
        self._events.write("store_lost", f"puller: {error}")
        transport.reconnect()
      except wire.WireError as error:
        # Keep the old version; a valid one will replace the bad one.
        self.stats.refused += 1
        self._refusals.add(_POINTER, error)
        stop.wait(0.2)
      with self._changed:
        self._interval.polled(self.stats.taken > taken)
        while not stop.is_set() and (due_s := self._interval.due_in_s()):
          self._changed.wait(due_s)
    transport.close()

  def _pull(self, transport: base.Transport) -> None:
    """Reads the pointer, and its version if that is newer."""
    tag = read_pointer(transport, self._run)
    # A pointer of an older epoch is from a trainer that was replaced.
    if tag is not None and (self._latest is None or tag > self._latest[0]):
      self._read(transport, tag, is_newest=True)
    self._read_older(transport)

  def _read_older(self, transport: base.Transport) -> None:
    """Reads the version that is asked for, if it was passed over."""
    with self._changed:
      if not self._lag_steps or self._latest is None:
        return
      (epoch, newest), _ = self._latest
      tag = epoch, self._asked_version
      if not 0 <= tag[1] < newest or tag in self._kept:
        return
    self._read(transport, tag, is_newest=False)

  def _read(
      self, transport: base.Transport, tag: Tag, *, is_newest: bool
  ) -> None:
    started = time.perf_counter()
    try:
      leaves = read_version(
          transport,
          tag,
          self._run,
          carriers=self._carriers,
          expected=self._wanted,
          base_name=self._base_name,
      )
    except wire.WireError as error:
      if error.reason not in _LASTING:
        self._ask_again(transport, tag)
      raise
    if leaves is None:
      self._ask_again(transport, tag)
      return
    ms = 1e3 * (time.perf_counter() - started)
    message = f"pulled version {tag_text(tag)} in {ms:.1f} ms"
    logging.log_every_n_seconds(logging.INFO, message, 30)
    self.stats.taken += 1
    with self._changed:
      if is_newest:
        self._latest = (tag, leaves)
      if self._lag_steps:
        self._keep(tag, leaves)
      self._changed.notify_all()

  def _keep(self, tag: Tag, leaves: dict[str, np.ndarray]) -> None:
    """Keeps a version, and those that may still be asked for."""
    epoch, newest = self._latest[0]
    asked = newest if self._asked_version < 0 else self._asked_version
    oldest = epoch, min(asked, newest - self._lag_steps)
    self._kept = {
        kept: self._kept.get(kept, leaves)
        for kept in sorted({*self._kept, tag})
        if kept >= oldest
    }

  def _ask_again(self, transport: base.Transport, tag: Tag) -> None:
    now = time.monotonic()
    if now >= self._next_ask:
      self._next_ask = now + _ASK_EVERY_S
      ask_again(transport, self._run, self._name, tag)


# Up to this size, the store is as fast as a file and needs no directory.
SMALL_BYTES = 4 << 20


def choose_carrier(config: ml_collections.ConfigDict, num_bytes: int) -> str:
  """Returns the name of the trainer's carrier for versions of `num_bytes`.

  `publish.carrier="auto"` chooses the store for small params; Orbax's shards
  for an object store, or a directory that several processes of a trainer share
  with other hosts; files if all processes can read them; else the store, which
  is slow above some 100 MB: set `publish.directory` then.
  """
  setting, directory = config.publish.carrier, config.publish.directory
  if setting != "auto":
    return setting
  if num_bytes <= SMALL_BYTES:
    return "store"
  if bucket.is_remote(directory):
    return "orbax"
  if locator.is_one_host(config.store.address):
    return "files"
  if directory:
    return "orbax" if config.trainer.num_processes > 1 else "files"
  return "store"


def make_write_carriers(
    config: ml_collections.ConfigDict,
    run: run_directory.Run,
    specs: Specs,
    peers: carrier_orbax.Leader | None = None,
) -> list[carrier_lib.Carrier]:
  """Returns the carriers to write with, in order of preference.

  Args:
    config: reads `publish`, `store` and `trainer`.
    run: run whose params are published.
    specs: shapes and dtypes of the published leaves.
    peers: result of `make_peers`; then "orbax" is the only carrier, since no
      process has all params.
  """
  name = choose_carrier(config, carrier_lib.num_bytes(specs))
  names = [name]
  if config.publish.carrier == "auto" and name != "store" and peers is None:
    names.append("store")
  made = make_read_carriers(config, run, peers=peers)
  return [made[name] for name in names]


def make_peers(
    config: ml_collections.ConfigDict,
    run: run_directory.Run,
    cluster: cluster_lib.Cluster,
    params: types.PyTree,
) -> carrier_orbax.Leader | carrier_orbax.Helper | None:
  """Returns this process's end of writing shards from every process.

  None if process 0 writes everything. `params` may be abstract.
  """
  copy = functools.partial(snapshot, dtypes=published_dtypes(config))
  num_bytes = carrier_lib.num_bytes(specs_of(jax.eval_shape(copy, params)))
  if cluster.num_processes == 1 or choose_carrier(config, num_bytes) != "orbax":
    return None
  settings = {"secret": run.secret, "deadline_s": config.store.deadline_s}
  if cluster.leads:
    return carrier_orbax.Leader(
        cluster.client, cluster.num_processes, **settings
    )
  jitted = jax.jit(copy)
  return carrier_orbax.Helper(
      cluster.client,
      cluster.process,
      lambda params: by_path(jitted(params)),
      **settings,
  )


def make_read_carriers(
    config: ml_collections.ConfigDict,
    run: run_directory.Run,
    *,
    peers: carrier_orbax.Leader | None = None,
) -> dict[str, carrier_lib.Carrier]:
  """Returns every carrier by name, as manifests refer to them.

  Args:
    config: reads `publish` and `store`.
    run: run whose params they carry.
    peers: result of `make_peers`.
  """
  place = carrier_lib.Place(
      directory=config.publish.directory,
      workdir=run.workdir,
      run_id=run.run_id,
      secret=run.secret,
      deadline_s=config.store.deadline_s,
      peers=peers,
  )
  return {
      name: carriers_lib.make(name, place) for name in carriers_lib.CARRIERS
  }
