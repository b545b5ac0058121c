# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Products of runs of rows, each with a matrix of its own.

Their arithmetic is that of the rows, not of rows times matrices. The gradient
of `jax.lax.ragged_dot` by its matrices multiplies all rows for each matrix, and
on a CPU so does `ragged_dot` itself.

Axes: R rows, E matrices, F outputs, D inputs, b rows of a block.
"""

from collections.abc import Callable
import functools

import jax
import jax.numpy as jnp

from tba_jax.models import layers

# Rows, and sizes of a matrix, that TPU's kernel of gradients has at a time.
_TILE = (512, 1024, 1024)
# Rows of a block elsewhere.
_MIN_BLOCK, _MAX_BLOCK = 8, 256


def product(
    platform: str, x: jax.Array, kernels: jax.Array, sizes: jax.Array
) -> jax.Array:
  """Returns kernels[e] @ x[r] for each row r, of run e.

  Args:
    platform: platform that it will run on, JAX's name.
    x: [R, D]; runs follow each other from the first row on.
    kernels: [E, F, D].
    sizes: [E] int32, rows of each run, together at most R.

  Returns:
    [R, F], 0 in rows past the last run.
  """
  return layers.keep(_product(platform, x, kernels, sizes))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _product(platform, x_RxD, kernels_ExFxD, sizes_E):
  return _times(platform, x_RxD, kernels_ExFxD, sizes_E, 2)


def _forward(platform, *operands):
  return _product(platform, *operands), operands


def _backward(platform, operands, grad_RxF):
  x_RxD, kernels_ExFxD, sizes_E = operands
  grad_x_RxD = _times(platform, grad_RxF, kernels_ExFxD, sizes_E, 1)
  if platform == "tpu":
    sums = _tpu_sums(grad_RxF, x_RxD, sizes_E)
  else:
    sums = _block_sums(platform, grad_RxF, x_RxD, sizes_E)
  return grad_x_RxD, sums.astype(kernels_ExFxD.dtype), None


_product.defvjp(_forward, _backward)


def _times(
    platform: str,
    x: jax.Array,
    kernels: jax.Array,
    sizes_E: jax.Array,
    axis: int,
) -> jax.Array:
  """Returns products of rows with their matrices along an axis of these."""
  if platform == "tpu":
    numbers = jax.lax.RaggedDotDimensionNumbers(
        dot_dimension_numbers=(((1,), (axis,)), ((), ())),
        lhs_ragged_dimensions=(0,),
        rhs_group_dimensions=(0,),
    )
    out = jax.lax.ragged_dot_general(
        x, kernels, sizes_E, numbers, preferred_element_type=x.dtype
    )
    return _zero_past(out, sizes_E)
  return _block_products(platform, x, kernels, sizes_E, axis)


def _zero_past(out: jax.Array, sizes_E: jax.Array) -> jax.Array:
  """Returns rows with 0 past the last run."""
  rows_R = jax.lax.broadcasted_iota(jnp.int32, out.shape, 0)
  return jnp.where(rows_R < jnp.sum(sizes_E), out, jnp.zeros((), out.dtype))


def _tpu_sums(
    grad_RxF: jax.Array,
    x_RxD: jax.Array,
    sizes_E: jax.Array,
    interpret: bool = False,
) -> jax.Array:
  """Returns Σ_r grad[r] x[r]ᵀ of each run, [E, F, D] float32, on a TPU."""
  # Half a second of imports that other platforms do without. The package's
  # function `gmm` hides the module of that name.
  from jax.experimental.pallas.ops.tpu.megablox.gmm import tgmm

  R = len(x_RxD)
  tile = (_TILE[0], *map(min, (grad_RxF.shape[1], x_RxD.shape[1]), _TILE[1:]))
  pad = lambda x: jnp.pad(x, ((0, -R % tile[0]), (0, 0)))
  grad, x = pad(grad_RxF), pad(x_RxD)
  rest = len(x) - jnp.sum(sizes_E, keepdims=True)
  return tgmm(
      grad.T,
      x,
      jnp.concatenate([sizes_E, rest]),
      tiling=tile,
      num_actual_groups=len(sizes_E),
      interpret=interpret,
  )


# Blocks: rows of one run at a time, in a loop


def _over_blocks(
    platform: str,
    num_rows: int,
    sizes_E: jax.Array,
    body: Callable[..., jax.Array],
    out: jax.Array,
    size: int,
) -> jax.Array:
  """Returns `out` after body(e, start, out) for each block of each run.

  On a GPU, which would wait for the host at each trip of a loop of unknown
  length, there are trips past the last block, with start = num_rows.
  """
  E = len(sizes_E)
  counts_E = -(-sizes_E // size)
  last_E = jnp.cumsum(counts_E)
  starts_E = jnp.cumsum(sizes_E) - sizes_E
  most = -(-num_rows // size) + E
  numbers = jnp.arange(most, dtype=jnp.int32)
  run = jnp.searchsorted(last_E, numbers, side="right", method="compare_all")
  run = jnp.minimum(run, E - 1).astype(jnp.int32)
  starts = starts_E[run] + (numbers - (last_E - counts_E)[run]) * size
  starts = jnp.where(numbers < last_E[-1], starts, num_rows)
  trips = most if platform == "gpu" else last_E[-1]
  return jax.lax.fori_loop(
      0, trips, lambda i, out: body(run[i], starts[i], out), out
  )


def _block_size(num_rows: int, num_runs: int) -> int:
  """Returns the rows of a block: those of a mean run, within bounds."""
  size = _MIN_BLOCK
  while size < min(num_rows / num_runs, _MAX_BLOCK):
    size *= 2
  return size


def _block_products(
    platform: str,
    x: jax.Array,
    kernels: jax.Array,
    sizes_E: jax.Array,
    axis: int,
) -> jax.Array:
  """Returns `_times` by a loop over blocks."""
  R, b = len(x), _block_size(len(x), len(kernels))
  # A block may end past its run: the next one writes over it.
  x = jnp.pad(x, ((0, b), (0, 0)))
  spec = ("bf,fd->bd", "bd,fd->bf")[axis - 1]

  def body(e: jax.Array, start: jax.Array, out: jax.Array) -> jax.Array:
    block = jax.lax.dynamic_slice_in_dim(x, start, b)
    new = layers.summed(spec, block, kernels[e], x.dtype)
    return jax.lax.dynamic_update_slice_in_dim(out, new, start, 0)

  out = jnp.zeros((len(x), kernels.shape[3 - axis]), x.dtype)
  out = _over_blocks(platform, R, sizes_E, body, out, b)[:R]
  return _zero_past(out, sizes_E)


def _block_sums(
    platform: str, grad_RxF: jax.Array, x_RxD: jax.Array, sizes_E: jax.Array
) -> jax.Array:
  """Returns `_tpu_sums` by a loop over blocks."""
  E, R = len(sizes_E), len(x_RxD)
  b = _block_size(R, E)
  grad, x = (jnp.pad(y, ((0, b), (0, 0))) for y in (grad_RxF, x_RxD))
  ends_E = jnp.cumsum(sizes_E)

  def body(e: jax.Array, start: jax.Array, out: jax.Array) -> jax.Array:
    of_block = lambda y: jax.lax.dynamic_slice_in_dim(y, start, b)
    own = start + jnp.arange(b) < ends_E[e]
    own = jnp.where(own[:, None], of_block(grad), 0)
    new = layers.summed("bf,bd->fd", own, of_block(x), jnp.float32)
    return out.at[e].add(new)

  out = jnp.zeros((E, grad_RxF.shape[1], x_RxD.shape[1]), jnp.float32)
  return _over_blocks(platform, R, sizes_E, body, out, b)
