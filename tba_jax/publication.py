# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Versioned params from the trainer to whoever samples: published, pulled.

The trainer never waits for a reader, and a reader never for the trainer: both
have a thread and a transport of their own. A reader keeps what it has until a
newer version has come whole (see `versions`).
"""

from collections.abc import Callable
import contextlib
import dataclasses
import threading
import time

from absl import logging
import jax
import numpy as np

from tba_jax import types
from tba_jax import versions
from tba_jax.transport import base
from tba_jax.transport import wire


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
      keep_versions: int,
      on_event: Callable[[str, str], None],
      span: Callable[[str], contextlib.AbstractContextManager],
  ):
    """Starts the thread.

    Args:
      make_transport: makes the thread's own transport.
      epoch: the trainer's start count.
      run_id: the run.
      secret: key of the run's messages.
      keep_versions: how many versions stay readable, at least 1.
      on_event: called with (kind, message) for what a user should know.
      span: notes the time of a body of the named kind, in the thread.
    """
    self._make_transport = make_transport
    self._span = span
    self._epoch = epoch
    self._run_id = run_id
    self._secret = secret
    self._keep = keep_versions
    self._on_event = on_event
    self._copy = jax.jit(lambda tree: jax.tree.map(lambda x: x + 0, tree))
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

  def submit(self, version: int, params: types.PyTree) -> None:
    """Takes a copy of the params on their devices; returns at once.

    Raises:
      TransportError: the thread has ended, with its error as the cause.
    """
    self._check()
    snapshot = self._copy(params)
    with self._wake:
      self._next = (version, snapshot)
      self._wake.notify_all()

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
    if self._error is not None:
      raise base.TransportError("publishing has ended") from self._error

  def _run(self) -> None:
    try:
      transport = self._make_transport()
      last: tuple[int, dict[str, np.ndarray]] | None = None
      tags: list[str] = []
      while True:
        with self._wake:
          self._wake.wait_for(
              lambda: self._next is not None or self._stop, timeout=0.5
          )
          if self._stop:
            break
          pending, self._next = self._next, None
        try:
          if pending is None and (
              last is None or self._is_current(transport, last[0])
          ):
            continue
          with self._span("publish"):
            if pending is not None:
              last = (pending[0], versions.flatten(pending[1]))
            self._write(transport, last, tags)
        except base.TransportError as error:
          self._on_event("store_lost", f"publisher: {error}")
          transport.reconnect()
          tags.clear()
          if last is not None:
            with self._span("publish"):
              self._write(transport, last, tags)
      transport.close()
    except Exception as error:  # The trainer's thread raises it.
      logging.exception("publisher ended")
      with self._wake:
        self._error = error
        self._wake.notify_all()

  def _is_current(self, transport: base.Transport, version: int) -> bool:
    # A replaced trainer that still writes, or a new store, moves the pointer.
    try:
      tag = versions.read_pointer(
          transport, run_id=self._run_id, secret=self._secret
      )
    except wire.WireError as error:
      self._on_event("refused_version", f"the pointer is not ours: {error}")
      return False
    return tag == (self._epoch, version)

  def _write(
      self,
      transport: base.Transport,
      last: tuple[int, dict[str, np.ndarray]],
      tags: list[str],
  ) -> None:
    version, leaves = last
    versions.write_version(
        transport,
        leaves,
        epoch=self._epoch,
        version=version,
        run_id=self._run_id,
        secret=self._secret,
    )
    with self._wake:
      self._written = max(self._written, version)
      self._wake.notify_all()
    tag = versions.tag_text(self._epoch, version)
    if tag not in tags:
      tags.append(tag)
    while len(tags) > self._keep:
      transport.delete(f"p/{tags.pop(0)}")


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
      expected: dict[str, tuple[tuple[int, ...], np.dtype]],
      every_s: float,
      on_event: Callable[[str, str], None],
  ):
    """Starts the thread.

    Args:
      make_transport: makes the thread's own transport.
      run_id: the run.
      secret: key of the run's messages.
      expected: shape and dtype of every leaf.
      every_s: seconds between two looks at the pointer.
      on_event: called with (kind, message).
    """
    self._make_transport = make_transport
    self._run_id = run_id
    self._secret = secret
    self._expected = expected
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

  def _look(self, transport: base.Transport) -> None:
    keys = {"run_id": self._run_id, "secret": self._secret}
    tag = versions.read_pointer(transport, **keys)
    held = self._latest
    # An older epoch's pointer comes from a trainer that was replaced.
    if tag is None or (held is not None and tag <= held[0]):
      return
    started = time.perf_counter()
    leaves = versions.read_version(
        transport, tag, expected=self._expected, **keys
    )
    if leaves is None:
      return
    logging.log_every_n_seconds(
        logging.INFO,
        "pulled version %s in %.1f ms",
        30,
        versions.tag_text(*tag),
        1e3 * (time.perf_counter() - started),
    )
    self.stats.taken += 1
    with self._changed:
      self._latest = (tag, leaves)
      self._changed.notify_all()
