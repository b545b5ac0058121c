# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""The matrix product of activations with a kernel.

Axes: R decode rows, F outputs, D inputs.
"""

import functools

import jax
from jax.experimental import layout as layout_lib
import jax.numpy as jnp


def product(
    x: jax.Array, kernel: jax.Array, dtype: jnp.dtype | None = None
) -> jax.Array:
  """Returns x @ kernel.T.

  Args:
    x: [..., D].
    kernel: [F, D].
    dtype: of the result and the sums; that of `x` by default.

  Returns:
    [..., F].
  """
  plain = functools.partial(
      jnp.einsum, "...d,fd->...f", preferred_element_type=dtype
  )
  if x.ndim != 2:
    return plain(x, kernel)
  on_cpu = functools.partial(_rows_on_cpu, dtype=dtype)
  return jax.lax.platform_dependent(x, kernel, cpu=on_cpu, default=plain)


def _rows_on_cpu(
    x_RxD: jax.Array, kernel_FxD: jax.Array, *, dtype: jnp.dtype | None
) -> jax.Array:
  """Returns [R, F] as the transpose of kernel @ x.T.

  With few rows the CPU backend is a fifth faster with the kernel on the left.
  The layouts are told, or the compiler would turn the product round again; and
  rows stay rows in memory, so that no operation behind it mixes them: the bits
  of a row then do not depend on its place.
  """
  rows_major = lambda y: layout_lib.with_layout_constraint(
      y, layout_lib.Layout((0, 1))
  )
  out_FxR = jnp.einsum(
      "fd,dr->fr",
      kernel_FxD,
      rows_major(x_RxD.T),
      preferred_element_type=dtype,
  )
  return rows_major(rows_major(out_FxR).T)
