# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Parts of arrays: the shards of processes, and leaves assembled from them."""

from collections.abc import Sequence
import math
from typing import Any

import jax
import numpy as np

from tba_jax.transport import wire

# A part of an array: [start, stop] for each axis.
Box = list[list[int]]


def box_of(index: Sequence[slice], shape: Sequence[int]) -> Box:
  """Returns the box of an index; omitted axes are complete."""
  whole = [slice(None)] * (len(shape) - len(index))
  return [
      list(part.indices(size)[:2])
      for part, size in zip([*index, *whole], shape, strict=True)
  ]


def box_slices(box: Box, outer: Box | None = None) -> tuple[slice, ...]:
  """Returns a box as an index of the array, or of its part `outer`."""
  starts = [start for start, _ in outer or [[0, 0]] * len(box)]
  return tuple(
      slice(a - start, b - start)
      for (a, b), start in zip(box, starts, strict=True)
  )


def intersection(box: Box, other: Box) -> Box | None:
  """Returns the common part of two boxes, None if it is empty."""
  overlap = [
      [max(a, c), min(b, d)] for (a, b), (c, d) in zip(box, other, strict=True)
  ]
  return overlap if all(start < stop for start, stop in overlap) else None


def check_cover(name: str, shape: Sequence[int], parts: Sequence[Box]) -> None:
  """Raises WireError if disjoint boxes do not cover a leaf."""
  sizes = []
  for box in parts:
    inside = len(box) == len(shape) and all(
        0 <= start <= stop <= length
        for (start, stop), length in zip(box, shape, strict=True)
    )
    sizes.append(math.prod(b - a for a, b in box) if inside else -math.inf)
  if sum(sizes) != math.prod(shape):
    raise wire.WireError(
        "leaves", f"leaf {name}: shards {parts} do not cover {list(shape)}"
    )


def cut_box(
    box: Box, dtype: np.dtype, pieces: Sequence[tuple[Box, np.ndarray]]
) -> np.ndarray:
  """Returns a box's array from pieces that cover it; a view if one does."""
  out = np.empty([stop - start for start, stop in box], dtype)
  for place, data in pieces:
    overlap = intersection(place, box)
    if overlap is None:
      continue
    part = data[box_slices(overlap, place)]
    if overlap == box:
      return np.asarray(part)
    out[box_slices(overlap, box)] = part
  return out


def shards_of(leaf: Any) -> list[tuple[Box, Any]]:
  """Returns box and data of this process's shards, one per replica set."""
  if not math.prod(leaf.shape):
    return []
  if not isinstance(leaf, jax.Array):
    return [(box_of((), leaf.shape), leaf)]
  return [
      (box_of(shard.index, leaf.shape), shard.data)
      for shard in leaf.addressable_shards
      if shard.replica_id == 0
  ]
