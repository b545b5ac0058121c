# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""The parts that transformer families are made of: norms, MLPs, attention.

Axes: B prompts, K completions, P prompt tokens, T completion tokens, Q
queries, S keys, L any run of tokens, D width, G key-value heads, M query heads
of one key-value head (H = G * M), Dh head width, E rotated entries of it.
Leading axes written `...` may be any.

A parameter is a `nnx.Param` with the metadata `logical_axes`: the name of each
of its axes, which `config.sharding` maps to the axes of the mesh.
"""

from collections.abc import Callable, Sequence
import math

from flax import nnx
import jax
import jax.numpy as jnp

# Finite, so that a row with every key masked stays finite and has no NaN
# gradient; far below any score, so that a masked key weighs exactly 0.
MASKED_SCORE = -1e30

# (q_...xGxMxDh, k_...xGxDh, v_...xGxDh) -> (out_...xGxMxDh, what the mode
# keeps of the layer, for example its keys and values).
AttendFn = Callable[[jax.Array, jax.Array, jax.Array], tuple[jax.Array, object]]


def expand_to(x: jax.Array, ndim: int) -> jax.Array:
  """Returns `x` with axes of size 1 in front, so that it has `ndim` axes."""
  return jnp.expand_dims(x, tuple(range(ndim - x.ndim)))


class Linear(nnx.Module):
  """A matrix product over the last axes of its input.

  kernel: [*out_shape, *in_shape] in the param dtype, normal with a standard
    deviation of `scale` / sqrt(product of in_shape). Output axes come first,
    as torch stores them: the gradient of the kernel is then one product of
    row-major operands, which XLA's CPU backend does a third faster.
  bias: [*out_shape], zeros at first; only where `bias` asks for it.
  """

  def __init__(
      self,
      in_shape: Sequence[int],
      out_shape: Sequence[int],
      logical_axes: Sequence[str],
      *,
      rngs: nnx.Rngs,
      param_dtype: jnp.dtype,
      scale: float = 1.0,
      bias: bool = False,
  ):
    self.num_in = len(in_shape)
    stddev = scale / math.sqrt(math.prod(in_shape))
    shape = (*out_shape, *in_shape)
    value = stddev * jax.random.normal(rngs.params(), shape, jnp.float32)
    self.kernel = nnx.Param(
        value.astype(param_dtype), logical_axes=tuple(logical_axes)
    )
    self.has_bias = bias
    if bias:
      self.bias = nnx.Param(
          jnp.zeros(tuple(out_shape), param_dtype),
          logical_axes=tuple(logical_axes)[: len(out_shape)],
      )

  def __call__(self, x: jax.Array) -> jax.Array:
    """Returns [..., *out_shape] for x [..., *in_shape], in the dtype of x."""
    kernel = self.kernel[...].astype(x.dtype)
    in_axes = lambda ndim: tuple(range(ndim - self.num_in, ndim))
    out = jnp.tensordot(x, kernel, (in_axes(x.ndim), in_axes(kernel.ndim)))
    if self.has_bias:
      out += expand_to(self.bias[...].astype(x.dtype), out.ndim)
    return out


class Embedding(nnx.Module):
  """Token embeddings [V, D], normal with standard deviation 1 / sqrt(D)."""

  def __init__(
      self,
      vocab_size: int,
      width: int,
      *,
      rngs: nnx.Rngs,
      param_dtype: jnp.dtype,
  ):
    value = jax.random.normal(rngs.params(), (vocab_size, width), jnp.float32)
    value = value / math.sqrt(width)
    self.embedding = nnx.Param(
        value.astype(param_dtype), logical_axes=("vocab", "width")
    )

  def __call__(self, tokens: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Returns [..., D] for int32 tokens [...]."""
    return jnp.take(self.embedding[...], tokens, axis=0).astype(dtype)

  def attend(self, x: jax.Array) -> jax.Array:
    """Returns the tied head's logits [..., V] float32 for x [..., D]."""
    kernel = self.embedding[...].astype(x.dtype)
    return jnp.einsum(
        "...d,vd->...v", x, kernel, preferred_element_type=jnp.float32
    )


class RMSNorm(nnx.Module):
  """x / rms(x) * scale over the last axis, in float32 whatever the input."""

  def __init__(
      self,
      width: int,
      *,
      epsilon: float,
      param_dtype: jnp.dtype,
      logical_axis: str = "width",
  ):
    self.epsilon = epsilon
    self.scale = nnx.Param(
        jnp.ones((width,), param_dtype), logical_axes=(logical_axis,)
    )

  def __call__(self, x: jax.Array) -> jax.Array:
    x32 = x.astype(jnp.float32)
    mean_square = jnp.mean(x32 * x32, axis=-1, keepdims=True)
    scale = expand_to(self.scale[...].astype(jnp.float32), x.ndim)
    return (x32 * jax.lax.rsqrt(mean_square + self.epsilon) * scale).astype(
        x.dtype
    )


class GatedMLP(nnx.Module):
  """down(silu(gate(x)) * up(x)): SwiGLU of Shazeer 2020 (arXiv:2002.05202)."""

  def __init__(
      self,
      width: int,
      mlp_width: int,
      *,
      rngs: nnx.Rngs,
      param_dtype: jnp.dtype,
      out_scale: float,
      bias: bool = False,
  ):
    make = lambda n, m, axes, scale=1.0: Linear(
        *((n,), (m,), axes),
        rngs=rngs,
        param_dtype=param_dtype,
        scale=scale,
        bias=bias,
    )
    self.gate = make(width, mlp_width, ("mlp", "width"))
    self.up = make(width, mlp_width, ("mlp", "width"))
    self.down = make(mlp_width, width, ("width", "mlp"), out_scale)

  def __call__(self, x: jax.Array) -> jax.Array:
    return self.down(jax.nn.silu(self.gate(x)) * self.up(x))


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
    make = lambda heads, axis: Linear(
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
    self.o = Linear(
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
      norm = lambda: RMSNorm(
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


def _scores(spec: str, q: jax.Array, k: jax.Array, mask: jax.Array):
  """Returns scaled scores in float32, with MASKED_SCORE where mask is 0."""
  scores = jnp.einsum(spec, q, k, preferred_element_type=jnp.float32)
  mask = jnp.broadcast_to(mask, scores.shape)
  return jnp.where(mask, scores / math.sqrt(q.shape[-1]), MASKED_SCORE)


def attend_self(
    q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array
) -> jax.Array:
  """Returns attention of one sequence over itself.

  Args:
    q: [B, Q, G, M, Dh].
    k: [B, S, G, Dh].
    v: [B, S, G, Dh].
    mask: [B, Q, S] bool, True where query sees key.

  Returns:
    [B, Q, G, M, Dh].
  """
  scores = _scores("bqgmd,bsgd->bgmqs", q, k, mask[:, None, None])
  weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
  return jnp.einsum("bgmqs,bsgd->bqgmd", weights, v)


def attend_cached(
    q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array
) -> jax.Array:
  """Returns attention of one query per row over the columns of its cache.

  Args:
    q: [R, G, M, Dh].
    k: [R, G, C, Dh].
    v: [R, G, C, Dh].
    mask: [R, C] bool, True where the query sees the column.

  Returns:
    [R, G, M, Dh].
  """
  scores = _scores("rgmd,rgcd->rgmc", q, k, mask[:, None, None])
  weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
  return jnp.einsum("rgmc,rgcd->rgmd", weights, v)


def attend_shared(
    q: jax.Array,
    prompt: tuple[jax.Array, jax.Array, jax.Array],
    own: tuple[jax.Array, jax.Array, jax.Array],
) -> jax.Array:
  """Returns attention over a prompt shared by K rows and each row's own keys.

  One softmax over both sets of keys; the prompt's keys and values are read
  once for all K rows and never repeated.

  Args:
    q: [B, K, Q, G, M, Dh].
    prompt: keys [B, P, G, Dh], values [B, P, G, Dh], mask [B, Q, P] bool, or
      [B, 1, P] where each query sees the same.
    own: keys [B, K, S, G, Dh], values [B, K, S, G, Dh], mask [B, K, Q, S]
      bool.

  Returns:
    [B, K, Q, G, M, Dh].
  """
  k_prompt, v_prompt, mask_prompt = prompt
  k_own, v_own, mask_own = own
  s_prompt = _scores(
      "bkqgmd,bpgd->bgkmqp", q, k_prompt, mask_prompt[:, None, None, None]
  )
  s_own = _scores("bkqgmd,bksgd->bkgmqs", q, k_own, mask_own[:, :, None, None])
  swap = lambda x: jnp.swapaxes(x, 1, 2)
  largest = lambda x: jnp.max(x, axis=-1, initial=MASKED_SCORE)
  # Softmax is unchanged by a shift, so no gradient passes through the maximum.
  shift = jax.lax.stop_gradient(
      jnp.maximum(largest(s_prompt), swap(largest(s_own)))
  )[..., None]
  e_prompt, e_own = jnp.exp(s_prompt - shift), jnp.exp(s_own - swap(shift))
  total = e_prompt.sum(-1) + swap(e_own.sum(-1))
  out = jnp.einsum("bgkmqp,bpgd->bkqgmd", e_prompt.astype(q.dtype), v_prompt)
  out += jnp.einsum("bkgmqs,bksgd->bkqgmd", e_own.astype(q.dtype), v_own)
  total_BxKxQxGxM = jnp.transpose(total, (0, 2, 4, 1, 3))
  return out / total_BxKxQxGxM[..., None].astype(out.dtype)
