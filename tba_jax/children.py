# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Child processes of a run: started on their cores, watched, ended. No JAX."""

from collections.abc import Sequence
import dataclasses
import os
import pathlib
import signal
import subprocess
import sys
import time

from tba_jax import jsonl
from tba_jax import processes

_MAX_LOG_BYTES = 8_000_000
# In which the processes of a group notice that one of them is gone.
_TOGETHER_S = 3.0
_DEATHS = 3
_WITHIN_S = 60.0
_ERRORS = 3


@dataclasses.dataclass
class Child:
  """One place for a process of a role; a restart fills it again.

  role, index: of the process.
  cores: that it runs on; empty = all of its parent's.
  process: the present one, None before the first start.
  deaths: times of unplanned ends, seconds of the monotonic clock.
  restarts: how often it was started again.
  finished: it ended as planned and is not started again.
  started: time of the last start, seconds of the epoch.
  errors: how often in a row it ended by an error and got no further.
  furthest: the run's step at the latest of them.
  group: those that live and die together, with itself; empty = it is alone.
  operands: of its program, after the index.
  """

  role: str
  index: int
  cores: Sequence[int]
  process: subprocess.Popen | None = None
  deaths: list[float] = dataclasses.field(default_factory=list)
  restarts: int = 0
  finished: bool = False
  started: float = 0.0
  errors: int = 0
  furthest: int = -1
  group: Sequence["Child"] = dataclasses.field(default=(), repr=False)
  operands: Sequence[str] = ()

  @property
  def name(self) -> str:
    return f"{self.role}-{self.index}"


class Children:
  """Starts, watches and ends the processes of one run."""

  def __init__(self, workdir: pathlib.Path):
    """Makes the log directory.

    Args:
      workdir: of the run.
    """
    self._workdir = workdir
    self._logs = workdir / "logs"
    self._logs.mkdir(exist_ok=True)
    self._all: list[Child] = []

  @property
  def all(self) -> list[Child]:
    return self._all

  def log_path(self, child: Child) -> pathlib.Path:
    return self._logs / f"{child.name}.log"

  def add(self, role: str, index: int, cores: Sequence[int]) -> Child:
    """Starts a process of a role and watches it from now on."""
    child = Child(role, index, cores)
    self._all.append(child)
    self.start(child)
    return child

  def add_group(
      self, role: str, size: int, cores: Sequence[int]
  ) -> list[Child]:
    """Starts processes that live and die together; watches them from now on."""
    group = [Child(role, index, cores) for index in range(size)]
    for child in group:
      child.group = group if size > 1 else ()
    self._all += group
    self.start_again(group[0])
    return group

  def start_again(self, child: Child) -> None:
    """Starts a child, and with it all of its group, at a new address."""
    address = f"127.0.0.1:{processes.free_port()}" if child.group else ""
    for one in child.group or (child,):
      one.operands = (address,) if address else ()
      one.finished = False
      self.start(one)

  def end_group(self, child: Child) -> Child:
    """Ends the group of a child that has ended; returns who tells why.

    The others notice by themselves, and end by an error of their own, or by
    SIGABRT of the library; they have some seconds for it. Without a group, and
    where its first process has ended as planned, that is it.
    """
    killed = []
    deadline = time.monotonic() + _TOGETHER_S
    for one in child.group:
      try:
        one.process.wait(max(0.0, deadline - time.monotonic()))
      except subprocess.TimeoutExpired:
        one.process.kill()
        one.process.wait()
        killed.append(one.index)

    def tells_least(one: Child) -> tuple[bool, ...]:
      code = one.process.returncode
      return (
          one.index in killed,
          one.index > 0 or code != processes.EXIT_OK,
          code not in (processes.EXIT_CONFIG, processes.EXIT_FATAL),
          code in (-signal.SIGABRT, processes.EXIT_OK),
      )

    return min(child.group or (child,), key=tells_least)

  def start(self, child: Child) -> None:
    """Starts the process of a child, bound to its cores before it runs."""
    path = self.log_path(child)
    if path.exists() and path.stat().st_size > _MAX_LOG_BYTES:
      path.replace(path.with_suffix(".log.1"))
    command = [
        sys.executable,
        "-m",
        "tba_jax.main",
        f"--program={child.role}",
        f"--workdir={self._workdir}",
        str(child.index),
        *child.operands,
    ]
    # A child inherits the affinity of the thread that starts it.
    own = processes.available_cores()
    child.started = time.time()
    processes.pin(child.cores)
    try:
      with path.open("ab") as log:
        child.process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            # Ctrl-C in the terminal is for the supervisor alone.
            start_new_session=True,
            env={
                **processes.ROLE_ENVIRONMENT,
                **os.environ,
                processes.SUPERVISED: str(os.getpid()),
            },
        )
    finally:
      processes.pin(own)

  def died_too_often(self, child: Child) -> bool:
    """Notes a death; True where it is the third within a minute."""
    now = time.monotonic()
    child.deaths = [t for t in child.deaths if now - t < _WITHIN_S] + [now]
    return len(child.deaths) >= _DEATHS

  def gets_no_further(self, child: Child, step: int) -> bool:
    """Notes an end by an error; True for the third without a further step."""
    child.errors = child.errors + 1 if step <= child.furthest else 1
    child.furthest = max(child.furthest, step)
    return child.errors >= _ERRORS

  def write_table(self, service_pid: int | None) -> None:
    """Writes `processes.json`: role, index and pid of what runs now."""
    rows = [
        {"role": c.role, "index": c.index, "pid": c.process.pid}
        for c in self._all
        if c.process is not None and c.process.poll() is None
    ]
    if service_pid is not None:
      rows.append({"role": "kvservice", "index": 0, "pid": service_pid})
    jsonl.atomic_write_json(self._workdir / "processes.json", rows)

  def tail(self, child: Child, num_lines: int = 20) -> str:
    """Returns the last lines of a child's log."""
    try:
      with self.log_path(child).open("rb") as log:
        log.seek(0, os.SEEK_END)
        log.seek(max(0, log.tell() - 16384))
        text = log.read().decode(errors="replace")
    except OSError as error:
      return f"(no log: {error})"
    return "\n".join(text.splitlines()[-num_lines:])

  def end(self, roles: Sequence[str], deadline_s: float) -> None:
    """Sends SIGTERM to the processes of some roles, SIGKILL at the deadline.

    Blocks until they have ended.
    """
    chosen = [
        c
        for c in self._all
        if c.role in roles
        and c.process is not None
        and c.process.poll() is None
    ]
    for child in chosen:
      child.process.send_signal(signal.SIGTERM)
    deadline = time.monotonic() + deadline_s
    for child in chosen:
      try:
        child.process.wait(max(0.0, deadline - time.monotonic()))
      except subprocess.TimeoutExpired:
        # A stopped process (SIGSTOP) does not see SIGTERM.
        child.process.kill()
        child.process.wait()
