# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Runs user code on completions, each in a separate process.

A pool starts a keeper, which loads the user's code, confines itself, and forks
a process for each completion. Only the keeper has the pool's pipes, and it
reads the nonce of a request after the fork, so a completion, and processes that
it starts, can affect neither other answers nor the keeper's memory. Once it has
answered or missed its deadline, all its processes are killed and its files are
removed; then the answer goes to the pool.
"""

from collections.abc import Callable, Mapping
import contextlib
import functools
import gc
import json
import os
import pathlib
import resource
import signal
import sys
import time
import traceback
from typing import Any, IO, NoReturn

from tba_jax.system import frames
from tba_jax.system import processes
from tba_jax.system import sandbox

# Request -> answer, and whether the completion is over.
AnswerFn = Callable[[Any], tuple[dict[str, Any], bool]]
# First byte of an answer: this keeper takes the next request; a new keeper must
# take it; a new keeper must also take this request again.
MORE, LAST, RETRY = b"\x00", b"\x01", b"\x02"
# Failure of a request that a keeper must take which has imported what the
# failure's message names: it gets that as "preload" of its first message.
PRELOAD = "preload"

# Longest times for `close`, and for killed processes to be gone.
_CLOSE_S = 2.0
_GONE_S = 10.0


def serve(
    begin: Callable[[dict[str, Any]], AnswerFn],
    *,
    shows_prints: bool,
    goes_on: Callable[[Any], bool] = lambda request: False,
    close: Callable[[], None] | None = None,
) -> int:
  """Answers requests until the pool closes the pipe.

  Args:
    begin: function called with the first message, before the sandbox closes.
    shows_prints: whether prints of user code go to stderr, or nowhere.
    goes_on: predicate: whether a request is for the previous one's process.
    close: function called at the end of a completion in its process.

  Returns:
    Exit status.
  """
  processes.die_with_parent()
  pool = _pipes(os.dup(0), os.dup(1))
  # Keep user code off the pipes.
  with open(os.devnull, "r+b") as nothing:
    os.dup2(nothing.fileno(), 0)
    os.dup2(2 if shows_prints else nothing.fileno(), 1)
  try:
    hello = json.loads(frames.unpack(pool.read))
    nonce = pool.read(frames.NONCE_BYTES)
  except frames.PipeClosed:
    return 0
  sandbox.limit_memory(hello["memory_mb"])
  os.umask(0o022)  # Forks may run as another user than the links' owner.
  try:
    _link(hello)
    answer = begin(hello)
    cell = sandbox.enter(**hello["sandbox"])
  except Exception as error:  # Reported by the pool.
    pool.write(_reply(nonce, LAST, {"error": repr(error)}))
    return 1
  processes.hide_memory()
  processes.adopt_orphans()
  # As the first process of a box, the keeper ends with the pool. Otherwise it
  # outlives the pool, to end the processes of a completion.
  if os.getpid() != 1:
    processes.outlive_parent()
  gc.collect()
  gc.freeze()  # The collector's marks would copy memory in forks.
  pool.write(_reply(nonce, MORE, {"threads": _num_threads()}))
  keeper = _Keeper(pool, answer, close, cell, hello)
  try:
    keeper.run(goes_on)
  except (frames.PipeClosed, frames.WatchedPipeClosed):
    return 0
  finally:
    keeper.end()


def _link(hello: Mapping[str, Any]) -> None:
  """Puts the first message's links, as {path in it: folder}, into the home."""
  for path, folder in hello["links"].items():
    link = pathlib.Path(hello["sandbox"]["home"], path)
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(folder)


def _num_threads() -> int:
  """Returns the number of this process's threads, of libraries too (Linux)."""
  try:
    return len(os.listdir("/proc/self/task"))
  except OSError:
    return 1


def _reply(nonce: bytes, flag: bytes, answer: Mapping[str, Any]) -> bytes:
  return nonce + flag + frames.pack(answer)


def _pipes(
    source: int, sink: int, watched: IO[bytes] | None = None
) -> frames.Pipes:
  return frames.Pipes(open(source, "rb", 0), open(sink, "wb", 0), watched)


class _Keeper:
  """Forks a process for each completion, and passes its answers on."""

  def __init__(
      self,
      pool: frames.Pipes,
      answer: AnswerFn,
      close: Callable[[], None] | None,
      cell: sandbox.Confinement,
      hello: Mapping[str, Any],
  ):
    self._pool = pool
    self._answer = answer
    self._close = close
    self._cell = cell
    self._hello = hello
    self._limits = _limits()
    self._pid = 0  # The completion's process.
    self._pipes: frames.Pipes | None = None  # None without a process.

  def run(self, goes_on: Callable[[Any], bool]) -> None:
    """Answers requests until the pool has closed, or needs another keeper."""
    flag = MORE
    while flag == MORE:
      request = frames.unpack(self._pool.read)
      if self._pipes is None or not goes_on(json.loads(request)):
        flag = MORE if self.end() else RETRY
        self._begin()
      # Only now: the completion's process must not know the nonce.
      nonce = self._pool.read(frames.NONCE_BYTES)
      if flag == RETRY:
        self._pool.write(_reply(nonce, flag, {}))
        return
      is_over, answer = self._exchange(request)
      if is_over and not self.end():
        flag = LAST
      self._pool.write(nonce + flag + answer)

  def _begin(self) -> None:
    with contextlib.suppress(OSError):  # Not a file.
      os.ftruncate(2, 0)
      os.lseek(2, 0, os.SEEK_SET)
    requests, answers = os.pipe(), os.pipe()
    self._pid = os.fork()
    if self._pid == 0:
      self._pool.close()
      os.close(requests[1])
      os.close(answers[0])
      self._work(_pipes(requests[0], answers[1]))
    os.close(requests[0])
    os.close(answers[1])
    self._pipes = _pipes(answers[0], requests[1], self._pool.source)

  def _work(self, pipes: frames.Pipes) -> NoReturn:
    """Answers a completion's requests, in its process."""
    status = 1
    try:
      os.setsid()
      # Processes that it forks must not have the pipes either.
      os.register_at_fork(after_in_child=pipes.close)
      _link(self._hello)
      self._cell.close()
      while True:
        request = json.loads(frames.unpack(pipes.read))
        answer, is_over = self._answer(request)
        pipes.write((LAST if is_over else MORE) + frames.pack(answer))
    except frames.PipeClosed:
      if self._close is not None:
        self._close()
    except SystemExit as error:
      status = error.code if isinstance(error.code, int) else bool(error.code)
      if isinstance(error.code, str):
        print(error.code, file=sys.stderr)  # As the interpreter does.
    except BaseException:  # User code, on text that a model wrote.
      traceback.print_exc()
    finally:
      with contextlib.suppress(Exception):
        sys.stdout.flush()
        sys.stderr.flush()
      # Skips the exit handlers that a completion may have registered.
      os._exit(status)  # pylint: disable=protected-access

  def _exchange(self, request: bytes) -> tuple[bool, bytes]:
    """Returns whether the completion is over, and the message to pass on."""
    deadline_s = self._hello["deadline_s"]
    deadline = time.monotonic() + deadline_s
    read = functools.partial(self._pipes.read, deadline=deadline)
    try:
      self._pipes.write(frames.HEADER.pack(len(request)) + request, deadline)
      is_over = read(1) != MORE
      answer = frames.unpack(read)
      return is_over, frames.HEADER.pack(len(answer)) + answer
    except frames.PipeTimeout:
      failure = "deadline", f"no answer in {deadline_s:g} s"
    except frames.PipeClosed:
      failure = "crash", f"it ended, status {self._status()}"
    except frames.FrameError as error:
      failure = "crash", str(error)
    return True, frames.pack({"failure": failure[0], "message": failure[1]})

  def _status(self) -> int | None:
    """Returns the status of the process; None if it does not end soon."""
    deadline = time.monotonic() + _CLOSE_S
    while time.monotonic() < deadline:
      ended, status = os.waitpid(self._pid, os.WNOHANG)
      if ended:
        return os.waitstatus_to_exitcode(status)
      time.sleep(0.001)
    return None

  def end(self) -> bool:
    """Ends a completion; returns False if anything of it remains."""
    if self._pipes is None:
      return True
    self._pipes.close()
    self._pipes = None
    if self._close is not None:
      with contextlib.suppress(ChildProcessError):  # Its status was taken.
        self._status()
    # Its processes, of the same user, may have changed this process's limits.
    return (
        _end_other_processes()
        and self._cell.clean()
        and _limits() == self._limits
    )


def _limits() -> list[Any]:
  """Returns the limits of this process, and its share of the cores."""
  kinds = [n for n in dir(resource) if n.startswith("RLIMIT_")]
  limits = [resource.getrlimit(getattr(resource, kind)) for kind in kinds]
  share = os.getpriority(os.PRIO_PROCESS, 0), os.sched_getscheduler(0)
  return [limits, share, processes.available_cores()]


def _end_other_processes() -> bool:
  """Kills all descendants; returns False if one does not end."""
  deadline = time.monotonic() + _GONE_S
  while time.monotonic() < deadline:
    if os.getpid() == 1:
      with contextlib.suppress(ProcessLookupError):
        os.kill(-1, signal.SIGKILL)
    else:
      processes.kill_descendants(os.getpid())
    try:
      while os.waitpid(-1, os.WNOHANG)[0]:
        pass
    except ChildProcessError:  # There are none.
      return True
    time.sleep(0.001)
  return False
