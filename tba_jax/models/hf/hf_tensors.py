# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Checks and slices the tensors of a folder by the table of a model's leaves.

Does not import JAX.
"""

from collections.abc import Sequence
import dataclasses
import math
import pathlib
import re

import numpy as np

from tba_jax.models import config as config_lib
from tba_jax.models.hf import hf_files
from tba_jax.models.hf import hf_names
from tba_jax.models.hf import mxfp4_tensors

# Maximum ratio of described to existing tensors; above it, missing tensors are
# not listed one by one.
_MAX_TIMES = 100
# What a model's tensors are read from.
AnyFiles = hf_files.AnyFiles | hf_files.Fp8Files | mxfp4_tensors.Mxfp4Files
# Start and stop of each axis.
Ranges = tuple[tuple[int, int], ...]


def open_files(folder: pathlib.Path) -> AnyFiles:
  """Returns the tensors of a model's folder.

  Raises:
    ValueError: `hf_files.WeightFiles`, `hf_files.Fp8Files` or
      `mxfp4_tensors.Mxfp4Files` fails.
  """
  files = hf_files.Fp8Files(hf_files.open_files(folder))
  return mxfp4_tensors.Mxfp4Files(files)


def _problems(files: AnyFiles, name: str, shape: tuple[int, ...]) -> list[str]:
  """Returns what is wrong with a tensor, given its expected shape."""
  if name not in files.shapes:
    return [f"missing tensor {name} {list(shape)}"]
  problems = []
  if files.shapes[name] != shape:
    problems.append(
        f"tensor {name} has shape {list(files.shapes[name])}, expected"
        f" {list(shape)}"
    )
  if files.dtypes[name] not in hf_files.DTYPES:
    problems.append(
        f"tensor {name} has dtype {files.dtypes[name]}, must be one of"
        f" {', '.join(hf_files.DTYPES)}"
    )
  return problems


def check_tensors(
    files: AnyFiles,
    rows: Sequence[hf_names.TensorRow],
    *,
    num_layers: int,
    ignored: str,
) -> None:
  """Checks names, shapes and dtypes against a table.

  Args:
    num_layers: length of the leaves under "blocks".
    ignored: regular expression of the names that may be missing from the table.

  Raises:
    ValueError: tensors are missing, unused, of a wrong shape or not
      floating-point; the message names the first few.
  """
  described = sum(math.prod(row.stack(num_layers)) for row in rows)
  # A wrong number of layers or experts can be huge: do not list every tensor.
  if described > _MAX_TIMES * len(files.shapes):
    raise ValueError(
        f"has {len(files.shapes)} tensors, of {described} that config.json"
        " describes"
    )
  expected = {
      name: row.hf_shape for row in rows for name in row.hf_names(num_layers)
  }
  problems = []
  for name, shape in expected.items():
    problems += _problems(files, name, shape)
  problems += [
      f"unused tensor {name} {list(files.shapes[name])}"
      for name in sorted(files.shapes.keys() - expected)
      if not re.fullmatch(ignored, name)
  ]
  if problems:
    raise ValueError(
        f"{hf_files.first_of(problems)}; must be the tensors that config.json"
        " describes"
    )


def check_model(folder: pathlib.Path, config: config_lib.ModelConfig) -> None:
  """Raises ValueError unless the file headers list a model's tensors."""
  files = open_files(folder)
  check_tensors(
      files,
      hf_names.match_prefix(files.shapes, config, hf_names.rows(config)),
      num_layers=config.num_layers,
      ignored=hf_names.ignored(config),
  )


@dataclasses.dataclass(frozen=True)
class SliceCut:
  """How to read a slice of a leaf from its tensor.

  shape: dimensions of the data read, with axes split.
  index: the leaf's entries in the reshaped data; an int drops the axis.
  order: permutation of the remaining axes into the leaf's.
  """

  tensor: tuple[slice, ...]
  shape: tuple[int, ...]
  index: tuple[int | slice, ...]
  order: tuple[int, ...]

  def take(self, read: np.ndarray) -> np.ndarray:
    """Returns the slice of the leaf from the data read."""
    return read.reshape(self.shape)[self.index].transpose(self.order)


def cut_slices(row: hf_names.TensorRow, ranges: Ranges) -> SliceCut:
  """Returns how to read a slice of a layer's leaf.

  For a fused tensor, this reads the shortest range of each axis that contains
  the slice.

  Args:
    ranges: start and stop on each axis of `row.shape`; no range is empty.
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
    run, run_shape, run_index = _range(axes, wanted[done : done + len(axes)])
    tensor.append(run)
    shape += run_shape
    index += run_index
    done += len(axes)
  return SliceCut(tuple(tensor), tuple(shape), tuple(index), row.order)


def _range(
    sizes: Sequence[int], wanted: Sequence[int | tuple[int, int]]
) -> tuple[slice, list[int], list[int | slice]]:
  """Returns the range of one tensor axis that covers the wanted sub-ranges."""
  inner = int(np.prod(sizes))
  start, length, shape, index = 0, 1, [], []
  for i, (size, want) in enumerate(zip(sizes, wanted)):
    inner //= size
    low, high = (want, want + 1) if isinstance(want, int) else want
    if length > 1:  # Once an outer axis has a range, read all of this one.
      shape.append(size)
      index.append(want if isinstance(want, int) else slice(low, high))
      continue
    start += low * inner
    shape.append(high - low)
    index.append(0 if isinstance(want, int) else slice(None))
    if high - low > 1:
      length = (high - low) * inner
  return slice(start, start + length), shape, index


def put_slices(
    row: hf_names.TensorRow, tensor: np.ndarray, leaf: np.ndarray
) -> None:
  """Writes a layer's leaf into its tensor of shape `row.split_shape`."""
  if row.part is not None:
    axis, part = row.part
    tensor = tensor[(slice(None),) * axis + (part,)]
  tensor.transpose(row.order)[...] = leaf
