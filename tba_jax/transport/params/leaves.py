# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Params as leaves by path, and back."""

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from tba_jax import types


def by_path(params: types.PyTree) -> dict[str, Any]:
  """Returns the leaves by path, in the order of the tree."""
  leaves = jax.tree_util.tree_flatten_with_path(params)[0]
  return {jax.tree_util.keystr(path): leaf for path, leaf in leaves}


def flatten(params: types.PyTree) -> dict[str, np.ndarray]:
  """Returns the leaves as host arrays by path; waits for the device."""
  return {
      name: np.asarray(leaf)
      for name, leaf in by_path(jax.device_get(params)).items()
  }


def unflatten(leaves: Mapping[str, Any], like: types.PyTree) -> types.PyTree:
  """Returns the tree of `like` with leaves given by path."""
  treedef = jax.tree.structure(like)
  return jax.tree.unflatten(treedef, [leaves[name] for name in by_path(like)])
