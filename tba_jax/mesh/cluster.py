# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""The processes of one trainer, joined by `jax.distributed`, led by process 0.

Process 0 runs the training loop. Before it enters a collective, it broadcasts a
command on which the other processes make the same call, so all processes enter
all collectives in the same order. Commands go through the key-value store of
the trainer's coordinator, in process 0. If one process ends, all end and are
restarted together.
"""

from collections.abc import Callable, Mapping, Sequence
import contextlib
import dataclasses
import inspect
import os
import queue
import re
import socket
import sys
import threading
import time
from typing import Any

from absl import logging
import jax
import ml_collections

from tba_jax.system import processes
from tba_jax.transport import addresses
from tba_jax.transport import byte_store
from tba_jax.transport import wire
from tba_jax.transport.kv import certificates
from tba_jax.transport.kv import jax_kv

_BARRIER_PREFIX = "tba_save"
_BARRIER_POLL_S = 0.05

_PREFIX = "tba_trainer"
_COMMAND_SCHEMA = {"name": str, "count": int, "fields": {}}
# Intervals at which process 0 polls for stop requests and sends a heartbeat.
_STOP_POLL_S = 1.0
_ALIVE_S = 10.0
# Longest wait for all processes to join, and longest silence of process 0.
_START_DEADLINE_S = 300.0
_DEADLINE_S = 1800.0
_TICK_S = 0.2
# All processes shut down together; longest wait for a missing one.
_SHUTDOWN_S = 20


class SaveError(OSError):
  """A process could not write its part of a checkpoint."""


class SaveBarrier:
  """Barrier of threads that save or restore a checkpoint, one per process.

  For `orbax.checkpoint.AsyncOptions.barrier_sync_fn`. A process that fails to
  write skips the remaining barriers of a save, so Orbax's own named barriers
  would no longer match. These barriers are numbered instead, and the failing
  process shares its error, which all processes then raise.

  All processes call it in the same order, from one thread at a time; after an
  error no more saves may begin.

  failure: error of the first process that failed, or None.
  deadline_s: longest time of a whole save.
  """

  def __init__(
      self,
      client: jax_kv.Client,
      process: int,
      num_processes: int,
      *,
      secret: bytes,
      deadline_s: float,
  ):
    self._client = client
    self._process = process
    self._num_processes = num_processes
    self._secret = secret
    self.count = 0
    self.failure: SaveError | None = None
    self.deadline_s = deadline_s

  def __call__(self, *, key: str, timeout_ms: int) -> None:
    """Waits until all processes have reached the next barrier.

    Args:
      key: Orbax's name of the barrier, for messages.
      timeout_ms: time left of the deadline.

    Raises:
      SaveError: a process could not write, or was late.
    """
    # Orbax calls this in `finally`, while its own error propagates.
    error = sys.exc_info()[1]
    if error is not None and self.failure is None:
      late = (
          f"not done within {self.deadline_s:.0f} s"
          " (config.trainer.save_deadline_s): "
      )
      cause = late * isinstance(error, TimeoutError) + str(error)
      self.failure = SaveError(
          f"process {self._process} of the trainer: {cause}"
      )
    count = self._tell("" if self.failure is None else str(self.failure))
    if self.failure is not None:
      raise self.failure
    texts = self._hear(count, key, timeout_ms / 1e3, until_all=False)
    if errors := list(filter(None, texts)):
      self.failure = SaveError(errors[0])
      raise self.failure

  def share(self, text: str, what: str) -> list[str]:
    """Returns the texts of all processes; every process must call it.

    Args:
      text: message of this process, or "".
      what: work that the processes do, for messages.

    Raises:
      SaveError: a process was late.
    """
    return self._hear(self._tell(text), what, self.deadline_s, until_all=True)

  def _tell(self, text: str) -> int:
    """Posts a text for the other processes; returns the barrier's number."""
    count, self.count = self.count, self.count + 1
    key = f"{_barrier_key(count)}/{self._process}"
    _put_signed(self._client, self._secret, key, text)
    return count

  def _hear(
      self, count: int, what: str, timeout_s: float, *, until_all: bool
  ) -> list[str]:
    """Returns the texts of a barrier, in the order of the processes.

    Without `until_all`, the first non-empty text ends the wait.
    """
    until = time.monotonic() + timeout_s
    while True:
      texts = _signed_texts(self._client, self._secret, _barrier_key(count))
      names = [str(process) for process in range(self._num_processes)]
      came = {int(name): texts[name] for name in names if name in texts}
      missing = sorted(set(range(self._num_processes)) - set(came))
      if not missing or (not until_all and any(came.values())):
        break
      if time.monotonic() > until:
        self.failure = SaveError(
            f"process {', '.join(map(str, missing))} of the trainer did not"
            f" reach {what} within {timeout_s:.0f} s"
            " (config.trainer.save_deadline_s)"
        )
        raise self.failure
      time.sleep(_BARRIER_POLL_S)
    if count and not missing:
      # All processes have passed the previous barrier.
      self._client.key_value_delete(
          f"{_barrier_key(count - 1)}/{self._process}"
      )
    return [came[i] for i in sorted(came)]


def _barrier_key(count: int) -> str:
  return f"{_BARRIER_PREFIX}/{count:012d}"


def _put_signed(
    client: jax_kv.Client, secret: bytes, key: str, text: str
) -> None:
  """Writes a signed text; overwrites any other value of the key."""
  data = wire.encode_message({"key": key, "text": text}, secret)
  client.key_value_set_bytes(key, data, allow_overwrite=True)


def _signed_texts(
    client: jax_kv.Client, secret: bytes, directory: str
) -> dict[str, str]:
  """Returns the texts written by `_put_signed` in a directory, by name."""
  texts = {}
  for key, data in client.key_value_dir_get_bytes(directory):
    with contextlib.suppress(wire.WireError):
      message = wire.decode_message(data, secret, {"key": str, "text": str})
      if message["key"] == key:
        texts[key.removeprefix(f"{directory}/")] = message["text"]
  return texts


class Ended(Exception):
  """Process 0 has ended the run; all processes exit with `status`."""

  def __init__(self, status: int):
    super().__init__(f"process 0 of the trainer ends with status {status}")
    self.status = status


@dataclasses.dataclass(frozen=True)
class Command:
  """A call for all processes to make; `fields` has JSON types."""

  name: str
  fields: dict[str, Any]


class Cluster:
  """One trainer process's connection to the others; a context manager.

  Args:
    process: number of this process; 0 leads.
    num_processes: number of the trainer's processes.
    deadline_s: longest silence of process 0.
    client: connection to the trainer's coordinator; None for a single process.
    clock: function that returns seconds, as `time.monotonic`.
  """

  def __init__(
      self,
      process: int = 0,
      num_processes: int = 1,
      *,
      secret: bytes = b"",
      deadline_s: float = 0.0,
      client: jax_kv.Client | None = None,
      clock: Callable[[], float] = time.monotonic,
  ):
    self._clock = clock
    self.process = process
    self.num_processes = num_processes
    self.client = client
    self._secret = secret
    self._deadline_s = deadline_s
    self.count = 0
    self._sent_at = self._polled_at = clock()
    self._stop_requested = False
    self._ended = False
    self._received: queue.Queue[Command | Exception] = queue.Queue(maxsize=4)
    if not self.leads:
      # The thread waits in the library, and must not return during the exit.
      threading.Thread(
          target=self._listen,
          name=f"{processes.LEFT_BEHIND}_listen",
          daemon=True,
      ).start()

  @property
  def leads(self) -> bool:
    return self.process == 0

  def __enter__(self) -> "Cluster":
    return self

  def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
    if self.client is None:
      return
    if self.leaves_alone(error):
      logging.error("process %d leaves alone", self.process, exc_info=error)
      print(f"error: {error}", file=sys.stderr)
      sys.stderr.flush()
      os._exit(status_of(error))  # pylint: disable=protected-access
    if error is not None:
      # Log first: the shutdown may kill this process.
      logging.error("process %d ends: %s", self.process, error)
    jax.distributed.shutdown()

  def leaves_alone(self, error: BaseException | None) -> bool:
    """Returns whether this process must exit without a common shutdown.

    After an error in only this process, the others may hang in a collective.
    """
    return not (self.leads or error is None or isinstance(error, Ended))

  def broadcast(
      self, name: str, fields: Mapping[str, Any] | None = None
  ) -> None:
    """Sends a command from process 0 to the others, without waiting.

    Does nothing in the other processes, which run the same code.
    """
    if not self.leads:
      return
    message = {"name": name, "count": self.count, "fields": dict(fields or {})}
    for process in range(1, self.num_processes):
      self.client.key_value_set_bytes(
          key_of(process, self.count),
          wire.encode_message(message, self._secret),
      )
    self.count += 1
    self._sent_at = self._clock()

  def collect(
      self, name: str, fields: Mapping[str, Any]
  ) -> dict[int, dict[str, Any]]:
    """Gathers fields in process 0, which returns the others' by process.

    All processes must call it; only process 0 waits.

    Args:
      fields: values of JSON types.

    Raises:
      TransportError: a process has not sent its fields within `deadline_s`, or
        they belong to another run.
    """
    key = f"{_PREFIX}/{name}"
    if not self.leads:
      data = wire.encode_message(fields, self._secret)
      self.client.key_value_set_bytes(f"{key}/{self.process}", data)
      return {}
    messages = {}
    for process in range(1, self.num_processes):
      try:
        data = self.client.blocking_key_value_get_bytes(
            f"{key}/{process}", int(1e3 * self._deadline_s)
        )
        messages[process] = wire.decode_message(data, self._secret)
      except (jax_kv.KvError, wire.WireError) as error:
        message = f"process {process} of the trainer sent no {name}: {error}"
        raise byte_store.TransportError(message) from error
    return messages

  def begin(self) -> None:
    """Waits for process 0 to start; call it before the first collective.

    Raises:
      Ended: process 0 could not start.
      TransportError: process 0 is lost.
    """
    if self.leads:
      self.broadcast("begin")
      return
    command = self.receive(lambda: False)
    if command.name == "end":
      raise Ended(command.fields["status"])

  def save_barrier(self, deadline_s: float) -> SaveBarrier | None:
    """Returns the barrier for saves, None for a single process."""
    if self.client is None:
      return None
    return SaveBarrier(
        self.client,
        self.process,
        self.num_processes,
        secret=self._secret,
        deadline_s=deadline_s,
    )

  def receive(self, should_stop: Callable[[], bool]) -> Command:
    """Returns the next command of process 0.

    If `should_stop` is true, asks process 0 to stop; process 0 decides.

    Raises:
      DeadlineExceededError: process 0 was silent for `deadline_s`.
      TransportError: the coordinator is lost, or a command is another run's.
    """
    deadline = time.monotonic() + self._deadline_s
    while True:
      if should_stop() and not self._stop_requested:
        self._stop_requested = True
        key = f"{_PREFIX}/stop/{self.process}"
        _put_signed(self.client, self._secret, key, "stop")
      try:
        received = self._received.get(timeout=_TICK_S)
      except queue.Empty:
        if time.monotonic() > deadline:
          raise byte_store.DeadlineExceededError(
              "process 0 of the trainer sent nothing for"
              f" {self._deadline_s:.0f} s"
          ) from None
        continue
      if isinstance(received, Exception):
        raise received
      if received.name != "alive":
        return received
      deadline = time.monotonic() + self._deadline_s

  def stopper(self, should_stop: Callable[[], bool]) -> Callable[[], bool]:
    """Returns a function that is true once any process wants to stop.

    Process 0 calls it wherever it waits, so it also sends the heartbeat.
    """

    def any_should_stop() -> bool:
      now = self._clock()
      if self.num_processes > 1 and now - self._polled_at > _STOP_POLL_S:
        self._polled_at = now
        requests = _signed_texts(self.client, self._secret, f"{_PREFIX}/stop")
        self._stop_requested = self._stop_requested or bool(requests)
        if now - self._sent_at > _ALIVE_S:
          self.broadcast("alive")
      return self._stop_requested or should_stop()

    return any_should_stop if self.leads else should_stop

  def end(self, status: int) -> None:
    """Broadcasts the exit status; only the first call has an effect."""
    if self.leads and not self._ended:
      self._ended = True
      self.broadcast("end", {"status": status})

  def _listen(self) -> None:
    """Prefetches commands, so that no step waits for one."""
    count = 0
    while True:
      key = key_of(self.process, count)
      try:
        data = self.client.blocking_key_value_get_bytes(
            key, int(1e3 * (self._deadline_s + 60))
        )
        self.client.key_value_delete(key)
        message = wire.decode_message(data, self._secret, _COMMAND_SCHEMA)
        if message["count"] != count:
          raise wire.WireError("header", f"{key} has count {message['count']}")
      except Exception as error:  # Raised by `receive`.
        lost = byte_store.TransportError(f"trainer's coordinator: {error}")
        lost.__cause__ = error
        self._received.put(lost)
        return
      self._received.put(Command(message["name"], message["fields"]))
      if message["name"] == "end":
        return
      count += 1


def status_of(error: BaseException | None) -> int:
  """Returns the exit status of a trainer that ends with an error."""
  if error is None:
    return processes.EXIT_OK
  if isinstance(error, ValueError):
    return processes.EXIT_CONFIG
  return processes.EXIT_FATAL if isinstance(error, FloatingPointError) else 1


def key_of(process: int, count: int) -> str:
  return f"{_PREFIX}/{process}/{count:012d}"


def join(
    settings: ml_collections.ConfigDict,
    operands: Sequence[str],
    secret: bytes,
    tls: certificates.Tls | None = None,
) -> Cluster:
  """Joins `jax.distributed`; call it before any use of a device.

  Waits for all processes for at most `_START_DEADLINE_S`, then exits with a
  message, since `jax.distributed` would abort this process.

  Args:
    settings: `config.trainer`.
    operands: number of this process, and host:port of process 0 (default:
      `settings.coordinator`). Without these, JAX detects both on Slurm, TPU VMs
      and others.
    tls: files of mutual TLS with process 0.

  Raises:
    ValueError: an operand or setting is wrong, or jax does not support `tls`.
  """
  if settings.cpu_devices:
    jax.config.update("jax_num_cpu_devices", settings.cpu_devices)
  num_processes = settings.num_processes
  process, address = _parse(settings, operands)
  if num_processes == 1:
    return Cluster()
  secured = tls_options(tls)
  jax.config.update("jax_cpu_collectives_implementation", "gloo")
  # JAX's service would take over SIGTERM, which we report to process 0.
  jax.config.update("jax_enable_preemption_service", False)
  if process == 0:
    _check_free(address)
    if tls is None and not addresses.is_one_host(address):
      print(certificates.unguarded(address), file=sys.stderr, flush=True)
  waited = threading.Timer(
      _START_DEADLINE_S, _give_up, (settings, process, address)
  )
  waited.daemon = True
  waited.start()
  signals = {}
  if address is not None:
    signals = dict(
        coordinator_address=address,
        num_processes=num_processes,
        process_id=process,
        # By default, JAX would listen on all interfaces.
        coordinator_bind_address=address,
        cluster_detection_method="deactivate",
    )
  jax.distributed.initialize(
      **signals,
      **secured,
      # Longer than our timer, which exits with a helpful message.
      initialization_timeout=int(_START_DEADLINE_S) + 60,
      heartbeat_timeout_seconds=max(1, int(settings.heartbeat_s)),
      shutdown_timeout_seconds=_SHUTDOWN_S,
  )
  waited.cancel()
  if jax.process_count() != num_processes:
    raise ValueError(
        f"config.trainer.num_processes = {num_processes}: the environment has"
        f" {jax.process_count()} processes"
    )
  return Cluster(
      jax.process_index(),
      num_processes,
      secret=secret,
      deadline_s=_DEADLINE_S,
      client=jax_kv.distributed_client(),
  )


def _parse(
    settings: ml_collections.ConfigDict, operands: Sequence[str]
) -> tuple[int | None, str | None]:
  """Returns this process's number and process 0's address.

  Both are None if JAX should detect them.
  """
  num_processes = settings.num_processes
  if num_processes > 1 and not operands and not settings.coordinator:
    return None, None
  text = operands[0] if operands else "0"
  if not text.isdigit() or int(text) >= num_processes:
    raise ValueError(
        f"operand {text!r}: must be the number of a process of the trainer, 0"
        f" to {num_processes - 1} (config.trainer.num_processes ="
        f" {num_processes})"
    )
  address = operands[1] if len(operands) > 1 else settings.coordinator
  if num_processes > 1 and not re.fullmatch(r"\S+:\d+", address):
    raise ValueError(
        f"config.trainer.coordinator = {address!r}: must be host:port of"
        " process 0, where each process is started with its number"
    )
  return int(text), address


def tls_options(tls: certificates.Tls | None) -> dict[str, object]:
  if tls is None:
    return {}
  offered = inspect.signature(jax.distributed.initialize).parameters
  if "mtls_cert_file" not in offered:
    raise ValueError(
        f"config.store.tls_cert_file = {tls.cert_file!r}: mutual TLS between"
        f" the trainer's processes needs jax {certificates.NEEDED}, here is"
        f" {jax.__version__}; must be '' or config.trainer.num_processes = 1"
    )
  return tls.jax_options()


def _check_free(address: str) -> None:
  """Raises ValueError if the address is in use: gRPC would share its port."""
  host, _, port = address.rpartition(":")
  family = socket.AF_INET6 if ":" in host else socket.AF_INET
  try:
    with socket.socket(family) as probe:
      # Like gRPC, ignore the TIME_WAIT of an earlier coordinator.
      probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
      probe.bind((host.strip("[]"), int(port)))
  except OSError as error:
    raise ValueError(
        f"config.trainer.coordinator = {address!r}: process 0 cannot listen"
        f" there ({error}); another trainer may"
    ) from error


def _give_up(
    settings: ml_collections.ConfigDict,
    process: int | None,
    address: str | None,
) -> None:
  who = "a process" if process is None else f"process {process}"
  print(
      f"error: {who} of the trainer waited {_START_DEADLINE_S:.0f} s at"
      f" {address or 'the address that JAX found'} and not all of"
      f" config.trainer.num_processes = {settings.num_processes} came: start"
      " each number from 0 on once, with one coordinator and one secret",
      file=sys.stderr,
      flush=True,
  )
  # With a status that allows a restart: a host may only have been away.
  os._exit(1)  # pylint: disable=protected-access
