# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Where the entries of a leaf stand in a tensor of a file, slice by slice.

A row of `hf_names.py` says how a tensor's axes are split, which part of it is
ours, and in which order. Here that becomes an index: the slice of the tensor to
read for a slice of the leaf, so that a process reads what its devices own. jax
is not imported.
"""

from collections.abc import Sequence
import dataclasses

import numpy as np

from tba_jax.models import hf_names

# Start and stop of each axis.
Ranges = tuple[tuple[int, int], ...]


@dataclasses.dataclass(frozen=True)
class Cut:
  """A slice of a leaf as one of its tensor.

  tensor: a slice of each axis of the tensor, to be read.
  shape: of what was read, its axes split.
  index: of that, what is the leaf's; an int drops the axis.
  order: the leaf's axes as indices of those that are left.
  """

  tensor: tuple[slice, ...]
  shape: tuple[int, ...]
  index: tuple[int | slice, ...]
  order: tuple[int, ...]

  def take(self, read: np.ndarray) -> np.ndarray:
    """Returns the slice of the leaf, for what `tensor` says to read."""
    return read.reshape(self.shape)[self.index].transpose(self.order)


def cut(row: hf_names.Row, ranges: Ranges) -> Cut:
  """Returns what to read for a slice of a layer's leaf.

  Of a fused tensor more than the leaf's own entries may be read: the shortest
  run of each axis that has them all.

  Args:
    row: of the leaf.
    ranges: start and stop of each axis of `row.shape`, none of them empty.
  """
  sizes = row.split_shape
  wanted: list[int | tuple[int, int]] = [0] * len(sizes)
  left = list(range(len(sizes)))
  if row.part is not None:
    axis, wanted[axis] = row.part
    left.remove(axis)
  for ours, split in enumerate(row.order):
    wanted[left[split]] = ranges[ours]
  tensor, shape, index, done = [], [], [], 0
  for axes in row.split:
    run, run_shape, run_index = _run(axes, wanted[done : done + len(axes)])
    tensor.append(run)
    shape += run_shape
    index += run_index
    done += len(axes)
  return Cut(tuple(tensor), tuple(shape), tuple(index), row.order)


def _run(
    sizes: Sequence[int], wanted: Sequence[int | tuple[int, int]]
) -> tuple[slice, list[int], list[int | slice]]:
  """Returns the run of one axis that holds what is wanted of its parts."""
  inner = int(np.prod(sizes))
  start, length, shape, index = 0, 1, [], []
  for i, (size, want) in enumerate(zip(sizes, wanted)):
    inner //= size
    low, high = (want, want + 1) if isinstance(want, int) else want
    if length > 1:  # Of an axis within a longer one, all of it is read.
      shape.append(size)
      index.append(want if isinstance(want, int) else slice(low, high))
      continue
    start += low * inner
    shape.append(high - low)
    index.append(0 if isinstance(want, int) else slice(None))
    if high - low > 1:
      length = (high - low) * inner
  return slice(start, start + length), shape, index


def put(row: hf_names.Row, tensor: np.ndarray, leaf: np.ndarray) -> None:
  """Writes a layer's leaf into its tensor, which has the row's split shape."""
  if row.part is not None:
    axis, part = row.part
    tensor = tensor[(slice(None),) * axis + (part,)]
  tensor.transpose(row.order)[...] = leaf
