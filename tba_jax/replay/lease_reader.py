# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Reads searchers' leases from the store, those that changed."""

from collections.abc import Callable
import time
from typing import Any

from tba_jax.transport import base
from tba_jax.transport import wire

# Between two looks; with thousands of leases, so many times what a look took.
_EVERY_S = 0.25
_EVERY_TIMES = 20


class LeaseReader:
  """Knows the leases it has read, so that it checks each only once."""

  def __init__(
      self,
      *,
      run_id: str,
      secret: bytes,
      refuse: Callable[[str], None],
      clock: Callable[[], float] = time.monotonic,
  ):
    """Has read nothing yet.

    Args:
      run_id: the run.
      secret: key of the run's messages.
      refuse: called with what was wrong with a message.
      clock: seconds.
    """
    self._run_id = run_id
    self._secret = secret
    self._refuse = refuse
    self._clock = clock
    self._due_at = clock()
    self._read: dict[str, bytes] = {}

  def is_due(self) -> bool:
    """True where it is time for the next look."""
    return self._clock() >= self._due_at

  def read(self, transport: base.Transport) -> dict[str, dict[str, Any]]:
    """Returns sid -> lease of those that are new; removes what is none.

    Raises:
      TransportError: as of the transport.
    """
    start = self._clock()
    before, self._read = self._read, transport.list("live")
    found = {}
    for key, data in self._read.items():
      if before.get(key) == data:
        continue
      try:
        lease = wire.decode_message(data, self._secret)
        if lease["run"] == self._run_id and key == f"live/{lease['sid']}":
          found[lease["sid"]] = lease
      except (wire.WireError, KeyError) as error:
        self._refuse(f"{key}: {error!r}")
        transport.delete(key)
    took_s = self._clock() - start
    self._due_at = start + max(_EVERY_S, _EVERY_TIMES * took_s)
    return found
