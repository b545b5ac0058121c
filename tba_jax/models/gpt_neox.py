# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""GPT-NeoX and Pythia: attention and MLP in parallel.

Source: Black et al. 2022 (arXiv:2204.06745) and Biderman et al. 2023
(arXiv:2304.01373), as computed by Hugging Face's `GPTNeoXForCausalLM`: the MLP
has its own norm even with a parallel residual.
"""

import math

from flax import nnx
import jax

from tba_jax.models import config as config_lib
from tba_jax.models import layers

ModelConfig = config_lib.ModelConfig


class Block(nnx.Module):
  """x + attention(norm(x)) + mlp(norm(x)), or the MLP after attention."""

  def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
    self.config = config
    # Keeps the stream's variance near 1 over its 2N branches.
    out_scale = 1.0 / math.sqrt(2 * config.num_layers)
    self.attention_norm = layers.LayerNorm(config)
    self.attention = layers.Attention(
        config,
        rngs=rngs,
        out_scale=out_scale,
        qkv_bias=config.attention_bias,
        out_bias=config.attention_bias,
    )
    self.mlp_norm = layers.LayerNorm(config)
    self.mlp = layers.MLP(config, rngs=rngs, out_scale=out_scale)

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
    read = x if self.config.parallel_residual else x + out
    return x + out + self.mlp(self.mlp_norm(read)), kept


class GPTNeoX(layers.Stack):
  """GPT-NeoX's stack; positions are rotary on a part of each head."""

  Block = Block
  make_norm = staticmethod(layers.LayerNorm)

  def tables(self, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the rotary tables of positions [...]."""
    return layers.rotary_tables(self.config, positions)
