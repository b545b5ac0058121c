# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Frozen BERT and RoBERTa, for sentence embeddings and classification.

Source: Devlin et al. 2019 (arXiv:1810.04805) and Liu et al. 2019
(arXiv:1907.11692), as computed by Hugging Face's `BertModel`, `RobertaModel`
and their `…ForSequenceClassification`.

Axes: B texts, L tokens, D width, N layers, C labels.
"""

from collections.abc import Callable, Iterator, Mapping
import dataclasses
import os
from typing import Any

from flax import nnx
import jax
import jax.numpy as jnp

from tba_jax import types
from tba_jax.models.families import family as family_lib
from tba_jax.models.hf import hf
from tba_jax.models.hf import hf_config
from tba_jax.models.hf import hf_files
from tba_jax.models.hf import hf_hub
from tba_jax.models.hf import hf_names
from tba_jax.models.net import attention
from tba_jax.models.net import layers as layers_lib
from tba_jax.models.net import sequence

PyTree = types.PyTree

FAMILIES = ("bert", "roberta")


@dataclasses.dataclass(frozen=True)
class EncoderConfig:
  """The shape of one encoder; params and activations are float32.

  family: "bert" or "roberta".
  vocab_size: V.
  num_layers: N.
  width: D, a multiple of num_heads.
  num_heads: H.
  mlp_width: F.
  max_positions: rows of the position embedding.
  num_types: rows of the token type embedding; only the first is used.
  norm_epsilon: term added to the variance in a norm.
  pad_id: id of the padding token; RoBERTa's positions start at the next id.
  num_labels: outputs of a classifier; 0 is no head.
  """

  family: str
  vocab_size: int
  num_layers: int
  width: int
  num_heads: int
  mlp_width: int
  max_positions: int
  num_types: int
  norm_epsilon: float
  activation: str
  pad_id: int
  num_labels: int = 0

  # `models/net/layers.py` reads this and the next two.
  param_dtype: str = "float32"

  @property
  def num_kv_heads(self) -> int:
    return self.num_heads

  @property
  def head_dim(self) -> int:
    return self.width // self.num_heads

  @property
  def first_position(self) -> int:
    """Position index of a text's first token."""
    return self.pad_id + 1 if self.family == "roberta" else 0

  @property
  def max_tokens(self) -> int:
    """Maximum number of tokens of a text."""
    return self.max_positions - self.first_position


def encoder_config_from_hf(hf_json: Mapping[str, Any]) -> EncoderConfig:
  """Returns the shape that a Hugging Face config.json describes.

  Raises:
    ValueError: model_type is not an encoder, or settings are missing, unknown
      or unsupported; the message lists all of them.
  """
  family = hf_json.get("model_type")
  if family not in FAMILIES:
    raise ValueError(
        f"config.json: model_type={family!r} is not supported for an encoder;"
        f" supported: {sorted(FAMILIES)}"
    )
  keys = {
      "vocab_size": ("vocab_size", int, ...),
      "num_layers": ("num_hidden_layers", int, ...),
      "width": ("hidden_size", int, ...),
      "num_heads": ("num_attention_heads", int, ...),
      "mlp_width": ("intermediate_size", int, ...),
      # Defaults of `transformers`.
      "max_positions": ("max_position_embeddings", int, 512),
      "num_types": ("type_vocab_size", int, 2),
      "norm_epsilon": ("layer_norm_eps", float, 1e-12),
      "activation": ("hidden_act", family_lib.HF_ACTIVATIONS, "gelu"),
      "pad_id": ("pad_token_id", int, 0 if family == "bert" else 1),
  }
  others = ("architectures", "bos_token_id", "dtype", "eos_token_id",
            "id2label", "num_labels", "tie_word_embeddings",
            "torch_dtype")  # fmt: skip
  fields, problems = hf_config.read_settings(hf_json, keys, {}, others)
  if fields["width"] % max(fields["num_heads"], 1):
    problems.append("hidden_size is not a multiple of num_attention_heads")
  if problems:
    raise ValueError("config.json: " + "; ".join(problems))
  # Heads of other classes are not used.
  num_labels = hf_config.read_num_labels(hf_json, problems)
  return EncoderConfig(family=family, num_labels=num_labels, **fields)


class EncoderBlock(nnx.Module):
  """norm(x + attention(x)), then norm(x + mlp(x))."""

  def __init__(self, config: EncoderConfig, rngs: nnx.Rngs):
    self.attention = layers_lib.Attention(
        config,
        rngs=rngs,
        out_scale=1.0,
        qkv_bias=True,
        out_bias=True,
    )
    self.attention_norm = layers_lib.LayerNorm(config)
    self.mlp = layers_lib.MLP(config, rngs=rngs, out_scale=1.0)
    self.mlp_norm = layers_lib.LayerNorm(config)

  def __call__(self, x: jax.Array, attend: layers_lib.AttendFn) -> jax.Array:
    """Returns the stream [B, L, D] after the block."""
    out, _ = self.attention(x, None, attend)
    x = self.attention_norm(x + out)
    return self.mlp_norm(x + self.mlp(x))


class Stack(nnx.Module):
  """Embeddings and their norm, N stacked blocks, and an optional classifier."""

  def __init__(self, config: EncoderConfig, rngs: nnx.Rngs):
    table = lambda size: layers_lib.Embedding(
        size, config.width, rngs=rngs, param_dtype=jnp.float32
    )
    self.words = table(config.vocab_size)
    self.positions = table(config.max_positions)
    self.types = table(config.num_types)
    self.norm = layers_lib.LayerNorm(config)
    make_block = lambda rngs: EncoderBlock(config, rngs)
    self.blocks = nnx.vmap(make_block)(rngs.split(config.num_layers))
    if config.num_labels:
      linear = lambda size, axis: layers_lib.Linear(
          *((config.width,), (size,), (axis, "width")),
          rngs=rngs,
          param_dtype=jnp.float32,
          bias=True,
      )
      self.pooler = linear(config.width, "mlp")
      self.score = linear(config.num_labels, "labels")


class Encoder:
  """An encoder as pure functions; params are nested dicts of arrays.

  Texts `tokens` [B, L] are right-padded and include special tokens; `mask`
  [B, L] is 1 on real tokens.

  logical_axes: params with a tuple of axis names in place of each leaf.
  """

  def __init__(self, config: EncoderConfig):
    self.config = config
    define = lambda module: nnx.split(
        nnx.eval_shape(lambda: module(config, nnx.Rngs(params=0)))
    )
    self._stack_def, state = define(Stack)
    self._block_def, _ = define(EncoderBlock)
    self.logical_axes = layers_lib.logical_axes(state)

  def init(self, rng: jax.Array) -> PyTree:
    """Returns random params; the leaves of params["blocks"] are [N, ...]."""
    return nnx.to_pure_dict(nnx.state(Stack(self.config, nnx.Rngs(params=rng))))

  def states(
      self, params: PyTree, tokens: jax.Array, mask: jax.Array
  ) -> jax.Array:
    """Returns [B, L, D] float32 after the last block.

    States are finite but meaningless at padding. Raises ValueError if L is too
    large.
    """
    c = self.config
    if tokens.shape[1] > c.max_tokens:
      raise ValueError(
          f"texts of {tokens.shape[1]} tokens: the encoder has positions for"
          f" {c.max_tokens}"
      )
    stack, parts = nnx.merge(self._stack_def, params), sequence.current_split()
    seen_BxL = mask.astype(bool)
    # RoBERTa gives padding the position of its pad token.
    position_BxL = jnp.cumsum(seen_BxL, axis=-1) - 1
    position_BxL = jnp.where(
        seen_BxL, position_BxL + c.first_position, max(c.first_position - 1, 0)
    )
    x_BxLxD = (
        stack.words(tokens, jnp.float32)
        + stack.positions(position_BxL, jnp.float32)
        + stack.types(jnp.zeros_like(tokens), jnp.float32)
    )
    seen_BxLxL = jnp.broadcast_to(
        seen_BxL[:, None, :], (*seen_BxL.shape, seen_BxL.shape[1])
    )

    def attend(q, k, v, sinks):
      return attention.attend_self(q, k, v, seen_BxLxL, sinks), None

    def step(x, layer_params):
      x = nnx.merge(self._block_def, layer_params)(x, attend)
      return parts.place(x, "batch"), None

    x_BxLxD = parts.place(stack.norm(x_BxLxD), "batch")
    return jax.lax.scan(step, x_BxLxD, params["blocks"])[0]

  def mean_pooled(
      self, params: PyTree, tokens: jax.Array, mask: jax.Array
  ) -> jax.Array:
    """Returns the mean state over real tokens, [B, D] float32."""
    weights_BxLx1 = mask.astype(jnp.float32)[..., None]
    sums_BxD = (self.states(params, tokens, mask) * weights_BxLx1).sum(axis=1)
    return sums_BxD / jnp.maximum(weights_BxLx1.sum(axis=1), 1e-9)

  def label_scores(
      self, params: PyTree, tokens: jax.Array, mask: jax.Array
  ) -> jax.Array:
    """Returns a classifier's logits [B, C] float32."""
    stack = nnx.merge(self._stack_def, params)
    first_BxD = self.states(params, tokens, mask)[:, 0]
    return stack.score(jnp.tanh(stack.pooler(first_BxD)))


# Tensors of unused heads, and buffers that older versions stored.
_IGNORED = (
    r"(.*\.)?(embeddings\.(position_ids|token_type_ids)|pooler\..*)"
    r"|cls\..*|lm_head\..*"
)


def hf_rows(c: EncoderConfig, prefix: str) -> list[hf_names.TensorRow]:
  """Returns the table of a shape's leaves.

  Args:
    prefix: start of all names except the head's: "" or "<family>.".
  """
  sizes = {
      "vocab": c.vocab_size,
      "positions": c.max_positions,
      "types": c.num_types,
      "labels": c.num_labels,
      "width": c.width,
      "mlp": c.mlp_width,
      "heads": c.num_heads,
      "head_dim": c.width // c.num_heads,
  }
  return [hf_names.make_row(sizes, *line) for line in _table(c, prefix)]


def _table(c: EncoderConfig, prefix: str) -> Iterator[family_lib.Line]:
  embeddings, layer = f"{prefix}embeddings", prefix + "encoder.layer.{layer}"
  for name, path, axis in (
      ("word", "words", "vocab"),
      ("position", "positions", "positions"),
      ("token_type", "types", "types"),
  ):
    source = f"{embeddings}.{name}_embeddings.weight"
    yield source, f"{path}.embedding", f"{axis} width"
  yield from family_lib.norm(f"{embeddings}.LayerNorm", "norm")
  heads = "heads*head_dim"
  linear = family_lib.linear
  for name in ("query", "key", "value"):
    source, path = (
        f"{layer}.attention.self.{name}",
        f"blocks.attention.{name[0]}",
    )
    yield from linear(source, path, heads, "width")
  output = f"{layer}.attention.output"
  yield from linear(f"{output}.dense", "blocks.attention.o", "width", heads)
  yield from family_lib.norm(f"{output}.LayerNorm", "blocks.attention_norm")
  source = f"{layer}.intermediate.dense"
  yield from linear(source, "blocks.mlp.up", "mlp", "width")
  yield from linear(f"{layer}.output.dense", "blocks.mlp.down", "width", "mlp")
  yield from family_lib.norm(f"{layer}.output.LayerNorm", "blocks.mlp_norm")
  if c.num_labels:
    is_bert = c.family == "bert"
    pooler = f"{prefix}pooler.dense" if is_bert else "classifier.dense"
    yield from linear(pooler, "pooler", "width", "width")
    score = "classifier" if is_bert else "classifier.out_proj"
    yield from linear(score, "score", "labels", "width")


def load_encoder(
    folder: str | os.PathLike[str],
    shardings_of: Callable[[Encoder], PyTree] = lambda encoder: None,
) -> tuple[Encoder, PyTree]:
  """Returns the encoder of a Hugging Face folder and its params, float32.

  Heads other than a classifier's are ignored.

  Args:
    folder: a path, or a model of the hub (`hf_hub`).
    shardings_of: (encoder) -> shardings of the params; None is the default
      device.

  Raises:
    ValueError: config.json is not supported, a file cannot be read, or tensors
      are missing, unused, of a wrong shape, not floating-point or not finite.
  """
  path = hf_hub.find(folder)
  try:
    hf_json = hf_files.read_json(path / "config.json")
    config = encoder_config_from_hf(hf_json)
    hf_config.log_ignored(f"{path}/config.json", frozenset(hf_json))
    files = hf_files.open_files(path)
    prefix = f"{config.family}."
    if not any(name.startswith(prefix) for name in files.shapes):
      prefix = ""
    encoder = Encoder(config)
    params = hf.read_params(
        files,
        hf_rows(config, prefix),
        num_layers=config.num_layers,
        dtype="float32",
        ignored=_IGNORED,
        shardings=shardings_of(encoder),
    )
  except ValueError as error:
    raise ValueError(f"{folder}: {error}") from error
  return encoder, params
