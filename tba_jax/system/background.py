# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Background threads whose errors reach their owner."""

from collections.abc import Callable
import logging
import queue
import threading

from tba_jax.system import processes

_CLOSE_S = 60.0


class Thread:
  """Runs a function in a daemon thread; `check` and `close` raise its error.

  Args:
    run: function, called once with an event that `close` sets, after which it
      must return soon.
    close_s: longest wait of `close`.
    wake: function called by `close` and after an error; wakes waiting threads.
  """

  def __init__(
      self,
      name: str,
      run: Callable[[threading.Event], None],
      *,
      close_s: float = _CLOSE_S,
      wake: Callable[[], None] = lambda: None,
  ):
    self._name = name
    self._run = run
    self._close_s = close_s
    self._wake = wake
    self._stop = threading.Event()
    self._error: BaseException | None = None
    self._thread = threading.Thread(target=self._main, name=name, daemon=True)
    self._thread.start()

  @property
  def failed(self) -> bool:
    return self._error is not None

  def is_alive(self) -> bool:
    return self._thread.is_alive()

  def check(self) -> None:
    """Raises the thread's error, if any."""
    if self._error is not None:
      raise self._error

  def join(self, timeout_s: float) -> None:
    """Waits for the end of the thread; raises its error, or TimeoutError."""
    self._thread.join(timeout_s)
    if self._thread.is_alive():
      raise TimeoutError(f"{self._name}: did not end within {timeout_s:g} s")
    self.check()

  def close(self) -> None:
    """Asks the thread to end and waits for it; raises as `join` does."""
    self._stop.set()
    self._wake()
    try:
      self.join(self._close_s)
    except TimeoutError:
      # The process can end without this thread.
      self._thread.name = f"{processes.LEFT_BEHIND} {self._name}"
      raise

  def _main(self) -> None:
    try:
      self._run(self._stop)
    except (
        BaseException
    ) as error:  # Logged now, as the owner may raise it late.
      logging.error("thread %s ended", self._name, exc_info=error)
      self._error = error
      self._wake()


class JobQueue(Thread):
  """A thread that runs jobs in order, up to the first failure.

  Args:
    max_waiting: size of the queue; `submit` waits while it is full.
    deadline_s: longest wait of `submit`, `flush` and `close`.
  """

  def __init__(
      self, name: str, *, max_waiting: int = 256, deadline_s: float = _CLOSE_S
  ):
    # `flush` enqueues an event, which is set even after a failure.
    self._jobs: queue.Queue[Callable[[], None] | threading.Event | None] = (
        queue.Queue(max_waiting)
    )
    super().__init__(name, self._work, close_s=deadline_s)

  def submit(self, job: Callable[[], None] | threading.Event) -> None:
    """Enqueues a job; raises an earlier job's error, or TimeoutError."""
    self.check()
    try:
      self._jobs.put(job, timeout=self._close_s)
    except queue.Full as error:
      raise TimeoutError(
          f"{self._name}: {self._jobs.maxsize} jobs wait, none was done within"
          f" {self._close_s:g} s"
      ) from error

  def flush(self) -> None:
    """Waits for all jobs so far; raises as `submit` does."""
    done = threading.Event()
    self.submit(done)
    if not done.wait(self._close_s):
      raise TimeoutError(f"{self._name}: not done within {self._close_s:g} s")
    self.check()

  def close(self) -> None:
    """Runs the remaining jobs and ends the thread; raises as `submit` does."""
    try:
      self._jobs.put(None, timeout=self._close_s)
    except queue.Full:
      pass  # The thread hangs, which `close` below reports.
    super().close()

  def _work(self, _: threading.Event) -> None:
    while (job := self._jobs.get()) is not None:
      try:
        if isinstance(job, threading.Event):
          job.set()
        elif self._error is None:
          job()
      except Exception as error:  # The queue's owner raises it.
        self._error = error
