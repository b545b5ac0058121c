# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""What every family has around its blocks: embeddings, final norm and head."""

from collections.abc import Callable
from typing import ClassVar

from flax import nnx
import jax
import jax.numpy as jnp

from tba_jax.models import config as model_config_lib
from tba_jax.models import layers

ModelConfig = model_config_lib.ModelConfig


class Stack(nnx.Module):
  """Embeddings, N stacked blocks, final norm and head; a family derives it.

  Every parameter of `blocks` has a leading axis [num_layers, ...]; the forward
  modes of `models/build.py` scan over it.

  Block: the family's block, (config, rngs) -> module; called with (x, tables,
    attend, layer), the last an index from 0.
  make_norm: (config) -> the norm before the head.
  """

  Block: ClassVar[type[nnx.Module]]
  make_norm: ClassVar[Callable[[ModelConfig], nnx.Module]]

  def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
    dtype = jnp.dtype(config.param_dtype)
    self.config = config
    self.embed = layers.Embedding(
        config.vocab_size, config.width, rngs=rngs, param_dtype=dtype
    )
    make_block = lambda rngs: self.Block(config, rngs)
    self.blocks = nnx.vmap(make_block)(rngs.split(config.num_layers))
    self.final_norm = self.make_norm(config)
    make_head = lambda size, axis: layers.Linear(
        *((config.width,), (size,), (axis, "width")),
        rngs=rngs,
        param_dtype=dtype,
    )
    if config.num_labels:
      self.score = make_head(config.num_labels, "labels")
    elif not config.tie_embeddings:
      self.head = make_head(config.vocab_size, "vocab")

  def tables(self, positions: jax.Array) -> tuple[jax.Array, jax.Array] | None:
    """Returns what attention needs of positions [...]; None: nothing."""
    raise NotImplementedError

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
