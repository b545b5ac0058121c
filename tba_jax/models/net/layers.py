# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Layers of the transformer families: products, norms, MLPs, attention.

Axes: B prompts, K completions, P prompt tokens, T completion tokens, Q
queries, S keys, L tokens, D width, G key-value heads, M query heads per
key-value head (H = G * M), Dh head width, E rotated entries of a head. Leading
axes written `...` are free.

Each `nnx.Param` has the metadata `logical_axes`, the names of its axes;
`policy.sharding.RULES` maps these to mesh axes.
"""

from collections.abc import Callable, Sequence
import math

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np

from tba_jax import types
from tba_jax.models import config as config_lib
from tba_jax.models.families import family as family_lib
from tba_jax.models.net import activations
from tba_jax.models.net import products
from tba_jax.models.net import quantized

# Params that no gradient reaches, and that weight decay must not change.
FIXED = ("choice_bias", "scalar")
# `jax.ad_checkpoint.checkpoint_name` of attention results.
ATTENTION = "attention"


def logical_axes(state: nnx.State) -> types.PyTree:
  """Returns a module's params, each replaced by its tuple of axis names."""
  axes = {}
  for path, param in nnx.to_flat_state(state):
    stacked = ("layers",) if path[0] == "blocks" else ()
    node = axes
    for name in path[:-1]:
      node = node.setdefault(name, {})
    node[path[-1]] = stacked + param.get_metadata()["logical_axes"]
  return axes


class Linear(nnx.Module):
  """A linear map over the last axes of its input.

  kernel: [*out_shape, *in_shape] in the param dtype, normal with a standard
    deviation of `scale` / sqrt(product of in_shape). Output axes come first, as
    in torch: the kernel's gradient is then a product of row-major operands,
    which is a third faster on XLA's CPU backend.
  bias: [*out_shape], initially zeros; optional.
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

  def __call__(self, x: jax.Array, dtype: jnp.dtype | None = None) -> jax.Array:
    """Returns [..., *out_shape] in `dtype` for x [..., *in_shape]."""
    dtype = dtype or x.dtype
    held = kernel = self.kernel.get_value()
    if isinstance(held, products.Adapted):
      kernel = held.kernel
    shape = kernel.shape[: kernel.ndim - self.num_in]
    x = x.reshape(*x.shape[: x.ndim - self.num_in], -1)
    kernel_FxD = kernel.reshape(-1, x.shape[-1])
    if isinstance(held, quantized.Quantized):
      out = products.quantized_product(x, kernel_FxD, dtype)
    else:
      out = products.product(x, kernel_FxD.astype(x.dtype), dtype)
    if isinstance(held, products.Adapted):
      out += held.correction(x).astype(dtype)
    out = out.reshape(*x.shape[:-1], *shape)
    if self.has_bias:
      out += products.expand_to(self.bias[...].astype(dtype), out.ndim)
    return out


class Embedding(nnx.Module):
  """Token embeddings [V, D], normal with deviation `scale` / sqrt(D)."""

  def __init__(
      self,
      vocab_size: int,
      width: int,
      *,
      rngs: nnx.Rngs,
      param_dtype: jnp.dtype,
      axis: str = "width",
      scale: float = 1.0,
  ):
    value = jax.random.normal(rngs.params(), (vocab_size, width), jnp.float32)
    value = scale * value / math.sqrt(width)
    self.embedding = nnx.Param(
        value.astype(param_dtype), logical_axes=("vocab", axis)
    )

  def __call__(self, tokens: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Returns [..., D] for int32 tokens [...]."""
    table = self.embedding.get_value()
    if isinstance(table, quantized.Quantized):
      return table.rows(tokens).astype(dtype)
    return jnp.take(table, tokens, axis=0).astype(dtype)

  def attend(self, x: jax.Array) -> jax.Array:
    """Returns the tied head's logits [..., V] float32 for x [..., D]."""
    kernel = self.embedding.get_value()
    if isinstance(kernel, quantized.Quantized):
      return products.quantized_product(x, kernel, jnp.float32)
    return products.product(x, kernel.astype(x.dtype), jnp.float32)


def normalized(x: jax.Array, epsilon: float) -> jax.Array:
  """Returns x / rms(x) over the last axis in float32, with epsilon added."""
  x32 = x.astype(jnp.float32)
  mean_square = jnp.mean(x32 * x32, axis=-1, keepdims=True)
  return x32 * jax.lax.rsqrt(mean_square + epsilon)


class RMSNorm(nnx.Module):
  """x / rms(x) * (offset + scale) over the last axis, computed in float32."""

  def __init__(
      self,
      width: int,
      *,
      epsilon: float,
      param_dtype: jnp.dtype,
      logical_axis: str = "width",
      offset: float = 0.0,
  ):
    self.epsilon, self.offset = epsilon, offset
    self.scale = nnx.Param(
        jnp.full((width,), 1.0 - offset, param_dtype),
        logical_axes=(logical_axis,),
    )

  def __call__(self, x: jax.Array) -> jax.Array:
    scale = products.expand_to(self.scale[...].astype(jnp.float32), x.ndim)
    scale = self.offset + scale
    return (normalized(x, self.epsilon) * scale).astype(x.dtype)


class LayerNorm(nnx.Module):
  """(x - mean) / std * scale + bias over the last axis, in float32."""

  def __init__(self, config: config_lib.ModelConfig):
    self.epsilon = config.norm_epsilon
    dtype = jnp.dtype(config.param_dtype)
    make = lambda value: nnx.Param(
        jnp.full((config.width,), value, dtype), logical_axes=("width",)
    )
    self.scale, self.bias = make(1.0), make(0.0)

  def __call__(self, x: jax.Array) -> jax.Array:
    x32 = x.astype(jnp.float32)
    centered = x32 - jnp.mean(x32, axis=-1, keepdims=True)
    variance = jnp.mean(centered * centered, axis=-1, keepdims=True)
    scale, bias = (
        products.expand_to(leaf[...].astype(jnp.float32), x.ndim)
        for leaf in (self.scale, self.bias)
    )
    normed = centered * jax.lax.rsqrt(variance + self.epsilon)
    return (normed * scale + bias).astype(x.dtype)


class MLP(nnx.Module):
  """down(activation(up(x))), both with biases."""

  def __init__(
      self,
      config: config_lib.ModelConfig,
      *,
      rngs: nnx.Rngs,
      out_scale: float,
  ):
    make = lambda n, m, axes, scale: Linear(
        *((n,), (m,), axes),
        rngs=rngs,
        param_dtype=jnp.dtype(config.param_dtype),
        scale=scale,
        bias=True,
    )
    self.activation = config.activation
    self.up = make(config.width, config.mlp_width, ("mlp", "width"), 1.0)
    self.down = make(
        config.mlp_width, config.width, ("width", "mlp"), out_scale
    )

  def __call__(self, x: jax.Array) -> jax.Array:
    return self.down(activations.ACTIVATIONS[self.activation](self.up(x)))


class GatedMLP(nnx.Module):
  """down(activation(gate(x)) * up(x)) of Shazeer 2020 (arXiv:2002.05202).

  It is SwiGLU with the activation "silu".
  """

  def __init__(
      self,
      width: int,
      mlp_width: int,
      *,
      rngs: nnx.Rngs,
      param_dtype: jnp.dtype,
      out_scale: float,
      bias: bool = False,
      activation: str = "silu",
      axis: str = "mlp",
  ):
    make = lambda n, m, axes, scale=1.0: Linear(
        *((n,), (m,), axes),
        rngs=rngs,
        param_dtype=param_dtype,
        scale=scale,
        bias=bias,
    )
    self.activation = activation
    self.gate = make(width, mlp_width, (axis, "width"))
    self.up = make(width, mlp_width, (axis, "width"))
    self.down = make(mlp_width, width, ("width", axis), out_scale)

  def __call__(self, x: jax.Array) -> jax.Array:
    gate = activations.ACTIVATIONS[self.activation](self.gate(x))
    return self.down(gate * self.up(x))


class SharedExpert(GatedMLP):
  """A gated MLP that every token uses, next to a layer's experts.

  Its output is multiplied by σ(out_gate · x) in families with
  `gates_shared_expert`.

  out_gate: [D].
  """

  def __init__(
      self,
      config: config_lib.ModelConfig,
      *,
      rngs: nnx.Rngs,
      out_scale: float,
  ):
    dtype = jnp.dtype(config.param_dtype)
    super().__init__(
        config.width,
        config.shared_expert_width,
        rngs=rngs,
        param_dtype=dtype,
        out_scale=out_scale,
        activation=config.activation,
        axis="shared_mlp",
    )
    self.has_gate = family_lib.FAMILIES[config.family].gates_shared_expert
    if self.has_gate:
      value = jax.random.normal(rngs.params(), (config.width,), jnp.float32)
      self.out_gate = nnx.Param(
          (value / math.sqrt(config.width)).astype(dtype),
          logical_axes=("width",),
      )

  def __call__(self, x: jax.Array) -> jax.Array:
    out = super().__call__(x)
    if not self.has_gate:
      return out
    gate_1xD = self.out_gate[...][None].astype(x.dtype)
    gate = jax.nn.sigmoid(products.product(x, gate_1xD, jnp.float32))
    return (out * gate).astype(x.dtype)


# (q_...xGxMxDh, k_...xGxDh, v_...xGxDh, sinks_GxM or None) -> (out_...xGxMxDh,
# auxiliary output). A shared layer has None in place of keys and values.
AttendFn = Callable[
    [jax.Array, jax.Array | None, jax.Array | None, jax.Array | None],
    tuple[jax.Array, object],
]


def rotate(x: jax.Array, tables: tuple[jax.Array, jax.Array]) -> jax.Array:
  """Returns x [..., heads, Dh] rotated by tables [..., E / 2] in float32.

  Entry i is paired with entry i + E / 2, as Hugging Face stores heads; the
  paper pairs 2i with 2i + 1, which is a permutation. Entries from E on are
  unchanged.
  """
  cos, sin = (table[..., None, :] for table in tables)
  half = cos.shape[-1]
  first, second, rest = jnp.split(x.astype(jnp.float32), (half, 2 * half), -1)
  return jnp.concatenate(
      [first * cos - second * sin, second * cos + first * sin, rest], axis=-1
  ).astype(x.dtype)


class Attention(nnx.Module):
  """Grouped-query attention (arXiv:2305.13245), rotary if tables are given.

  The caller's `attend` implements masks and caches, so that one module serves
  training, prefill and decoding.

  has_norms: whether query and key heads are normalized (Qwen3, Gemma 3).
  has_value_norm: whether value heads are, without a scale (Gemma 4).
  is_global: whether it has the shape of layers without a sliding window.
  is_shared: whether it has queries alone, for another layer's keys.
  joins_norms: whether that norm is over all heads together (OLMo 3).
  has_sinks: whether each query head has a sink (gpt-oss), a logit without a
    value: `sinks` [H], initially zeros.
  has_gate: whether the output is multiplied by a sigmoid gate, which `q` then
    computes next to each head's query (Qwen3.5).
  """

  def __init__(
      self,
      config: config_lib.ModelConfig,
      *,
      rngs: nnx.Rngs,
      out_scale: float,
      qkv_bias: bool,
      out_bias: bool,
      is_global: bool = False,
      is_shared: bool = False,
      has_norms: bool = False,
      has_value_norm: bool = False,
      joins_norms: bool = False,
      norm_offset: float = 0.0,
      has_sinks: bool = False,
      has_gate: bool = False,
  ):
    self.has_sinks, self.has_norms = has_sinks, has_norms
    self.joins_norms = joins_norms
    self.has_gate = has_gate
    self.is_shared = is_shared
    self.value_epsilon = config.norm_epsilon if has_value_norm else None
    width, head_dim, kv_heads = (
        config.width, config.head_dim, config.num_kv_heads
    )  # fmt: skip
    dim_axis, kv_axis = "head_dim", "kv_heads"
    if is_global:
      head_dim = config.global_head_dim or head_dim
      kv_heads = config.global_kv_heads or kv_heads
      dim_axis, kv_axis = "global_head_dim", "global_kv_heads"
    self.num_kv_heads = kv_heads
    self.keys_as_values = is_global and config.keys_as_values
    param_dtype = jnp.dtype(config.param_dtype)
    make = lambda shape, *axes: Linear(
        (width,),
        (*shape, head_dim),
        (*axes, dim_axis, "width"),
        rngs=rngs,
        param_dtype=param_dtype,
        bias=qkv_bias,
    )
    if has_gate:
      self.q = make((config.num_heads, 2), "heads", "gates")
    else:
      self.q = make((config.num_heads,), "heads")
    if not is_shared:
      self.k = make((kv_heads,), kv_axis)
      if not self.keys_as_values:
        self.v = make((kv_heads,), kv_axis)
    self.o = Linear(
        (config.num_heads, head_dim),
        (width,),
        ("width", "heads", dim_axis),
        rngs=rngs,
        param_dtype=param_dtype,
        scale=out_scale,
        bias=out_bias,
    )
    if has_norms:
      norm = lambda heads, axis: RMSNorm(
          heads * head_dim if joins_norms else head_dim,
          epsilon=config.norm_epsilon,
          param_dtype=param_dtype,
          logical_axis=f"all_{axis}" if joins_norms else dim_axis,
          offset=norm_offset,
      )
      self.q_norm = norm(config.num_heads, "heads")
      if not is_shared:
        self.k_norm = norm(kv_heads, kv_axis)
    if has_sinks:
      self.sinks = nnx.Param(
          jnp.zeros((config.num_heads,), param_dtype), logical_axes=("heads",)
      )

  def __call__(
      self,
      x: jax.Array,
      tables: tuple[jax.Array, ...] | None,
      attend: AttendFn,
  ) -> tuple[jax.Array, object]:
    """Returns [..., D] and the second output of `attend`, for x [..., D].

    `tables` come from `rotary_tables`.
    """
    q = self.q(x)
    if self.has_gate:
      q, gate = q[..., 0, :], q[..., 1, :]
    q = self._placed(q, "q_norm", tables)
    if tables is not None:
      for factors in tables[2:]:
        q = q * factors[..., None, None].astype(q.dtype)
    k = v = None
    if not self.is_shared:
      k = self.k(x)
      v = k if self.keys_as_values else self.v(x)
      k = self._placed(k, "k_norm", tables)
      if self.value_epsilon is not None:
        v = normalized(v, self.value_epsilon).astype(v.dtype)
    *lead, heads, head_dim = q.shape
    groups = self.num_kv_heads
    q = q.reshape(*lead, groups, heads // groups, head_dim)
    sinks = None
    if self.has_sinks:
      sinks = self.sinks[...].astype(jnp.float32).reshape(groups, -1)
    out, kept = attend(q, k, v, sinks)
    out = out.reshape(*lead, heads, head_dim)
    if self.has_gate:
      out *= jax.nn.sigmoid(gate)
    return self.o(out), kept

  def _placed(
      self, x: jax.Array, norm: str, tables: tuple[jax.Array, ...] | None
  ) -> jax.Array:
    """Returns queries or keys [..., heads, Dh], normalized and rotated."""
    if self.joins_norms:
      x = getattr(self, norm)(x.reshape(*x.shape[:-2], -1)).reshape(x.shape)
    elif self.has_norms:
      x = getattr(self, norm)(x)
    return x if tables is None else rotate(x, tables[:2])


def rotary_frequencies(
    config: config_lib.ModelConfig, *, local: bool = False
) -> np.ndarray:
  """Returns [E / 2] float32, the angle per position of each pair.

  Frequency i is theta^(-2i / E) (Su et al. 2021, arXiv:2104.09864, eq. 15),
  scaled according to `config.rope_type`; "llama3" scales as in Llama 3.1 (Dubey
  et al. 2024, arXiv:2407.21783), "yarn" as in Peng et al. 2023
  (arXiv:2309.00071, section 3.2), as computed by `transformers`. Local layers
  use `config.local_rope_theta` without scaling. "proportional" has the
  frequencies of a whole head, of which the last ones are 0 (Gemma 4).
  """
  E = width = config.head_dim if local else config.rotary_dim
  is_proportional = not local and config.rope_type == "proportional"
  if is_proportional:
    width = config.rope_width
  exponents = np.arange(0, E, 2, dtype=np.float32) / np.float32(width)
  theta = config.local_rope_theta if local else config.rope_theta
  plain = np.float32(1.0) / np.float32(theta) ** exponents
  if local or config.rope_type == "default":
    return plain
  scaled = plain / np.float32(config.rope_factor)
  if config.rope_type == "linear":
    return scaled
  if is_proportional:
    return np.pad(scaled, (0, (width - E) // 2))
  if config.rope_type == "yarn":
    share = _yarn_share(config)
    return ((1.0 - share) * scaled + share * plain).astype(np.float32)
  # Rotations of a pair over the original context length.
  turns = config.rope_original_positions * plain / (2 * math.pi)
  low, high = config.rope_low_freq_factor, config.rope_high_freq_factor
  share = np.clip((turns - low) / (high - low), 0.0, 1.0)
  return ((1.0 - share) * scaled + share * plain).astype(np.float32)


def _yarn_share(config: config_lib.ModelConfig) -> np.ndarray:
  """Returns [E / 2] float32, the weight of each pair's unscaled frequency.

  It falls linearly in the pair's index, from 1 at the pair that makes
  `rope_beta_fast` rotations over the original context length to 0 at the pair
  that makes `rope_beta_slow`.
  """
  E, theta = config.rotary_dim, config.rope_theta

  def pair_of(rotations: float) -> float:
    wavelength = config.rope_original_positions / rotations
    return E * math.log(wavelength / (2 * math.pi)) / (2 * math.log(theta))

  first, last = pair_of(config.rope_beta_fast), pair_of(config.rope_beta_slow)
  if config.rope_truncate:
    first, last = math.floor(first), math.ceil(last)
  first, last = max(first, 0), min(last, E - 1)
  if first == last:
    last += 0.001
  pairs = np.arange(E // 2, dtype=np.float32)
  return 1.0 - np.clip((pairs - first) / np.float32(last - first), 0.0, 1.0)


def rotary_scale(config: config_lib.ModelConfig) -> float:
  """Returns the factor of cosines and sines with "yarn", else 1.

  It is sqrt(1 / temperature) in Peng et al. 2023, section 3.4.
  """
  if config.rope_type != "yarn":
    return 1.0
  if config.rope_attention_factor is not None:
    return config.rope_attention_factor
  scale = lambda weight: 1.0 + 0.1 * weight * math.log(config.rope_factor)
  if config.rope_mscale and config.rope_mscale_all_dim:
    return scale(config.rope_mscale) / scale(config.rope_mscale_all_dim)
  return scale(1.0)


def score_scale(config: config_lib.ModelConfig) -> float:
  """Returns the factor of scores in latent attention with "yarn", else 1.

  It is the square of the factor that `rotary_scale` would have of
  `rope_mscale_all_dim` alone, applied to entries that are not rotated too.
  """
  if config.rope_type != "yarn":
    return 1.0
  weight = config.rope_mscale_all_dim
  return (1.0 + 0.1 * weight * math.log(config.rope_factor)) ** 2


def rotary_tables(
    config: config_lib.ModelConfig,
    positions: jax.Array,
    *,
    local: bool = False,
) -> tuple[jax.Array, ...]:
  """Returns cosines and sines [..., E / 2] float32 of positions [...].

  They are multiplied by `rotary_scale`, except in local layers. With
  `config.query_growth` they are followed by the factors of queries, [...]
  float32 (as in Llama 4, as computed by `transformers`).
  """
  axes = tuple(range(positions.ndim))
  frequencies_E2 = jnp.expand_dims(
      jnp.asarray(rotary_frequencies(config, local=local)), axes
  )
  angles = positions.astype(jnp.float32)[..., None] * frequencies_E2
  tables = jnp.cos(angles), jnp.sin(angles)
  scale = 1.0 if local else rotary_scale(config)
  if scale != 1.0:
    tables = tuple(table * scale for table in tables)
  if config.query_growth:
    contexts = positions // config.rope_original_positions
    growth = config.query_growth * jnp.log1p(contexts.astype(jnp.float32))
    tables = *tables, 1.0 + growth
  return tables
