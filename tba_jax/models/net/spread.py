# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Arrays in the head layouts of `models/head_layout.py`.

Layers run with the weights of a spread model, which are made of the model's own
while a program runs. So params, gradients and checkpoints keep their shapes.
Query heads of zeros add nothing: the output matrix has zeros for them too.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec
import numpy as np

from tba_jax import types
from tba_jax.models import config as config_lib
from tba_jax.models import head_layout
from tba_jax.models.net import products
from tba_jax.models.net import quantized
from tba_jax.models.net import sequence

ModelConfig = config_lib.ModelConfig
Layout = head_layout.Layout
PyTree = types.PyTree

KEY_AXES = ("kv_heads", "global_kv_heads")
HEAD_AXES = ("heads", *KEY_AXES)


def model_over(config: ModelConfig, parts: sequence.Split) -> ModelConfig:
  """Returns the shape whose blocks run on a mesh; see `head_layout.spread`."""
  if parts.head_count == 1:
    return config
  return head_layout.spread(config, parts.head_count)


def keys(x: PyTree, axis: int, layout: Layout) -> PyTree:
  """Returns an array with its G key-value heads along `axis` spread."""
  xp = jnp if isinstance(x, jax.Array) else np
  if layout.copies > 1:
    x = xp.repeat(x, layout.copies, axis=axis)
  return _pad(x, axis, layout.groups)


def queries(x: PyTree, axis: int, layout: Layout) -> PyTree:
  """Returns an array with axes G, M from `axis` on spread."""
  G, M = x.shape[axis : axis + 2]
  shape = *x.shape[:axis], G * layout.copies, layout.members
  x = _pad(x, axis + 1, layout.copies * layout.members)
  return _pad(x.reshape(*shape, *x.shape[axis + 2 :]), axis, layout.groups)


def gathered(x: jax.Array, axis: int, shape: Sequence[int], copies: int):
  """Returns the array of which `queries` made `x`; its axes are `shape`."""
  G, M = shape
  x = jax.lax.slice_in_dim(x, 0, G * copies, axis=axis)
  x = x.reshape(*x.shape[:axis], G, -1, *x.shape[axis + 2 :])
  return jax.lax.slice_in_dim(x, 0, M, axis=axis + 1)


def _pad(x: PyTree, axis: int, size: int) -> PyTree:
  """Returns an array with zeros after the entries of an axis."""
  if x.shape[axis] == size:
    return x
  xp = jnp if isinstance(x, jax.Array) else np
  padding = [(0, 0)] * x.ndim
  padding[axis] = 0, size - x.shape[axis]
  return xp.pad(x, padding)


def layer_params(
    config: ModelConfig,
    params: PyTree,
    logical_axes: PyTree,
    parts: sequence.Split,
) -> PyTree:
  """Returns params of a layer for a block of `model_over`.

  Args:
    config: shape of the model.
    params: arrays of the layer, on the host or traced, or adapted kernels.
    logical_axes: names of the dimensions of the model's blocks, layers first.
    parts: split of the heads.
  """
  if model_over(config, parts) == config:
    return params

  def spread_leaf(x: PyTree, axes: Sequence[str], is_global: bool) -> PyTree:
    own = [axis for axis in axes if axis in HEAD_AXES]
    if not own:
      return x
    G = config.num_kv_heads
    G = (config.global_kv_heads or G) if is_global else G
    layout = head_layout.choose(G, config.num_heads // G, parts.head_count)
    at, shape = axes.index(own[0]), x.shape
    if own[0] in KEY_AXES:
      x = keys(x, at, layout)
    else:
      x = x.reshape(*shape[:at], G, -1, *shape[at + 1 :])
      x = queries(x, at, layout)
      x = x.reshape(*shape[:at], -1, *shape[at + 1 :])
    if x.shape == shape or not isinstance(x, jax.Array):
      return x
    # Splits widths, as params do, then heads: the compiler would gather them.
    for split in [axis for axis in axes if axis.endswith("head_dim")], own:
      spec = [PartitionSpec.UNCONSTRAINED] * x.ndim
      spec[at] = None
      for axis in split:
        spec[axes.index(axis)] = parts.heads
      place = NamedSharding(parts.mesh, PartitionSpec(*spec))
      x = jax.lax.with_sharding_constraint(x, place)
    return x

  def of_module(name: str, x: PyTree, axes: tuple[str, ...]) -> PyTree:
    is_global, axes = name.startswith("global"), axes[1:]
    if not isinstance(x, products.Adapted):
      return spread_leaf(x, axes, is_global)
    num_out = quantized.num_out(axes)
    return products.Adapted(
        spread_leaf(x.kernel, axes, is_global),
        spread_leaf(x.a, ("lora_rank", *axes[num_out:]), is_global),
        spread_leaf(x.b, (*axes[:num_out], "lora_rank"), is_global),
    )

  return {
      name: jax.tree.map(
          lambda x, axes, name=name: of_module(name, x, axes),
          node,
          logical_axes[name],
          is_leaf=lambda x: isinstance(x, products.Adapted),
      )
      for name, node in params.items()
  }


def layer_shardings(shardings: PyTree, logical_axes: PyTree) -> PyTree:
  """Returns shardings of `layer_params`, given the layer's own.

  The mesh axis that splits the heads' widths in params splits the heads.
  """

  def of_leaf(place: NamedSharding, axes: tuple[str, ...]) -> NamedSharding:
    axes = axes[1:]
    heads = [i for i, axis in enumerate(axes) if axis in HEAD_AXES]
    widths = [i for i, axis in enumerate(axes) if axis.endswith("head_dim")]
    spec = [*place.spec]
    if heads and widths and spec[heads[0]] is None:
      spec[heads[0]], spec[widths[0]] = spec[widths[0]], None
    return NamedSharding(place.mesh, PartitionSpec(*spec))

  return jax.tree.map(of_leaf, shardings, logical_axes)
