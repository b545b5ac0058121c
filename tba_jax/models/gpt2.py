# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""GPT-2: learned positions, biases everywhere.

Source: Radford et al. 2019, "Language Models are Unsupervised Multitask
Learners", as computed by Hugging Face's `GPT2LMHeadModel`.
"""

import math

from flax import nnx
import jax
import jax.numpy as jnp

from tba_jax.models import config as config_lib
from tba_jax.models import layers

ModelConfig = config_lib.ModelConfig


class Block(nnx.Module):
  """x + attention(norm(x)), then x + mlp(norm(x))."""

  def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
    self.config = config
    # Keeps the stream's variance near 1 over its 2N branches.
    out_scale = 1.0 / math.sqrt(2 * config.num_layers)
    self.attention_norm = layers.LayerNorm(config)
    self.attention = layers.Attention(
        config,
        rngs=rngs,
        out_scale=out_scale,
        qkv_bias=True,
        out_bias=True,
    )
    self.mlp_norm = layers.LayerNorm(config)
    self.mlp = layers.MLP(config, rngs=rngs, out_scale=out_scale)

  def __call__(
      self,
      x: jax.Array,
      tables: None,
      attend: layers.AttendFn,
      layer: jax.Array | int,
  ) -> tuple[jax.Array, object]:
    """Returns the stream [..., D] after the block and what `attend` keeps."""

    def attend_scaled(q, k, v):
      return attend(self._scaled(q, layer), k, v)

    out, kept = self.attention(self.attention_norm(x), tables, attend_scaled)
    x = x + out
    return x + self.mlp(self.mlp_norm(x)), kept

  def _scaled(self, q: jax.Array, layer: jax.Array | int) -> jax.Array:
    """Returns queries scaled for scores that get divided by sqrt(Dh)."""
    c = self.config
    if c.scale_attention and not c.scale_attention_by_layer:
      return q
    scale = 1.0 if c.scale_attention else math.sqrt(c.head_dim)
    if c.scale_attention_by_layer:
      scale = scale / (1.0 + layer)
    return (q.astype(jnp.float32) * scale).astype(q.dtype)


class GPT2(layers.Stack):
  """GPT-2's stack; positions are added to the embeddings."""

  Block = Block
  make_norm = staticmethod(layers.LayerNorm)

  def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
    super().__init__(config, rngs)
    shape = (config.max_positions, config.width)
    value = 0.1 * jax.random.normal(rngs.params(), shape, jnp.float32)
    self.positions = nnx.Param(
        (value / math.sqrt(config.width)).astype(config.param_dtype),
        logical_axes=("positions", "width"),
    )

  def tables(self, positions: jax.Array) -> None:
    """Returns None: attention does not use positions."""
    del positions

  def embed_tokens(self, tokens: jax.Array, positions: jax.Array) -> jax.Array:
    """Returns the stream [..., D] before the first block."""
    # Idle rows of a sampler may be past the last position.
    own = jnp.take(self.positions[...], positions, axis=0, mode="clip")
    return super().embed_tokens(tokens, positions) + own.astype(
        jnp.dtype(self.config.compute_dtype)
    )
