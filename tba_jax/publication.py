# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Versioned params from the trainer to whoever samples: published, pulled.

The trainer never waits for a reader, and a reader never for the trainer: both
have a thread and a transport of their own. A reader keeps what it has until a
newer version has come whole (see `versions`).
"""

from collections.abc import Callable, Mapping, Sequence
import contextlib
import dataclasses
import functools
import threading
import time
from typing import TYPE_CHECKING

from absl import logging
import jax
import numpy as np

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
      expected: versions.Specs,
      carriers: "Mapping[str, carriers_lib.Carrier]",
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
      every_s: seconds between two looks at the pointer.
      on_event: called with (kind, message).
      base_name: as of `versions.read_version`.
    """
    self._make_transport = make_transport
    self._keys = {"run_id": run_id, "secret": secret}
    published = versions.published(expected, dtype)
    self._wanted = {"expected": published, "base_name": base_name}
    self._expected = expected
    self._carriers = carriers
    self._every_s = every_s
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
      if not self._changed.wait_for(ready, timeout_s):
        return None
    return self.latest()

  def close(self) -> None:
    self._stop.set()
    self._thread.join(timeout=5.0)

  def _run(self) -> None:
    try:
      transport = self._make_transport()
      while not self._stop.wait(self._every_s):
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
      transport.close()
    except Exception as error:  # The searcher's thread raises it.
      logging.exception("puller ended")
      with self._changed:
        self._error = error
        self._changed.notify_all()
    for carrier in self._carriers.values():
      carrier.close()

  def _look(self, transport: base.Transport) -> None:
    tag = versions.read_pointer(transport, **self._keys)
    held = self._latest
    # An older epoch's pointer comes from a trainer that was replaced.
    if tag is None or (held is not None and tag <= held[0]):
      return
    started = time.perf_counter()
    keys = {"carriers": self._carriers, **self._wanted, **self._keys}
    leaves = versions.read_version(transport, tag, **keys)
    if leaves is None:
      return
    # Beside the ones in use, which go when the reader swaps.
    leaves = versions.cast(leaves, self._expected)
    ms = 1e3 * (time.perf_counter() - started)
    message = f"pulled version {versions.tag_text(*tag)} in {ms:.1f} ms"
    logging.log_every_n_seconds(logging.INFO, message, 30)
    self.stats.taken += 1
    with self._changed:
      self._latest = (tag, leaves)
      self._changed.notify_all()
