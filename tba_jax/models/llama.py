# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Llama and its kin: pre-norm blocks of grouped-query attention and SwiGLU.

Source: Touvron et al. 2023 (arXiv:2302.13971, arXiv:2307.09288), as Hugging
Face's `LlamaForCausalLM` computes it. Mistral (arXiv:2310.06825) adds a sliding
window, Qwen2 (arXiv:2407.10671) biases of query, key and value, Qwen3
(arXiv:2505.09388) norms of each query and key head.
"""

import math

from flax import nnx
import jax
import jax.numpy as jnp

from tba_jax.models import config as model_config_lib
from tba_jax.models import layers
from tba_jax.models import rotary

ModelConfig = model_config_lib.ModelConfig


class Block(nnx.Module):
  """x + attention(norm(x)), then x + mlp(norm(x))."""

  def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
    dtype = jnp.dtype(config.param_dtype)
    # The 2N branches that are added to the stream keep its variance near 1.
    out_scale = 1.0 / math.sqrt(2 * config.num_layers)
    norm = lambda: layers.RMSNorm(
        config.width, epsilon=config.norm_epsilon, param_dtype=dtype
    )
    self.attention_norm = norm()
    self.attention = layers.Attention(
        config.width,
        config.num_heads,
        config.num_kv_heads,
        config.head_dim,
        rngs=rngs,
        param_dtype=dtype,
        out_scale=out_scale,
        qkv_bias=config.attention_bias or config.family == "qwen2",
        out_bias=config.attention_bias,
        norm_epsilon=config.norm_epsilon if config.family == "qwen3" else None,
    )
    self.mlp_norm = norm()
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
  ) -> tuple[jax.Array, object]:
    """Returns the stream [..., D] after the block and what `attend` keeps."""
    out, kept = self.attention(self.attention_norm(x), tables, attend)
    x = x + out
    return x + self.mlp(self.mlp_norm(x)), kept


class Llama(nnx.Module):
  """Embeddings, N stacked blocks, final norm and head.

  Every parameter of `blocks` has a leading axis [num_layers, ...]; the forward
  modes of `models/build.py` scan over it.
  """

  Block = Block

  def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
    dtype = jnp.dtype(config.param_dtype)
    self.config = config
    self.embed = layers.Embedding(
        config.vocab_size, config.width, rngs=rngs, param_dtype=dtype
    )
    make_block = lambda rngs: Block(config, rngs)
    self.blocks = nnx.vmap(make_block)(rngs.split(config.num_layers))
    self.final_norm = layers.RMSNorm(
        config.width, epsilon=config.norm_epsilon, param_dtype=dtype
    )
    if config.num_labels:
      self.score = layers.Linear(
          (config.width,),
          (config.num_labels,),
          ("labels", "width"),
          rngs=rngs,
          param_dtype=dtype,
      )
    elif not config.tie_embeddings:
      self.head = layers.Linear(
          (config.width,),
          (config.vocab_size,),
          ("vocab", "width"),
          rngs=rngs,
          param_dtype=dtype,
      )

  def tables(self, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the rotary tables of positions [...]."""
    return rotary.tables(self.config, positions)

  def embed_tokens(self, tokens: jax.Array, positions: jax.Array) -> jax.Array:
    """Returns the stream [..., D] before the first block."""
    del positions  # Attention alone knows them.
    return self.embed(tokens, jnp.dtype(self.config.compute_dtype))

  def unembed(self, x: jax.Array) -> jax.Array:
    """Returns logits [..., V] float32 of the stream [..., D].

    V is the number of labels where the model has a scalar head.
    """
    x = self.final_norm(x)
    if self.config.num_labels:
      return self.score(x).astype(jnp.float32)
    if self.config.tie_embeddings:
      return self.embed.attend(x)
    return self.head(x).astype(jnp.float32)
