# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""A thread that does jobs in their order, so that a loop need not wait."""

from collections.abc import Callable
import queue
import threading

_MAX_WAITING = 256
_DEADLINE_S = 60.0


class Background:
  """Does jobs one after the other; what one raises, the owner raises."""

  def __init__(
      self,
      name: str,
      *,
      max_waiting: int = _MAX_WAITING,
      deadline_s: float = _DEADLINE_S,
  ):
    """Starts the thread.

    Args:
      name: of the thread, in messages.
      max_waiting: jobs that may wait; `submit` waits for a place among them.
      deadline_s: of a place, and of `flush`.
    """
    self._name = name
    self._deadline_s = deadline_s
    # An event is set when its turn comes, whatever became of the jobs.
    self._jobs: queue.Queue[Callable[[], None] | threading.Event | None] = (
        queue.Queue(max_waiting)
    )
    self._error: BaseException | None = None
    self._thread = threading.Thread(target=self._run, name=name, daemon=True)
    self._thread.start()

  def submit(self, job: Callable[[], None]) -> None:
    """Leaves a job to the thread; waits only where too many are waiting.

    Raises:
      TimeoutError: there was no place within the deadline.
      Exception: what an earlier job raised.
    """
    self._check()
    self._put(job)

  def flush(self) -> None:
    """Waits until all that was submitted is done.

    Raises:
      TimeoutError: it was not within the deadline.
      Exception: what one of them raised.
    """
    self._check()
    done = threading.Event()
    self._put(done)
    if not done.wait(self._deadline_s):
      raise TimeoutError(
          f"{self._name}: not done within {self._deadline_s:g} s"
      )
    self._check()

  def close(self) -> None:
    """Does what waits, and ends the thread.

    Raises:
      TimeoutError: it did not end within the deadline.
      Exception: what a job raised that nobody was told of.
    """
    try:
      self._jobs.put(None, timeout=self._deadline_s)
    except queue.Full:
      pass  # The thread is seen below not to end.
    self._thread.join(self._deadline_s)
    if self._thread.is_alive():
      raise TimeoutError(
          f"{self._name}: did not end within {self._deadline_s:g} s"
      )
    self._check()

  def _put(self, job: Callable[[], None] | threading.Event) -> None:
    try:
      self._jobs.put(job, timeout=self._deadline_s)
    except queue.Full as error:
      raise TimeoutError(
          f"{self._name}: {self._jobs.maxsize} jobs wait, none was done within"
          f" {self._deadline_s:g} s"
      ) from error

  def _check(self) -> None:
    if self._error is not None:
      raise self._error

  def _run(self) -> None:
    while (job := self._jobs.get()) is not None:
      if isinstance(job, threading.Event):
        job.set()
      elif self._error is None:  # What comes after an error is left out.
        try:
          job()
        except Exception as error:  # Its owner raises it.
          self._error = error
