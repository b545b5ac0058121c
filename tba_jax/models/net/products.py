# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Matrix products, and their gradients, as the backends compute them fast.

Axes: D inputs, F outputs, R rank of an adapter; axes written `...` are free.
"""

import contextvars
import dataclasses
import functools

import jax
from jax import ad_checkpoint
import jax.numpy as jnp

from tba_jax.models.net import quantized
from tba_jax.models.net import sequence

# `jax.ad_checkpoint.checkpoint_name` of the results of matrix products.
PRODUCT = "product"
# Whether it keeps results of products for its gradient as bits (`keep`).
KEEPS_BITS = contextvars.ContextVar("keeps_bits", default=False)


def expand_to(x: jax.Array, ndim: int) -> jax.Array:
  """Returns `x` with leading axes of size 1 added, up to `ndim` axes."""
  return jnp.expand_dims(x, tuple(range(ndim - x.ndim)))


def product(
    x: jax.Array, kernel: jax.Array, dtype: jnp.dtype | None = None
) -> jax.Array:
  """Returns x @ kernel.T.

  Args:
    x: [..., D].
    kernel: [F, D].
    dtype: type of the result and the sums; the dtype of `x` by default.

  Returns:
    [..., F].
  """
  return keep(_product(x, kernel, dtype or x.dtype))


def keep(out: jax.Array) -> jax.Array:
  """Returns a product's result, named for `train.remat`.

  To write a layer's bfloat16 into the stack of all layers, XLA's CPU backend
  converts the stack to float32 and back, and to read one keeps a float32 copy
  of it. Integers it leaves as they are.
  """
  if KEEPS_BITS.get() and out.dtype == jnp.bfloat16:
    return _keep_bits(out)
  return ad_checkpoint.checkpoint_name(out, PRODUCT)


@jax.custom_jvp
def _keep_bits(out: jax.Array) -> jax.Array:
  bits = jax.lax.bitcast_convert_type(out, jnp.uint16)
  bits = ad_checkpoint.checkpoint_name(bits, PRODUCT)
  return jax.lax.bitcast_convert_type(bits, out.dtype)


@_keep_bits.defjvp
def _keep_bits_jvp(
    primals: tuple[jax.Array], tangents: tuple[jax.Array]
) -> tuple[jax.Array, jax.Array]:
  # Not `_keep_bits` itself, whose name a policy would not see.
  return _keep_bits.fun(*primals), tangents[0]


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _product(
    x: jax.Array, kernel_FxD: jax.Array, dtype: jnp.dtype
) -> jax.Array:
  """Returns x @ kernel.T, with a gradient that transposes no operand.

  The compiler's own recomputes what comes before the product while it
  transposes the cotangent: on a CPU that took a sixth of a training step.
  """
  return summed("...d,fd->...f", x, kernel_FxD, dtype)


def _product_forward(
    x: jax.Array, kernel_FxD: jax.Array, dtype: jnp.dtype
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
  return _product(x, kernel_FxD, dtype), (x, kernel_FxD)


def _product_backward(
    dtype: jnp.dtype, operands: tuple[jax.Array, jax.Array], grad: jax.Array
) -> tuple[jax.Array, jax.Array]:
  del dtype  # `grad` has that dtype.
  x, kernel_FxD = operands
  grad_x = summed("...f,fd->...d", grad, kernel_FxD, x.dtype)
  if sequence.current_split().count == 1:
    # The backend would transpose operands of more than two axes; if two axes
    # are split over devices, merging them would gather the array.
    x, grad = (y.reshape(-1, y.shape[-1]) for y in (x, grad))
  rows = tuple(range(x.ndim - 1))
  plain = lambda grad, x: jax.lax.dot_general(
      grad,
      x,
      ((rows, rows), ((), ())),
      preferred_element_type=kernel_FxD.dtype,
  )
  if x.dtype != jnp.bfloat16 or x.ndim > 2:
    return grad_x, plain(grad, x)
  grad_FxD = jax.lax.platform_dependent(
      grad,
      x,
      cpu=lambda grad, x: _sum_over_rows(grad, x).astype(kernel_FxD.dtype),
      default=plain,
  )
  return grad_x, grad_FxD


def summed(
    spec: str, x: jax.Array, y: jax.Array, dtype: jnp.dtype
) -> jax.Array:
  """Returns `jnp.einsum(spec, x, y)` with sums in `dtype`.

  On a CPU bfloat16 operands are summed in float32: other bfloat16 products are
  two to six times as slow there, and slower than float32 products.
  """
  plain = lambda x, y: jnp.einsum(spec, x, y, preferred_element_type=dtype)
  if y.dtype != jnp.bfloat16:
    return plain(x, y)
  on_cpu = lambda x, y: jnp.einsum(
      spec, x.astype(y.dtype), y, preferred_element_type=jnp.float32
  ).astype(dtype)
  return jax.lax.platform_dependent(x, y, cpu=on_cpu, default=plain)


def _sum_over_rows(grad: jax.Array, x: jax.Array) -> jax.Array:
  """Returns grad.T @ x in float32, for the CPU's bfloat16 product."""
  turned = _transposed(grad.astype(x.dtype))
  return jnp.matmul(turned, x, preferred_element_type=jnp.float32)


def _transposed(x: jax.Array) -> jax.Array:
  """Returns x.T, which the compiler does not fold into a product.

  Folded, the product has no fast kernel. What leaves a conditional exists in
  memory, and the compiler does not see through the condition of this one.
  """
  true = jax.lax.optimization_barrier(jnp.bool_(True))
  return jax.lax.cond(
      true, jnp.transpose, lambda x: jnp.zeros(x.shape[::-1], x.dtype), x
  )


_product.defvjp(_product_forward, _product_backward)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Adapted:
  """A kernel W with a low-rank adapter: W x + B A x.

  It takes a kernel's place in params. With W frozen, its gradient is never
  computed. Of a layer of experts all three have an axis of experts in front.

  kernel: [*out_shape, *in_shape].
  a: [rank, *in_shape].
  b: [*out_shape, rank].
  """

  kernel: jax.Array
  a: jax.Array
  b: jax.Array

  def correction(self, x: jax.Array) -> jax.Array:
    """Returns B A x, [..., F], for x [..., D], in the dtype of x."""
    a_RxD = self.a.reshape(self.a.shape[0], -1).astype(x.dtype)
    b_FxR = self.b.reshape(-1, self.b.shape[-1]).astype(x.dtype)
    return _product(_product(x, a_RxD, x.dtype), b_FxR, x.dtype)


def quantized_product(
    x: jax.Array, kernel_FxD: quantized.Quantized, dtype: jnp.dtype
) -> jax.Array:
  """Returns x @ kernel.T in `dtype`.

  The result is scaled, so the operand remains integers, which are exact in
  bfloat16: no kernel of floats is made.
  """
  values = kernel_FxD.values.astype(x.dtype)
  # Devices that share a product add up results in `dtype`, as for floats.
  out = product(x, values, dtype)
  return (out * expand_to(kernel_FxD.scale, out.ndim)).astype(dtype)
