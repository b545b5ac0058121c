# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Interface of the carriers, which move params from trainer to searchers.

A version's pointer and manifest are always in the store (see
`learning/publication.py`); a carrier moves the leaves. It packs a version once
and sends it to each new generation of the store.
"""

import abc
from collections.abc import Iterator, Mapping
import dataclasses
import hashlib
import pathlib
from typing import Any

import numpy as np

from tba_jax.transport import base
from tba_jax.transport import wire

# Shape and dtype of each leaf, by path, in the order of the tree.
Specs = dict[str, tuple[tuple[int, ...], np.dtype]]

# Size of the pieces in which a leaf is hashed and moved.
PIECE_BYTES = 1 << 20


@dataclasses.dataclass
class Packed:
  """A version that is ready to be sent.

  tag: name of the version in keys and file names.
  carried: facts by which a reader finds and verifies the leaves, in JSON types.
  held: the carrier's own data, until the version is dropped.
  """

  tag: str
  carried: dict[str, Any]
  held: Any = None


@dataclasses.dataclass(frozen=True)
class Place:
  """What a carrier of a run is made from.

  directory: `config.publish.directory`.
  workdir: run directory.
  run_id: id of the run.
  secret: key of the run's messages.
  deadline_s: longest time to write or read a version.
  peers: trainer's other processes, where they write too; None if none does.
  """

  directory: str
  workdir: pathlib.Path
  run_id: str
  secret: bytes
  deadline_s: float
  peers: Any = None


class Carrier(abc.ABC):
  """Moves leaves; for one thread.

  name: carrier's name in the manifest and in `publish.carrier`.
  schema: form of `Packed.carried`, as `jsonl.schema_error` reads it.
  """

  name: str
  schema: Mapping[str, Any] = {}

  @classmethod
  def make(cls, place: Place) -> "Carrier":
    """Returns the carrier of a run."""
    del place
    return cls()

  @abc.abstractmethod
  def pack(self, tag: str, leaves: Mapping[str, Any]) -> Packed:
    """Returns a version that is ready to be sent; waits for the device.

    Args:
      tag: name of the version; may repeat after a restart.
      leaves: path to array, on devices or not.

    Raises:
      OSError: no room or no permission.
    """

  def send(self, transport: base.Transport, packed: Packed) -> None:
    """Writes to the store; called for each new generation."""

  def serve(self, transport: base.Transport, packed: Packed | None) -> None:
    """Does periodic work, a few times a second, with the newest version."""

  def drop(self, packed: Packed) -> None:
    """Frees a version's data outside the store; readers may finish."""

  def clean(self, tag: str) -> None:
    """Removes versions older than `tag`, left by earlier trainers."""

  @abc.abstractmethod
  def read(
      self,
      transport: base.Transport,
      tag: str,
      carried: Mapping[str, Any],
      specs: Specs,
  ) -> dict[str, np.ndarray] | None:
    """Returns the leaves of a version, None if it was dropped meanwhile.

    Args:
      transport: transport of the calling thread.
      tag, carried: fields of the version's authenticated manifest; `carried`
        is of the carrier's schema.
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


def specs_of(leaves: Mapping[str, Any]) -> Specs:
  return {
      name: (tuple(leaf.shape), np.dtype(leaf.dtype))
      for name, leaf in leaves.items()
  }


def num_bytes(specs: Specs) -> int:
  return sum(leaf_bytes(*spec) for spec in specs.values())


def leaf_bytes(shape: tuple[int, ...], dtype: np.dtype) -> int:
  return int(np.prod(shape, dtype=np.int64)) * dtype.itemsize


def pieces(data: np.ndarray) -> Iterator[np.ndarray]:
  for start in range(0, len(data), PIECE_BYTES):
    yield data[start : start + PIECE_BYTES]


def digest(piece: Any) -> str:
  """Returns the first 128 bits of SHA-256 in hex, as in manifests."""
  return hashlib.sha256(piece).hexdigest()[:32]


def check_digest(name: str, piece: Any, wanted: str) -> None:
  """Raises WireError if a digest differs."""
  if digest(piece) != wanted:
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
