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
from tba_jax.transport.params import version as version_lib

# Intervals of serving readers, and of checking the store's pointer.
SERVE_S = 0.05
_CHECK_S = 0.5
# Least time between sending a version twice because readers asked for it.
_REPEAT_EVERY_S = 2.0
_CLOSE_S = 5.0


class Publisher:
  """Publishes versions from a thread; `submit` only copies params on devices.

  It is the `ports.ParamsSink` of the store. Versions that come faster than they
  can be written are skipped, but for an exact lag: then each is needed.
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
      config: reads `publish.keep_versions`.
      run: run whose params are published.
      make_transport: returns a new client of the run's store.
      carriers: carriers to write with, in order of preference; closed at the
        end.
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
    # A reader may be at the version before those that are needed.
    self._keep = max(config.publish.keep_versions, lag_steps + 2)
    self._may_skip = not lag_steps
    self._copy = copy
    self._carriers = carriers
    self._changed = threading.Condition()
    self._submitted: collections.deque[
        tuple[version_lib.Version, dict[str, Any], Any]
    ] = collections.deque()
    self._written = -1
    self._thread = background.Thread(
        "publisher", self._serve, close_s=_CLOSE_S, wake=self._wake
    )

  def submit(
      self, version: int, params: types.PyTree, nonfinite: Any = 0
  ) -> int | None:
    byte_store.check_thread(self._thread, "publishing")
    copy = self._copy(params)
    skipped = None
    with self._changed:
      if self._submitted and self._may_skip:
        skipped = self._submitted.pop()[0].step
      number = version_lib.Version(self._epoch, version)
      self._submitted.append((number, copy, nonfinite))
      self._changed.notify_all()
    return skipped

  def wait(self, version: int, deadline_s: float) -> None:
    with self._changed:
      done = self._changed.wait_for(
          lambda: self._written >= version or self._thread.failed, deadline_s
      )
    byte_store.check_thread(self._thread, "publishing")
    if not done:
      raise byte_store.DeadlineExceededError(
          f"version {version} was not published within {deadline_s:.0f} s:"
          f" the store holds version {self._written}"
      )

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
    kept: list[carrier_lib.PackedVersion] = []
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
          with self._span("publish", lane="publish"):
            self._pack(kept, *pending[:2])
            pending = None  # Free the copy of the params before sending.
            self._send(transport, kept)
          checked = sent = time.monotonic()
        elif kept and time.monotonic() > checked + _CHECK_S:
          checked = time.monotonic()
          newest = kept[-1].version
          asked = manifest.take_asked(transport, self._run, self._refusals)
          is_due = checked > sent + _REPEAT_EVERY_S
          # A replaced trainer that still writes, or a new store, changes it.
          if self._pointer(transport) != newest or (is_due and newest in asked):
            with self._span("publish", lane="publish"):
              # Older versions are waited for as well with an exact lag.
              for older in [] if self._may_skip else kept[:-1]:
                self._send_one(transport, older)
              self._send(transport, kept)
            sent = time.monotonic()
        newest = kept[-1] if kept else None
        for carrier in self._carriers:
          is_its = newest is not None and newest.carrier is carrier
          carrier.serve(transport, newest if is_its else None)
      except byte_store.TransportError as error:
        self._on_event("store_lost", f"publisher: {error}")
        transport.reconnect()
        checked = 0.0
    for old in kept:
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

  def _pack(
      self,
      kept: list[carrier_lib.PackedVersion],
      version: version_lib.Version,
      leaves: Mapping[str, Any],
  ) -> None:
    """Packs a version with the first carrier that has room."""
    for carrier in self._carriers:
      try:
        new = carrier.pack(version, leaves)
        break
      except OSError as error:
        if carrier is self._carriers[-1]:
          raise
        self._on_event("carrier_full", f"{carrier.name}: {error}")
    if not kept:
      new.carrier.clean(new.tag)
    # After a restore, the same version may be published again.
    kept[:] = [old for old in kept if old.version != version] + [new]

  def _send(
      self,
      transport: byte_store.Transport,
      kept: list[carrier_lib.PackedVersion],
  ) -> None:
    """Sends the newest version, and drops those that are too old."""
    self._send_one(transport, kept[-1])
    with self._changed:
      self._written = max(self._written, kept[-1].version.step)
      self._changed.notify_all()
    while len(kept) > self._keep:
      manifest.drop_version(transport, kept[0])
      kept.pop(0)  # Only now, in case the store is lost during the drop.

  def _send_one(
      self, transport: byte_store.Transport, packed: carrier_lib.PackedVersion
  ) -> None:
    manifest.send_version(transport, packed, self._run, self._base_name)
