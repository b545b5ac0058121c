# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Pulls the newest params for a searcher, in a thread."""

from collections.abc import Callable, Mapping
import secrets
import threading
import time

from absl import logging
import ml_collections
import numpy as np

from tba_jax.system import background
from tba_jax.system import polling
from tba_jax.transport import byte_store
from tba_jax.transport import wire
from tba_jax.transport.params import carrier as carrier_lib
from tba_jax.transport.params import manifest
from tba_jax.transport.params import pace as pace_lib
from tba_jax.transport.params import version as version_lib

# Least time between two requests for a version.
_ASK_EVERY_S = 0.5
# Reasons for refusing a version that would remain after sending it again.
_LASTING = ("base", "carrier", "leaves")
_CLOSE_S = 5.0
# A version, and its leaves by path.
Pulled = tuple[version_lib.Version, dict[str, np.ndarray]]
# Intervals of reading the pointer: while a caller waits, and the longest.
_PAUSE_S = 0.02
_WAITING_PAUSE_S = 0.004
# Limit for all searchers together; 1600 took 23 % of the store's core.
_POLLS_PER_S = 800.0
_LONGEST_PAUSE_S = 1.0
# The interval as a share of the time since the last version.
_PAUSE_SHARE = 0.05


class Puller:
  """Keeps the newest verified version; a thread pulls it.

  It is the `ports.ParamsSource` of the store.
  """

  def __init__(
      self,
      config: ml_collections.ConfigDict,
      run: wire.RunIdentity,
      expected: version_lib.Specs,
      *,
      make_transport: Callable[[], byte_store.Transport],
      carriers: Mapping[str, carrier_lib.Carrier],
      lag_steps: int,
      on_event: Callable[[str, str], None],
      base_name: str = "",
  ):
    """Starts the thread.

    Args:
      config: reads `search.num_searchers` and `store.deadline_s`.
      expected: shape and dtype of every published leaf, by path.
      make_transport: returns a new client of the run's store.
      carriers: readers by name; closed at the end.
      lag_steps: exact lag of the schedule in steps, 0 for none.
      on_event: function called with kind and message, of a lost store or a
        refused version.
      base_name: base params of the reader's adapters; "" without adapters.
    """
    self._connect = make_transport
    self._run = run
    self._expected = expected
    self._base_name = base_name
    self._carriers = carriers
    floor_s = max(_PAUSE_S, config.search.num_searchers / _POLLS_PER_S)
    self._interval = polling.PollInterval(
        floor_s=floor_s,
        waiting_floor_s=_WAITING_PAUSE_S,
        share=_PAUSE_SHARE,
        cap_s=max(floor_s, _LONGEST_PAUSE_S),
    )
    self._on_event = on_event
    self._refusals = wire.Refusals(on_event, kind="refused_version")
    self._name = secrets.token_hex(8)
    self._next_ask = 0.0
    self._pace = pace_lib.Pace(config.store.deadline_s)
    self._num_bytes = version_lib.num_bytes(expected)
    self.stats = version_lib.PullStats()
    self._changed = threading.Condition()
    self._latest: Pulled | None = None
    # With an exact lag: versions that may still be requested, oldest first.
    self._lag_steps = lag_steps
    self._versions: dict[version_lib.Version, dict[str, np.ndarray]] = {}
    self._asked_version = -1
    self._thread = background.Thread(
        "puller", self._serve, close_s=_CLOSE_S, wake=self._wake
    )

  def latest(self) -> Pulled | None:
    byte_store.check_thread(self._thread, "pulling")
    return self._latest

  def wait_for(self, version: int, timeout_s: float) -> Pulled | None:
    def find() -> Pulled | None:
      latest = self._latest
      if latest is None or version in (-1, latest[0].step):
        return latest
      tag = latest[0]._replace(step=version)
      return (tag, self._versions[tag]) if tag in self._versions else None

    ready = lambda: self._thread.failed or find() is not None
    with self._changed:
      self._asked_version = version
      if not ready() and self._interval.start_waiting():
        self._changed.notify_all()
      if not self._changed.wait_for(ready, timeout_s):
        return None
      self._interval.stop_waiting()
      byte_store.check_thread(self._thread, "pulling")
      return find()

  def is_pulling(self) -> bool:
    return self._pace.is_moving()

  def close(self) -> None:
    byte_store.close_thread(self._thread, "pulling")

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
      except byte_store.TransportError as error:
        self._on_event("store_lost", f"puller: {error}")
        transport.reconnect()
      except wire.WireError as error:
        # Keep the old version; a valid one will replace the bad one.
        self.stats.refused += 1
        self._refusals.add(manifest.POINTER, error)
        stop.wait(0.2)
      with self._changed:
        self._interval.polled(self.stats.taken > taken)
        while not stop.is_set() and (due_s := self._interval.due_in_s()):
          self._changed.wait(due_s)
    transport.close()

  def _pull(self, transport: byte_store.Transport) -> None:
    """Reads the pointer, and the version it names if newer."""
    newest = manifest.read_pointer(transport, self._run)
    # A pointer of an older epoch is a replaced trainer's.
    if newest is not None and (
        self._latest is None or newest > self._latest[0]
    ):
      self._read(transport, newest, is_newest=True)
    self._read_older(transport)

  def _read_older(self, transport: byte_store.Transport) -> None:
    """Reads the requested version, if it is an older one that was skipped."""
    with self._changed:
      if not self._lag_steps or self._latest is None:
        return
      newest, _ = self._latest
      older = newest._replace(step=self._asked_version)
      if not 0 <= older.step < newest.step or older in self._versions:
        return
    self._read(transport, older, is_newest=False)

  def _read(
      self,
      transport: byte_store.Transport,
      version: version_lib.Version,
      *,
      is_newest: bool,
  ) -> None:
    started = time.perf_counter()
    try:
      with self._pace.moving(self._num_bytes):
        leaves = manifest.read_version(
            transport,
            version,
            self._run,
            carriers=self._carriers,
            expected=self._expected,
            base_name=self._base_name,
        )
    except wire.WireError as error:
      if error.reason not in _LASTING:
        self._ask_again(transport, version)
      raise
    if leaves is None:
      self._ask_again(transport, version)
      return
    seconds = time.perf_counter() - started
    self._pace.done(self._num_bytes, seconds)
    message = f"pulled version {version.tag} in {1e3 * seconds:.1f} ms"
    logging.log_every_n_seconds(logging.INFO, message, 30)
    self.stats.taken += 1
    with self._changed:
      if is_newest:
        self._latest = version, leaves
      if self._lag_steps:
        self._keep(version, leaves)
      self._changed.notify_all()

  def _keep(
      self, version: version_lib.Version, leaves: dict[str, np.ndarray]
  ) -> None:
    """Keeps a version, and all that may still be requested."""
    epoch, newest = self._latest[0]
    requested = newest if self._asked_version < 0 else self._asked_version
    oldest = epoch, min(requested, newest - self._lag_steps)
    self._versions = {
        tag: self._versions.get(tag, leaves)
        for tag in sorted({*self._versions, version})
        if tag >= oldest
    }

  def _ask_again(
      self, transport: byte_store.Transport, version: version_lib.Version
  ) -> None:
    now = time.monotonic()
    if now >= self._next_ask:
      self._next_ask = now + _ASK_EVERY_S
      manifest.ask_again(transport, self._run, self._name, version)
