# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Grouped-query attention as a part of a block (arXiv:2305.13245).

Axes: D width, G key-value heads, M query heads of one key-value head
(H = G * M), Dh head width, E rotated entries of it. Leading axes written `...`
may be any.
"""

from collections.abc import Callable

from flax import nnx
import jax
import jax.numpy as jnp

from tba_jax.models import layers

# (q_...xGxMxDh, k_...xGxDh, v_...xGxDh) -> (out_...xGxMxDh, what is kept).
AttendFn = Callable[[jax.Array, jax.Array, jax.Array], tuple[jax.Array, object]]


def rotate(x: jax.Array, tables: tuple[jax.Array, jax.Array]) -> jax.Array:
  """Returns x [..., heads, Dh] rotated by tables [..., E / 2] in float32.

  Entry i is paired with entry i + E / 2, as Hugging Face stores heads; the
  paper pairs 2i with 2i + 1, a permutation of the same thing. Entries from E
  on stay as they are.
  """
  cos, sin = (table[..., None, :] for table in tables)
  half = cos.shape[-1]
  first, second, rest = jnp.split(x.astype(jnp.float32), (half, 2 * half), -1)
  return jnp.concatenate(
      [first * cos - second * sin, second * cos + first * sin, rest], axis=-1
  ).astype(x.dtype)


class Attention(nnx.Module):
  """Grouped-query attention, with rotary positions where tables are given.

  norm_epsilon: of the norms of each query and key head (Qwen3); None: no norms.

  It makes queries, keys and values and projects the result; `attend` says who
  sees whom, so that one module serves training, prefill and decoding.
  """

  def __init__(
      self,
      width: int,
      num_heads: int,
      num_kv_heads: int,
      head_dim: int,
      *,
      rngs: nnx.Rngs,
      param_dtype: jnp.dtype,
      out_scale: float,
      qkv_bias: bool = False,
      out_bias: bool = False,
      norm_epsilon: float | None = None,
  ):
    self.num_kv_heads = num_kv_heads
    make = lambda heads, axis: layers.Linear(
        (width,),
        (heads, head_dim),
        (axis, "head_dim", "width"),
        rngs=rngs,
        param_dtype=param_dtype,
        bias=qkv_bias,
    )
    self.q = make(num_heads, "heads")
    self.k = make(num_kv_heads, "kv_heads")
    self.v = make(num_kv_heads, "kv_heads")
    self.o = layers.Linear(
        (num_heads, head_dim),
        (width,),
        ("width", "heads", "head_dim"),
        rngs=rngs,
        param_dtype=param_dtype,
        scale=out_scale,
        bias=out_bias,
    )
    self.has_norms = norm_epsilon is not None
    if self.has_norms:
      norm = lambda: layers.RMSNorm(
          head_dim,
          epsilon=norm_epsilon,
          param_dtype=param_dtype,
          logical_axis="head_dim",
      )
      self.q_norm, self.k_norm = norm(), norm()

  def __call__(
      self,
      x: jax.Array,
      tables: tuple[jax.Array, jax.Array] | None,
      attend: AttendFn,
  ) -> tuple[jax.Array, object]:
    """Returns [..., D] and what `attend` keeps, for x [..., D]."""
    q, k, v = self.q(x), self.k(x), self.v(x)
    if self.has_norms:
      q, k = self.q_norm(q), self.k_norm(k)
    if tables is not None:
      q, k = rotate(q, tables), rotate(k, tables)
    *lead, heads, head_dim = q.shape
    groups = self.num_kv_heads
    q = q.reshape(*lead, groups, heads // groups, head_dim)
    out, kept = attend(q, k, v)
    return self.o(out.reshape(*lead, heads, head_dim)), kept
