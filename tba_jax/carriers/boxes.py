# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Boxes: where in an array a piece of it lies. NumPy alone."""

from collections.abc import Sequence
import math

import numpy as np

# [start, stop] of each axis, in numbers that JSON has.
Box = list[list[int]]


def of(index: Sequence[slice], shape: Sequence[int]) -> Box:
  """Returns an index as numbers; axes that it leaves out are whole."""
  whole = [slice(None)] * (len(shape) - len(index))
  return [
      list(part.indices(size)[:2])
      for part, size in zip([*index, *whole], shape, strict=True)
  ]


def slices(box: Box) -> tuple[slice, ...]:
  """Returns a box as an index."""
  return tuple(slice(start, stop) for start, stop in box)


def size(box: Box) -> int:
  """Returns the number of elements of a box."""
  return math.prod(stop - start for start, stop in box)


def meet(box: Box, other: Box) -> bool:
  """Tells whether two boxes have an element in common."""
  return size(box) > 0 and all(
      max(a, c) < min(b, d) for (a, b), (c, d) in zip(box, other, strict=True)
  )


def filled(shape: Sequence[int], parts: Sequence[Box]) -> int:
  """Returns how many elements of an array disjoint boxes have; -1 outside."""
  for box in parts:
    if len(box) != len(shape) or not all(
        0 <= start <= stop <= length
        for (start, stop), length in zip(box, shape, strict=True)
    ):
      return -1
  return sum(size(box) for box in parts)


def cut(
    box: Box, dtype: np.dtype, pieces: Sequence[tuple[Box, np.ndarray]]
) -> np.ndarray:
  """Returns the array in a box from the pieces that meet it.

  Args:
    box: what is wanted.
    dtype: of the pieces.
    pieces: box and array; together they have all of `box`.

  Returns:
    A view where one piece has it all, else a new array.
  """
  out = np.empty([stop - start for start, stop in box], dtype)
  for place, data in pieces:
    if not meet(place, box):
      continue
    both = [
        [max(a, c), min(b, d)]
        for (a, b), (c, d) in zip(place, box, strict=True)
    ]
    part = data[slices(_within(both, place))]
    if both == box:
      return np.asarray(part)
    out[slices(_within(both, box))] = part
  return out


def _within(box: Box, outer: Box) -> Box:
  """Returns a box as counted from the start of another one."""
  return [
      [a - start, b - start]
      for (a, b), (start, _) in zip(box, outer, strict=True)
  ]
