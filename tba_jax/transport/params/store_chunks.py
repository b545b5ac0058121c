# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Carries params through the store, in chunks of 1 MiB under `p/<tag>/<chunk>`.

Works wherever the store does, for params of up to some 100 MB and few readers.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from tba_jax.transport import byte_store
from tba_jax.transport import wire
from tba_jax.transport.params import carrier
from tba_jax.transport.params import version


class StoreChunks(carrier.Carrier):
  """The carrier "store"."""

  name = "store"
  schema = {"digests": [str]}

  def write(
      self, tag: str, leaves: Mapping[str, Any]
  ) -> tuple[dict[str, Any], Any]:
    del tag
    data = b"".join(carrier.flat_bytes(leaf).data for leaf in leaves.values())
    chunks = [
        data[start : start + carrier.PIECE_BYTES]
        for start in range(0, len(data), carrier.PIECE_BYTES)
    ]
    digests = [carrier.digest(chunk) for chunk in chunks]
    return {"digests": digests}, chunks

  def send(
      self, transport: byte_store.Transport, packed: carrier.PackedVersion
  ) -> None:
    for i, chunk in enumerate(packed.content):
      transport.put(f"p/{packed.tag}/{i:06d}", chunk)

  def drop(self, packed: carrier.PackedVersion) -> None:
    packed.content = None

  def read(
      self,
      transport: byte_store.Transport,
      tag: str,
      carried: Mapping[str, Any],
      specs: version.Specs,
  ) -> dict[str, np.ndarray] | None:
    chunks = []
    for i, digest in enumerate(carried["digests"]):
      chunk = transport.get(f"p/{tag}/{i:06d}")
      if chunk is None:
        return None
      if carrier.digest(chunk) != digest:
        start = i * carrier.PIECE_BYTES
        raise wire.WireError(
            "hash",
            f"p/{tag}/{i:06d} is torn; it has leaves"
            f" {_names_at(specs, start, start + carrier.PIECE_BYTES)}",
        )
      chunks.append(chunk)
    data = b"".join(chunks)
    total = version.num_bytes(specs)
    if len(data) != total:
      raise wire.WireError("truncated", f"{len(data)} bytes, expected {total}")
    leaves, start = {}, 0
    for name, spec in specs.items():
      leaves[name] = carrier.as_leaf(data, spec, start)
      start += version.leaf_bytes(*spec)
    return leaves


def _names_at(specs: version.Specs, first: int, last: int) -> list[str]:
  """Returns the leaves with bytes in [first, last)."""
  names, start = [], 0
  for name, spec in specs.items():
    end = start + version.leaf_bytes(*spec)
    if max(start, first) < min(end, last):
      names.append(name)
    start = end
  return names
