# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Requests from their arrival to their outcome, in their order.

A model's requests are done in the order of their numbers; samples, calls and
ends of episodes by arrival, together.
"""

from collections.abc import Callable, Mapping
import threading
import time
from typing import Any

from absl import logging

from tba_jax.serving import kinds
from tba_jax.serving import request_journal

# Bytes of the requests that wait: four passes of the largest kind.
MOST_QUEUED = 2**30
# Seconds between attempts to write to a disk that is full.
DISK_S = 1.0
# Seconds after the last arrival at which a burst of samples is decoded.
_BURST_S = 0.01
_LONGEST_BURST_S = 0.1
# Category of the failure of a request that was never begun.
_UNDONE = "unknown"


class BusyError(OSError):
  """A request that cannot be taken now."""


class RequestQueue:
  """The requests that wait; begins with those that the journal has undone.

  `submit` and `stop` are for any thread, `next_batch`, `finish` and `insist`
  for the one that does requests.

  lock: held while requests come at the same time: none begins meanwhile.

  Args:
    journal: stores the requests.
    gap_deadline_s: longest wait of a request for the one before.
    on_done: called with the ids of requests that are done.
  """

  def __init__(
      self,
      journal: request_journal.RequestJournal,
      gap_deadline_s: float,
      on_done: Callable[[list[str]], None],
  ):
    self._journal = journal
    self._gap_deadline_s = gap_deadline_s
    self._on_done = on_done
    self.lock = threading.Condition()
    self._is_stopping = False
    # Requests of each model by number, and the number that is next.
    self._waiting: dict[str, dict[int, request_journal.ServerRequest]] = {}
    self._expected: dict[str, int] = {}
    self._samples: list[request_journal.ServerRequest] = []
    for request in journal.pending():
      self._add(request)

  def submit(
      self,
      kind: str,
      owner: str,
      seq: int | None,
      body: bytes,
      *,
      name: str = "",
  ) -> request_journal.ServerRequest:
    """Journals a request and queues it, unless it has come before.

    Args:
      owner: model, sampling session or episode.
      seq: its number; None takes the next one.
      body: JSON as received.
      name: key among the owner's requests that identifies a retry; "" = its
        number.

    Raises:
      ConflictError: another request has this number.
      BusyError: the requests that wait are too large for one more.
    """
    with self.lock:
      if seq is None:
        seq = self._journal.last_seq(owner) + 1
      id = f"{owner}:{name or seq}"
      if self._bytes + len(body) > MOST_QUEUED:
        if self._journal.outcome(id) is None:
          raise BusyError(f"{self._bytes} bytes of requests wait")
      request, is_new = self._journal.accept(id, owner, seq, kind, body)
      if is_new:
        self._add(request)
        self.lock.notify_all()
    return request

  def stop(self) -> None:
    """Ends `next_batch` and `insist`."""
    with self.lock:
      self._is_stopping = True
      self.lock.notify_all()

  @property
  def is_stopping(self) -> bool:
    return self._is_stopping

  def has_waiting(self, owner: str) -> bool:
    """Returns whether a model has requests that wait."""
    return bool(self._waiting.get(owner))

  def next_batch(self) -> list[request_journal.ServerRequest]:
    """Waits for the requests to do next: one of a model, or samples.

    Returns:
      Requests; none after `stop`.
    """
    with self.lock:
      while not self._is_stopping:
        if batch := self._take():
          return batch
        self.lock.wait(timeout=1.0)
    return []

  def insist(self, write: Callable[..., None], *args: Any) -> None:
    """Repeats a write until the disk takes it; OSError if that is at `stop`."""
    while True:
      try:
        return write(*args)
      except OSError as error:
        logging.error("%s; trying again", error)
        with self.lock:
          if self._is_stopping:
            raise
          self.lock.wait(timeout=DISK_S)

  def finish(self, outcomes: Mapping[str, kinds.Outcome]) -> None:
    """Writes outcomes by request, whose effects are there."""
    if outcomes:
      self.insist(self._journal.finish, outcomes)
      self._on_done(list(outcomes))

  def advance(self, request: request_journal.ServerRequest) -> None:
    """Lets the model's request after a finished one begin."""
    with self.lock:
      seq = request.seq + 1
      # Those that waited too long for this one.
      while self._is_done(f"{request.owner}:{seq}"):
        seq += 1
      self._expected[request.owner] = seq

  @property
  def _bytes(self) -> int:
    """Bytes of the bodies that wait, which are in memory."""
    queues = [
        self._samples,
        *(waiting.values() for waiting in self._waiting.values()),
    ]
    return sum(len(request.body) for waiting in queues for request in waiting)

  def _add(self, request: request_journal.ServerRequest) -> None:
    if request.kind in kinds.DECODED:
      self._samples.append(request)
      return
    owner = request.owner
    if owner not in self._expected:
      self._expected[owner] = self._journal.next_seq(owner)
    self._waiting.setdefault(owner, {})[request.seq] = request

  def _take(self) -> list[request_journal.ServerRequest]:
    """Returns the next requests, possibly none."""
    self._give_up_gaps()
    ready = [
        waiting[self._expected[owner]]
        for owner, waiting in self._waiting.items()
        if self._expected[owner] in waiting
    ]
    first = min(ready, key=lambda r: r.accepted_s, default=None)
    if self._samples and (
        first is None or self._samples[0].accepted_s <= first.accepted_s
    ):
      end = time.monotonic() + _LONGEST_BURST_S
      while self.lock.wait(timeout=_BURST_S) and time.monotonic() < end:
        pass
      batch, self._samples = self._samples, []
      return batch
    if first is None:
      return []
    del self._waiting[first.owner][first.seq]
    return [first]

  def _give_up_gaps(self) -> None:
    """Fails requests whose predecessor does not come."""
    now_s, wait_s = time.time(), self._gap_deadline_s
    for owner, waiting in list(self._waiting.items()):
      expected = self._expected[owner]
      if expected in waiting:
        continue
      for seq, request in list(waiting.items()):
        if now_s - request.accepted_s < wait_s:
          continue
        late = kinds.failure(
            f"seq_id {seq} of {owner} waited {wait_s:.0f} s"
            f" (config.serve.gap_deadline_s) for seq_id {expected}, which did"
            " not come",
            category=_UNDONE,
        )
        self.finish({request.id: late})
        del waiting[seq]

  def _is_done(self, id: str) -> bool:
    outcome = self._journal.outcome(id)
    return outcome is not None and outcome.is_done
