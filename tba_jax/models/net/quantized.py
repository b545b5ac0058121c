# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Int8 quantization of a sampler's matrices: decoding reads half the bytes.

Each output channel has its own scale, so that a product with the rounded matrix
is a product with its integers, times the scale: an accelerator's compiler reads
the integers and widens them inside the product. An expert's `down` has a scale
for each input instead, as results of experts are summed inside a product.

Axes: [*out_shape, *in_shape], as in a kernel.
"""

from collections.abc import Sequence
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

# Logical axes that are all of a kernel's inputs where they come last.
_INPUTS = ("width", "latent", "query_rank", "layer_input")
# In place of a number of output axes: scales belong to inputs.
OF_INPUTS = -1
# The largest integer; -128 is unused, so that the range is symmetric.
_MOST = 127


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Quantized:
  """A kernel that is values * scale; it takes a kernel's place in params.

  values: [*out_shape, *in_shape] int8 in -127 … 127.
  scale: [*out_shape] float32; [experts, in] of experts' `down`.
  """

  values: jax.Array
  scale: jax.Array

  @property
  def shape(self) -> tuple[int, ...]:
    return self.values.shape

  @property
  def ndim(self) -> int:
    return self.values.ndim

  def reshape(self, *shape: int) -> "Quantized":
    """Returns the kernel with one output axis, of shape [F, D]."""
    return Quantized(self.values.reshape(shape), self.scale.reshape(-1))

  def rows(self, indices: jax.Array) -> jax.Array:
    """Returns rows [..., D] float32 of a table [V, D]; indices are [...]."""
    values = jnp.take(self.values, indices, axis=0).astype(jnp.float32)
    return values * jnp.take(self.scale, indices, axis=0)[..., None]


def quantize(kernel: jax.Array, num_out: int) -> Quantized:
  """Returns the kernel rounded to multiples of each output channel's scale.

      scale = max |kernel| / 127, values = round(kernel / scale)

  The rounding error is at most half a scale. A zero channel stays zero.

  Args:
    kernel: [*out_shape, *in_shape], floats.
    num_out: number of axes of `out_shape`; `OF_INPUTS` for a scale per input of
      each expert's [out, in].
  """
  kernel = kernel.astype(jnp.float32)
  axes = tuple(range(num_out, kernel.ndim)) if num_out != OF_INPUTS else (1,)
  most = jnp.max(jnp.abs(kernel), axis=axes, keepdims=True)
  scale = most / _MOST
  values = jnp.round(kernel / jnp.where(scale > 0, scale, 1.0))
  return Quantized(values.astype(jnp.int8), jnp.squeeze(scale, axes))


def num_out(axes: Sequence[str]) -> int:
  """Returns the number of a kernel's output axes, given its logical axes.

  Either the inputs or the outputs of a kernel are the residual stream, or its
  inputs are a latent.
  """
  if axes[0] == "experts" and axes[-1] not in _INPUTS:
    return OF_INPUTS
  return len(axes) - 1 if axes[-1] in _INPUTS else 1


def quantize_tree(params: Any, num_outs: Any) -> Any:
  """Returns params with some arrays replaced by a `Quantized`.

  Args:
    params: nested dicts of arrays.
    num_outs: number of output axes of each array to quantize, 0 for the others.
  """
  return jax.tree.map(
      lambda x, count: quantize(x, count) if count else x, params, num_outs
  )
