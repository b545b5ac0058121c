# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""What the trainer tells its searchers: one message for each of them.

It holds all that a searcher asks for, the blocks that it is granted and how far
its own have come, so that one look of the searcher brings both.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from tba_jax.transport import base
from tba_jax.transport import wire


def key_of(sid: str) -> str:
  """Returns the key of a searcher's message."""
  return f"work/{sid}"


class Replies:
  """Writes messages that only this trainer can have written, in its epoch."""

  def __init__(self, *, run_id: str, secret: bytes, epoch: int):
    """Writes nothing yet.

    Args:
      run_id: the run.
      secret: key of the run's messages.
      epoch: the trainer's start count.
    """
    self._run_id = run_id
    self._secret = secret
    self._epoch = epoch
    self._count = 0

  def put(
      self, transport: base.Transport, key: str, message: Mapping[str, Any]
  ) -> None:
    """Writes one message."""
    transport.put(key, self._seal(key, message))

  def put_work(
      self,
      transport: base.Transport,
      work: Mapping[str, Sequence[Any]],
      watermarks: Mapping[str, int],
  ) -> None:
    """Writes to several searchers what they hold, and what came of them.

    Args:
      transport: of the calling thread.
      work: sid -> all blocks that it holds, as of `Grants.assign`.
      watermarks: next sequence of each searcher; those below are acknowledged.
    """
    messages = {}
    for sid, blocks in work.items():
      # A later message has a higher count, whatever it is about.
      self._count += 1
      message = {
          "count": self._count,
          "blocks": blocks,
          "acked": watermarks.get(sid, 0),
      }
      messages[key_of(sid)] = self._seal(key_of(sid), message)
    transport.put_all(messages)

  def _seal(self, key: str, message: Mapping[str, Any]) -> bytes:
    # The key, so that no message can stand in the place of another.
    about = {"run": self._run_id, "epoch": self._epoch, "key": key}
    return wire.encode_message({**about, **message}, self._secret)
