# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Modules of a decoder, built from its family's description (`family.py`).

Blocks are pre-norm: x + attention(norm(x)), then x + mlp(norm(x)), or both in
parallel. The outputs of attention and MLP may be normalized too, or instead.
Attention has grouped queries; positions are rotary or learned.
"""

from collections.abc import Sequence
import itertools
import math

from flax import nnx
import jax
import jax.numpy as jnp

from tba_jax.models import config as config_lib
from tba_jax.models.families import family as family_lib
from tba_jax.models.net import delta
from tba_jax.models.net import experts
from tba_jax.models.net import layers

ModelConfig = config_lib.ModelConfig


def make_norm(config: ModelConfig) -> nnx.Module:
  """Returns a norm over the stream's width."""
  family = family_lib.FAMILIES[config.family]
  if family.norm == "layer":
    return layers.LayerNorm(config)
  return layers.RMSNorm(
      config.width,
      epsilon=config.norm_epsilon,
      param_dtype=jnp.dtype(config.param_dtype),
      offset=family.norm_offset,
  )


def _make_mlp(
    config: ModelConfig, rngs: nnx.Rngs, out_scale: float
) -> nnx.Module:
  if config.num_experts:
    return experts.Experts(config, rngs=rngs, out_scale=out_scale)
  if not family_lib.FAMILIES[config.family].is_gated:
    return layers.MLP(config, rngs=rngs, out_scale=out_scale)
  return layers.GatedMLP(
      config.width,
      config.mlp_width,
      rngs=rngs,
      param_dtype=jnp.dtype(config.param_dtype),
      out_scale=out_scale,
      bias=config.mlp_bias,
      activation=config.activation,
  )


class Block(nnx.Module):
  """An MLP, and attention or another token mixer.

  Each has its own norms and residual connection. A block of all kinds has the
  modules of every kind, and is never run.
  """

  def __init__(self, config: ModelConfig, rngs: nnx.Rngs, kind: Sequence[str]):
    """Initializes the modules of a kind from `config.kinds`."""
    self.config = config
    family = family_lib.FAMILIES[config.family]
    # Keeps the variance of the residual stream near 1 over its 2N branches.
    out_scale = 1.0 / math.sqrt(2 * config.num_layers)
    self.kind = tuple(kind)
    self.has_in_norms = family.has_in_norms
    if self.has_in_norms:
      self.attention_norm = make_norm(config)
      self.mlp_norm = make_norm(config)
    if "attention" in kind:
      self.attention = layers.Attention(
          config,
          rngs=rngs,
          out_scale=out_scale,
          qkv_bias=config.attention_bias or family.qkv_bias,
          out_bias=config.attention_bias or family.out_bias,
          has_norms=family.has_head_norms,
          joins_norms=family.joins_head_norms,
          norm_offset=family.norm_offset,
          has_sinks=family.has_sinks,
          has_gate=family.has_output_gate,
      )
    if "delta" in kind:
      self.delta = delta.GatedDeltaNet(config, rngs=rngs, out_scale=out_scale)
    self.mlp = _make_mlp(config, rngs, out_scale)
    self.has_out_norms = family.has_out_norms
    if self.has_out_norms:
      self.attention_out_norm = make_norm(config)
      self.mlp_out_norm = make_norm(config)

  def __call__(
      self,
      x: jax.Array,
      tables: tuple[jax.Array, ...] | None,
      attend: layers.AttendFn,
      layer: jax.Array | int,
      routes: jax.Array | None = None,
      recur: delta.RecurFn | None = None,
  ) -> tuple[jax.Array, object, jax.Array | None]:
    """Returns the stream [..., D], the mixer's second output, and the experts.

    A layer with a recurrent state calls `recur` where others call `attend`. The
    experts of each token, [..., A], equal `routes` if given; they are None for
    a layer without experts.
    """

    def attend_scaled(q, *others):
      return attend(self._scaled(q, layer), *others)

    inputs = self.attention_norm(x) if self.has_in_norms else x
    if "delta" in self.kind:
      out, kept = self.delta(inputs, recur)
    else:
      out, kept = self.attention(inputs, tables, attend_scaled)
    if self.has_out_norms:
      out = self.attention_out_norm(out)
    after = x + out
    read = x if self.config.parallel_residual else after
    inputs, chosen = self.mlp_norm(read) if self.has_in_norms else read, None
    if self.config.num_experts:
      out, chosen = self.mlp(inputs, routes)
    else:
      out = self.mlp(inputs)
    if self.has_out_norms:
      out = self.mlp_out_norm(out)
    return after + out, kept, chosen

  def _scaled(self, q: jax.Array, layer: jax.Array | int) -> jax.Array:
    """Returns queries scaled for scores that `attend` divides by sqrt(Dh)."""
    c = self.config
    score_dim = c.score_dim or c.head_dim
    scale = math.sqrt(c.head_dim / score_dim)
    if not c.scale_attention:
      scale = math.sqrt(c.head_dim)
    if scale == 1.0 and not c.scale_attention_by_layer:
      return q
    if c.scale_attention_by_layer:
      scale = scale / (1.0 + layer)
    return (q.astype(jnp.float32) * scale).astype(q.dtype)


class Decoder(nnx.Module):
  """Embeddings, N stacked blocks, final norm and head.

  Every parameter in `blocks` has a leading axis over the layers that have it,
  which `transformer.py` scans over (`stacks.py`). Learned positions are added
  to the embeddings.
  """

  def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
    dtype = jnp.dtype(config.param_dtype)
    self.config = config
    self.embed = layers.Embedding(
        config.vocab_size, config.width, rngs=rngs, param_dtype=dtype
    )
    modules = dict.fromkeys(itertools.chain(*config.kinds))
    make_block = lambda rngs: Block(config, rngs, tuple(modules))
    self.blocks = nnx.vmap(make_block)(rngs.split(config.num_layers))
    for name in modules:
      own = config.layers_with(name)
      if len(own) < config.num_layers:
        module = getattr(self.blocks, name)
        take = lambda x, own=jnp.asarray(own): x[own]
        nnx.update(module, jax.tree.map(take, nnx.state(module)))
    self.final_norm = make_norm(config)
    make_head = lambda size, axis: layers.Linear(
        *((config.width,), (size,), (axis, "width")),
        rngs=rngs,
        param_dtype=dtype,
    )
    if config.num_labels:
      self.score = make_head(config.num_labels, "labels")
    elif not config.tie_embeddings:
      self.head = make_head(config.vocab_size, "vocab")
    if self._learns_positions:
      shape = (config.max_positions, config.width)
      value = 0.1 * jax.random.normal(rngs.params(), shape, jnp.float32)
      self.positions = nnx.Param(
          (value / math.sqrt(config.width)).astype(dtype),
          logical_axes=("positions", "width"),
      )

  @property
  def _learns_positions(self) -> bool:
    return family_lib.FAMILIES[self.config.family].positions == "learned"

  def tables(
      self, positions: jax.Array
  ) -> dict[int, tuple[jax.Array, ...] | None]:
    """Returns rotary tables of positions [...] for each sliding window.

    The tables are None if positions are learned.
    """
    windows = dict.fromkeys(self.config.windows)
    if self._learns_positions:
      return windows
    has_local = family_lib.FAMILIES[self.config.family].has_local_rope
    return {
        window: layers.rotary_tables(
            self.config, positions, local=has_local and window > 0
        )
        for window in windows
    }

  def embed_tokens(self, tokens: jax.Array, positions: jax.Array) -> jax.Array:
    """Returns the stream [..., D] before the first block."""
    dtype = jnp.dtype(self.config.compute_dtype)
    x = self.embed(tokens, dtype)
    if family_lib.FAMILIES[self.config.family].scales_embeddings:
      x = x * jnp.asarray(math.sqrt(self.config.width), dtype)
    if not self._learns_positions:
      return x
    # A sampler's idle rows may be past the last position.
    own = jnp.take(self.positions[...], positions, axis=0, mode="clip")
    return x + own.astype(dtype)

  def unembed(self, x: jax.Array) -> jax.Array:
    """Returns float32 logits [..., V] or labels [..., C] of the stream."""
    x = self.final_norm(x)
    if self.config.num_labels:
      return self.score(x, jnp.float32)
    if self.config.tie_embeddings:
      return self.embed.attend(x)
    return self.head(x, jnp.float32)
