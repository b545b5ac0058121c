# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Grouped matrix products: each run of rows is multiplied by its own matrix.

The cost grows with the number of rows, not with rows times matrices. With
`jax.lax.ragged_dot`, the gradient for the matrices multiplies all rows for each
matrix, and on CPUs and GPUs so does `ragged_dot` itself. For TPUs, JAX has
kernels for both; for GPUs, we have two in Triton, which run from compute
capability 8.0 on (JAX's need Hopper); on CPUs, loops run instead.

Axes: R rows, E matrices, F outputs, D inputs, b rows of a block; C columns that
are summed over and N columns that remain: either D and F, or F and D.
"""

from collections.abc import Callable
import functools
import math

import jax
import jax.numpy as jnp

from tba_jax.models.net import products

# Tile of the TPU gradient kernel: rows, and the two sizes of a matrix.
_TILE = (512, 1024, 1024)
# Tile of a GPU program in bfloat16: rows, columns that remain, and columns that
# are summed over; the last is half as large in float32.
GPU_TILE = (128, 128, 64)
_GPU_WARPS, _GPU_STAGES = 8, 3
_LEAST_TILE = 16  # Minimum size of a matrix product on a GPU.
# Bounds of the rows per block on a CPU.
_MIN_BLOCK, _MAX_BLOCK = 8, 256


def product(
    platform: str, x: jax.Array, kernels: jax.Array, sizes: jax.Array
) -> jax.Array:
  """Returns kernels[e] @ x[r] for each row r in run e.

  Args:
    platform: JAX's name of the backend.
    x: [R, D]; runs are adjacent and begin at the first row.
    kernels: [E, F, D]; may be integers, without a gradient.
    sizes: [E] int32, rows of each run, at most R in total.

  Returns:
    [R, F], 0 in rows past the last run.
  """
  return products.keep(_product(platform, x, kernels, sizes))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _product(platform, x_RxD, kernels_ExFxD, sizes_E):
  return _times(platform, x_RxD, kernels_ExFxD, sizes_E, 2)


def _forward(platform, *operands):
  return _product(platform, *operands), operands


def _backward(platform, operands, grad_RxF):
  x_RxD, kernels_ExFxD, sizes_E = operands
  grad_x_RxD = _times(platform, grad_RxF, kernels_ExFxD, sizes_E, 1)
  sums = {"tpu": tpu_sums, "gpu": gpu_sums}.get(platform, _block_sums)
  sums_ExFxD = sums(grad_RxF, x_RxD, sizes_E)
  return grad_x_RxD, sums_ExFxD.astype(kernels_ExFxD.dtype), None


_product.defvjp(_forward, _backward)


def _times(
    platform: str,
    x: jax.Array,
    kernels: jax.Array,
    sizes_E: jax.Array,
    axis: int,
) -> jax.Array:
  """Returns products of rows with their matrices along a matrix axis."""
  if platform == "tpu":
    numbers = jax.lax.RaggedDotDimensionNumbers(
        dot_dimension_numbers=(((1,), (axis,)), ((), ())),
        lhs_ragged_dimensions=(0,),
        rhs_group_dimensions=(0,),
    )
    out = jax.lax.ragged_dot_general(
        *(x, kernels.astype(x.dtype), sizes_E, numbers),
        preferred_element_type=x.dtype,
    )
    return _zero_past(out, sizes_E)
  products = gpu_products if platform == "gpu" else _block_products
  return products(x, kernels, sizes_E, axis)


def _zero_past(out: jax.Array, sizes_E: jax.Array) -> jax.Array:
  """Returns the rows with zeros past the last run."""
  rows_R = jax.lax.broadcasted_iota(jnp.int32, out.shape, 0)
  return jnp.where(rows_R < jnp.sum(sizes_E), out, jnp.zeros((), out.dtype))


def tpu_sums(
    grad_RxF: jax.Array,
    x_RxD: jax.Array,
    sizes_E: jax.Array,
    interpret: bool = False,
) -> jax.Array:
  """Returns Σ_r grad[r] x[r]ᵀ of each run, [E, F, D] float32, on a TPU."""
  # Half a second of imports that other platforms do not need. The package's
  # function `gmm` hides the module of the same name.
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


def gpu_products(
    x_RxC: jax.Array,
    kernels: jax.Array,
    sizes_E: jax.Array,
    axis: int,
    interpret: bool = False,
) -> jax.Array:
  """Returns `_times` on a GPU, with one program per tile of a block's result.

  Raises:
    ValueError: an array has more elements than its kernel can index.
  """
  # Imports that other platforms do not need.
  from jax.experimental import pallas as pl
  from jax.experimental.pallas import triton as plgpu

  (R, C), E, N = x_RxC.shape, len(kernels), kernels.shape[3 - axis]
  for shape in (x_RxC.shape, (R, N), kernels.shape):
    if math.prod(shape) >= 2**31:
      raise ValueError(
          f"an array of experts of shape {shape}: on a GPU it must have fewer"
          " than 2^31 elements; lower config.train.micro_batch_prompts"
      )
  b, width, depth = _gpu_tile(R, N, C, x_RxC.dtype)
  # The rows past the last run form one more run, without a matrix.
  rest = R - jnp.sum(sizes_E, keepdims=True)
  blocks = _list_blocks(R, jnp.concatenate([sizes_E, rest]), b)

  def kernel(run_ref, start_ref, end_ref, x_ref, kernels_ref, out_ref):
    i, first = pl.program_id(0), pl.program_id(1) * width
    run, start, end = run_ref[i], start_ref[i], end_ref[i]
    is_row = (start + jnp.arange(b) < end)[:, None]
    is_column = first + jnp.arange(width) < N

    def add(k: jax.Array, total: jax.Array) -> jax.Array:
      inner = k * depth
      is_inner = inner + jnp.arange(depth) < C
      x = plgpu.load(
          x_ref.at[pl.ds(start, b), pl.ds(inner, depth)],
          mask=is_row & is_inner[None],
          other=0.0,
      )
      places = [pl.ds(first, width), pl.ds(inner, depth)]
      masks = [is_column[:, None], is_inner[None]]
      if axis == 1:
        places, masks = places[::-1], [is_column[None], is_inner[:, None]]
      matrix = plgpu.load(
          kernels_ref.at[run, *places], mask=masks[0] & masks[1], other=0
      )
      matrix = matrix.astype(x.dtype)
      return total + plgpu.dot(x, matrix, trans_b=axis == 2)

    trips = jnp.where(run < E, jnp.int32(pl.cdiv(C, depth)), jnp.int32(0))
    total = jnp.zeros((b, width), jnp.float32)
    total = jax.lax.fori_loop(0, trips, add, total)
    plgpu.store(
        out_ref.at[pl.ds(start, b), pl.ds(first, width)],
        total.astype(out_ref.dtype),
        mask=is_row & is_column[None],
    )

  return pl.pallas_call(
      kernel,
      grid=(len(blocks[0]), pl.cdiv(N, width)),
      out_shape=jax.ShapeDtypeStruct((R, N), x_RxC.dtype),
      compiler_params=plgpu.CompilerParams(
          num_warps=_GPU_WARPS, num_stages=_GPU_STAGES
      ),
      interpret=interpret,
      name="grouped_products",
  )(*blocks, x_RxC, kernels)


def gpu_sums(
    grad_RxF: jax.Array,
    x_RxD: jax.Array,
    sizes_E: jax.Array,
    interpret: bool = False,
) -> jax.Array:
  """Returns `tpu_sums` in the dtype of x on a GPU, one program per tile."""
  from jax.experimental import pallas as pl
  from jax.experimental.pallas import triton as plgpu

  (R, F), (E, D) = grad_RxF.shape, (len(sizes_E), x_RxD.shape[1])
  height, width, b = _gpu_tile(F, D, R, x_RxD.dtype)
  ends_E = jnp.cumsum(sizes_E)

  def kernel(start_ref, end_ref, grad_ref, x_ref, out_ref):
    e = pl.program_id(0)
    places = [
        pl.ds(pl.program_id(1) * height, height),
        pl.ds(pl.program_id(2) * width, width),
    ]
    is_output = places[0].start + jnp.arange(height) < F
    is_input = places[1].start + jnp.arange(width) < D
    start, end = start_ref[e], end_ref[e]

    def add(i: jax.Array, total: jax.Array) -> jax.Array:
      first = start + i * b
      is_row = (first + jnp.arange(b) < end)[:, None]
      grad, x = (
          plgpu.load(
              ref.at[pl.ds(first, b), place],
              mask=is_row & mask[None],
              other=0.0,
          )
          for ref, place, mask in zip(
              (grad_ref, x_ref), places, (is_output, is_input)
          )
      )
      return total + plgpu.dot(grad, x, trans_a=True)

    total = jnp.zeros((height, width), jnp.float32)
    trips = jax.lax.div(end - start + b - 1, b)
    total = jax.lax.fori_loop(0, trips, add, total)
    plgpu.store(
        out_ref.at[e, *places],
        total.astype(out_ref.dtype),
        mask=is_output[:, None] & is_input[None],
    )

  return pl.pallas_call(
      kernel,
      grid=(E, pl.cdiv(F, height), pl.cdiv(D, width)),
      out_shape=jax.ShapeDtypeStruct((E, F, D), x_RxD.dtype),
      compiler_params=plgpu.CompilerParams(
          num_warps=_GPU_WARPS, num_stages=_GPU_STAGES
      ),
      interpret=interpret,
      name="grouped_sums",
  )(ends_E - sizes_E, ends_E, grad_RxF, x_RxD)


def _gpu_tile(
    rows: int, columns: int, inner: int, dtype: jnp.dtype
) -> tuple[int, ...]:
  """Returns the tile sizes, powers of 2, for a product of these sizes."""
  most = list(GPU_TILE)
  if dtype == jnp.float32:
    most[2] //= 2
  needed = (max(_LEAST_TILE, 1 << (n - 1).bit_length())
            for n in (rows, columns, inner))  # fmt: skip
  return tuple(map(min, most, needed))


# Blocks: rows of one run at a time


def _list_blocks(
    num_rows: int, sizes_E: jax.Array, size: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Returns run, first row and end of each block, int32.

  The list has the maximum possible length. Entries past the last block have run
  E - 1, and begin and end at `num_rows`.
  """
  E = len(sizes_E)
  counts_E = -(-sizes_E // size)
  last_E, ends_E = jnp.cumsum(counts_E), jnp.cumsum(sizes_E)
  numbers = jnp.arange(-(-num_rows // size) + E, dtype=jnp.int32)
  run = jnp.searchsorted(last_E, numbers, side="right", method="compare_all")
  run = jnp.minimum(run, E - 1).astype(jnp.int32)
  index = numbers - (last_E - counts_E)[run]
  starts = (ends_E - sizes_E)[run] + index * size
  ends = jnp.minimum(starts + size, ends_E[run])
  is_block = numbers < last_E[-1]
  at = lambda rows: jnp.where(is_block, rows, num_rows).astype(jnp.int32)
  return run, at(starts), at(ends)


def _over_blocks(
    num_rows: int,
    sizes_E: jax.Array,
    body: Callable[..., jax.Array],
    out: jax.Array,
    size: int,
) -> jax.Array:
  """Returns `out` after body(e, start, out) for each block of each run."""
  run, starts, _ = _list_blocks(num_rows, sizes_E, size)
  trips = jnp.sum(-(-sizes_E // size))
  return jax.lax.fori_loop(
      0, trips, lambda i, out: body(run[i], starts[i], out), out
  )


def _block_size(num_rows: int, num_runs: int) -> int:
  """Returns the rows per block: the mean run length, within bounds."""
  size = _MIN_BLOCK
  while size < min(num_rows / num_runs, _MAX_BLOCK):
    size *= 2
  return size


def _block_products(
    x: jax.Array, kernels: jax.Array, sizes_E: jax.Array, axis: int
) -> jax.Array:
  """Returns `_times`, computed by a loop over blocks."""
  R, b = len(x), _block_size(len(x), len(kernels))
  # A block may extend past its run: the next block overwrites the excess.
  x = jnp.pad(x, ((0, b), (0, 0)))
  spec = ("bf,fd->bd", "bd,fd->bf")[axis - 1]

  def body(e: jax.Array, start: jax.Array, out: jax.Array) -> jax.Array:
    block = jax.lax.dynamic_slice_in_dim(x, start, b)
    new = products.summed(spec, block, kernels[e].astype(x.dtype), x.dtype)
    return jax.lax.dynamic_update_slice_in_dim(out, new, start, 0)

  out = jnp.zeros((len(x), kernels.shape[3 - axis]), x.dtype)
  out = _over_blocks(R, sizes_E, body, out, b)[:R]
  return _zero_past(out, sizes_E)


def _block_sums(
    grad_RxF: jax.Array, x_RxD: jax.Array, sizes_E: jax.Array
) -> jax.Array:
  """Returns `tpu_sums`, computed by a loop over blocks."""
  E, R = len(sizes_E), len(x_RxD)
  b = _block_size(R, E)
  grad, x = (jnp.pad(y, ((0, b), (0, 0))) for y in (grad_RxF, x_RxD))
  ends_E = jnp.cumsum(sizes_E)

  def body(e: jax.Array, start: jax.Array, out: jax.Array) -> jax.Array:
    of_block = lambda y: jax.lax.dynamic_slice_in_dim(y, start, b)
    own = start + jnp.arange(b) < ends_E[e]
    own = jnp.where(own[:, None], of_block(grad), 0)
    new = products.summed("bf,bd->fd", own, of_block(x), jnp.float32)
    return out.at[e].add(new)

  out = jnp.zeros((E, grad_RxF.shape[1], x_RxD.shape[1]), jnp.float32)
  return _over_blocks(R, sizes_E, body, out, b)
