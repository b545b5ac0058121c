# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Searcher process of the store benchmark.

The first line of standard input is a JSON object of settings, each further line
a command: `rate R` sends R blocks per second (0: none, -1: unlimited), and `raw
PORT BYTES PIECE` sends bytes to a local socket. The process ends with its
input.
"""

import json
import socket
import sys
import threading
import time

import ml_collections
import numpy as np

from tba_jax import types
from tba_jax.system import processes
from tba_jax.transport import wire
from tba_jax.transport.groups import queue_client
from tba_jax.transport.kv import kv_client

_PROMPT_TOKENS = 16
# Distinct groups are sent in turn, to defeat caches.
_POOL = 16


def make_groups(
    num_completions: int, completion_tokens: int
) -> list[types.Group]:
  """Returns groups of full-length random completions."""
  rng = np.random.default_rng(0)
  shape = (num_completions, completion_tokens)
  return [
      types.Group(
          prompt_id=i,
          visit=0,
          position=i,
          prompt_tokens=np.arange(1, _PROMPT_TOKENS + 1, dtype=np.int32),
          completion_tokens=rng.integers(1, 30_000, shape, np.int32),
          completion_lengths=np.full(shape[0], shape[1], np.int32),
          sampled_mask=np.ones(shape, np.bool_),
          stopped=np.ones(shape[0], np.bool_),
          behavior_logprobs=-rng.random(shape, np.float32),
          rewards=rng.random(shape[0], np.float32),
          versions=np.zeros(shape[0], np.int32),
          epoch=0,
      )
      for i in range(_POOL)
  ]


class _Feeder:
  """A thread that submits blocks of one group at the rate of `rate`."""

  def __init__(
      self, client: queue_client.QueueClient, groups: list[types.Group]
  ):
    self.rate = 0.0
    self._client = client
    self._groups = groups
    self._thread = threading.Thread(target=self._run, daemon=True)
    self._thread.start()

  def _run(self) -> None:
    count, due = 0, time.monotonic()
    while True:
      rate, now = self.rate, time.monotonic()
      if not rate or (rate > 0 and now < due):
        time.sleep(0.002)
        continue
      if rate > 0:
        # After a pause or a full ring, catch up by only one block.
        due = max(due, now - 1.0 / rate) + 1.0 / rate
      group = self._groups[count % len(self._groups)]
      self._client.submit([group])
      count += 1


def main() -> None:
  """Executes the commands on standard input until it ends."""
  processes.die_with_parent()
  settings = json.loads(sys.stdin.readline())
  processes.pin(settings["cores"])
  client = queue_client.QueueClient(
      ml_collections.ConfigDict({"search": settings}),
      wire.RunIdentity(settings["run_id"], bytes.fromhex(settings["secret"])),
      make_transport=lambda: kv_client.KvTransport(
          settings["locator"], deadline_s=60.0
      ),
      sid="searcher",
      index=0,
      on_event=lambda kind, message: print(kind, message, file=sys.stderr),
  )
  feeder = _Feeder(
      client,
      make_groups(settings["num_completions"], settings["completion_tokens"]),
  )
  for line in sys.stdin:
    command, *numbers = line.split()
    if command == "rate":
      feeder.rate = float(numbers[0])
    else:
      _send_raw(*map(int, numbers))
  client.close(0.0)


def _send_raw(port: int, num_bytes: int, piece: int) -> None:
  data = bytes(piece)
  with socket.create_connection(("127.0.0.1", port)) as connection:
    for _ in range(num_bytes // piece):
      connection.sendall(data)


if __name__ == "__main__":
  main()
