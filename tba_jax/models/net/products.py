# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Matrix products and their gradients, in forms that backends compute fast.

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
# Whether results of products are saved for the gradient as bits (`keep`).
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
    dtype: type of the result and of the sums; by default the dtype of `x`.

  Returns:
    [..., F].
  """
  return keep(_product(x, kernel, dtype or x.dtype))


def keep(out: jax.Array) -> jax.Array:
  """Returns a product's result, named for `train.remat`.

  To write a layer's bfloat16 result into the stack over layers, XLA's CPU
  backend converts the whole stack to float32 and back; to read a layer, it
  keeps a float32 copy of the stack. It does neither for integers.
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
  # Not `_keep_bits` itself: it would hide the name from a checkpoint policy.
  return _keep_bits.fun(*primals), tangents[0]


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _product(
    x: jax.Array, kernel_FxD: jax.Array, dtype: jnp.dtype
) -> jax.Array:
  """Returns x @ kernel.T, with a gradient that transposes no operand.

  JAX's default gradient transposes the cotangent and recomputes what precedes
  the product meanwhile: on a CPU that took a sixth of a train step.
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
    # The backend would transpose operands with more than two axes; merging two
    # axes that are both split over devices would gather the array.
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

  On a CPU, products of bfloat16 operands sum in float32: other bfloat16
    products
  are two to six times as slow, and slower than float32 products.
  """
  plain = lambda x, y: jnp.einsum(spec, x, y, preferred_element_type=dtype)
  if y.dtype != jnp.bfloat16:
    return plain(x, y)
  on_cpu = lambda x, y: jnp.einsum(
      spec, x.astype(y.dtype), y, preferred_element_type=jnp.float32
  ).astype(dtype)
  return jax.lax.platform_dependent(x, y, cpu=on_cpu, default=plain)


def _sum_over_rows(grad: jax.Array, x: jax.Array) -> jax.Array:
  """Returns grad.T @ x with float32 sums, by the CPU's bfloat16 product."""
  turned = _transposed(grad.astype(x.dtype))
  return jnp.matmul(turned, x, preferred_element_type=jnp.float32)


def _transposed(x: jax.Array) -> jax.Array:
  """Returns x.T such that the compiler does not fold it into a product.

  A product with a folded transpose has no fast kernel. The result of a
  conditional is materialized, and the compiler cannot evaluate this condition.
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

  It takes a kernel's place in params. If W is frozen, its gradient is never
  computed. In a layer of experts, all three have a leading axis of experts.

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

  Only the result is scaled, so the operand stays integer, which is exact in
  bfloat16: no float kernel is materialized.
  """
  values = kernel_FxD.values.astype(x.dtype)
  # Devices that share a product sum their results in `dtype`, as for floats.
  out = product(x, values, dtype)
  return (out * expand_to(kernel_FxD.scale, out.ndim)).astype(dtype)
