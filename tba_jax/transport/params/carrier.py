# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Interface of the carriers, which move params from trainer to searchers.

A version's pointer and manifest are always in the store (`manifest.py`); a
carrier moves the leaves. It packs a version once and sends it to each new
generation of the store.
"""

import abc
from collections.abc import Callable, Mapping
import dataclasses
import functools
import hashlib
import pathlib
import socket
from typing import Any

import ml_collections
import numpy as np

from tba_jax.system import bucket
from tba_jax.transport import addresses
from tba_jax.transport import byte_store
from tba_jax.transport import wire
from tba_jax.transport.params import carriers
from tba_jax.transport.params import version as version_lib

# Size of the chunks of the store.
PIECE_BYTES = 1 << 20
# Up to this size, the store is as fast as a file and needs no directory.
SMALL_BYTES = 4 << 20


@dataclasses.dataclass(frozen=True)
class CarrierPlace:
  """Arguments of a run's carrier.

  directory: `config.publish.directory`.
  secret: key of the run's messages.
  deadline_s: longest time without progress of a transfer.
  find_address: returns where this process of the trainer serves versions.
  peers: trainer's other processes, if they write too; else None.
  """

  directory: str
  workdir: pathlib.Path
  run_id: str
  secret: bytes
  deadline_s: float
  find_address: Callable[[], str]
  peers: Any = None


@dataclasses.dataclass
class PackedVersion:
  """A version in the trainer, ready to be sent.

  carrier: transport that packed the version.
  specs: shape and dtype of every leaf, by path.
  carried: facts by which a reader finds and verifies the leaves, in JSON types.
  content: the carrier's own data, until the version is dropped.
  """

  version: version_lib.Version
  carrier: "Carrier"
  specs: version_lib.Specs
  carried: dict[str, Any]
  content: Any = None

  @property
  def tag(self) -> str:
    return self.version.tag


class Carrier(abc.ABC):
  """Moves leaves; used by one thread.

  name: carrier's name in the manifest and in `publish.carrier`.
  schema: form of `PackedVersion.carried`, as `jsonl.schema_error` reads it.
  """

  name: str
  schema: Mapping[str, Any] = {}

  @classmethod
  def make(cls, place: CarrierPlace) -> "Carrier":
    """Returns the carrier of a run."""
    del place
    return cls()

  def pack(
      self, version: version_lib.Version, leaves: Mapping[str, Any]
  ) -> PackedVersion:
    """Returns a version that is ready to be sent; raises as `write` does."""
    carried, content = self.write(version.tag, leaves)
    specs = version_lib.specs_of(leaves)
    return PackedVersion(version, self, specs, carried, content)

  @abc.abstractmethod
  def write(
      self, tag: str, leaves: Mapping[str, Any]
  ) -> tuple[dict[str, Any], Any]:
    """Returns `PackedVersion`'s `carried` and `content`; waits for the device.

    Args:
      tag: name of the version; may repeat after a restart.
      leaves: path to array, on devices or not.

    Raises:
      OSError: no room or no permission.
    """

  def send(
      self, transport: byte_store.Transport, packed: PackedVersion
  ) -> None:
    """Writes to the store; called for each new generation."""

  def serve(
      self, transport: byte_store.Transport, packed: PackedVersion | None
  ) -> None:
    """Does periodic work, a few times a second, with the newest version."""

  def is_full(self) -> bool:
    """Returns whether a write must wait for readers of dropped versions."""
    return False

  def drop(self, packed: PackedVersion) -> None:
    """Frees a version's data outside the store; readers may finish."""

  def clean(self, tag: str) -> None:
    """Removes versions older than `tag`, left by earlier trainers."""

  @abc.abstractmethod
  def read(
      self,
      transport: byte_store.Transport,
      tag: str,
      carried: Mapping[str, Any],
      specs: version_lib.Specs,
  ) -> dict[str, np.ndarray] | None:
    """Returns the leaves of a version, None if it was dropped meanwhile.

    Args:
      transport: owned by the calling thread.
      tag, carried: fields of the version's authenticated manifest; `carried`
        matches the carrier's schema.
      specs: shapes and dtypes of the leaves.

    Raises:
      WireError: a leaf is corrupt or missing.
      TransportError: the store is lost.
    """

  def close(self) -> None:
    """Frees everything; no other call may follow."""


def flat_bytes(leaf: Any) -> np.ndarray:
  """Returns the bytes of an array, [num_bytes] uint8; a view if on the host."""
  array = np.ascontiguousarray(np.asarray(leaf))
  return array.reshape(-1).view(np.uint8)


def digest(piece: Any) -> str:
  """Returns the first 128 bits of SHA-256 in hex, as in manifests."""
  return hashlib.sha256(piece).hexdigest()[:32]


def check_digest(name: str, piece: Any, expected: str) -> None:
  """Raises WireError if a digest differs."""
  if digest(piece) != expected:
    raise wire.WireError("hash", f"leaf {name} is torn")


def as_leaf(
    data: Any, spec: tuple[tuple[int, ...], np.dtype], offset: int = 0
) -> np.ndarray:
  """Returns a view of the array at `offset` in `data`."""
  shape, dtype = spec
  count = int(np.prod(shape, dtype=np.int64))
  if not count:
    return np.zeros(shape, dtype)
  return np.frombuffer(data, dtype, count, offset).reshape(shape)


def choose_carrier(config: ml_collections.ConfigDict, num_bytes: int) -> str:
  """Returns the name of the trainer's carrier for versions of `num_bytes`.

  `publish.carrier="auto"` chooses, in this order: the store for small params;
  "orbax" for an object store; "files" if all processes are on one host; with a
  `publish.directory`, "orbax" for a trainer of several processes, else "files";
  "network" otherwise.
  """
  setting, directory = config.publish.carrier, config.publish.directory
  if setting != "auto":
    return setting
  if num_bytes <= SMALL_BYTES:
    return "store"
  if bucket.is_remote(directory):
    return "orbax"
  store = config.store.address, config.store.locator
  if all(map(addresses.is_one_host, store)):
    return "files"
  if directory:
    return "orbax" if config.trainer.num_processes > 1 else "files"
  return "network"


def serve_address(config: ml_collections.ConfigDict) -> str:
  """Returns where a process of the trainer serves: `publish.address`.

  By default, a free port at the address from which this host reaches the store.

  Raises:
    OSError: the store's host is unknown or out of reach.
  """
  if config.publish.address:
    return config.publish.address
  store = config.store.locator or config.store.address
  host, _ = addresses.split_range(store or "127.0.0.1:0")
  try:
    family, kind, _, _, target = socket.getaddrinfo(
        host, 9, type=socket.SOCK_DGRAM
    )[0]
    with socket.socket(family, kind) as probe:
      probe.connect(target)  # Sends nothing.
      return addresses.join_address(probe.getsockname()[0], 0)
  except OSError as error:
    raise OSError(
        error.errno,
        f"config.publish.address = '': no address reaches {host!r}"
        f" ({error.strerror}); name one of this host",
    ) from error


def make_write_carriers(
    config: ml_collections.ConfigDict,
    run: wire.RunIdentity,
    specs: version_lib.Specs,
    peers: Any = None,
) -> list[Carrier]:
  """Returns the carriers to write with, in order of preference.

  Args:
    config: reads `publish`, `store` and `trainer`.
    peers: result of `peers.make_peers`; if not None, there is only one carrier,
      since no process has all params.
  """
  name = choose_carrier(config, version_lib.num_bytes(specs))
  names = [name]
  if config.publish.carrier == "auto" and name == "files":
    names.append("network")
  carriers = make_read_carriers(config, run, peers=peers)
  return [carriers[name] for name in names]


def make_read_carriers(
    config: ml_collections.ConfigDict,
    run: wire.RunIdentity,
    *,
    peers: Any = None,
) -> dict[str, Carrier]:
  """Returns every carrier by name, as manifests refer to them.

  Args:
    config: reads `publish` and `store`.
    peers: result of `peers.make_peers`.
  """
  place = CarrierPlace(
      directory=config.publish.directory,
      workdir=run.workdir,
      run_id=run.run_id,
      secret=run.secret,
      deadline_s=config.store.deadline_s,
      find_address=functools.partial(serve_address, config),
      peers=peers,
  )
  return {name: carriers.make(name, place) for name in carriers.CARRIERS}
