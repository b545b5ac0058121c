# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Store, journal, searcher process and drain for benchmarks."""

import collections
from collections.abc import Iterator
import contextlib
import json
import pathlib
import secrets
import socket
import subprocess
import sys
import tempfile
import threading
import time
from typing import Any

import ml_collections

from tba_jax.replay import prompt_order
from tba_jax.system import processes
from tba_jax.transport import wire
from tba_jax.transport.groups import queue_server
from tba_jax.transport.kv import kv_client
from tba_jax.transport.kv import kv_host

# A block is one group of 64 completions of 512 tokens, with 4 bytes per token
# and per log-prob.
COMPLETIONS = 64
TOKENS = 512
BLOCK_BYTES = COMPLETIONS * TOKENS * 8
_RUN = "benchmark"
_PROMPTS = 1_000_000
_DEADLINE_S = 120.0
# Seconds until blocks in flight have arrived after the searcher was paused.
_SETTLE_S = 0.3


class Draining:
  """A drain with a log of received blocks."""

  def __init__(self, drain: queue_server.QueueServer):
    self._drain = drain
    self.watermarks: dict[str, int] = {}
    # Searcher, sequence and time of each block, if logged.
    self.log: list[tuple[str, int, float]] | None = None

  def poll_stats(self) -> collections.Counter[str]:
    """Returns the sums over the server's polls so far."""
    return self._drain.poll_stats.copy()

  def take(self) -> int:
    """Takes arrived blocks, as the trainer does; returns their number."""
    self._drain.check()
    records = self._drain.inbox.take()
    now = time.monotonic()
    for record in records:
      header = record.header
      if "sequence" not in header:
        continue  # A searcher has left.
      self.watermarks[header["sid"]] = header["sequence"] + 1
      if self.log is not None:
        self.log.append((header["sid"], header["sequence"], now))
    return len(records)

  def receive_for(self, seconds: float) -> None:
    """Takes arriving blocks for a while, like a trainer waiting for data."""
    deadline = time.monotonic() + seconds
    self._drain.admit(_PROMPTS)
    self._drain.urgent = True
    while (remaining_s := deadline - time.monotonic()) > 0:
      self._drain.inbox.wait(min(remaining_s, 0.1))
      self.take()

  def receive(self, num_blocks: int) -> None:
    """Waits for `num_blocks` blocks; raises RuntimeError if none arrive."""
    deadline = time.monotonic() + _DEADLINE_S
    self._drain.urgent = True
    while num_blocks > 0:
      self._drain.inbox.wait(1.0)
      num_blocks -= self.take()
      if time.monotonic() > deadline:
        raise RuntimeError(f"{num_blocks} blocks did not arrive in time")
    self._drain.urgent = False


class Queue(contextlib.ExitStack):
  """Host, store, journal and searcher process; all end with this stack."""

  def __init__(
      self,
      config: ml_collections.ConfigDict,
      child: str = "benchmarks.store_searcher",
  ):
    """Starts all parts.

    Args:
      config: settings with `replay`, `search` and `store`.
      child: module of the searcher process.
    """
    super().__init__()
    self._config = config
    self._child_module = child
    self._secret = secrets.token_bytes(wire.SECRET_BYTES)
    self._watermarks: dict[str, int] = {}
    self._saved: dict[str, Any] | None = None
    self._folder = pathlib.Path(
        self.enter_context(tempfile.TemporaryDirectory(prefix="tba_jax_"))
    )
    try:
      self._start()
    except BaseException:
      self.close()
      raise

  def _start(self) -> None:
    cores = processes.assign_cores(1)
    host = kv_host.KvHost(
        self._folder / "spool",
        _RUN,
        probe_timeout_s=kv_host.probe_timeout_s(self._config.store.deadline_s),
        on_event=_on_event,
    )
    stop = threading.Event()
    thread = threading.Thread(target=host.run, args=(stop,))
    thread.start()
    self.callback(thread.join)
    self.callback(stop.set)
    self._locator = host.locator_path
    self._host = host
    self._child = subprocess.Popen(
        [sys.executable, "-m", self._child_module],
        stdin=subprocess.PIPE,
        text=True,
    )
    self.callback(self._end_child)
    processes.pin(cores["trainer"])
    self.say(
        json.dumps(
            {
                "cores": cores["searchers"][0],
                "locator": str(self._locator),
                "run_id": _RUN,
                "secret": self._secret.hex(),
                "credits": self._config.search.credits,
                "lease_s": self._config.search.lease_s,
                "num_completions": COMPLETIONS,
                "completion_tokens": TOKENS,
            }
        )
    )

  def feed(self, blocks_per_s: float) -> None:
    """Sets the searcher's rate of blocks; -1 is unlimited."""
    self.say(f"rate {blocks_per_s}")

  @contextlib.contextmanager
  def draining(self) -> Iterator[Draining]:
    """Runs a drain; afterwards the searcher is paused and the queue empty."""
    config = self._config.copy_and_resolve_references()
    config.search.prompts_per_round = 1
    config.search.lockstep = False
    config.rounds.mini_batches = 0
    order = prompt_order.PromptOrder(_PROMPTS, seed=0)
    drain = queue_server.QueueServer(
        config,
        wire.RunIdentity(_RUN, self._secret, self._folder),
        make_transport=self._transport,
        order=order,
        epoch=0,
        open_store=lambda transport: None,
        on_event=_on_event,
        saved=self._saved,
    )
    draining = Draining(drain)
    drain.start()
    try:
      yield draining
      self.feed(0)
      time.sleep(_SETTLE_S)
      draining.take()
    finally:
      drain.close()
    draining.take()
    self._watermarks.update(draining.watermarks)
    self._saved = {
        "applied": drain.journal.offset,
        "watermarks": self._watermarks,
        "order": prompt_order.Positions().get_state(order),
    }
    drain.journal.truncate_before(drain.journal.offset)

  def time_raw(self, num_bytes: int) -> float:
    """Returns the seconds to send bytes through a plain socket."""
    with socket.create_server(("127.0.0.1", 0)) as server:
      port = server.getsockname()[1]
      self.say(f"raw {port} {num_bytes} {BLOCK_BYTES}")
      server.settimeout(_DEADLINE_S)
      connection, _ = server.accept()
    with connection:
      start = time.perf_counter()
      # Assemble every block once, like the journal.
      while _read_block(connection):
        pass
      return time.perf_counter() - start

  def _transport(self) -> kv_client.KvTransport:
    return kv_client.KvTransport(
        self._locator,
        deadline_s=self._config.store.deadline_s,
        run_id=_RUN,
    )

  @property
  def folder(self) -> pathlib.Path:
    """Folder of the queue's files, deleted with the queue."""
    return self._folder

  @property
  def service_pid(self) -> int:
    """Process id of the key-value service."""
    return self._host.child_pid

  def say(self, line: str) -> None:
    """Sends the searcher process a command."""
    if self._child.poll() is not None:
      raise RuntimeError(f"the searcher ended with {self._child.returncode}")
    self._child.stdin.write(line + "\n")
    self._child.stdin.flush()

  def _end_child(self) -> None:
    self._child.stdin.close()
    try:
      self._child.wait(10.0)
    except subprocess.TimeoutExpired:
      self._child.kill()
      self._child.wait()


def _read_block(connection: socket.socket) -> bytes:
  """Returns the next block, or its beginning if the connection ends."""
  block = bytearray(BLOCK_BYTES)
  view, size = memoryview(block), 0
  while size < BLOCK_BYTES:
    count = connection.recv_into(view[size:])
    if not count:
      break
    size += count
  return bytes(view[:size])


def _on_event(kind: str, message: str) -> None:
  print(f"{kind}: {message}", file=sys.stderr)
