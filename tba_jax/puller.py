# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Versioned params from the trainer to whoever samples: pulled.

A reader never waits for the trainer: it has a thread and a transport of its
own, and keeps what it has until a newer version has come whole (see
`versions`). `publication` is the other side.
"""

from collections.abc import Callable, Mapping
import dataclasses
import threading
import time
from typing import TYPE_CHECKING

from absl import logging
import numpy as np

from tba_jax import pace as pace_lib
from tba_jax import versions
from tba_jax.transport import base
from tba_jax.transport import wire

if TYPE_CHECKING:
  from tba_jax.carriers import base as carriers_lib

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
      every_s: seconds between two looks at the pointer, at least, while nobody
        waits for a version.
      on_event: called with (kind, message).
      base_name: as of `versions.read_version`.
    """
    self._make_transport = make_transport
    self._keys = {"run_id": run_id, "secret": secret}
    published = versions.published(expected, dtype)
    self._wanted = {"expected": published, "base_name": base_name}
    self._expected = expected
    self._carriers = carriers
    self._pace = pace_lib.Pace(
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
      if not ready() and self._pace.wait():
        self._changed.notify_all()
      if not self._changed.wait_for(ready, timeout_s):
        return None
      self._pace.rest()
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
          self._pace.asked(self.stats.taken > taken)
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
