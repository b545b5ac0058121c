# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Publishes the trainer's params, from a thread."""

import collections
from collections.abc import Callable, Mapping, Sequence
import contextlib
import threading
import time
from typing import Any

import ml_collections
import numpy as np

from tba_jax import types
from tba_jax.system import background
from tba_jax.transport import byte_store
from tba_jax.transport import wire
from tba_jax.transport.params import carrier as carrier_lib
from tba_jax.transport.params import manifest
from tba_jax.transport.params import pace as pace_lib
from tba_jax.transport.params import version as version_lib

# Intervals of serving readers, and of checking the store's pointer.
SERVE_S = 0.05
_CHECK_S = 0.5
# Least time before a version is sent again because readers requested it.
_REPEAT_EVERY_S = 2.0
# Failed writes in a row that end the trainer, and the pauses between attempts:
# about three minutes in all.
MOST_FAILURES = 12
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 30.0
# Time that versions must have waited to be written before a skipped one is
# logged as an event, and least time between two such events.
LATE_S, _SKIP_EVENT_S = 10.0, 60.0
_CLOSE_S = 5.0


class Publisher:
  """Publishes versions from a thread; `submit` only copies params on devices.

  It is the `ports.ParamsSink` of the store. Versions that come faster than they
  can be written or read are skipped, except with an exact lag, which needs each
  of them. A failed write is repeated until a newer version comes; meanwhile
  searchers keep the version that they have. After `MOST_FAILURES` failures in a
  row the thread ends.
  """

  def __init__(
      self,
      config: ml_collections.ConfigDict,
      run: wire.RunIdentity,
      *,
      make_transport: Callable[[], byte_store.Transport],
      carriers: Sequence[carrier_lib.Carrier],
      copy: Callable[[types.PyTree], dict[str, Any]],
      epoch: int,
      lag_steps: int,
      base_name: str,
      on_event: Callable[[str, str], None],
      span: Callable[..., contextlib.AbstractContextManager],
  ):
    """Starts the thread.

    Args:
      config: reads `publish.keep_versions` and `store.deadline_s`.
      make_transport: returns a new client of the run's store.
      carriers: writers in order of preference; closed at the end.
      copy: returns a copy of the published leaves of params, by path.
      epoch: the trainer's start count.
      lag_steps: exact lag of the schedule in steps, 0 for none.
      base_name: base params of adapters; "" without adapters.
      on_event: function called with kind and message of an event.
      span: records the time of its body, of a kind and a lane.
    """
    self._connect = make_transport
    self._run = run
    self._epoch = epoch
    self._base_name = base_name
    self._on_event = on_event
    self._span = span
    self._refusals = wire.Refusals(on_event, kind="refused_version")
    # One more: a reader may still be at the version before the needed ones.
    self._keep = max(config.publish.keep_versions, lag_steps + 2)
    self._may_skip = not lag_steps
    self._copy = copy
    self._carriers = carriers
    self._changed = threading.Condition()
    self._submitted: collections.deque[
        tuple[version_lib.Version, dict[str, Any], Any]
    ] = collections.deque()
    self._written = -1
    self._pace = pace_lib.Pace(config.store.deadline_s)
    # Failed attempts in a row, and the time of the next attempt.
    self._failures = 0
    self._next_try = 0.0
    # Time since which a version waits, and earliest time of the next event.
    self._due_since = self._next_skip_event = 0.0
    self._thread = background.Thread(
        "publisher", self._serve, close_s=_CLOSE_S, wake=self._wake
    )

  def submit(
      self, version: int, params: types.PyTree, nonfinite: Any = 0
  ) -> int | None:
    byte_store.check_thread(self._thread, "publishing")
    copy = self._copy(params)
    skipped = None
    now = time.monotonic()
    with self._changed:
      if not self._submitted:
        self._due_since = now
      elif self._may_skip:
        skipped = self._submitted.pop()[0].step
      number = version_lib.Version(self._epoch, version)
      self._submitted.append((number, copy, nonfinite))
      self._changed.notify_all()
    due = max(self._due_since + LATE_S, self._next_skip_event)
    if skipped is not None and now >= due:
      self._next_skip_event = now + _SKIP_EVENT_S
      self._on_event(
          "version_skipped",
          f"version {skipped} is skipped for version {version}: none was"
          f" begun for {now - self._due_since:.0f} s; raise"
          " config.publish.every_steps or choose a faster"
          " config.publish.carrier",
      )
    return skipped

  def wait(self, version: int, should_stop: Callable[[], bool]) -> None:
    with self._changed:
      while not (
          self._written >= version or self._thread.failed or should_stop()
      ):
        self._changed.wait(_CHECK_S)
    byte_store.check_thread(self._thread, "publishing")

  def is_publishing(self) -> bool:
    with self._changed:
      return bool(self._failures) or self._pace.is_moving()

  def close(self) -> None:
    byte_store.close_thread(self._thread, "publishing")

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
    packed: list[carrier_lib.PackedVersion] = []
    checked_at = sent_at = 0.0
    while True:
      with self._changed:
        self._changed.wait_for(
            lambda: self._is_due() or stop.is_set(), timeout=SERVE_S
        )
        if stop.is_set():
          break
        pending = self._submitted.popleft() if self._is_due() else None
      try:
        if pending is not None and not float(np.asarray(pending[2])):
          num_bytes = version_lib.num_bytes(version_lib.specs_of(pending[1]))
          began = time.monotonic()
          with (
              self._span("publish", lane="publish"),
              self._pace.moving(num_bytes),
          ):
            is_packed = self._pack(packed, *pending)
            pending = None  # Free the copy of the params before sending.
            if is_packed:
              self._send(transport, packed)
              checked_at = sent_at = time.monotonic()
              self._pace.done(num_bytes, sent_at - began)
        elif packed and time.monotonic() > checked_at + _CHECK_S:
          checked_at = time.monotonic()
          newest = packed[-1].version
          requested = manifest.take_requests(
              transport, self._run, self._refusals
          )
          is_due = checked_at > sent_at + _REPEAT_EVERY_S
          # The pointer differs after a store loss, or if a replaced trainer
          # still writes.
          if self._pointer(transport) != newest or (
              is_due and newest in requested
          ):
            with self._span("publish", lane="publish"):
              # With an exact lag, searchers wait for older versions too.
              for older in [] if self._may_skip else packed[:-1]:
                self._send_one(transport, older)
              self._send(transport, packed)
            sent_at = time.monotonic()
        newest = packed[-1] if packed else None
        for carrier in self._carriers:
          is_its = newest is not None and newest.carrier is carrier
          carrier.serve(transport, newest if is_its else None)
      except byte_store.TransportError as error:
        self._on_event("store_lost", f"publisher: {error}")
        transport.reconnect()
        checked_at = 0.0
    for old in packed:
      old.carrier.drop(old)
    transport.close()

  def _pointer(
      self, transport: byte_store.Transport
  ) -> version_lib.Version | None:
    try:
      return manifest.read_pointer(transport, self._run)
    except wire.WireError as error:
      self._refusals.add(manifest.POINTER, error)
      return None

  def _is_due(self) -> bool:
    """Returns whether a version is to be written now; under the lock."""
    if not self._submitted or time.monotonic() < self._next_try:
      return False
    return not (self._may_skip and any(c.is_full() for c in self._carriers))

  def _pack(
      self,
      packed: list[carrier_lib.PackedVersion],
      version: version_lib.Version,
      leaves: Mapping[str, Any],
      nonfinite: Any,
  ) -> bool:
    """Packs a version with the first carrier that has room.

    Returns False if no carrier has room. The version is then tried again,
    unless versions may be skipped and a newer one waits. Raises after too many
    failures in a row.
    """
    for carrier in self._carriers:
      try:
        new = carrier.pack(version, leaves)
        break
      except (OSError, MemoryError, wire.WireError) as error:
        if carrier is self._carriers[-1]:
          self._note_failure(version, error)
          with self._changed:
            if not (self._submitted and self._may_skip):
              self._submitted.appendleft((version, leaves, nonfinite))
          return False
        self._on_event("carrier_full", f"{carrier.name}: {error}")
    self._failures = 0
    if not packed:
      new.carrier.clean(new.tag)
    # After a restore, the same version may be published again.
    packed[:] = [old for old in packed if old.version != version] + [new]
    return True

  def _note_failure(
      self, version: version_lib.Version, error: Exception
  ) -> None:
    """Sets the time of the next attempt; raises `error` after the last."""
    self._failures += 1
    message = (
        f"version {version.step} could not be written, attempt {self._failures}"
        f" of {MOST_FAILURES}: {error or type(error).__name__}; searchers go"
        " on with the version that they have (config.publish.carrier)"
    )
    self._on_event("publish_failed", message)
    if self._failures >= MOST_FAILURES:
      raise OSError(message) from error
    pause_s = FIRST_PAUSE_S * 2 ** (self._failures - 1)
    self._next_try = time.monotonic() + min(pause_s, LONGEST_PAUSE_S)

  def _send(
      self,
      transport: byte_store.Transport,
      packed: list[carrier_lib.PackedVersion],
  ) -> None:
    """Sends the newest version, and drops versions that are too old."""
    self._send_one(transport, packed[-1])
    with self._changed:
      self._written = max(self._written, packed[-1].version.step)
      self._changed.notify_all()
    while len(packed) > self._keep:
      manifest.drop_version(transport, packed[0])
      packed.pop(0)  # Only now, in case the store is lost during the drop.

  def _send_one(
      self, transport: byte_store.Transport, packed: carrier_lib.PackedVersion
  ) -> None:
    manifest.send_version(transport, packed, self._run, self._base_name)
