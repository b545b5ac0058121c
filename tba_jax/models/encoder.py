# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""BERT and RoBERTa: encoders that see a whole text at once.

Source: Devlin et al. 2019 (arXiv:1810.04805) and Liu et al. 2019
(arXiv:1907.11692), as Hugging Face's `BertModel` and `RobertaModel` compute
them, and their `…ForSequenceClassification`. Both are frozen here: they give
sentence embeddings and classify.

Axes: B texts, L tokens, D width, N layers, C labels.
"""

from collections.abc import Callable
import dataclasses

from flax import nnx
import jax
import jax.numpy as jnp

from tba_jax import types
from tba_jax.models import attention
from tba_jax.models import encoder_config
from tba_jax.models import grouped_query
from tba_jax.models import layers

EncoderConfig = encoder_config.EncoderConfig
PyTree = types.PyTree


class Block(nnx.Module):
  """norm(x + attention(x)), then norm(x + mlp(x))."""

  def __init__(self, config: EncoderConfig, rngs: nnx.Rngs):
    self.attention = grouped_query.Attention(
        config.width,
        config.num_heads,
        config.num_heads,
        config.width // config.num_heads,
        rngs=rngs,
        param_dtype=jnp.float32,
        out_scale=1.0,
        qkv_bias=True,
        out_bias=True,
    )
    self.attention_norm = layers.LayerNorm(config)
    self.mlp = layers.MLP(config, rngs=rngs, out_scale=1.0)
    self.mlp_norm = layers.LayerNorm(config)

  def __call__(self, x: jax.Array, attend: grouped_query.AttendFn) -> jax.Array:
    """Returns the stream [B, L, D] after the block."""
    out, _ = self.attention(x, None, attend)
    x = self.attention_norm(x + out)
    return self.mlp_norm(x + self.mlp(x))


class Stack(nnx.Module):
  """Embeddings and their norm, N stacked blocks, and a classifier's head."""

  def __init__(self, config: EncoderConfig, rngs: nnx.Rngs):
    table = lambda size: layers.Embedding(
        size, config.width, rngs=rngs, param_dtype=jnp.float32
    )
    self.words = table(config.vocab_size)
    self.positions = table(config.max_positions)
    self.types = table(config.num_types)
    self.norm = layers.LayerNorm(config)
    make_block = lambda rngs: Block(config, rngs)
    self.blocks = nnx.vmap(make_block)(rngs.split(config.num_layers))
    if config.num_labels:
      linear = lambda size, axis: layers.Linear(
          *((config.width,), (size,), (axis, "width")),
          rngs=rngs,
          param_dtype=jnp.float32,
          bias=True,
      )
      self.pooler = linear(config.width, "mlp")
      self.score = linear(config.num_labels, "labels")


@dataclasses.dataclass(frozen=True)
class Encoder:
  """One encoder as pure functions; params are nested dicts of arrays.

  Texts are right-padded, with their framing tokens; a mask is 1 on real tokens.

  config: the shape.
  init: (rng) -> params; the leaves of params["blocks"] are [N, ...].
  states: (params, tokens_BxL, mask_BxL) -> states_BxLxD float32 after the last
    block; those at padding mean nothing but are finite.
  mean_pooled: as states -> [B, D] float32, the mean over real tokens.
  label_scores: as states -> [B, C] float32: what `transformers` calls logits;
    None where the shape has no labels.
  """

  config: EncoderConfig
  init: Callable[[jax.Array], PyTree]
  states: Callable[[PyTree, jax.Array, jax.Array], jax.Array]
  mean_pooled: Callable[[PyTree, jax.Array, jax.Array], jax.Array]
  label_scores: Callable[[PyTree, jax.Array, jax.Array], jax.Array] | None


class _Functions:
  """The functions of one shape."""

  def __init__(self, config: EncoderConfig):
    self.config = config
    define = lambda module: nnx.split(
        nnx.eval_shape(lambda: module(config, nnx.Rngs(params=0)))
    )[0]
    self.stack_def, self.block_def = define(Stack), define(Block)

  def init(self, rng: jax.Array) -> PyTree:
    return nnx.to_pure_dict(nnx.state(Stack(self.config, nnx.Rngs(params=rng))))

  def states(
      self, params: PyTree, tokens: jax.Array, mask: jax.Array
  ) -> jax.Array:
    c = self.config
    if tokens.shape[1] > c.max_tokens:
      raise ValueError(
          f"texts of {tokens.shape[1]} tokens: the encoder has positions for"
          f" {c.max_tokens}"
      )
    stack = nnx.merge(self.stack_def, params)
    seen_BxL = mask.astype(bool)
    # RoBERTa's padding has the position of its pad token.
    place_BxL = jnp.cumsum(seen_BxL, axis=-1) - 1
    place_BxL = jnp.where(
        seen_BxL, place_BxL + c.first_position, max(c.first_position - 1, 0)
    )
    x_BxLxD = (
        stack.words(tokens, jnp.float32)
        + stack.positions(place_BxL, jnp.float32)
        + stack.types(jnp.zeros_like(tokens), jnp.float32)
    )
    seen_BxLxL = jnp.broadcast_to(
        seen_BxL[:, None, :], (*seen_BxL.shape, seen_BxL.shape[1])
    )

    def attend(q, k, v):
      return attention.attend_self(q, k, v, seen_BxLxL), None

    def step(x, layer_params):
      return nnx.merge(self.block_def, layer_params)(x, attend), None

    return jax.lax.scan(step, stack.norm(x_BxLxD), params["blocks"])[0]

  def mean_pooled(
      self, params: PyTree, tokens: jax.Array, mask: jax.Array
  ) -> jax.Array:
    weights_BxLx1 = mask.astype(jnp.float32)[..., None]
    sums_BxD = (self.states(params, tokens, mask) * weights_BxLx1).sum(axis=1)
    return sums_BxD / jnp.maximum(weights_BxLx1.sum(axis=1), 1e-9)

  def label_scores(
      self, params: PyTree, tokens: jax.Array, mask: jax.Array
  ) -> jax.Array:
    stack = nnx.merge(self.stack_def, params)
    first_BxD = self.states(params, tokens, mask)[:, 0]
    return stack.score(jnp.tanh(stack.pooler(first_BxD)))


def make_encoder(config: EncoderConfig) -> Encoder:
  """Returns the encoder of a shape."""
  functions = _Functions(config)
  return Encoder(
      config=config,
      init=functions.init,
      states=functions.states,
      mean_pooled=functions.mean_pooled,
      label_scores=functions.label_scores if config.num_labels else None,
  )
