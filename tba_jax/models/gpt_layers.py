# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""What GPT-2 and GPT-NeoX share: norms with a mean, MLPs without a gate."""

from collections.abc import Callable, Mapping
import functools

from flax import nnx
import jax
import jax.numpy as jnp

from tba_jax.models import config as model_config_lib
from tba_jax.models import layers

ModelConfig = model_config_lib.ModelConfig

# `config.activation` -> function.
ACTIVATIONS: Mapping[str, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "gelu": functools.partial(jax.nn.gelu, approximate=False),
    "gelu_new": functools.partial(jax.nn.gelu, approximate=True),
    "relu": jax.nn.relu,
}


class LayerNorm(nnx.Module):
  """(x - mean) / deviation * scale + bias over the last axis, in float32."""

  def __init__(self, config: ModelConfig):
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
        layers.expand_to(leaf[...].astype(jnp.float32), x.ndim)
        for leaf in (self.scale, self.bias)
    )
    normed = centered * jax.lax.rsqrt(variance + self.epsilon)
    return (normed * scale + bias).astype(x.dtype)


class MLP(nnx.Module):
  """down(activation(up(x))), both with biases."""

  def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs, out_scale: float):
    make = lambda n, m, axes, scale: layers.Linear(
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
    return self.down(ACTIVATIONS[self.activation](self.up(x)))


def make_attention(
    config: ModelConfig, *, rngs: nnx.Rngs, out_scale: float, bias: bool
) -> layers.Attention:
  """Returns attention in which each query head has its own key and value."""
  return layers.Attention(
      config.width,
      config.num_heads,
      config.num_heads,
      config.head_dim,
      rngs=rngs,
      param_dtype=jnp.dtype(config.param_dtype),
      out_scale=out_scale,
      qkv_bias=bias,
      out_bias=bias,
  )
