# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Carries params from device to device by `jax.experimental.transfer`.

An offer serves one pull, and a pull that nobody has offered hangs. So a reader
first asks in the store (`x/want/<reader>`), the trainer offers what it asked
for and says so (`x/offer/<reader>`), and only then the reader pulls, in a
thread that is given up at a deadline. A reader with a mesh asks for parts of
leaves, and each comes to the device that needs it. What came is held to the
digests of the manifest.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
import datetime
import secrets
import socket
import time
from typing import Any

import jax
import numpy as np

from tba_jax.carriers import base
from tba_jax.carriers import boxes
from tba_jax.transport import base as transports
from tba_jax.transport import wire

_WANT = "x/want"
_OFFER = "x/offer"
_POLL_S = 0.01
# An offer that nobody takes holds its version in memory.
_OFFER_S = 120

# By leaf: its parts.
_Parts = dict[str, list[boxes.Box]]


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
      placement: base.Placement | None = None,
  ):
    """Opens nothing yet.

    Args:
      run_id: the run.
      secret: key of the run's messages.
      find_host: returns this host's address as the others reach it.
      deadline_s: of one pull, and of the answer before it.
      placement: sharding of a leaf that is read, by its path; None = whole on
        one device.
    """
    self._run_id = run_id
    self._secret = secret
    self._find_host = find_host
    self._deadline_s = deadline_s
    self._placement = placement
    self._reader = secrets.token_hex(8)
    self._server: Any = None
    self._answered: dict[str, str] = {}
    # The newest version as it was last cut: tag, parts, arrays.
    self._cut: tuple[str, _Parts, list[jax.Array]] | None = None

  def pack(self, tag: str, leaves: Mapping[str, Any]) -> base.Packed:
    self._start()
    arrays = {name: _on_one_device(leaf) for name, leaf in leaves.items()}
    digests = {
        name: [base.digest(p) for p in base.pieces(base.flat_bytes(array))]
        for name, array in arrays.items()
    }
    return base.Packed(tag, {"digests": digests}, arrays)

  def serve(
      self, transport: transports.Transport, packed: base.Packed | None
  ) -> None:
    for key, data in transport.list(_WANT).items():
      reader = key.rpartition("/")[2]
      try:
        want = wire.decode_placed(data, self._secret, self._run_id, key)
        tag, nonce, parts = want["tag"], want["nonce"], want["parts"]
      except (wire.WireError, KeyError):
        transport.delete(key)
        continue
      # A question that is put again has had its answer.
      if self._answered.get(reader) != nonce:
        self._answered[reader] = nonce
        offer = {"nonce": nonce, "uuid": -1, "address": ""}
        if packed is not None and packed.tag == tag:
          offer.update(self._offer(packed, parts))
        self._put(transport, f"{_OFFER}/{reader}", offer)
      transport.delete(key)

  def drop(self, packed: base.Packed) -> None:
    packed.held = None
    if self._cut is not None and self._cut[0] == packed.tag:
      self._cut = None

  def read(
      self,
      transport: transports.Transport,
      tag: str,
      carried: Mapping[str, Any],
      specs: base.Specs,
  ) -> dict[str, Any] | None:
    self._start()
    places = self._places(specs)
    parts = {name: [box for box, _ in found] for name, found in places.items()}
    offer = self._ask(transport, tag, parts)
    if offer["uuid"] < 0:
      return None
    wanted = [
        jax.ShapeDtypeStruct(
            [stop - start for start, stop in box],
            specs[name][1],
            sharding=jax.sharding.SingleDeviceSharding(devices[0]),
        )
        for name, found in places.items()
        for box, devices in found
    ]
    arrays = iter(self._pull(offer, wanted))
    leaves = {
        name: self._assemble(name, specs[name][0], places[name], arrays)
        for name in specs
    }
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

  def _places(
      self, specs: base.Specs
  ) -> dict[str, list[tuple[boxes.Box, list[jax.Device]]]]:
    """Returns the parts of each leaf, with the devices that need them."""
    places = {}
    for name, (shape, _) in specs.items():
      indices = {jax.local_devices()[0]: ()}
      if self._placement is not None:
        indices = self._placement(name).addressable_devices_indices_map(shape)
      places[name] = found = []
      for device, index in indices.items():
        box = boxes.of(index, shape)
        same = [devices for other, devices in found if other == box]
        if same:
          same[0].append(device)
        else:
          found.append((box, [device]))
    return places

  def _assemble(
      self,
      name: str,
      shape: tuple[int, ...],
      places: Sequence[tuple[boxes.Box, list[jax.Device]]],
      arrays: Iterator[jax.Array],
  ) -> jax.Array:
    """Returns a leaf from the next arrays, its parts, where it is placed."""
    parts = [
        jax.device_put(part, device)
        for (_, devices), part in zip(places, arrays)
        for device in devices
    ]
    if self._placement is None:
      return parts[0]
    return jax.make_array_from_single_device_arrays(
        shape, self._placement(name), parts
    )

  def _offer(self, packed: base.Packed, parts: _Parts) -> dict[str, Any]:
    uuid = secrets.randbits(62)
    until = datetime.datetime.now(datetime.UTC) + datetime.timedelta(
        seconds=_OFFER_S
    )
    # Readers with one mesh ask for the same parts.
    if self._cut is None or self._cut[:2] != (packed.tag, parts):
      self._cut = packed.tag, parts, _parts_of(packed.held, parts)
    self._server.await_pull(uuid, self._cut[2], timeout=until)
    return {"uuid": uuid, "address": self._server.address()}

  def _ask(
      self, transport: transports.Transport, tag: str, parts: _Parts
  ) -> dict[str, Any]:
    """Returns the trainer's answer to our question."""
    nonce = secrets.token_hex(16)
    want = {"tag": tag, "nonce": nonce, "parts": parts}
    self._put(transport, f"{_WANT}/{self._reader}", want)
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


def _parts_of(
    leaves: Mapping[str, jax.Array], parts: _Parts
) -> list[jax.Array]:
  """Returns the parts of leaves; of a whole one the leaf itself."""
  return [
      leaf if boxes.size(box) == leaf.size else leaf[boxes.slices(box)]
      for name, leaf in leaves.items()
      for box in parts[name]
  ]
