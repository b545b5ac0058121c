# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Child processes of user code: calls with deadlines, restarts, confinement.

A `SupervisedWorker` runs a module that calls `keeper.serve`, which answers one
call at a time, each completion in its own process. A worker that does not
answer, or answers another call, is killed with all that it started, and the
next call starts a new one.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent import futures
import contextlib
import functools
import hmac
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from typing import Any, IO

import ml_collections

from tba_jax.system import frames
from tba_jax.system import keeper
from tba_jax.system import processes
from tba_jax.system import sandbox

_EXIT_S = 2.0
_START_DEADLINE_S = 60.0
# Seconds for a worker to end a completion that has missed its deadline.
_GRACE_S = 15.0
# Seconds within which a killed process is gone.
_KILL_S = 30.0
_THREADS = (
    "; it had {} threads before it forked, which the fork has not: start them"
    " when they are first used"
)
_SEES = (
    "a worker sees the files of its task and those of config.reward.readable"
)


class ChildProcess:
  """A process group leader, killed together with its descendants.

  pipes: stdin and stdout of the process.
  """

  def __init__(
      self,
      command: Sequence[str],
      environment: Mapping[str, str],
      stderr: IO[bytes] | None = None,
  ):
    """Starts the command; raises OSError if it cannot be started."""
    self._kill_lock = threading.Lock()
    self._process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=stderr,
        bufsize=0,
        start_new_session=True,
        env=environment,
    )
    self.pipes = frames.Pipes(self._process.stdout, self._process.stdin)

  @property
  def pid(self) -> int:
    return self._process.pid

  def has_ended(self) -> bool:
    if self._process.returncode is not None or not hasattr(os, "waitid"):
      return self._process.poll() is not None
    # Not reaped until `kill`: afterwards its pid, also its group's, might be
    # reused.
    flags = os.WEXITED | os.WNOHANG | os.WNOWAIT
    return os.waitid(os.P_PID, self.pid, flags) is not None

  def kill(self) -> None:
    """Kills the child with its descendants, and its group."""
    with self._kill_lock:
      if self._process.returncode is not None:
        return
      if not self.has_ended():
        self._process.send_signal(signal.SIGSTOP)
        processes.kill_descendants(self.pid)
      with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(self.pid, signal.SIGKILL)
      with contextlib.suppress(subprocess.TimeoutExpired):
        self._process.wait(_EXIT_S)
    self.pipes.close()


class _WorkerProcess(ChildProcess):
  """A confined process with a private directory.

  num_threads: number of threads before it forks.
  """

  def __init__(self, module: str, passed: Sequence[str], box: sandbox.Box):
    self._folder = sandbox.TemporaryHome()
    self.home = box.home(self._folder.path)
    self.num_threads = 1
    # A file rather than a pipe, since file sizes are limited.
    self._stderr = tempfile.TemporaryFile(buffering=0)
    super().__init__(
        box.command([sys.executable, "-m", module], self.home),
        {"HF_HUB_OFFLINE": "1", **sandbox.environment(self.home, passed)},
        self._stderr,
    )

  def exchange(
      self, message: Any, timeout_s: float
  ) -> tuple[bytes, dict[str, Any]]:
    """Sends a message; returns flag and answer; raises as `Pipes` does."""
    deadline = time.monotonic() + timeout_s
    nonce = frames.nonce()
    self.pipes.write(frames.pack(message) + nonce, deadline)
    read = functools.partial(self.pipes.read, deadline=deadline)
    try:
      if not hmac.compare_digest(read(len(nonce)), nonce):
        raise frames.FrameError("an answer that is not to this request")
      return read(1), frames.parse(frames.unpack(read))
    except frames.FrameError as error:
      raise frames.PipeClosed(str(error)) from error

  def last_words(self) -> str:
    """Returns the last bytes of its standard error."""
    descriptor = self._stderr.fileno()
    end = os.fstat(descriptor).st_size
    data = os.pread(descriptor, 200, max(0, end - 200))
    return data.decode("utf-8", "replace").strip()

  def kill(self) -> None:
    super().kill()
    self._folder.close()
    self._stderr.close()


class SupervisedWorker:
  """A confined process that answers calls, started by the first of them."""

  def __init__(
      self,
      module: str,
      hello: Mapping[str, Any],
      config_reward: ml_collections.ConfigDict,
      box: sandbox.Box,
      links: Mapping[str, str],
  ):
    """Starts nothing yet; see `WorkerPool`."""
    self._module = module
    self._hello = {
        **hello,
        "links": dict(links),
        "preload": "",
        "memory_mb": config_reward.memory_mb,
        "deadline_s": config_reward.deadline_s,
    }
    self._passed = [n.strip() for n in config_reward.env_vars.split(",")]
    self._box = box
    self._deadline_s = config_reward.deadline_s + _GRACE_S
    self._process: _WorkerProcess | None = None
    self._is_closed = False
    self._lock = threading.Lock()

  def call(self, message: Any) -> dict[str, Any]:
    """Returns the answer to a JSON message, or `failure` and `message`.

    A call after a failure may use a new process. One thread calls at a time.
    """
    flag, answer = keeper.RETRY, {}
    while flag == keeper.RETRY:
      try:
        process = self._process or self._start()
      except (frames.PipeTimeout, frames.PipeClosed, OSError) as error:
        return _failure("start", repr(error))
      try:
        flag, answer = process.exchange(message, self._deadline_s)
      except frames.PipeTimeout:
        flag = keeper.LAST
        answer = _failure("deadline", f"no answer in {self._deadline_s:g} s")
      except frames.PipeClosed as error:
        flag, answer = keeper.LAST, _failure("crash", str(error))
      cause = answer.get("failure")
      if cause == keeper.PRELOAD and not self._hello["preload"]:
        flag, self._hello["preload"] = keeper.RETRY, answer["message"]
      if cause == "crash":
        answer["message"] += f" {process.last_words()}"
      if cause == "deadline" and process.num_threads > 1:
        answer["message"] += _THREADS.format(process.num_threads)
      if flag != keeper.MORE:
        self._end()
    return answer

  def replace_dead(self) -> None:
    """Lets the next call start a process if this one ended while idle."""
    process = self._process
    if process is not None and process.has_ended():
      self._end()

  def close(self) -> None:
    """Kills the process, waits for its end, and prevents further starts."""
    self._is_closed = True
    self._end()

  def _start(self) -> _WorkerProcess:
    with self._lock:
      if self._is_closed:
        raise frames.PipeClosed("the worker is closed")
      process = _WorkerProcess(self._module, self._passed, self._box)
      self._process = process
    try:
      hello = {**self._hello, "sandbox": self._box.arguments(process.home)}
      _, answer = process.exchange(hello, _START_DEADLINE_S)
      if "error" in answer:
        sees = "" if self._box.reason else f"; {_SEES}"
        raise frames.PipeClosed(answer["error"] + sees)
      process.num_threads = answer["threads"]
    except BaseException:
      self._end()
      raise
    return process

  def _end(self) -> None:
    with self._lock:
      process, self._process = self._process, None
    if process is not None:
      process.kill()


def _failure(cause: str, message: str) -> dict[str, Any]:
  return {"failure": cause, "message": message}


class WorkerPool:
  """Supervised workers, and a thread for each.

  threads: executor of as many threads as workers.
  longest_s: longest time of a worker's answer, including a process start.
  """

  def __init__(
      self,
      module: str,
      hello: Mapping[str, Any],
      config_reward: ml_collections.ConfigDict,
      box: sandbox.Box,
      *,
      links: Mapping[str, str],
      on_event: Callable[[str, str], None] | None,
  ):
    """Starts the threads, and reports what is not confined.

    Args:
      module: entry point of the processes; calls `keeper.serve`.
      hello: fields of the first message to a process.
      config_reward: `config.reward`.
      links: symlinks in a completion's directory, {path in it: folder}.
      on_event: function that receives ("sandbox_limited", message).
    """
    if on_event is not None and box.missing:
      on_event("sandbox_limited", box.warning())
    self.longest_s = (
        _START_DEADLINE_S + config_reward.deadline_s + _GRACE_S + _KILL_S
    )
    count = config_reward.num_workers
    # A process dies with the thread that started it, so keep the threads.
    self.threads = futures.ThreadPoolExecutor(count, "reward")
    self._workers = [
        SupervisedWorker(module, hello, config_reward, box, links)
        for _ in range(count)
    ]
    self._idle: queue.SimpleQueue[SupervisedWorker] = queue.SimpleQueue()
    for worker in self._workers:
      self._idle.put(worker)

  @contextlib.contextmanager
  def hold(self) -> Iterator[SupervisedWorker]:
    """Yields an idle worker; called only on one of `threads`."""
    worker = self._idle.get_nowait()  # Every thread has a worker.
    worker.replace_dead()
    try:
      yield worker
    finally:
      self._idle.put(worker)

  def close(self) -> None:
    """Kills the processes and waits until they have exited."""
    self.threads.shutdown(wait=False, cancel_futures=True)
    for worker in self._workers:
      worker.close()
