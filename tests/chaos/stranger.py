# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""A process that reaches a run's store and does harm there.

    python -m tests.chaos.stranger LOCATOR RATE [ROOT]

writes, overwrites and deletes RATE times a second the keys that a run has, and
those that it finds by listing. It has no secret; with ROOT it knows the
directory of the run's keys all the same. It prints the number of operations
once a second, and ends with the store.
"""

import random
import socket
import sys
import time

from tba_jax.system import processes
from tba_jax.transport.kv import jax_kv
from tba_jax.transport.kv import locator

_DIRECTORIES = ("live", "q", "new", "work", "p", "join", "meta", "ask", "ctl")
_KEYS = ("p_cur", "ctl/stop", "meta/trainer", "meta/settings", "meta/store",
         "status/run", "new/0/s000/000000000000", "q/0/s000/000000000000",
         "live/s000", "work/s000",
         f"join/{socket.gethostname()}/0/50000000")  # fmt: skip
_LIST_EVERY_S = 0.25
_SIZES = (1, 100, 10_000)
# Shares of operations on keys that were found, and of writes; the other
# operations delete, half of them a whole directory.
_FOUND, _WRITES = 0.7, 0.6


class _Stranger:

  def __init__(self, root: str):
    self._root = f"{root}/" if root else ""
    self._rng = random.Random(0)
    self._keys: list[str] = []
    self._listed = 0.0

  def act(self, client: jax_kv.Client) -> None:
    """Does one operation, and now and then lists all directories."""
    rng, now = self._rng, time.monotonic()
    if now > self._listed + _LIST_EVERY_S:
      self._listed = now
      self._keys = [
          key
          for name in _DIRECTORIES
          for key, _ in client.key_value_dir_get_bytes(self._root + name)
      ]
    if self._keys and rng.random() < _FOUND:
      key = rng.choice(self._keys)
    else:
      key = self._root + rng.choice(_KEYS)
    if rng.random() < _WRITES:
      data = rng.randbytes(rng.choice(_SIZES))
      client.key_value_set_bytes(key, data, allow_overwrite=True)
    elif rng.random() < 0.5:
      client.key_value_delete(key)
    else:
      client.key_value_delete(self._root + rng.choice(_DIRECTORIES))


def main() -> None:
  """Does harm until the store ends."""
  path, rate, *root = sys.argv[1:]
  processes.die_with_parent()
  client = jax_kv.connect(locator.read_locator(path).address)
  stranger = _Stranger(*root or ("",))
  count, told, due = 0, 0.0, time.monotonic()
  while True:
    now = time.monotonic()
    if now < due:
      time.sleep(due - now)
    # A tenth of a second is made up for what a pause held up.
    due = max(due, now - 0.1) + 1.0 / float(rate)
    try:
      stranger.act(client)
    except jax_kv.KvError as error:
      if jax_kv.error_code(error) == "UNAVAILABLE":
        break
      raise
    count += 1
    if now > told + 1.0:
      told = now
      print(count, flush=True)


if __name__ == "__main__":
  main()
