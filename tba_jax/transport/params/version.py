# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""A version of the params: its number, and its leaves' shapes and dtypes."""

from collections.abc import Mapping
import dataclasses
from typing import Any, NamedTuple

import numpy as np

# Shape and dtype of each leaf, by path, in the order of the tree.
Specs = dict[str, tuple[tuple[int, ...], np.dtype]]


class Version(NamedTuple):
  """Number of published params; a restarted trainer's are always newer.

  epoch: start count of the trainer.
  step: steps that the params were trained for.
  """

  epoch: int
  step: int

  @property
  def tag(self) -> str:
    """Text for keys and file names, which sorts like the version."""
    return f"{self.epoch:08d}.{self.step:010d}"


@dataclasses.dataclass
class PullStats:
  """Counts of versions taken and refused."""

  taken: int = 0
  refused: int = 0


def specs_of(leaves: Mapping[str, Any]) -> Specs:
  """Returns shape and dtype of leaves, which may be abstract, by path."""
  return {
      name: (tuple(leaf.shape), np.dtype(leaf.dtype))
      for name, leaf in leaves.items()
  }


def num_bytes(specs: Specs) -> int:
  return sum(leaf_bytes(*spec) for spec in specs.values())


def leaf_bytes(shape: tuple[int, ...], dtype: np.dtype) -> int:
  return int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
