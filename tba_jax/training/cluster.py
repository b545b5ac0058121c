# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""The trainer's processes: joined by `jax.distributed`, led by process 0.

Process 0 decides what is done. Whatever its devices do together with those of
the others it tells them first, as one command after the other, and then does
the same itself: so all processes enter every collective, in one order, and
none skips one alone. Commands go through the key-value store of the trainer's
own coordinator, which lives in process 0; no device waits for them. Where one
process ends, all do, and are started again together.
"""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import inspect
import os
import queue
import re
import socket
import sys
import threading
import time
from typing import Any, TYPE_CHECKING

from absl import logging
import jax
import ml_collections

from tba_jax.system import processes
from tba_jax.training import sharding
from tba_jax.transport import base
from tba_jax.transport import jax_kv
from tba_jax.transport import wire

if TYPE_CHECKING:
  from tba_jax.transport import locator


# Where the processes of a trainer wait for each other while they save.
#
# Orbax writes in threads beside the steps, and has those of all processes meet
# at
# barriers, one after the other. One that could not write leaves out what is
# left
# to do, and would meet the others at another barrier than the one they wait at,
# until the deadline of a slow disk. Here they meet by count: it says why it
# failed, and that is then the error of all of them.


_BARRIER_PREFIX = "tba_save"
_LOOK_S = 0.05


class SaveError(OSError):
  """A process could not write its part; the message names it and the cause."""


class SaveBarrier:
  """Called as `orbax.checkpoint.AsyncOptions.barrier_sync_fn`.

  All processes call it equally often and in one order, from one thread at a
  time; after an error no more saves may begin.

  failure: what went wrong, in whatever process; None as long as nothing has.
  deadline_s: of a whole save.
  """

  def __init__(
      self,
      client: "jax_kv.Client",
      process: int,
      num_processes: int,
      *,
      deadline_s: float,
  ):
    """Waits for nobody yet.

    Args:
      client: of the coordinator of all of them.
      process: this one.
      num_processes: in all.
      deadline_s: at least 1.
    """
    self._client = client
    self._process = process
    self._num_processes = num_processes
    self._count = 0
    self.failure: SaveError | None = None
    self.deadline_s = deadline_s

  def __call__(self, *, key: str, timeout_ms: int) -> None:
    """Waits until all have come; each call is the next barrier.

    Args:
      key: what Orbax calls it, for messages.
      timeout_ms: the longest wait, what is left of the deadline.

    Raises:
      SaveError: one of them could not write, or did not come in time.
    """
    # Orbax calls it while the error of what it has just done is on its way up.
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
    count, self._count = self._count, self._count + 1
    text = "" if self.failure is None else str(self.failure)
    self._client.key_value_set_bytes(
        f"{_folder(count)}/{self._process}", text.encode()
    )
    if self.failure is not None:
      raise self.failure
    self._wait(count, key, timeout_ms / 1e3)
    if count:
      # All are here, so none looks at the one before any more.
      self._client.key_value_delete(f"{_folder(count - 1)}/{self._process}")

  def _wait(self, count: int, key: str, timeout_s: float) -> None:
    until = time.monotonic() + timeout_s
    while True:
      came = {
          int(name.rpartition("/")[2]): text.decode()
          for name, text in self._client.key_value_dir_get_bytes(_folder(count))
      }
      causes = [text for text in came.values() if text]
      lacking = sorted(set(range(self._num_processes)) - set(came))
      if causes:
        self.failure = SaveError(causes[0])
      elif not lacking:
        return
      elif time.monotonic() > until:
        self.failure = SaveError(
            f"process {', '.join(map(str, lacking))} of the trainer did not"
            f" come to {key} within {timeout_s:.0f} s"
            " (config.trainer.save_deadline_s)"
        )
      if self.failure is not None:
        raise self.failure
      time.sleep(_LOOK_S)


def _folder(count: int) -> str:
  return f"{_BARRIER_PREFIX}/{count:012d}"


_PREFIX = "tba_trainer"
# How often process 0 looks whether another one wants to stop, and the least
# that it says when there is nothing to do.
_LOOK_EVERY_S = 1.0
_ALIVE_EVERY_S = 10.0
_TICK_S = 0.2


class Ended(Exception):
  """Process 0 has ended, and with it this one.

  status: that both exit with.
  """

  def __init__(self, status: int):
    super().__init__(f"process 0 of the trainer ends with status {status}")
    self.status = status


@dataclasses.dataclass(frozen=True)
class Command:
  """What process 0 has all processes do.

  name: of what is to be done.
  fields: of JSON types.
  """

  name: str
  fields: dict[str, Any]


class Cluster:
  """The processes of one trainer, seen from one of them."""

  def __init__(
      self,
      process: int = 0,
      num_processes: int = 1,
      *,
      secret: bytes = b"",
      deadline_s: float = 0.0,
      client: jax_kv.Client | None = None,
  ):
    """Takes the place of this process.

    Args:
      process: 0 leads.
      num_processes: in all.
      secret: key of the commands.
      deadline_s: the longest silence of process 0.
      client: of the trainer's coordinator; None where there is one process.
    """
    self.process = process
    self.num_processes = num_processes
    self._secret = secret
    self._deadline_s = deadline_s
    self._client = client
    self._told = 0
    self._told_at = self._looked_at = time.monotonic()
    self._stop_asked = False
    self._ended = False
    self._heard: queue.Queue[Command | Exception] = queue.Queue(maxsize=4)
    if not self.leads:
      threading.Thread(target=self._listen, name="listen", daemon=True).start()

  @property
  def leads(self) -> bool:
    return self.process == 0

  @property
  def client(self) -> jax_kv.Client | None:
    """Of the trainer's coordinator; None where there is one process."""
    return self._client

  def __enter__(self) -> "Cluster":
    return self

  def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
    if self._client is None:
      return
    if self.leaves_alone(error):
      logging.error("process %d leaves alone", self.process, exc_info=error)
      print(f"error: {error}", file=sys.stderr)
      sys.stderr.flush()
      os._exit(status_of(error))  # pylint: disable=protected-access
    if error is not None:
      # Before the wait for the others, in which it may be killed.
      logging.error("process %d ends: %s", self.process, error)
    jax.distributed.shutdown()

  def leaves_alone(self, error: BaseException | None) -> bool:
    """True where an error ends this process, of which the others know nothing.

    They may hang in a collective that it has left: nobody would come to leave
    together, so it must not wait for them.
    """
    return not (self.leads or error is None or isinstance(error, Ended))

  def broadcast(
      self, name: str, fields: Mapping[str, Any] | None = None
  ) -> None:
    """Tells every other process what comes next; waits for none of them.

    A process that follows tells nothing: it does the same by the same code.

    Args:
      name: of what is to be done.
      fields: of JSON types.
    """
    if not self.leads:
      return
    message = {"name": name, "count": self._told, "fields": dict(fields or {})}
    for process in range(1, self.num_processes):
      self._client.key_value_set_bytes(
          _key(process, self._told), wire.encode_message(message, self._secret)
      )
    self._told += 1
    self._told_at = time.monotonic()

  def collect(
      self, name: str, fields: Mapping[str, Any]
  ) -> dict[int, dict[str, Any]]:
    """Sends fields to process 0, which gets those of all others by process.

    All processes must call it; none but process 0 waits.

    Args:
      name: of what is collected, never used before.
      fields: of JSON types.

    Raises:
      TransportError: a process has not sent them within `deadline_s`, or they
        are not of this run.
    """
    key = f"{_PREFIX}/{name}"
    if not self.leads:
      data = wire.encode_message(fields, self._secret)
      self._client.key_value_set_bytes(f"{key}/{self.process}", data)
      return {}
    found = {}
    for process in range(1, self.num_processes):
      try:
        data = self._client.blocking_key_value_get_bytes(
            f"{key}/{process}", int(1e3 * self._deadline_s)
        )
        found[process] = wire.decode_message(data, self._secret)
      except (jax_kv.KvError, wire.WireError) as error:
        message = f"process {process} of the trainer sent no {name}: {error}"
        raise base.TransportError(message) from error
    return found

  def begin(self) -> None:
    """Has process 0 say that nothing is in the way; the others wait for it.

    Before it none does anything that needs them all.

    Raises:
      Ended: something is.
      TransportError: process 0 is lost, or has been silent for too long.
    """
    if self.leads:
      self.broadcast("begin")
      return
    command = self.receive(lambda: False)
    if command.name == "end":
      raise Ended(command.fields["status"])

  def gatherer(self, mesh: jax.sharding.Mesh) -> Callable[[Any], Any]:
    """Returns what makes a tree of arrays whole on devices of this process.

    All processes must call it together. With one it returns the tree itself.
    """
    if self.num_processes == 1:
      return lambda tree: tree
    whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    replicate = jax.jit(lambda tree: tree, out_shardings=whole)
    return lambda tree: jax.tree.map(
        lambda x: x.addressable_data(0), replicate(tree)
    )

  def params_gatherer(self, mesh: jax.sharding.Mesh) -> Callable[[Any], Any]:
    """As `gatherer`, of params, split over the devices of this process."""
    if self.num_processes == 1 or mesh.size == self.num_processes:
      return self.gatherer(mesh)
    return sharding.make_gather(mesh)

  def save_barrier(self, deadline_s: float) -> SaveBarrier | None:
    """Returns where the processes meet that save together; None for one.

    Args:
      deadline_s: of a whole save.
    """
    if self._client is None:
      return None
    return SaveBarrier(
        self._client, self.process, self.num_processes, deadline_s=deadline_s
    )

  def receive(self, should_stop: Callable[[], bool]) -> Command:
    """Returns the next command of process 0, in its order.

    Waits for it, `deadline_s` at most without a word. Where `should_stop` is
    true, process 0 is told so: it decides.

    Raises:
      DeadlineExceededError: process 0 has been silent for too long.
      TransportError: the coordinator is lost, or a command is not of this run.
    """
    deadline = time.monotonic() + self._deadline_s
    while True:
      if should_stop() and not self._stop_asked:
        self._stop_asked = True
        self._client.key_value_set_bytes(f"{_PREFIX}/stop/{self.process}", b"1")
      try:
        heard = self._heard.get(timeout=_TICK_S)
      except queue.Empty:
        if time.monotonic() > deadline:
          raise base.DeadlineExceededError(
              "process 0 of the trainer said nothing for"
              f" {self._deadline_s:.0f} s (config.trainer.deadline_s)"
          ) from None
        continue
      if isinstance(heard, Exception):
        raise heard
      if heard.name != "alive":
        return heard
      deadline = time.monotonic() + self._deadline_s

  def stopper(self, should_stop: Callable[[], bool]) -> Callable[[], bool]:
    """Returns what is true where any process shall stop; for process 0.

    It is asked wherever process 0 waits, and so also tells that it lives.
    """

    def any_should_stop() -> bool:
      now = time.monotonic()
      if self.num_processes > 1 and now - self._looked_at > _LOOK_EVERY_S:
        self._looked_at = now
        asked = self._client.key_value_dir_get_bytes(f"{_PREFIX}/stop")
        self._stop_asked = self._stop_asked or bool(asked)
        if now - self._told_at > _ALIVE_EVERY_S:
          self.broadcast("alive")
      return self._stop_asked or should_stop()

    return any_should_stop if self.leads else should_stop

  def end(self, status: int) -> None:
    """Tells the others to end with a status; the first one counts."""
    if self.leads and not self._ended:
      self._ended = True
      self.broadcast("end", {"status": status})

  def _listen(self) -> None:
    """Fetches commands ahead, so that none is waited for between two steps."""
    count = 0
    while True:
      key = _key(self.process, count)
      try:
        data = self._client.blocking_key_value_get_bytes(
            key, int(1e3 * (self._deadline_s + 60))
        )
        self._client.key_value_delete(key)
        message = wire.decode_message(data, self._secret)
        if message["count"] != count:
          raise wire.WireError("header", f"{key} has count {message['count']}")
        command = Command(message["name"], message["fields"])
      except (jax_kv.KvError, wire.WireError, KeyError) as error:
        self._heard.put(base.TransportError(f"trainer's coordinator: {error}"))
        return
      self._heard.put(command)
      if command.name == "end":
        return
      count += 1


def status_of(error: BaseException | None) -> int:
  """Returns the exit status of a trainer that ends by an error."""
  if error is None:
    return processes.EXIT_OK
  if isinstance(error, ValueError):
    return processes.EXIT_CONFIG
  return processes.EXIT_FATAL if isinstance(error, FloatingPointError) else 1


def _key(process: int, count: int) -> str:
  return f"{_PREFIX}/{process}/{count:012d}"


# How a process becomes one of the trainer's, or says why it cannot.


# All leave together; who does not come is not waited for any longer.
_SHUTDOWN_S = 20


def join(
    settings: ml_collections.ConfigDict,
    operands: Sequence[str],
    secret: bytes,
    tls: "locator.Tls | None" = None,
) -> Cluster:
  """Joins this process to the trainer's others; to be called before any device.

  Waits until all have come, `start_deadline_s` at most; ends this process with
  a message where they have not, since `jax.distributed` would abort it.

  Args:
    settings: `config.trainer`.
    operands: of the program: the number of this process, and host:port of
      process 0, `settings.coordinator` where not given. With neither, what JAX
      finds in the environment of Slurm, TPU VMs and others.
    secret: key of the commands.
    tls: files of mutual TLS with process 0; None = without.

  Raises:
    ValueError: an operand or setting that does not fit the others, or `tls`
      where JAX does not offer it.
  """
  if settings.cpu_devices:
    jax.config.update("jax_num_cpu_devices", settings.cpu_devices)
  num_processes = settings.num_processes
  process, address = _parse(settings, operands)
  if num_processes == 1:
    return Cluster()
  secured = _tls_options(tls)
  jax.config.update("jax_cpu_collectives_implementation", "gloo")
  # It would take SIGTERM away from this program, and see it only where all
  # processes call it; here any of them tells process 0, which decides.
  jax.config.update("jax_enable_preemption_service", False)
  if process == 0:
    _check_free(address)
  waited = threading.Timer(
      settings.start_deadline_s, _give_up, (settings, process, address)
  )
  waited.daemon = True
  waited.start()
  found = {}
  if address is not None:
    found = dict(
        coordinator_address=address,
        num_processes=num_processes,
        process_id=process,
        # Never on all interfaces of a machine, which is what JAX would do.
        coordinator_bind_address=address,
        cluster_detection_method="deactivate",
    )
  jax.distributed.initialize(
      **found,
      **secured,
      # The timer comes first: it says what is wrong.
      initialization_timeout=int(settings.start_deadline_s) + 60,
      heartbeat_timeout_seconds=max(1, int(settings.heartbeat_s)),
      shutdown_timeout_seconds=_SHUTDOWN_S,
  )
  waited.cancel()
  if jax.process_count() != num_processes:
    raise ValueError(
        f"config.trainer.num_processes = {num_processes}: the environment has"
        f" {jax.process_count()}"
    )
  return Cluster(
      jax.process_index(),
      num_processes,
      secret=secret,
      deadline_s=settings.deadline_s,
      client=jax_kv.distributed_client(),
  )


def _parse(
    settings: ml_collections.ConfigDict, operands: Sequence[str]
) -> tuple[int | None, str | None]:
  """Returns the number of this process and the address of process 0.

  None where JAX is to find them.
  """
  num_processes = settings.num_processes
  if num_processes > 1 and not operands and not settings.coordinator:
    return None, None
  text = operands[0] if operands else "0"
  if not text.isdigit() or int(text) >= num_processes:
    raise ValueError(
        f"operand {text!r}: allowed the number of a process of the trainer, 0"
        f" to {num_processes - 1} (config.trainer.num_processes ="
        f" {num_processes})"
    )
  address = operands[1] if len(operands) > 1 else settings.coordinator
  if num_processes > 1 and not re.fullmatch(r"\S+:\d+", address):
    raise ValueError(
        f"config.trainer.coordinator = {address!r}: allowed host:port of"
        " process 0, where each process is started with its number"
    )
  return int(text), address


def _tls_options(tls: "locator.Tls | None") -> dict[str, object]:
  if tls is None:
    return {}
  offered = inspect.signature(jax.distributed.initialize).parameters
  if "mtls_cert_file" not in offered:
    raise ValueError(
        f"config.store.tls_cert_file = {tls.cert_file!r}: mutual TLS between"
        " the trainer's processes needs jax 0.11 or newer, here is"
        f" {jax.__version__}; allowed '' or config.trainer.num_processes = 1"
    )
  return {
      "mtls_cert_file": tls.cert_file,
      "mtls_key_file": tls.key_file,
      "mtls_ca_file": tls.ca_file,
      # No fall-back to a connection without it.
      "verify_secure_credentials": True,
  }


def _check_free(address: str) -> None:
  """Raises where somebody listens: two coordinators would share the port."""
  host, _, port = address.rpartition(":")
  family = socket.AF_INET6 if ":" in host else socket.AF_INET
  try:
    with socket.socket(family) as probe:
      # What an earlier coordinator has left in TIME_WAIT is no obstacle.
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
      f"error: {who} of the trainer waited {settings.start_deadline_s:.0f} s at"
      f" {address or 'the address that JAX found'} and not all of"
      f" config.trainer.num_processes = {settings.num_processes} came: start"
      " each number from 0 on once, with one coordinator",
      file=sys.stderr,
      flush=True,
  )
  os._exit(processes.EXIT_CONFIG)  # pylint: disable=protected-access
