# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Llama, Mistral and Qwen: pre-norm blocks of grouped-query attention, SwiGLU.

Source: Touvron et al. 2023 (arXiv:2302.13971, arXiv:2307.09288), as computed by
Hugging Face's `LlamaForCausalLM`. Mistral (arXiv:2310.06825) adds a sliding
window, Qwen2 (arXiv:2407.10671) biases of query, key and value, Qwen3
(arXiv:2505.09388) norms of each query and key head.
"""

import math

from flax import nnx
import jax
import jax.numpy as jnp

from tba_jax.models import config as config_lib
from tba_jax.models import layers

ModelConfig = config_lib.ModelConfig


def _norm(config: ModelConfig) -> layers.RMSNorm:
  return layers.RMSNorm(
      config.width,
      epsilon=config.norm_epsilon,
      param_dtype=jnp.dtype(config.param_dtype),
  )


class Block(nnx.Module):
  """x + attention(norm(x)), then x + mlp(norm(x))."""

  def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
    dtype = jnp.dtype(config.param_dtype)
    # Keeps the stream's variance near 1 over its 2N branches.
    out_scale = 1.0 / math.sqrt(2 * config.num_layers)
    self.attention_norm = _norm(config)
    self.attention = layers.Attention(
        config,
        rngs=rngs,
        out_scale=out_scale,
        qkv_bias=config.attention_bias or config.family == "qwen2",
        out_bias=config.attention_bias,
        has_norms=config.family == "qwen3",
    )
    self.mlp_norm = _norm(config)
    self.mlp = layers.GatedMLP(
        config.width,
        config.mlp_width,
        rngs=rngs,
        param_dtype=dtype,
        out_scale=out_scale,
        bias=config.mlp_bias,
    )

  def __call__(
      self,
      x: jax.Array,
      tables: tuple[jax.Array, jax.Array],
      attend: layers.AttendFn,
      layer: jax.Array | int,
  ) -> tuple[jax.Array, object]:
    """Returns the stream [..., D] after the block and what `attend` keeps."""
    del layer
    out, kept = self.attention(self.attention_norm(x), tables, attend)
    x = x + out
    return x + self.mlp(self.mlp_norm(x)), kept


class Llama(layers.Stack):
  """Llama's stack; positions are rotary."""

  Block = Block
  make_norm = staticmethod(_norm)

  def tables(self, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the rotary tables of positions [...]."""
    return layers.rotary_tables(self.config, positions)
