# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""A searcher's blocks that the trainer has not acknowledged, in order."""

from collections.abc import Callable
import dataclasses
import math
import time


@dataclasses.dataclass
class Message:
  """One block.

  sequence: its number.
  data: as it is sent.
  sent_at: when it was put into the present store, None = not yet.
  """

  sequence: int
  data: bytes
  sent_at: float | None = None


class Ring:
  """Messages by sequence. Not thread-safe: its owner locks."""

  def __init__(
      self, resend_s: float, *, clock: Callable[[], float] = time.monotonic
  ):
    """Is empty.

    Args:
      resend_s: an unacknowledged message is offered again so often.
      clock: seconds.
    """
    self._resend_s = resend_s
    self._clock = clock
    self._messages: list[Message] = []
    self.next_sequence = 0

  def __len__(self) -> int:
    return len(self._messages)

  def add(self, data: bytes) -> None:
    """Takes the next message."""
    self._messages.append(Message(self.next_sequence, data))
    self.next_sequence += 1

  def acknowledge(self, sequence: int) -> None:
    """Lets go of the messages below `sequence`."""
    self._messages = [m for m in self._messages if m.sequence >= sequence]

  def forget_sent(self) -> None:
    """Makes all of them unsent: the store that had them is gone."""
    for message in self._messages:
      message.sent_at = None

  def sent(self, message: Message) -> None:
    message.sent_at = self._clock()

  def unsent(self) -> list[Message]:
    return [m for m in self._messages if m.sent_at is None]

  def overdue(self) -> list[Message]:
    """Returns those to be offered again."""
    return [m for m in self._messages if self._resend_in_s(m) <= 0]

  def overdue_in_s(self) -> float:
    """Returns the seconds until one is, infinite where none was sent."""
    return min(map(self._resend_in_s, self._messages), default=math.inf)

  def _resend_in_s(self, message: Message) -> float:
    if message.sent_at is None:
      return math.inf
    return max(0.0, message.sent_at + self._resend_s - self._clock())
