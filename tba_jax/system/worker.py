# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Background threads whose errors reach their owner."""

from collections.abc import Callable
import logging
import queue
import threading

_CLOSE_S = 60.0


class Worker:
  """Runs a function in a daemon thread; the owner raises what it raised.

  Args:
    name: of the thread, in messages.
    run: called once with an event that `close` sets; returns soon after.
    close_s: how long `close` waits for it.
  """

  def __init__(
      self,
      name: str,
      run: Callable[[threading.Event], None],
      *,
      close_s: float = _CLOSE_S,
  ):
    self._name = name
    self._run = run
    self._close_s = close_s
    self._stop = threading.Event()
    self._error: BaseException | None = None
    self._thread = threading.Thread(target=self._main, name=name, daemon=True)
    self._thread.start()

  def is_alive(self) -> bool:
    return self._thread.is_alive()

  def check(self) -> None:
    """Raises what the thread has raised."""
    if self._error is not None:
      raise self._error

  def close(self) -> None:
    """Ends the thread; raises TimeoutError, or what the thread has raised."""
    self._stop.set()
    self._thread.join(self._close_s)
    if self._thread.is_alive():
      raise TimeoutError(
          f"{self._name}: did not end within {self._close_s:g} s"
      )
    self.check()

  def _main(self) -> None:
    try:
      self._run(self._stop)
    except BaseException as error:  # Its owner raises it, but maybe late.
      logging.error("thread %s ended", self._name, exc_info=error)
      self._error = error


class JobQueue(Worker):
  """A thread that does jobs in order; none is done after one that failed.

  Args:
    name: of the thread, in messages.
    max_waiting: `submit` waits while so many jobs are waiting.
    deadline_s: of `submit`, `flush` and `close`.
  """

  def __init__(
      self, name: str, *, max_waiting: int = 256, deadline_s: float = _CLOSE_S
  ):
    # `flush` puts an event, which is set whatever became of the jobs.
    self._jobs: queue.Queue[Callable[[], None] | threading.Event | None] = (
        queue.Queue(max_waiting)
    )
    super().__init__(name, self._work, close_s=deadline_s)

  def submit(self, job: Callable[[], None] | threading.Event) -> None:
    """Adds a job; raises TimeoutError, or what an earlier job has raised."""
    self.check()
    try:
      self._jobs.put(job, timeout=self._close_s)
    except queue.Full as error:
      raise TimeoutError(
          f"{self._name}: {self._jobs.maxsize} jobs wait, none was done within"
          f" {self._close_s:g} s"
      ) from error

  def flush(self) -> None:
    """Waits until all jobs so far are done; raises as `submit`."""
    done = threading.Event()
    self.submit(done)
    if not done.wait(self._close_s):
      raise TimeoutError(f"{self._name}: not done within {self._close_s:g} s")
    self.check()

  def close(self) -> None:
    """Does the jobs that wait and ends the thread; raises as `submit`."""
    try:
      self._jobs.put(None, timeout=self._close_s)
    except queue.Full:
      pass  # The thread hangs, as is found next.
    super().close()

  def _work(self, _: threading.Event) -> None:
    while (job := self._jobs.get()) is not None:
      try:
        if isinstance(job, threading.Event):
          job.set()
        elif self._error is None:
          job()
      except Exception as error:  # Its owner raises it.
        self._error = error
