# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Carries params from device to device by `jax.experimental.transfer`.

An offer serves one pull, and a pull that nobody has offered hangs. So a reader
first asks in the store (`x/want/<reader>`), the trainer offers what it asked
for and says so (`x/offer/<reader>`), and only then the reader pulls, in a
thread that is given up at a deadline. What came is held to the digests of the
manifest.
"""

from collections.abc import Callable, Mapping, Sequence
import datetime
import secrets
import socket
import time
from typing import Any

import jax
import numpy as np

from tba_jax.carriers import base
from tba_jax.transport import base as transports
from tba_jax.transport import wire

_WANT = "x/want"
_OFFER = "x/offer"
_POLL_S = 0.01
# An offer that nobody takes holds its version in memory.
_OFFER_S = 120


class Transfer(base.Carrier):
  """The carrier "transfer"."""

  name = "transfer"

  def __init__(
      self,
      *,
      run_id: str,
      secret: bytes,
      find_host: Callable[[], str],
      deadline_s: float,
  ):
    """Opens nothing yet.

    Args:
      run_id: the run.
      secret: key of the run's messages.
      find_host: returns this host's address as the others reach it.
      deadline_s: of one pull, and of the answer before it.
    """
    self._run_id = run_id
    self._secret = secret
    self._find_host = find_host
    self._deadline_s = deadline_s
    self._reader = secrets.token_hex(8)
    self._server: Any = None
    self._answered: dict[str, str] = {}

  def pack(self, tag: str, leaves: Mapping[str, Any]) -> base.Packed:
    self._start()
    arrays = {name: _on_one_device(leaf) for name, leaf in leaves.items()}
    digests = {
        name: [base.digest(p) for p in base.pieces(base.flat_bytes(array))]
        for name, array in arrays.items()
    }
    return base.Packed(tag, {"digests": digests}, list(arrays.values()))

  def serve(
      self, transport: transports.Transport, packed: base.Packed | None
  ) -> None:
    for key, data in transport.list(_WANT).items():
      reader = key.rpartition("/")[2]
      try:
        want = wire.decode_placed(data, self._secret, self._run_id, key)
        tag, nonce = want["tag"], want["nonce"]
      except (wire.WireError, KeyError):
        transport.delete(key)
        continue
      # A question that is put again has had its answer.
      if self._answered.get(reader) != nonce:
        self._answered[reader] = nonce
        offer = {"nonce": nonce, "uuid": -1, "address": ""}
        if packed is not None and packed.tag == tag:
          offer.update(self._offer(packed.held))
        self._put(transport, f"{_OFFER}/{reader}", offer)
      transport.delete(key)

  def drop(self, packed: base.Packed) -> None:
    packed.held = None

  def read(
      self,
      transport: transports.Transport,
      tag: str,
      carried: Mapping[str, Any],
      specs: base.Specs,
  ) -> dict[str, Any] | None:
    self._start()
    offer = self._ask(transport, tag)
    if offer["uuid"] < 0:
      return None
    device = jax.local_devices()[0]
    sharding = jax.sharding.SingleDeviceSharding(device)
    wanted = [
        jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)
        for shape, dtype in specs.values()
    ]
    arrays = self._pull(offer, wanted)
    leaves = dict(zip(specs, arrays, strict=True))
    for name, leaf in leaves.items():
      digests = carried["digests"].get(name)
      found = list(base.pieces(base.flat_bytes(leaf)))
      if digests is None or len(digests) != len(found):
        raise wire.WireError("leaves", f"leaf {name} is not in version {tag}")
      for piece, digest in zip(found, digests, strict=True):
        base.check_digest(name, piece, digest)
    return leaves

  def close(self) -> None:
    self._server = None

  def _start(self) -> None:
    if self._server is None:
      # Not every platform has it.
      from jax.experimental import transfer  # pylint: disable=g-import-not-at-top

      host = self._find_host()
      client = jax.local_devices()[0].client
      try:
        self._server = transfer.start_transfer_server(
            client, f"{host}:0", [f"{host}:0"]
        )
      except RuntimeError as error:
        raise OSError(f"no transfer server on {host}: {error}") from error

  def _offer(self, arrays: Sequence[jax.Array]) -> dict[str, Any]:
    uuid = secrets.randbits(62)
    until = datetime.datetime.now(datetime.UTC) + datetime.timedelta(
        seconds=_OFFER_S
    )
    self._server.await_pull(uuid, list(arrays), timeout=until)
    return {"uuid": uuid, "address": self._server.address()}

  def _ask(self, transport: transports.Transport, tag: str) -> dict[str, Any]:
    """Returns the trainer's answer to our question."""
    nonce = secrets.token_hex(16)
    self._put(
        transport, f"{_WANT}/{self._reader}", {"tag": tag, "nonce": nonce}
    )
    key = f"{_OFFER}/{self._reader}"
    deadline = time.monotonic() + self._deadline_s
    while time.monotonic() < deadline:
      data = transport.get(key)
      if data is not None:
        offer = wire.decode_placed(data, self._secret, self._run_id, key)
        if offer.get("nonce") == nonce:
          transport.delete(key)
          return offer
      time.sleep(_POLL_S)
    raise wire.WireError(
        "deadline",
        f"no offer of version {tag} within {self._deadline_s:.0f} s: its"
        " trainer is away",
    )

  def _pull(
      self, offer: Mapping[str, Any], wanted: list[jax.ShapeDtypeStruct]
  ) -> list[jax.Array]:
    """Returns the arrays, once all are here.

    It asks whether they are: a pull that fails may never end, and a thread that
    waits inside it could not be ended with its process.
    """
    deadline = time.monotonic() + self._deadline_s
    try:
      connection = self._server.connect(offer["address"])
      arrays = connection.pull(offer["uuid"], wanted)
      while not all(array.is_ready() for array in arrays):
        if time.monotonic() > deadline:
          raise TimeoutError(f"nothing within {self._deadline_s:.0f} s")
        time.sleep(_POLL_S)
      return jax.block_until_ready(arrays)
    except (RuntimeError, ValueError, TimeoutError) as error:
      raise wire.WireError(
          "transfer", f"pull from {offer['address']}: {error}"
      ) from error

  def _put(
      self, transport: transports.Transport, key: str, message: dict[str, Any]
  ) -> None:
    message = {"run": self._run_id, "key": key, **message}
    transport.put(key, wire.encode_message(message, self._secret))


def own_address(other: str) -> str:
  """Returns the address of this host's interface that leads to `other`.

  Raises:
    OSError: nothing leads there.
  """
  family, _, _, _, target = socket.getaddrinfo(
      other, 9, type=socket.SOCK_DGRAM
  )[0]
  # Nothing is sent: the system only chooses a route.
  with socket.socket(family, socket.SOCK_DGRAM) as probe:
    probe.connect(target)
    host = probe.getsockname()[0]
  return f"[{host}]" if ":" in host else host


def _on_one_device(leaf: Any) -> jax.Array:
  if isinstance(leaf, jax.Array) and len(leaf.devices()) == 1:
    return leaf
  return jax.device_put(np.asarray(leaf), jax.local_devices()[0])
