# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Versioned params from the trainer to whoever samples: published.

The trainer never waits for a reader: a thread with a transport of its own
writes them. `puller` is the other side, `versions` what lies between.
"""

from collections.abc import Callable, Sequence
import contextlib
import functools
import threading
import time
from typing import TYPE_CHECKING

from absl import logging
import jax

from tba_jax import types
from tba_jax import versions
from tba_jax.transport import base
from tba_jax.transport import wire

if TYPE_CHECKING:
  from tba_jax.carriers import base as carriers_lib

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
      carriers: "Sequence[carriers_lib.Carrier]",
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
    self._copy = jax.jit(functools.partial(versions.snapshot, dtype=dtype))
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
      kept: list[versions.Version] = []
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
      return versions.read_pointer(transport, **self._keys)
    except wire.WireError as error:
      self._on_event("refused_version", f"the pointer is not ours: {error}")
      return None

  def _pack(
      self, kept: list[versions.Version], version: int, params: types.PyTree
  ) -> None:
    found = versions.pack(
        self._carriers,
        versions.by_path(params),
        epoch=self._epoch,
        version=version,
        on_event=self._on_event,
    )
    if not kept:
      found.carrier.clean(found.packed.tag)
    # The same version again, after a restore.
    kept[:] = [it for it in kept if it.version != version] + [found]

  def _send(
      self, transport: base.Transport, kept: list[versions.Version]
  ) -> None:
    newest = kept[-1]
    versions.send(transport, newest, base_name=self._base_name, **self._keys)
    with self._wake:
      self._written = max(self._written, newest.version)
      self._wake.notify_all()
    while len(kept) > self._keep:
      versions.drop(transport, kept[0])
      # After the store has taken it: a lost one would leave the file.
      kept.pop(0)
