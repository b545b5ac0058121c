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
from tba_jax.models.net import activations
from tba_jax.models.net import delta
from tba_jax.models.net import experts
from tba_jax.models.net import latent
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
  return _gated_mlp(config, config.mlp_width, rngs, out_scale)


def _gated_mlp(
    config: ModelConfig,
    mlp_width: int,
    rngs: nnx.Rngs,
    out_scale: float,
    axis: str = "mlp",
) -> nnx.Module:
  return layers.GatedMLP(
      config.width,
      mlp_width,
      rngs=rngs,
      param_dtype=jnp.dtype(config.param_dtype),
      out_scale=out_scale,
      bias=config.mlp_bias,
      activation=config.activation,
      axis=axis,
  )


def _make_attention(
    config: ModelConfig, name: str, rngs: nnx.Rngs, out_scale: float
) -> layers.Attention:
  """Returns a module of `config_lib.ATTENTIONS`."""
  family = family_lib.FAMILIES[config.family]
  return layers.Attention(
      config,
      rngs=rngs,
      out_scale=out_scale,
      qkv_bias=config.attention_bias or family.qkv_bias,
      out_bias=config.attention_bias and family.has_out_bias or family.out_bias,
      is_global=name.startswith("global"),
      is_shared="shared" in name,
      has_norms=family.has_head_norms or config.head_norms,
      has_value_norm=family.has_value_norms,
      joins_norms=family.joins_head_norms,
      norm_offset=family.norm_offset,
      has_sinks=family.has_sinks,
      has_gate=family.has_output_gate,
  )


class LayerInput(nnx.Module):
  """norm(input_out(activation(input_gate(x)) * e)), for a layer's embedding e.

  Its width P is `config.layer_input_width`.

  input_gate: [P, D].
  input_out: [D, P].
  """

  def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs, out_scale: float):
    width, narrow = (config.width,), (config.layer_input_width,)
    make = lambda inputs, outs, *axes, scale=1.0: layers.Linear(
        *(inputs, outs, axes),
        rngs=rngs,
        param_dtype=jnp.dtype(config.param_dtype),
        scale=scale,
    )
    self.activation = config.activation
    self.input_gate = make(width, narrow, "layer_input", "width")
    self.input_out = make(
        narrow, width, "width", "layer_input", scale=out_scale
    )
    self.norm = make_norm(config)

  def __call__(self, x: jax.Array, embedding: jax.Array) -> jax.Array:
    """Returns [..., D] for x [..., D] and an embedding [..., P]."""
    gate = activations.ACTIVATIONS[self.activation](self.input_gate(x))
    return self.norm(self.input_out(gate * embedding))


class Block(nnx.Module):
  """An MLP or experts, and attention or another token mixer.

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
    self.divides_scores = family.divides_scores
    self.has_in_norms = family.has_in_norms
    if self.has_in_norms:
      self.attention_norm = make_norm(config)
      self.mlp_norm = make_norm(config)
    self.has_latents = family.has_latents
    if self.has_latents:
      self.attention = latent.LatentAttention(
          config, rngs=rngs, out_scale=out_scale
      )
    else:
      for name in filter(config_lib.ATTENTIONS.__contains__, kind):
        setattr(self, name, _make_attention(config, name, rngs, out_scale))
    if "delta" in kind:
      self.delta = delta.GatedDeltaNet(config, rngs=rngs, out_scale=out_scale)
    if "mlp" in kind:
      self.mlp = _make_mlp(config, rngs, out_scale)
    if "dense_mlp" in kind:
      self.dense_mlp = _gated_mlp(
          config, config.dense_mlp_width, rngs, out_scale, "dense_mlp"
      )
    if "shared_mlp" in kind:
      self.shared_mlp = layers.SharedExpert(
          config, rngs=rngs, out_scale=out_scale
      )
    self.has_out_norms = family.has_out_norms
    if self.has_out_norms:
      self.attention_out_norm = make_norm(config)
      self.mlp_out_norm = make_norm(config)
    self.norms_experts = family.norms_experts and config.num_experts > 0
    if self.norms_experts:
      self.experts_norm = make_norm(config)
      self.experts_out_norm = make_norm(config)
      self.shared_out_norm = make_norm(config)
    if config.layer_input_width:
      self.layer_input = LayerInput(config, rngs=rngs, out_scale=out_scale)
    self.has_scalar = family.has_layer_scalars
    if self.has_scalar:
      self.scalar = nnx.Param(
          jnp.ones((1,), jnp.dtype(config.param_dtype)),
          logical_axes=("one",),
      )

  def __call__(
      self,
      x: jax.Array,
      tables: tuple[jax.Array, ...] | None,
      attend: layers.AttendFn,
      layer: jax.Array | int,
      routes: jax.Array | None = None,
      recur: delta.RecurFn | None = None,
      layer_input: jax.Array | None = None,
      absorbs: bool = False,
  ) -> tuple[jax.Array, object, jax.Array | None]:
    """Returns the stream [..., D], the mixer's second output, and the experts.

    A layer with a recurrent state calls `recur` where others call `attend`. The
    experts of each token, [..., A], equal `routes` if given; they are None for
    a layer without experts. `layer_input` is the layer's embedding of each
    token, if there are any (`Decoder.layer_inputs`). `absorbs` is an argument
    of latent attention.
    """

    def attend_scaled(q, *others):
      return attend(self._scaled(q, layer), *others)

    inputs = self.attention_norm(x) if self.has_in_norms else x
    if "delta" in self.kind:
      out, kept = self.delta(inputs, recur)
    elif self.has_latents:
      out, kept = self.attention(inputs, tables, attend_scaled, absorbs)
    else:
      name = next(filter(config_lib.ATTENTIONS.__contains__, self.kind))
      out, kept = getattr(self, name)(inputs, tables, attend_scaled)
    if self.has_out_norms:
      out = self.attention_out_norm(out)
    after = x + out
    read = x if self.config.parallel_residual else after
    inputs, chosen = self.mlp_norm(read) if self.has_in_norms else read, None
    if "dense_mlp" in self.kind:
      out = self.dense_mlp(inputs)
    elif self.norms_experts:
      out, chosen = self.mlp(self.experts_norm(read), routes, read)
      out = self.experts_out_norm(out)
      out += self.shared_out_norm(self.shared_mlp(inputs))
    elif self.config.num_experts:
      out, chosen = self.mlp(inputs, routes)
      if "shared_mlp" in self.kind:
        out += self.shared_mlp(inputs)
    else:
      out = self.mlp(inputs)
    if self.has_out_norms:
      out = self.mlp_out_norm(out)
    x = after + out
    if layer_input is not None:
      x += self.layer_input(x, layer_input)
    if self.has_scalar:
      x *= jax.lax.stop_gradient(self.scalar[0]).astype(x.dtype)
    return x, kept, chosen

  def _scaled(self, q: jax.Array, layer: jax.Array | int) -> jax.Array:
    """Returns queries scaled for scores that `attend` divides by sqrt(Dh)."""
    c, head_dim = self.config, q.shape[-1]
    scale = math.sqrt(head_dim / (c.score_dim or head_dim))
    if not (self.divides_scores and c.scale_attention):
      scale = math.sqrt(head_dim)
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
    if config.layer_input_width:
      self._add_layer_inputs(rngs)
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

  def _add_layer_inputs(self, rngs: nnx.Rngs) -> None:
    """Adds embeddings of each layer, N * P wide, and their other source."""
    c, dtype = self.config, jnp.dtype(self.config.param_dtype)
    size = c.num_layers * c.layer_input_width
    self.layer_embed = layers.Embedding(
        *(c.vocab_size, size),
        rngs=rngs,
        param_dtype=dtype,
        axis="layer_inputs",
        scale=math.sqrt(c.num_layers),
    )
    self.layer_map = layers.Linear(
        *((c.width,), (size,), ("layer_inputs", "width")),
        rngs=rngs,
        param_dtype=dtype,
    )
    self.layer_map_norm = layers.RMSNorm(
        c.layer_input_width,
        epsilon=c.norm_epsilon,
        param_dtype=dtype,
        logical_axis="layer_input",
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

  def layer_inputs(self, tokens: jax.Array, x: jax.Array) -> jax.Array | None:
    """Returns each layer's embedding of tokens, [N, ..., P]; None without any.

    It is the mean of one that a table holds and of one that is made of the
    token's embedding, times √2.

    Source: Gemma 4, as computed by Hugging Face's `Gemma4TextModel`.

    Args:
      tokens: [...] int32.
      x: [..., D], result of `embed_tokens`.
    """
    c = self.config
    if not c.layer_input_width:
      return None
    split = lambda x: x.reshape(*x.shape[:-1], -1, c.layer_input_width)
    scale = jnp.asarray(math.sqrt(c.layer_input_width), x.dtype)
    table = split(self.layer_embed(tokens, x.dtype) * scale)
    made = self.layer_map_norm(split(self.layer_map(x) * c.width**-0.5))
    return jnp.moveaxis((made + table) * 2**-0.5, -2, 0)

  def unembed(self, x: jax.Array) -> jax.Array:
    """Returns float32 logits [..., V] or labels [..., C] of the stream."""
    x = self.final_norm(x)
    if self.config.num_labels:
      return self.score(x, jnp.float32)
    if self.config.tie_embeddings:
      logits = self.embed.attend(x)
    else:
      logits = self.head(x, jnp.float32)
    cap = self.config.logit_cap
    return cap * jnp.tanh(logits / cap) if cap else logits
