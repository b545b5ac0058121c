# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Interface of the carriers, which move params from trainer to searchers.

Pointer and manifest of a version are always in the store (see
`training/publication.py`); a carrier moves the leaves. It packs a version once,
in the publisher's thread, and sends it to each new generation of the store.
"""

import abc
from collections.abc import Iterator, Mapping
import dataclasses
import hashlib
from typing import Any

import numpy as np

from tba_jax.transport import base
from tba_jax.transport import wire

# Shape and dtype of each leaf, by its path in the order of the tree.
Specs = dict[str, tuple[tuple[int, ...], np.dtype]]

# A leaf is hashed and moved in pieces of so many bytes.
PIECE_BYTES = 1 << 20


@dataclasses.dataclass
class Packed:
  """A version that is ready to be sent.

  tag: name of the version in keys and file names.
  carried: what a reader needs to find and check the leaves, of JSON types.
  held: what the carrier keeps until the version is dropped.
  """

  tag: str
  carried: dict[str, Any]
  held: Any = None


class Carrier(abc.ABC):
  """Moves leaves; one object serves one thread.

  Attributes:
    name: in the manifest and in `publish.carrier`.
  """

  name: str

  @abc.abstractmethod
  def pack(self, tag: str, leaves: Mapping[str, Any]) -> Packed:
    """Returns a version that is ready to be sent; waits for the device.

    Args:
      tag: name of the version, which may be packed again.
      leaves: path to array, on devices or not.

    Raises:
      OSError: the carrier has no room, or no permission.
    """

  def send(self, transport: base.Transport, packed: Packed) -> None:
    """Writes to the store; called again for each new generation."""

  def serve(self, transport: base.Transport, packed: Packed | None) -> None:
    """Does periodic work, a few times a second, with the newest version."""

  def drop(self, packed: Packed) -> None:
    """Frees what a version holds outside the store; readers may finish."""

  def clean(self, tag: str) -> None:
    """Removes versions older than `tag` that earlier trainers have left."""

  @abc.abstractmethod
  def read(
      self,
      transport: base.Transport,
      tag: str,
      carried: Mapping[str, Any],
      specs: Specs,
  ) -> dict[str, np.ndarray] | None:
    """Returns the leaves of a version; None where it was dropped meanwhile.

    Args:
      transport: of the calling thread.
      tag, carried: of the version's authenticated manifest.
      specs: of its leaves.

    Raises:
      WireError: a leaf is torn or missing; it is named.
      TransportError: the store is gone.
    """

  def close(self) -> None:
    """Frees everything; no other call may follow."""


def flat_bytes(leaf: Any) -> np.ndarray:
  """Returns the bytes of an array, [num_bytes] uint8; a view on the host."""
  array = np.ascontiguousarray(np.asarray(leaf))
  return array.reshape(-1).view(np.uint8)


def specs_of(leaves: Mapping[str, Any]) -> Specs:
  """Returns shape and dtype of each leaf."""
  return {
      name: (tuple(leaf.shape), np.dtype(leaf.dtype))
      for name, leaf in leaves.items()
  }


def num_bytes(specs: Specs) -> int:
  """Returns the bytes of all leaves."""
  return sum(leaf_bytes(*spec) for spec in specs.values())


def leaf_bytes(shape: tuple[int, ...], dtype: np.dtype) -> int:
  return int(np.prod(shape, dtype=np.int64)) * dtype.itemsize


def pieces(data: np.ndarray) -> Iterator[np.ndarray]:
  """Yields the pieces of a leaf's bytes."""
  for start in range(0, len(data), PIECE_BYTES):
    yield data[start : start + PIECE_BYTES]


def digest(piece: Any) -> str:
  """Returns 128 bits of SHA-256 as hex, as manifests have them."""
  return hashlib.sha256(piece).hexdigest()[:32]


def check_digest(name: str, piece: Any, wanted: str) -> None:
  """Raises WireError, naming the leaf, where a digest differs."""
  if digest(piece) != wanted:
    raise wire.WireError("hash", f"leaf {name} is torn")


def as_leaf(
    data: Any, spec: tuple[tuple[int, ...], np.dtype], offset: int = 0
) -> np.ndarray:
  """Returns a view of the array that begins at `offset` of `data`."""
  shape, dtype = spec
  count = int(np.prod(shape, dtype=np.int64))
  if not count:
    return np.zeros(shape, dtype)
  return np.frombuffer(data, dtype, count, offset).reshape(shape)
