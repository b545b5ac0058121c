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

from collections.abc import Callable, Mapping
import dataclasses
import os
import queue
import sys
import threading
import time
from typing import Any

from absl import logging
import jax

from tba_jax import local_mesh
from tba_jax import processes
from tba_jax import save_barrier
from tba_jax.transport import base
from tba_jax.transport import jax_kv
from tba_jax.transport import wire

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

  def tell(self, name: str, fields: Mapping[str, Any] | None = None) -> None:
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
      self.tell("begin")
      return
    command = self.hear(lambda: False)
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
    return local_mesh.make_gather(mesh)

  def save_barrier(self, deadline_s: float) -> save_barrier.SaveBarrier | None:
    """Returns where the processes meet that save together; None for one.

    Args:
      deadline_s: of a whole save.
    """
    if self._client is None:
      return None
    return save_barrier.SaveBarrier(
        self._client, self.process, self.num_processes, deadline_s=deadline_s
    )

  def hear(self, should_stop: Callable[[], bool]) -> Command:
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
          self.tell("alive")
      return self._stop_asked or should_stop()

    return any_should_stop if self.leads else should_stop

  def end(self, status: int) -> None:
    """Tells the others to end with a status; the first one counts."""
    if self.leads and not self._ended:
      self._ended = True
      self.tell("end", {"status": status})

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
