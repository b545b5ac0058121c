# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""What carries the bytes of a version of params from trainer to searchers.

The pointer and the manifest of a version always lie in the store (`versions`);
a carrier moves the leaves. It packs a version once, and sends what lies in the
store again to each new generation of it. All of this happens in the publisher's
thread, and reading in the puller's.
"""

import abc
from collections.abc import Iterator, Mapping
import dataclasses
import hashlib
from typing import Any

import numpy as np

from tba_jax.transport import base
from tba_jax.transport import wire

# Shape and dtype of each leaf by its path, in the order of the tree.
Specs = dict[str, tuple[tuple[int, ...], np.dtype]]

# A leaf is hashed and moved in pieces of so many bytes.
PIECE_BYTES = 1 << 20


@dataclasses.dataclass
class Packed:
  """One version, ready to be sent.

  tag: names the version, part of keys and file names.
  carried: what a reader needs to find and to check the leaves, JSON types.
  held: what the carrier itself keeps until the version is dropped.
  """

  tag: str
  carried: dict[str, Any]
  held: Any = None


class Carrier(abc.ABC):
  """Moves leaves; one object serves one thread."""

  # Stands in the manifest, so that a reader takes the right carrier.
  name: str

  @abc.abstractmethod
  def pack(self, tag: str, leaves: Mapping[str, Any]) -> Packed:
    """Returns a version ready to be sent; waits until the device has made it.

    Args:
      tag: names the version; a tag may be packed again.
      leaves: path to array, on devices or not.

    Raises:
      OSError: no room, or no permission, where the carrier writes.
    """

  def send(self, transport: base.Transport, packed: Packed) -> None:
    """Writes what lies in the store; also into each new generation.

    Raises:
      TransportError: the store was lost on the way.
    """

  def serve(self, transport: base.Transport, packed: Packed | None) -> None:
    """Answers readers; called some times a second, with the newest version."""

  def drop(self, packed: Packed) -> None:
    """Gives back what a version held outside the store.

    Who reads it may go on. What lies in the store is removed by the caller.
    """

  def clean(self, tag: str) -> None:
    """Removes what trainers that are gone have left, older than `tag`."""

  @abc.abstractmethod
  def read(
      self,
      transport: base.Transport,
      tag: str,
      carried: Mapping[str, Any],
      specs: Specs,
  ) -> dict[str, np.ndarray] | None:
    """Returns the leaves of a version, None where it was dropped meanwhile.

    Args:
      transport: of the calling thread.
      tag, carried: of the version's manifest, which is authenticated.
      specs: of the leaves that are there.

    Raises:
      WireError: a leaf is torn or missing; it is named.
      TransportError: the store, or who serves the bytes, is gone.
    """

  def close(self) -> None:
    """Gives back everything; no other call may follow."""


def flat_bytes(leaf: Any) -> np.ndarray:
  """Returns the bytes of an array on the host, [num_bytes] uint8.

  Waits for the device. A view where the array is on the host already.
  """
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
  """Returns the digest of some bytes, as a manifest has it.

  Of SHA-256, for which processors have instructions.
  """
  return hashlib.sha256(piece).hexdigest()[:32]


def check_digest(name: str, piece: Any, wanted: str) -> None:
  """Raises a WireError that names the leaf where a piece is another one."""
  if digest(piece) != wanted:
    raise wire.WireError("hash", f"leaf {name} is torn")


def as_leaf(
    data: Any, spec: tuple[tuple[int, ...], np.dtype], offset: int = 0
) -> np.ndarray:
  """Returns the array that lies in `data` from `offset` on; a view."""
  shape, dtype = spec
  count = int(np.prod(shape, dtype=np.int64))
  if not count:
    return np.zeros(shape, dtype)
  return np.frombuffer(data, dtype, count, offset).reshape(shape)
