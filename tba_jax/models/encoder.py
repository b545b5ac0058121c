# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Frozen BERT and RoBERTa, for sentence embeddings and classification.

Source: Devlin et al. 2019 (arXiv:1810.04805) and Liu et al. 2019
(arXiv:1907.11692), as computed by Hugging Face's `BertModel`, `RobertaModel`
and their `…ForSequenceClassification`.

Axes: B texts, L tokens, D width, N layers, C labels.
"""

from collections.abc import Callable, Mapping
import dataclasses
import os
import re
from typing import Any

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np

from tba_jax import types
from tba_jax.models import attention
from tba_jax.models import hf_config
from tba_jax.models import hf_files
from tba_jax.models import hf_hub
from tba_jax.models import layers as layers_lib
from tba_jax.models import tokenizer

PyTree = types.PyTree

FAMILIES = ("bert", "roberta")
# Hugging Face's names, as in `models/config.py`.
_ACTIVATIONS = ("gelu", "gelu_new", "relu", "silu")
_CLASSIFIER = "ForSequenceClassification"
# Settings of either family that do not affect inference.
_WITHOUT_EFFECT = (
    "attention_probs_dropout_prob",
    "bos_token_id",
    "classifier_dropout",
    "eos_token_id",
    "finetuning_task",
    "gradient_checkpointing",
    "hidden_dropout_prob",
    "output_past",
    "tie_word_embeddings",
)


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
  num_types: rows of the token type embedding, of which the first is used.
  norm_epsilon: added to the variance in a norm.
  activation: of the MLP.
  pad_id: RoBERTa's positions start at the next id.
  num_labels: of a classifier; 0 is no head.
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

  # `models/layers.py` reads it.
  param_dtype: str = "float32"

  @property
  def first_position(self) -> int:
    """Position of a text's first token."""
    return self.pad_id + 1 if self.family == "roberta" else 0

  @property
  def max_tokens(self) -> int:
    """Tokens of the longest text."""
    return self.max_positions - self.first_position


def encoder_config_from_hf(hf: Mapping[str, Any]) -> EncoderConfig:
  """Returns the shape that a Hugging Face config.json describes.

  Raises:
    ValueError: model_type is no encoder's, or settings are missing, unknown or
      unsupported; the message lists all of them.
  """
  family = hf.get("model_type")
  if family not in FAMILIES:
    raise ValueError(
        f"config.json: model_type={family!r} is not supported for an encoder;"
        f" supported: {sorted(FAMILIES)}"
    )
  reader = hf_config.Reader(hf)
  reader.skip(*_WITHOUT_EFFECT)
  reader.only("position_embedding_type", "absolute")
  reader.only("is_decoder", False)
  reader.only("add_cross_attention", False)
  reader.only("cross_attention_hidden_size", None)
  reader.only("pruned_heads", {}, None)
  for name in ("torch_dtype", "dtype"):
    reader.take(name, None, (str, type(None)))
  names = reader.take("architectures", None, (list, type(None)))
  labels = reader.take("id2label", None, (dict, type(None)))
  num_labels = reader.take("num_labels", 2, int)
  is_classifier = bool(names) and str(names[0]).endswith(_CLASSIFIER)
  if is_classifier and labels is not None:
    num_labels = len(labels)
  activation = reader.take("hidden_act", "gelu", str)
  if activation not in _ACTIVATIONS:
    reader.problem("hidden_act", activation, " or ".join(_ACTIVATIONS))
  is_bert = family == "bert"
  fields = {
      "vocab_size": reader.need("vocab_size"),
      "num_layers": reader.need("num_hidden_layers"),
      "width": reader.need("hidden_size"),
      "num_heads": reader.need("num_attention_heads"),
      "mlp_width": reader.need("intermediate_size"),
      # Defaults are transformers' own.
      "max_positions": reader.take("max_position_embeddings", 512, int),
      "num_types": reader.take("type_vocab_size", 2, int),
      "norm_epsilon": reader.take("layer_norm_eps", 1e-12, float),
      "pad_id": reader.take("pad_token_id", 0 if is_bert else 1, int),
  }
  if fields["width"] % max(fields["num_heads"], 1):
    reader.problem(
        "hidden_size", fields["width"], "a multiple of num_attention_heads"
    )
  reader.finish()
  return EncoderConfig(
      family=family,
      activation=activation,
      num_labels=num_labels if is_classifier else 0,
      **fields,
  )


class Block(nnx.Module):
  """norm(x + attention(x)), then norm(x + mlp(x))."""

  def __init__(self, config: EncoderConfig, rngs: nnx.Rngs):
    self.attention = layers_lib.Attention(
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
    make_block = lambda rngs: Block(config, rngs)
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


@dataclasses.dataclass(frozen=True)
class Encoder:
  """An encoder as pure functions; params are nested dicts of arrays.

  Texts are right-padded and include special tokens; masks are 1 on real tokens.

  config: the shape.
  init: (rng) -> params; the leaves of params["blocks"] are [N, ...].
  states: (params, tokens_BxL, mask_BxL) -> states_BxLxD float32 after the last
    block; finite but meaningless at padding.
  mean_pooled: as states -> [B, D] float32, the mean over real tokens.
  label_scores: as states -> [B, C] float32, `transformers`' logits; None
    without labels.
  """

  config: EncoderConfig
  init: Callable[[jax.Array], PyTree]
  states: Callable[[PyTree, jax.Array, jax.Array], jax.Array]
  mean_pooled: Callable[[PyTree, jax.Array, jax.Array], jax.Array]
  label_scores: Callable[[PyTree, jax.Array, jax.Array], jax.Array] | None


class _Forward:
  """The forward passes of one shape."""

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
  forward = _Forward(config)
  return Encoder(
      config=config,
      init=forward.init,
      states=forward.states,
      mean_pooled=forward.mean_pooled,
      label_scores=forward.label_scores if config.num_labels else None,
  )


# Tensors of unused heads, and buffers that older versions stored.
_IGNORED = re.compile(
    r"(.*\.)?(embeddings\.(position_ids|token_type_ids)|pooler\..*)"
    r"|cls\..*|lm_head\..*"
)


@dataclasses.dataclass(frozen=True)
class HfRow:
  """A leaf of params and the Hugging Face tensor that holds it.

  hf_name: of the tensor; `{layer}` stands for the layer's index.
  path: keys of the nested dict; under "blocks" the leaf stacks all layers.
  shape: of one layer's leaf.
  hf_shape: of the tensor, a reshape of it.
  """

  hf_name: str
  path: tuple[str, ...]
  shape: tuple[int, ...]
  hf_shape: tuple[int, ...]


def hf_rows(c: EncoderConfig, prefix: str) -> list[HfRow]:
  """Returns the table of a shape's leaves.

  Args:
    c: the shape.
    prefix: of all names but the head's: "" or "<family>.".
  """
  D, F, H = c.width, c.mlp_width, c.num_heads
  out = []

  def add(
      hf_name: str,
      path: str,
      shape: tuple[int, ...],
      hf_shape: tuple[int, ...] | None = None,
  ) -> None:
    out.append(HfRow(hf_name, tuple(path.split(".")), shape, hf_shape or shape))

  def linear(name, path, out_shape, in_shape):
    size = int(np.prod(out_shape))
    matrix = (size, int(np.prod(in_shape)))
    add(f"{name}.weight", f"{path}.kernel", out_shape + in_shape, matrix)
    add(f"{name}.bias", f"{path}.bias", out_shape, (size,))

  def norm(name, path):
    add(f"{name}.weight", f"{path}.scale", (D,))
    add(f"{name}.bias", f"{path}.bias", (D,))

  for name, path, size in (
      ("word", "words", c.vocab_size),
      ("position", "positions", c.max_positions),
      ("token_type", "types", c.num_types),
  ):
    source = f"{prefix}embeddings.{name}_embeddings.weight"
    add(source, f"{path}.embedding", (size, D))
  norm(f"{prefix}embeddings.LayerNorm", "norm")
  layer, heads = prefix + "encoder.layer.{layer}.", (H, D // H)
  for name in ("query", "key", "value"):
    source = f"{layer}attention.self.{name}"
    linear(source, f"blocks.attention.{name[0]}", heads, (D,))
  linear(f"{layer}attention.output.dense", "blocks.attention.o", (D,), heads)
  norm(f"{layer}attention.output.LayerNorm", "blocks.attention_norm")
  linear(f"{layer}intermediate.dense", "blocks.mlp.up", (F,), (D,))
  linear(f"{layer}output.dense", "blocks.mlp.down", (D,), (F,))
  norm(f"{layer}output.LayerNorm", "blocks.mlp_norm")
  if c.num_labels:
    is_bert = c.family == "bert"
    pooler = f"{prefix}pooler.dense" if is_bert else "classifier.dense"
    linear(pooler, "pooler", (D,), (D,))
    score = "classifier" if is_bert else "classifier.out_proj"
    linear(score, "score", (c.num_labels,), (D,))
  return out


def load_encoder(
    folder: str | os.PathLike[str],
) -> tuple[Encoder, types.PyTree]:
  """Returns the encoder of a Hugging Face folder and its params, float32.

  Heads other than a classifier's are ignored.

  Raises:
    ValueError: config.json is not supported, a file cannot be read, or tensors
      are missing, unused, of a wrong shape, no floats or not finite; the
      message lists all of them.
  """
  path = hf_hub.find(folder)
  try:
    config = encoder_config_from_hf(hf_files.read_json(path / "config.json"))
  except ValueError as error:
    raise ValueError(f"{folder}: {error}") from error
  files = hf_files.Files(path)
  prefix = f"{config.family}."
  if not any(name.startswith(prefix) for name in files.shapes):
    prefix = ""
  params: dict = {}
  problems, used = [], set()
  for row in hf_rows(config, prefix):
    stacked = row.path[0] == "blocks"
    layers = range(config.num_layers) if stacked else range(1)
    names = [row.hf_name.format(layer=layer) for layer in layers]
    used.update(names)
    for name in names:
      problems += files.problems(name, row.hf_shape)
    if problems:
      continue
    leaf = np.stack([_read(files, name, row, problems) for name in names])
    node = params
    for key in row.path[:-1]:
      node = node.setdefault(key, {})
    node[row.path[-1]] = jnp.asarray(leaf if stacked else leaf[0])
  problems += [
      f"unused tensor {name} {list(files.shapes[name])}"
      for name in sorted(files.shapes.keys() - used)
      if not _IGNORED.fullmatch(name)
  ]
  if problems:
    raise ValueError(f"{folder}: " + "; ".join(problems))
  return make_encoder(config), params


def load_encoder_with_tokenizer(
    folder: str,
) -> tuple[Encoder, types.PyTree, tokenizer.TextTokenizer]:
  """Returns `load_encoder` of a folder, and its tokenizer."""
  made, params = load_encoder(folder)
  return made, params, tokenizer.load_texts(folder)


def _read(
    files: hf_files.Files, name: str, row: HfRow, problems: list[str]
) -> np.ndarray:
  """Returns a layer's leaf; adds to `problems` if it is not finite."""
  everything = (slice(None),) * len(row.hf_shape)
  values = files.read(name, everything).astype(np.float32)
  if not np.isfinite(values).all():
    problems.append(f"tensor {name} has NaN or infinite entries")
  return values.reshape(row.shape)
