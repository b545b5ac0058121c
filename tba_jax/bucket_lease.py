# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Who works in a folder of a bucket: an object that its holder keeps writing.

A bucket has no locks, but a write may ask that the object is still the one that
was read. No JAX here.
"""

import dataclasses
import json
import os
import secrets
import socket
import time
from typing import Any

import tensorstore as ts

NAME = ".lease.json"
# A holder writes so often, and is gone where nothing came for so long.
RENEW_S = 15.0
GONE_S = 90.0
_LOOK_S = 1.0


class HeldError(ValueError):
  """Somebody else works there; the message names who."""


class LostError(RuntimeError):
  """Somebody else has taken the lease; what is here must not go on."""


@dataclasses.dataclass(frozen=True)
class State:
  """What an object says.

  claim: how often the folder was taken so far.
  token: of the last who took it.
  holder: who works there, for messages; "" = nobody.
  generation: of the object.
  """

  claim: int = 0
  token: str = ""
  holder: str = ""
  generation: bytes = b""


class Lease:
  """The lease of one folder; one thread at a time uses it."""

  def __init__(self, url: str):
    """Takes nothing yet.

    Args:
      url: of the folder, as TensorStore opens it.

    Raises:
      OSError: the bucket cannot be read.
    """
    self._url = url
    self._beat = 0
    self._mine = State()
    self._store = _call(url, lambda: ts.KvStore.open(f"{url}/").result())

  def look(self) -> State:
    """Returns what stands there now.

    Raises:
      OSError: the bucket cannot be read.
    """
    read = _call(self._url, lambda: self._store.read(NAME).result())
    try:
      saved = json.loads(read.value) if read.value else {}
      claim, token = int(saved.get("claim", 0)), str(saved.get("token", ""))
      holder = str(saved.get("holder", ""))
    except (ValueError, AttributeError) as error:
      raise OSError(f"{self._url}/{NAME} is damaged: {error!r}") from error
    return State(claim, token, holder, read.stamp.generation)

  def take(self, token: str, *, gone_s: float = GONE_S) -> State:
    """Takes the lease; waits to see that a holder that says nothing is gone.

    Args:
      token: that this host took it with the last time: its own processes do not
        run any more, so there is nothing to wait for.
      gone_s: how long to watch a holder of another host.

    Returns:
      What stands there from now on.

    Raises:
      HeldError: the holder lives, or was faster.
      OSError: the bucket cannot be read or written.
    """
    seen = self.look()
    if seen.holder and seen.token != token:
      seen = self._watch(seen, gone_s)
    who = f"process {os.getpid()} of {socket.gethostname()}"
    mine = State(seen.claim + 1, secrets.token_hex(8), who)
    if not self._write(mine, seen.generation):
      raise HeldError(f"{self._url}: {self.look().holder} was faster")
    return self._mine

  def renew(self) -> None:
    """Says that this process still works there.

    Raises:
      LostError: it is somebody else's.
      OSError: the bucket cannot be written now.
    """
    if not self._write(self._mine, self._mine.generation):
      found = self.look()
      raise LostError(
          f"{self._url}: {found.holder or 'another process'} has taken it over:"
          f" this process had said nothing for {GONE_S:.0f} s"
      )

  def release(self) -> None:
    """Says that nobody works there any more; raises as `renew`."""
    self._mine = dataclasses.replace(self._mine, holder="")
    self.renew()

  def _watch(self, seen: State, gone_s: float) -> State:
    """Returns what stands there once a holder is gone; else raises."""
    until = time.monotonic() + gone_s
    while time.monotonic() < until:
      time.sleep(min(_LOOK_S, gone_s))
      if (now := self.look()).generation != seen.generation:
        if not now.holder:
          return now
        raise HeldError(f"{self._url}: {now.holder} already runs there")
    return seen

  def _write(self, state: State, generation: bytes) -> bool:
    """Writes where the object is still of a generation; False: it is not."""
    self._beat += 1
    saved = {
        "claim": state.claim,
        "token": state.token,
        "holder": state.holder,
        "beat": self._beat,
    }
    data = json.dumps(saved).encode()
    write = lambda: self._store.write(NAME, data, if_equal=generation).result()
    written = _call(self._url, write).generation
    if not written:
      # Where the first answer was lost, the second try found our own write.
      read = _call(self._url, lambda: self._store.read(NAME).result())
      if read.value != data:
        return False
      written = read.stamp.generation
    self._mine = dataclasses.replace(state, generation=written)
    return True


def _call(url: str, call: Any) -> Any:
  try:
    return call()
  # TensorStore raises ValueError, RuntimeError, … for whatever a service says.
  except Exception as error:
    raise OSError(f"{url} cannot be used: {error}") from error
