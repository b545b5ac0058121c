# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Journal of a run whose searchers are threads, in the queue server's format.

Separate processes can resume a run of threads, and vice versa.
"""

from collections.abc import Callable
import threading
from typing import Any

import ml_collections

from tba_jax import types
from tba_jax.transport import byte_store
from tba_jax.transport import wire
from tba_jax.transport.groups import intake
from tba_jax.transport.groups import journal as journal_lib
from tba_jax.transport.groups import leases as leases_lib
from tba_jax.transport.groups import messages

# Pause before another attempt to write to a full journal.
_FULL_RETRY_S = 0.25


class JournalHook(intake.Intake):
  """Journals a record and then delivers it, in the calling thread.

  left: sid -> totals of searcher processes from before this run of threads that
    are not written off yet.
  """

  def __init__(
      self,
      config: ml_collections.ConfigDict,
      run: wire.RunIdentity,
      *,
      on_event: Callable[[str, str], None],
      **kwargs: Any,
  ):
    """Takes the arguments of `Intake`; delivers what the checkpoint lacks."""
    super().__init__(config, run, on_event=on_event, **kwargs)
    self._writing = threading.Lock()
    self._is_closed = threading.Event()
    self._error: OSError | None = None
    read, damaged = leases_lib.read_files(run)
    for path in damaged:
      on_event("damaged", f"{path}: no valid lease")
    leases = {sid: lease for sid, (lease, _) in read.items()}
    self.replay(leases)
    # A checkpoint without a log would look like a loss.
    self._wait_for_room(self.ack_log.sync, lambda: True)
    self.left = {
        sid: lease["totals"]
        for sid, lease in leases.items()
        if self.written_off.get(sid) != lease["totals"]
    }

  def record(
      self,
      header: dict[str, Any],
      groups: list[types.Group] | None,
      should_stop: Callable[[], bool],
  ) -> bool:
    """Journals, delivers and marks a block, or the end of a searcher.

    Waits while another record is written, and for room. Returns False if it
    gave up waiting; nothing was then written or delivered.
    """
    arrays = {}
    if groups is not None:
      fields, arrays = messages.pack_groups(groups)
      key = messages.block_key(header["sid"], header["sequence"])
      header = {**fields, "run": self._run.run_id, "key": key, **header}
    entry = intake.Entry(header, arrays, groups=groups)
    write = lambda: self.write([entry])
    if not self._wait_for_room(write, should_stop):
      return False
    # The block is in the journal even if there is no room for its mark.
    self._wait_for_room(self.ack_log.sync, should_stop)
    return True

  def check(self) -> None:
    """Raises TransportError if the disk has failed."""
    if self._error is not None:
      message = f"the journal has failed: {self._error}"
      raise byte_store.TransportError(message) from self._error

  def close(self) -> None:
    """Stops writing and closes the journal."""
    self._is_closed.set()
    with self._writing:
      super().close()

  def _wait_for_room(
      self, write: Callable[[], Any], should_stop: Callable[[], bool]
  ) -> bool:
    while not self._is_closed.is_set():
      with self._writing:
        if self._is_closed.is_set():
          break
        try:
          write()
          self.set_obstacle(None)
          return True
        except journal_lib.JournalFullError as error:
          self.set_obstacle(error)
        except OSError as error:
          self._error = error
          self.check()
      if should_stop():
        break
      self._is_closed.wait(_FULL_RETRY_S)
    return False
