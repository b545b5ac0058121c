# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""The store's host: starts generations of the service and replaces dead ones.

The host never imports JAX, so no fault of the service can end it. It owns the
spool directory:

    host.lock       locked while a host lives; contains its pid
    generation      number of the last generation started
    locator.json    {"run", "generation", "address", "pid"} of the live one
    kv<gen>.sock    a generation's socket, if it is a unix socket

Each generation has a new address: clients of an older service on the same
address would abort their processes.
"""

import collections
from collections.abc import Callable, Sequence
import dataclasses
import json
import os
import pathlib
import select
import signal
import socket
import subprocess
import sys
import threading

from tba_jax.system import jsonl
from tba_jax.system import processes
from tba_jax.transport import addresses
from tba_jax.transport.kv import certificates
from tba_jax.transport.kv import locator

# Unix socket paths have at most 107 bytes, on some systems a few less.
_MAX_SOCKET_PATH = 100
_PROBE_INTERVAL_S = 0.5
_PROBE_TIMEOUT_S = 5.0
_TICK_S = 0.1
# The host gives up after this many services in a row that never answered.
_MAX_FAILED_STARTS = 3


def probe_timeout_s(deadline_s: float) -> float:
  """Returns how long a service may be silent, given `store.deadline_s`.

  The result is short enough for an operation to outlast a service restart.
  """
  return min(_PROBE_TIMEOUT_S, deadline_s / 3)


class KvHost:
  """Keeps one service generation alive at a time.

  Args:
    spool_dir: local directory, created with mode 0700 if missing.
    run_id: id of the run; clients refuse another run's store.
    address: "" for a unix socket in the spool directory, "host:0" for a free
      TCP port per generation, "host:first-last" for a port of that range.
    probe_timeout_s: a service silent for this long is killed and replaced.
    on_event: function called with a kind ("started", "lost", "stopped") and a
      message, on the thread of `run`.
    on_tick: function called by `run` several times a second, as a sign of life.
    start_timeout_s: longest time for a new service to answer.
    root: directory of all keys, from `locator.root`; "" for none.
    tls: files of mutual TLS; not used with a unix socket.

  Raises:
    ValueError: the directory is not private, or the socket path is too long.
    RuntimeError: another host uses the directory.
  """

  def __init__(
      self,
      spool_dir: str | os.PathLike[str],
      run_id: str,
      *,
      address: str = "",
      probe_timeout_s: float,
      on_event: Callable[[str, str], None] = lambda kind, message: None,
      on_tick: Callable[[], None] = lambda: None,
      start_timeout_s: float = 60.0,
      root: str = "",
      tls: certificates.Tls | None = None,
  ):
    self._spool = pathlib.Path(spool_dir).absolute()
    self._run_id = run_id
    self._root = root
    self._tcp = _parse_address(address) if address else None
    self._tls = tls if self._tcp else None
    self._probe_timeout_s = probe_timeout_s
    self._start_timeout_s = start_timeout_s
    self._on_event = on_event
    self._on_tick = on_tick
    # Ports that clients of recent generations may still use; at most half of
    # the range, since other programs may occupy the rest.
    num_ports = len(self._tcp[1]) if self._tcp else 2
    self._used_ports = collections.deque(maxlen=num_ports // 2)
    self._child: subprocess.Popen[bytes] | None = None
    self._probe_fd = -1
    self._announcer: locator.Announcer | None = None
    processes.make_private(self._spool, "store.spool_dir")
    try:
      self._lock_fd = processes.lock_file(self._spool / "host.lock")
    except processes.LockedError as holder:
      raise RuntimeError(
          f"store.spool_dir={self._spool} is held by another store host,"
          f" process {holder}; one run has one store"
      ) from None
    try:
      self._generation = self._read_generation()
      self._unix_path(self._generation + 1)
    except BaseException:
      os.close(self._lock_fd)
      raise
    for stale in [self.locator_path, *self._spool.glob("kv*.sock")]:
      stale.unlink(missing_ok=True)

  @property
  def locator_path(self) -> pathlib.Path:
    """The locator file of the live generation."""
    return self._spool / locator.FILE_NAME

  @property
  def generation(self) -> int:
    """Number of the newest generation; 0 before the first."""
    return self._generation

  @property
  def child_pid(self) -> int | None:
    """Process id of the current service, None without one."""
    child = self._child
    return child.pid if child is not None else None

  def announce(self, address: str, secret: bytes) -> None:
    """Also serves the locator at "host:port"; raises OSError."""
    self._announcer = locator.Announcer(address, secret, self.locator_path)

  def run(self, stop_event: threading.Event) -> None:
    """Serves until `stop_event` is set, then closes; call it once.

    Raises:
      RuntimeError: three services in a row ended before they answered once.
      BaseException: error that ended the announcer.
    """
    failed_starts = 0
    try:
      while not stop_event.is_set():
        self._spawn()
        answered, cause = self._watch(stop_event)
        self._kill()
        if stop_event.is_set():
          break
        self._on_event("lost", f"store generation {self._generation}: {cause}")
        failed_starts = 0 if answered else failed_starts + 1
        if failed_starts >= _MAX_FAILED_STARTS:
          raise RuntimeError(
              f"the store did not start {failed_starts} times in a row; the"
              f" last time: {cause}"
          )
      self._on_event("stopped", f"store after generation {self._generation}")
    finally:
      self.close()

  def close(self) -> None:
    """Kills the service, removes locator and sockets, releases the lock."""
    self._kill()
    if self._announcer is not None:
      announcer, self._announcer = self._announcer, None
      announcer.close()
    if self._lock_fd >= 0:
      self.locator_path.unlink(missing_ok=True)
      os.close(self._lock_fd)
      self._lock_fd = -1

  def _spawn(self) -> None:
    self._generation += 1
    # Before the service starts, so that no number is used twice.
    jsonl.replace_file(self._spool / "generation", str(self._generation))
    if self._tcp is None:
      self._address = f"unix:{self._unix_path(self._generation)}"
    else:
      self._address = free_address(
          *self._tcp, self._generation, self._used_ports
      )
    self._probe_fd, child_fd = os.pipe()
    settings = {
        "address": self._address,
        "run_id": self._run_id,
        "generation": self._generation,
        "host_pid": os.getpid(),
        "probe_fd": child_fd,
        "probe_interval_s": min(_PROBE_INTERVAL_S, self._probe_timeout_s / 4),
        "tls": self._tls and dataclasses.asdict(self._tls),
    }
    try:
      self._child = subprocess.Popen(
          [
              *(sys.executable, "-m", "tba_jax.transport.kv.kv_service"),
              json.dumps(settings),
          ],
          # The child exits at the EOF of this pipe.
          stdin=subprocess.PIPE,
          pass_fds=[child_fd],
          # jaxlib warns at each start that clients may rejoin, as intended.
          env={
              **processes.package_environment(),
              locator.ROOT_VARIABLE: self._root,
              "TF_CPP_MIN_LOG_LEVEL": "2",
          },
      )
    finally:
      os.close(child_fd)

  def _watch(self, stop_event: threading.Event) -> tuple[bool, str]:
    """Reads probe bytes until one is overdue.

    Returns:
      Whether the service ever answered, and why it ended.
    """
    answered, silent_s = False, 0.0
    while not stop_event.is_set():
      if self._announcer is not None:
        self._announcer.check()
      self._on_tick()
      ready, _, _ = select.select([self._probe_fd], [], [], _TICK_S)
      if not ready:
        # Counts ticks: by the clock, a suspended machine would look like a
        # silent service.
        silent_s += _TICK_S
        limit_s = self._probe_timeout_s if answered else self._start_timeout_s
        if silent_s < limit_s:
          continue
        return answered, f"process {self.child_pid} silent for {limit_s:.1f} s"
      if not os.read(self._probe_fd, 4096):
        return answered, f"process {self.child_pid} ended ({self._wait()})"
      silent_s = 0.0
      if not answered:
        answered = True
        self._publish_locator()
    return answered, "stopped"

  def _publish_locator(self) -> None:
    locator.write_locator(
        self.locator_path,
        locator.Locator(
            run=self._run_id,
            generation=self._generation,
            address=self._address,
            pid=self._child.pid,
            tls=self._tls is not None,
        ),
    )
    self._on_event(
        "started", f"store generation {self._generation} at {self._address}"
    )

  def _wait(self) -> str:
    """Waits briefly for the child to end; returns its status for messages."""
    try:
      return f"status {self._child.wait(timeout=5.0)}"
    except subprocess.TimeoutExpired:
      return "still alive"

  def _kill(self) -> None:
    if self._child is None:
      return
    self._child.send_signal(signal.SIGKILL)
    self._child.stdin.close()
    self._wait()
    self._child = None
    os.close(self._probe_fd)
    for path in self._spool.glob("kv*.sock"):
      path.unlink(missing_ok=True)

  def _unix_path(self, generation: int) -> str:
    path = str(self._spool / f"kv{generation}.sock")
    if self._tcp is None and len(os.fsencode(path)) > _MAX_SOCKET_PATH:
      raise ValueError(
          f"store.spool_dir: the socket path {path} has"
          f" {len(os.fsencode(path))} bytes; must have at most"
          f" {_MAX_SOCKET_PATH}. Choose a shorter directory, such as"
          " one in /tmp."
      )
    return path

  def _read_generation(self) -> int:
    path = self._spool / "generation"
    if not path.exists():
      return 0
    text = path.read_text().strip()
    if not text.isdecimal():
      raise ValueError(f"{path} contains {text!r}; must be a number")
    return int(text)


def free_address(
    host: str,
    ports: Sequence[int],
    generation: int,
    used_ports: collections.deque[int],
) -> str:
  """Returns the next free address of a host; appends its port to `used_ports`.

  Args:
    host: name or IP address; IPv6 if it contains a colon.
    ports: allowed ports; 0 stands for any.
    generation: number of the service; services take turns over the ports.
    used_ports: ports of the last services, whose clients may still use them.
  """
  start = generation % len(ports)
  family = socket.AF_INET6 if ":" in host else socket.AF_INET
  for port in [*ports[start:], *ports[:start]]:
    # No SO_REUSEPORT, which gRPC sets: with it, two services on one port would
    # both start and share clients.
    with socket.socket(family) as probe:
      try:
        probe.bind((host, port))
      except OSError:
        continue
      port = probe.getsockname()[1]
    if port not in used_ports:
      used_ports.append(port)
      return addresses.join_address(host, port)
  raise RuntimeError(f"store.address: no free port of {host} in {ports}")


def _parse_address(address: str) -> tuple[str, list[int]]:
  """Returns host and ports; port 0 = any."""
  host, ports = addresses.split_range(address)
  return host, ports * (64 if ports == [0] else 1)
