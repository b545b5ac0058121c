# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Simulated searchers of the scale benchmark, in one process.

Each searcher has its own client. Instead of sampling it sleeps for half to one
and a half times the mean, so searchers do not run in step. The first line of
standard input is a JSON object of settings. `start NAME COUNT SECONDS` starts
searchers with this mean sleep per group; `stop FILE` ends them and writes their
log. The process ends with its input.
"""

from collections.abc import Sequence
from concurrent import futures
import dataclasses
import functools
import json
import pathlib
import sys
import threading
import time
from typing import Any

import ml_collections
import numpy as np

from benchmarks import store_searcher
from tba_jax import types
from tba_jax.system import processes
from tba_jax.transport import wire
from tba_jax.transport.groups import queue_client
from tba_jax.transport.kv import kv_client

COMPLETIONS = 8
TOKENS = 64
_FLUSH_S = 3.0


class _CountedTransport(kv_client.KvTransport):
  """Transport that counts requests to the store."""

  num_calls = 0

  def put(self, key: str, value: bytes, *, overwrite: bool = True) -> bool:
    self.num_calls += 1
    return super().put(key, value, overwrite=overwrite)

  def get(self, key: str) -> bytes | None:
    self.num_calls += 1
    return super().get(key)


class _Searchers:
  """Searchers that run at the same time."""

  def __init__(
      self,
      settings: dict[str, Any],
      groups: Sequence[types.Group],
      name: str,
      count: int,
      sample_s: float,
  ):
    self._settings = settings
    self._groups = groups
    self._sample_s = sample_s
    self._stop = threading.Event()
    # [start of sampling, its end] of each block, by searcher.
    self._times: dict[str, list[list[float]]] = {}
    self._clients: list[queue_client.QueueClient] = []
    self._threads = []
    self._transports: list[_CountedTransport] = []
    self._cpu_s, self._wall_s = time.process_time(), time.monotonic()
    for index in range(count):
      sid = f"{name}-{index:03d}"
      self._times[sid] = []
      client = self._make_client(sid, index)
      self._clients.append(client)
      search = functools.partial(self._search, sid, client, index)
      self._threads.append(threading.Thread(target=search, daemon=True))
    for thread in self._threads:
      thread.start()

  def _make_client(self, sid: str, index: int) -> queue_client.QueueClient:
    settings = self._settings
    return queue_client.QueueClient(
        ml_collections.ConfigDict({"search": settings}),
        wire.RunIdentity(settings["run_id"], bytes.fromhex(settings["secret"])),
        make_transport=self._make_transport,
        sid=sid,
        index=index,
        on_event=lambda kind, message: print(kind, message, file=sys.stderr),
    )

  def _make_transport(self) -> _CountedTransport:
    locator = self._settings["locator"]
    self._transports.append(_CountedTransport(locator, deadline_s=60.0))
    return self._transports[-1]

  def _search(
      self, sid: str, client: queue_client.QueueClient, index: int
  ) -> None:
    count, rng = index, np.random.default_rng(index)
    # Start in the middle of a round, as after some time.
    shortest, longest = 0.0, 1.0
    while not self._stop.is_set():
      block = client.next_assignment(0.1)
      if block is None:
        continue
      start = time.monotonic()
      time.sleep(self._sample_s * rng.uniform(shortest, longest))
      shortest, longest = 0.5, 1.5
      groups = []
      for position, prompt_id, visit in block.prompts:
        count += 1
        groups.append(
            dataclasses.replace(
                self._groups[count % len(self._groups)],
                position=position,
                prompt_id=prompt_id,
                visit=visit,
                epoch=block.epoch,
            )
        )
      end = time.monotonic()
      if client.submit(groups, self._stop.is_set):
        self._times[sid].append([start, end])

  def stop(self, path: pathlib.Path) -> None:
    """Ends all searchers; writes their sampling times and CPU time."""
    wall_s = time.monotonic() - self._wall_s
    busy_share = (time.process_time() - self._cpu_s) / wall_s
    asks_per_s = sum(t.num_calls for t in self._transports) / wall_s
    self._stop.set()
    for thread in self._threads:
      thread.join()
    with futures.ThreadPoolExecutor(len(self._clients)) as pool:
      list(pool.map(lambda client: client.close(_FLUSH_S), self._clients))
    report = {"busy_share": busy_share, "asks_per_s": asks_per_s}
    text = json.dumps({"times": self._times, **report})
    temporary = path.with_suffix(".part")
    temporary.write_text(text)
    temporary.rename(path)


def main() -> None:
  """Executes the commands on standard input until it ends."""
  processes.die_with_parent()
  settings = json.loads(sys.stdin.readline())
  processes.pin(settings["cores"])
  groups = store_searcher.make_groups(COMPLETIONS, TOKENS)
  searchers = None
  for line in sys.stdin:
    command, *words = line.split()
    if command == "start":
      name, count, seconds = words
      searchers = _Searchers(settings, groups, name, int(count), float(seconds))
    elif command == "stop":
      searchers.stop(pathlib.Path(words[0]))


if __name__ == "__main__":
  main()
