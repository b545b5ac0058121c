# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""A family's modules without arrays: with params they are modules again."""

import dataclasses
from typing import TYPE_CHECKING

from flax import nnx

from tba_jax import types

if TYPE_CHECKING:
  from tba_jax.models import config as model_config_lib
  from tba_jax.models import stack

PyTree = types.PyTree


@dataclasses.dataclass(frozen=True)
class Definitions:
  """Static module definitions, for `nnx.merge`.

  model: of the whole stack.
  block: of one of its blocks.
  logical_axes: params with a tuple of axis names in place of each leaf.
  """

  model: nnx.GraphDef
  block: nnx.GraphDef
  logical_axes: PyTree


def of(
    family: "type[stack.Stack]", config: "model_config_lib.ModelConfig"
) -> Definitions:
  """Returns the definitions of a family's modules, without making arrays."""
  model_def, state = nnx.split(
      nnx.eval_shape(lambda: family(config, nnx.Rngs(params=0)))
  )
  block_def, _ = nnx.split(
      nnx.eval_shape(lambda: family.Block(config, nnx.Rngs(params=0)))
  )
  axes = {}
  for path, param in nnx.to_flat_state(state):
    stacked = ("layers",) if path[0] == "blocks" else ()
    node = axes
    for name in path[:-1]:
      node = node.setdefault(name, {})
    node[path[-1]] = stacked + param.get_metadata()["logical_axes"]
  return Definitions(model_def, block_def, axes)
