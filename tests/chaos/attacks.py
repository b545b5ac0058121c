# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""A process that reaches a port and does harm there.

    python -m tests.chaos.attacks ATTACK HOST:PORT PROTOCOL [ROOT]

  garbage      100 connections a second, each with 64 KB of random bytes
  slow         200 connections, each with a byte of a request every half second
  connections  10,000 that say nothing, opened again as they are closed
  replayed     20 times a second an older value of a key of the store, or a copy
               of another key's
  forged       the same, with the message of another run and start of the
               trainer

PROTOCOL is `store`, `announcer` or `http`. The last two attacks take the
directory of the store's keys as ROOT; without it they find no key, and write to
the names that keys have without one. It prints once a second how often it
acted, and ends with its parent.
"""

import asyncio
from collections.abc import Callable, Coroutine
import contextlib
import os
import random
import sys
import time

from tba_jax.system import processes
from tba_jax.transport import wire
from tba_jax.transport.kv import jax_kv
from tba_jax.transport.kv import locator

ATTACKS = ("garbage", "slow", "connections")
ON_KEYS = ("replayed", "forged")
# Beginnings of what each protocol expects.
_BEGINNINGS = {
    "store": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "announcer": bytes(15),
    "http": b"POST /api/v1/asample HTTP/1.1\r\nHost: x\r\nX-A: ",
}
_GARBAGE_PER_S, _GARBAGE_BYTES, _GARBAGE_WAIT_S = 100, 1 << 16, 1.0
_SLOW_COUNT, _SLOW_S = 200, 0.5
_CONNECTIONS, _OPENED_PER_S = 10_000, 2000
_KEYS_PER_S = 20
_DIRECTORIES = ("live", "q", "new", "work", "p", "join", "meta", "ask", "ctl",
                "status")  # fmt: skip
_NAMES = ("p_cur", "meta/trainer", "status/run", "live/s000", "work/s000",
          "new/0/s000/000000000000")  # fmt: skip


class _Count:
  value = 0


async def _garbage(host: str, port: int, protocol: str, count: _Count) -> None:
  del protocol

  async def send() -> None:
    with contextlib.suppress(OSError, TimeoutError):
      async with asyncio.timeout(_GARBAGE_WAIT_S):
        reader, writer = await asyncio.open_connection(host, port)
        with contextlib.closing(writer):
          writer.write(os.urandom(_GARBAGE_BYTES))
          await writer.drain()
          while await reader.read(1 << 16):
            pass
    count.value += 1

  tasks = set()
  while True:
    task = asyncio.create_task(send())
    tasks.add(task)
    task.add_done_callback(tasks.discard)
    await asyncio.sleep(1 / _GARBAGE_PER_S)


async def _slow(host: str, port: int, protocol: str, count: _Count) -> None:
  async def send() -> None:
    while True:
      with contextlib.suppress(OSError):
        _, writer = await asyncio.open_connection(host, port)
        with contextlib.closing(writer):
          for byte in _BEGINNINGS[protocol] + b"a" * 10_000:
            writer.write(bytes([byte]))
            await writer.drain()
            count.value += 1
            await asyncio.sleep(_SLOW_S)
      await asyncio.sleep(_SLOW_S)

  await asyncio.gather(*(send() for _ in range(_SLOW_COUNT)))


async def _connections(
    host: str, port: int, protocol: str, count: _Count
) -> None:
  del protocol
  pause_s = _CONNECTIONS / _OPENED_PER_S

  async def hold(number: int) -> None:
    await asyncio.sleep(number / _OPENED_PER_S)
    while True:
      with contextlib.suppress(OSError):
        reader, writer = await asyncio.open_connection(host, port)
        count.value += 1
        with contextlib.closing(writer):
          while await reader.read(1 << 16):
            pass
      await asyncio.sleep(pause_s)

  await asyncio.gather(*(hold(number) for number in range(_CONNECTIONS)))


class _Keys:
  """Writes old, copied or forged values over keys of a store."""

  def __init__(self, address: str, root: str, attack: str):
    self._client = jax_kv.connect(address)
    self._root = f"{root}/" if root else ""
    self._forges = attack == "forged"
    self._secret = os.urandom(32)
    self._rng = random.Random(0)
    self._seen: dict[str, bytes] = {}

  def act(self) -> None:
    now = {}
    for name in _DIRECTORIES:
      for key, value in self._client.key_value_dir_get_bytes(self._root + name):
        # Names come without the service's own beginning.
        now[key if key.startswith(self._root) else self._root + key] = value
    names = list(now) or [self._root + name for name in _NAMES]
    key = self._rng.choice(names)
    old = self._seen.get(key) or self._rng.choice(list(now.values()) or [b"x"])
    value = self._forge(old) if self._forges else old
    self._client.key_value_set_bytes(key, value, allow_overwrite=True)
    # The first value of each key is kept: the oldest.
    self._seen = {**now, **self._seen}

  def _forge(self, data: bytes) -> bytes:
    """Returns a message of another run, at another start of its trainer."""
    try:
      header, arrays = wire.decode_unverified(data)
    except wire.WireError:
      header, arrays = {"run": "other", "key": "live/s000"}, {}
    if isinstance(header.get("epoch"), int):
      header["epoch"] += 1
    return wire.encode({**header, "run": "other"}, arrays, self._secret)


def _act_on_keys(address: str, root: str, attack: str) -> None:
  keys, count, told = _Keys(address, root, attack), 0, 0.0
  while True:
    keys.act()
    count += 1
    if time.monotonic() > told + 1.0:
      told = time.monotonic()
      print(count, flush=True)
    time.sleep(1 / _KEYS_PER_S)


_Attack = Callable[[str, int, str, _Count], Coroutine[None, None, None]]


async def _run(attack: _Attack, address: str, protocol: str) -> None:
  count = _Count()
  task = asyncio.create_task(
      attack(*locator.split_address(address), protocol, count)
  )
  while not task.done():
    print(count.value, flush=True)
    await asyncio.wait([task], timeout=1.0)
  task.result()


def main() -> None:
  """Does harm until it is killed."""
  name, address, protocol, *root = sys.argv[1:]
  processes.die_with_parent()
  processes.raise_open_files()
  if name in ON_KEYS:
    with contextlib.suppress(jax_kv.KvError):  # The store has ended.
      _act_on_keys(address, *(root or ("",)), name)
    return
  attack = {"garbage": _garbage, "slow": _slow, "connections": _connections}
  asyncio.run(_run(attack[name], address, protocol))


if __name__ == "__main__":
  main()
