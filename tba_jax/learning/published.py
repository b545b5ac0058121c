# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Published params: their dtypes, and leaves by path."""

from collections.abc import Callable, Mapping
import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np

from tba_jax import types
from tba_jax.models import config as config_lib
from tba_jax.models.hf import hf_names
from tba_jax.transport.params import probe


@dataclasses.dataclass(frozen=True)
class Dtypes:
  """Dtypes of published floats; "" keeps the train state's dtype.

  matrices: leaves with at least two axes, not counting the layer axis.
  vectors: all other leaves, such as norms and biases.
  """

  matrices: str
  vectors: str

  def of(self, path: str, leaf: Any) -> np.dtype:
    """Returns the published dtype of a leaf with `shape` and `dtype`."""
    is_fixed = path.endswith(tuple(f"['{name}']" for name in hf_names.FLOAT32))
    is_float = jnp.issubdtype(leaf.dtype, jnp.floating)
    if probe.is_of(path) or is_fixed or not is_float:
      return np.dtype(leaf.dtype)
    num_axes = len(leaf.shape) - path.startswith("['blocks']")
    wanted = self.matrices if num_axes > 1 else self.vectors
    return np.dtype(wanted or leaf.dtype)


def published_dtypes(
    config: ml_collections.ConfigDict, backend: str | None = None
) -> Dtypes:
  """Returns the dtypes of `publish.dtype`.

  "auto" casts matrices to the dtype that the trainer computes in, and nothing
  with adapters. A sampler that computes in that dtype loses nothing: it casts
  matrices anyway, computes norms in float32 and merges adapters in float32.

  Args:
    config: reads `publish.dtype`, `model` and `lora`.
    backend: JAX backend of the trainer; None uses this process's backend.
  """
  dtype = config.publish.dtype
  if dtype != "auto":
    return Dtypes(dtype, dtype)
  return (
      Dtypes("", "") if config.lora.rank else computed_dtypes(config, backend)
  )


def computed_dtypes(
    config: ml_collections.ConfigDict, backend: str | None = None
) -> Dtypes:
  """Returns the narrowest dtypes that leave the model's results unchanged."""
  compute = config_lib.compute_dtype(
      config.model, backend or jax.default_backend()
  )
  return Dtypes(compute if compute == "bfloat16" else "", "")


def snapshot(params: types.PyTree, *, dtypes: Dtypes) -> types.PyTree:
  """Returns a copy of the params in the published dtypes."""

  def copy(path: Any, x: jax.Array) -> jax.Array:
    wanted = dtypes.of(jax.tree_util.keystr(path), x)
    return x + 0 if wanted == x.dtype else x.astype(wanted)

  return jax.tree_util.tree_map_with_path(copy, params)


def computed(
    config: ml_collections.ConfigDict, params: types.PyTree
) -> types.PyTree:
  """Returns a copy of the params in `computed_dtypes`."""
  dtypes = computed_dtypes(config)
  return jax.jit(functools.partial(snapshot, dtypes=dtypes))(params)


def make_copy(
    config: ml_collections.ConfigDict,
) -> Callable[[types.PyTree], dict[str, Any]]:
  """Returns params -> leaves of their `snapshot` by path, jitted."""
  dtypes = published_dtypes(config)
  copy = jax.jit(functools.partial(snapshot, dtypes=dtypes))
  return lambda params: by_path(copy(params))


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
  """Returns a tree with the structure of `like` from leaves by path."""
  treedef = jax.tree.structure(like)
  return jax.tree.unflatten(treedef, [leaves[name] for name in by_path(like)])
