# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Tables from Hugging Face's tensor names to paths of our params.

A tensor of a file differs from our leaf in how axes are split, in their order,
and in that one tensor may hold several leaves (fused query, key and value). A
row says so in terms of axes, so that a slice of a leaf is a slice of a tensor.
jax is not imported.
"""

from collections.abc import Callable
import dataclasses
import itertools
import math

from tba_jax.models import config as model_config_lib

ModelConfig = model_config_lib.ModelConfig


@dataclasses.dataclass(frozen=True)
class Row:
  """One leaf and the tensor that holds it, or those of each layer.

  hf_name: of the tensor; `{layer}` stands for the layer's index.
  path: keys of our nested dict; under "blocks" the leaf stacks all layers.
  axes: the logical axis of each axis of a layer's leaf.
  split: each axis of the tensor as the axes that it is made of.
  part: (axis, index): our leaf is this entry of one of the split axes; None: it
    has them all.
  order: our axes as indices of the split axes that are left.
  """

  hf_name: str
  path: tuple[str, ...]
  axes: tuple[str, ...]
  split: tuple[tuple[int, ...], ...]
  part: tuple[int, int] | None
  order: tuple[int, ...]

  @property
  def stacked(self) -> bool:
    return self.path[0] == "blocks"

  @property
  def hf_shape(self) -> tuple[int, ...]:
    """Shape of the tensor in the file."""
    return tuple(math.prod(axes) for axes in self.split)

  @property
  def split_shape(self) -> tuple[int, ...]:
    """Shape of the tensor once its axes are split."""
    return tuple(itertools.chain.from_iterable(self.split))

  @property
  def shape(self) -> tuple[int, ...]:
    """Our shape of one layer's leaf."""
    left = list(self.split_shape)
    if self.part is not None:
      del left[self.part[0]]
    return tuple(left[i] for i in self.order)

  def hf_names(self, num_layers: int) -> list[str]:
    """Returns the tensor's name, or the name of each layer's in order."""
    if not self.stacked:
      return [self.hf_name]
    return [self.hf_name.format(layer=layer) for layer in range(num_layers)]


def _row(
    hf_name: str,
    path: str,
    axes: str,
    *split: int | tuple[int, ...],
    part: tuple[int, int] | None = None,
    order: tuple[int, ...] | None = None,
) -> Row:
  """Returns a row; an int is an axis that is not split."""
  split = tuple(a if isinstance(a, tuple) else (a,) for a in split)
  if order is None:
    count = sum(map(len, split)) - (part is not None)
    order = tuple(range(count))
  names = tuple(axes.split())
  return Row(hf_name, tuple(path.split(".")), names, split, part, order)


def _llama(c: ModelConfig) -> list[Row]:
  """Llama, Mistral, Qwen2, Qwen3: one tensor for each of our leaves."""
  layer, block = "model.layers.{layer}.", "blocks."
  attention, mlp = f"{layer}self_attn.", f"{layer}mlp."
  norm = lambda hf_name, path: _row(f"{hf_name}.weight", path, "width", c.width)
  rows = [
      _row(
          *("model.embed_tokens.weight", "embed.embedding", "vocab width"),
          *(c.vocab_size, c.width),
      ),
      norm("model.norm", "final_norm.scale"),
      norm(f"{layer}input_layernorm", f"{block}attention_norm.scale"),
      norm(f"{layer}post_attention_layernorm", f"{block}mlp_norm.scale"),
  ]
  heads = (c.num_heads, c.head_dim)
  kv_heads = (c.num_kv_heads, c.head_dim)
  has_bias = c.attention_bias or c.family == "qwen2"
  for name, axis, split in (
      ("q", "heads", heads),
      ("k", "kv_heads", kv_heads),
      ("v", "kv_heads", kv_heads),
  ):
    source, path = f"{attention}{name}_proj", f"{block}attention.{name}"
    axes = f"{axis} head_dim"
    rows.append(
        _row(
            *(f"{source}.weight", f"{path}.kernel", f"{axes} width"),
            *(split, c.width),
        )
    )
    if has_bias:
      rows.append(_row(f"{source}.bias", f"{path}.bias", axes, split))
    if c.family == "qwen3" and name != "v":
      source, path = f"{attention}{name}_norm", f"{path}_norm"
      rows.append(
          _row(f"{source}.weight", f"{path}.scale", "head_dim", c.head_dim)
      )
  source, path = f"{attention}o_proj", f"{block}attention.o"
  axes = "width heads head_dim"
  rows.append(_row(f"{source}.weight", f"{path}.kernel", axes, c.width, heads))
  if c.attention_bias:
    rows.append(_row(f"{source}.bias", f"{path}.bias", "width", c.width))
  for name, axes, split in (
      ("gate", "mlp width", (c.mlp_width, c.width)),
      ("up", "mlp width", (c.mlp_width, c.width)),
      ("down", "width mlp", (c.width, c.mlp_width)),
  ):
    source, path = f"{mlp}{name}_proj", f"{block}mlp.{name}"
    rows.append(_row(f"{source}.weight", f"{path}.kernel", axes, *split))
    if c.mlp_bias:
      axis = axes.split()[0]
      rows.append(_row(f"{source}.bias", f"{path}.bias", axis, split[0]))
  return rows + _head(c, "lm_head.weight")


def _head(c: ModelConfig, hf_name: str) -> list[Row]:
  if c.num_labels:
    shape = (c.num_labels, c.width)
    return [_row("score.weight", "score.kernel", "labels width", *shape)]
  if c.tie_embeddings:
    return []
  return [_row(hf_name, "head.kernel", "vocab width", c.vocab_size, c.width)]


# Family -> its table.
_TABLES: dict[str, Callable[[ModelConfig], list[Row]]] = {
    "llama": _llama,
    "mistral": _llama,
    "qwen2": _llama,
    "qwen3": _llama,
}


def rows(config: ModelConfig) -> list[Row]:
  """Returns the table of a shape: each leaf of params exactly once."""
  return _TABLES[config.family](config)


def ignored(config: ModelConfig) -> tuple[str, ...]:
  """Returns regular expressions of tensors that carry nothing of their own.

  Old files store the rotary frequencies, and some tied models their head.
  """
  patterns = [r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq"]
  if config.tie_embeddings:
    patterns.append(r"lm_head\.weight")
  return tuple(patterns)
