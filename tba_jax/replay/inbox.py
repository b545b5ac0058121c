# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""What a searcher hears of the trainer: its messages, and its goodbye."""

from collections.abc import Callable
from typing import Any

from tba_jax.transport import base
from tba_jax.transport import wire


class Inbox:
  """Reads the trainer's messages; refuses and counts what is not its own.

  refused: messages that were not the trainer's.
  stop_requested: the trainer has asked this searcher to leave.
  run_done: it did so because the run is at its end.
  """

  def __init__(
      self, *, run_id: str, secret: bytes, on_event: Callable[[str, str], None]
  ):
    """Has heard nothing yet.

    Args:
      run_id: the run.
      secret: key of the run's messages.
      on_event: called with (kind, message).
    """
    self._run_id = run_id
    self._secret = secret
    self._on_event = on_event
    self.refused = 0
    self.stop_requested = False
    self.run_done = False
    # The last reason by key.
    self._refusals: dict[str, str] = {}

  def get(self, transport: base.Transport, key: str) -> dict[str, Any] | None:
    """Returns the trainer's message under a key; None where there is none."""
    data = transport.get(key)
    try:
      return data and wire.decode_placed(data, self._secret, self._run_id, key)
    except wire.WireError as error:
      self.refused += 1
      # One that stays there is read again and again.
      if str(error) != self._refusals.get(key):
        self._refusals[key] = str(error)
        self._on_event("refused_message", f"{key}: {error}")
      return None

  def read_goodbye(self, transport: base.Transport, epoch: int) -> None:
    """Takes the trainer's goodbye, where it is meant for this searcher.

    That of an older epoch than the searcher's is not: its trainer was replaced.
    A searcher without one came after the goodbye; where the run was only
    interrupted, it came for the next trainer.

    Args:
      transport: of the calling thread.
      epoch: of the newest trainer that this searcher has served, -1 = none.
    """
    goodbye = self.get(transport, "ctl/stop")
    if goodbye is None or goodbye["epoch"] < epoch:
      return
    if goodbye["done"] or epoch >= 0:
      self.run_done = goodbye["done"]
      self.stop_requested = True
