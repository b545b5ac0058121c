# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Queue of requests, from arrival to outcome.

A model's requests are executed in the order of their numbers; samples, calls
and ends of episodes in batches, in order of arrival.
"""

from collections.abc import Callable, Mapping
import threading
import time
from typing import Any

from absl import logging

from tba_jax.serving import kinds
from tba_jax.serving import request_journal

# Most bytes of waiting requests: four passes of the largest size.
MOST_QUEUED = 2**30
# Seconds between attempts to write to a full disk.
DISK_S = 1.0
# Seconds after the last arrival until a burst of samples is decoded.
_BURST_S = 0.01
_LONGEST_BURST_S = 0.1
# Failure category of a request that was never started.
_UNDONE = "unknown"


class BusyError(OSError):
  """The queue has no room for a request now."""


class RequestQueue:
  """The waiting requests, at first the unfinished ones of the journal.

  `submit` and `stop` are for any thread; `next_batch`, `finish` and `insist`
  for the engine's thread.

  lock: condition; no request starts while it is held.

  Args:
    gap_deadline_s: longest wait of a request for its predecessor.
    on_done: function called with the ids of finished requests.
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
    self.is_stopping = False
    # Requests of each model by number, and its next number.
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
    """Journals a request and queues it, unless it is a retry.

    Args:
      owner: model, sampling session or episode.
      seq: number among the owner's requests; None = the next number.
      body: JSON, or a protocol buffer of a pass.
      name: key among the owner's requests that identifies a retry; "" = the
        number.

    Raises:
      ConflictError: another request has this number.
      BusyError: the waiting requests leave no room for this one.
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
    """Makes `next_batch` return and `insist` give up."""
    with self.lock:
      self.is_stopping = True
      self.lock.notify_all()

  def has_waiting(self, owner: str) -> bool:
    """Returns whether a model has waiting requests."""
    return bool(self._waiting.get(owner))

  def next_batch(self) -> list[request_journal.ServerRequest]:
    """Waits for the next requests: one of a model, or a batch of samples.

    Returns:
      Requests; none after `stop`.
    """
    with self.lock:
      while not self.is_stopping:
        if batch := self._take():
          return batch
        self.lock.wait(timeout=1.0)
    return []

  def insist(self, write: Callable[..., None], *args: Any) -> None:
    """Repeats a write until it succeeds; raises its OSError after `stop`."""
    while True:
      try:
        return write(*args)
      except OSError as error:
        logging.error("%s; trying again", error)
        with self.lock:
          if self.is_stopping:
            raise
          self.lock.wait(timeout=DISK_S)

  def finish(self, outcomes: Mapping[str, kinds.Outcome]) -> None:
    """Journals outcomes by request id, and reports the requests as done."""
    if outcomes:
      self.insist(self._journal.finish, outcomes)
      self._on_done(list(outcomes))

  def advance(self, request: request_journal.ServerRequest) -> None:
    """Lets the model's next request start after a finished one."""
    with self.lock:
      seq = request.seq + 1
      # Skips successors that have failed, having waited too long for this one.
      while self._is_done(f"{request.owner}:{seq}"):
        seq += 1
      self._expected[request.owner] = seq

  @property
  def _bytes(self) -> int:
    """Bytes of the waiting requests' bodies, which are in memory."""
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
    """Fails requests whose predecessor has not come in time."""
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
