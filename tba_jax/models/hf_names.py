# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Tables that map Hugging Face's tensors to leaves of our params.

A tensor differs from our leaf in how axes are split, in their order, and may
fuse several leaves (query, key and value). A row of a table describes that in
terms of axes, so that a slice of a leaf maps to a slice of a tensor. Does not
import JAX.
"""

from collections.abc import Callable, Container, Sequence
import dataclasses
import itertools
import math
import re

from tba_jax.models import config as config_lib

ModelConfig = config_lib.ModelConfig


@dataclasses.dataclass(frozen=True)
class Row:
  """A leaf and the tensor that holds it, or one tensor per layer.

  hf_name: of the tensor; `{layer}` stands for the layer's index.
  path: keys of our nested dict; under "blocks" the leaf stacks all layers.
  axes: the logical axes of a layer's leaf.
  split: for each axis of the tensor, the sizes that it splits into.
  part: (axis, index) of the split tensor that is our leaf; None if all of it.
  order: permutation of the remaining split axes into ours.
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
    """Shape of the tensor with its axes split."""
    return tuple(itertools.chain.from_iterable(self.split))

  @property
  def shape(self) -> tuple[int, ...]:
    """Shape of one layer's leaf."""
    left = list(self.split_shape)
    if self.part is not None:
      del left[self.part[0]]
    return tuple(left[i] for i in self.order)

  def hf_names(self, num_layers: int) -> list[str]:
    """Returns the tensor's name, or that of each layer in order."""
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
  """Llama, Mistral, Qwen2, Qwen3: one tensor per leaf."""
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


def _norm(c: ModelConfig, hf_name: str, path: str) -> list[Row]:
  """Scale and bias of a layer norm."""
  return [
      _row(f"{hf_name}.weight", f"{path}.scale", "width", c.width),
      _row(f"{hf_name}.bias", f"{path}.bias", "width", c.width),
  ]


def _gpt_neox(c: ModelConfig) -> list[Row]:
  """GPT-NeoX: one tensor fuses query, key and value, head by head."""
  layer, block = "gpt_neox.layers.{layer}.", "blocks."
  rows = [
      _row(
          *("gpt_neox.embed_in.weight", "embed.embedding", "vocab width"),
          *(c.vocab_size, c.width),
      ),
      *_norm(c, "gpt_neox.final_layer_norm", "final_norm"),
      *_norm(c, f"{layer}input_layernorm", f"{block}attention_norm"),
      *_norm(c, f"{layer}post_attention_layernorm", f"{block}mlp_norm"),
  ]
  fused = (c.num_heads, 3, c.head_dim)
  source = f"{layer}attention.query_key_value"
  for i, (name, axis) in enumerate(_QKV):
    path, axes, part = f"{block}attention.{name}", f"{axis} head_dim", (1, i)
    rows.append(
        _row(
            *(f"{source}.weight", f"{path}.kernel", f"{axes} width"),
            *(fused, c.width),
            part=part,
        )
    )
    if c.attention_bias:
      rows.append(
          _row(f"{source}.bias", f"{path}.bias", axes, fused, part=part)
      )
  source, path = f"{layer}attention.dense", f"{block}attention.o"
  heads = (c.num_heads, c.head_dim)
  axes = "width heads head_dim"
  rows.append(_row(f"{source}.weight", f"{path}.kernel", axes, c.width, heads))
  if c.attention_bias:
    rows.append(_row(f"{source}.bias", f"{path}.bias", "width", c.width))
  for hf_name, name, axes, shape in (
      ("dense_h_to_4h", "up", ("mlp", "width"), (c.mlp_width, c.width)),
      ("dense_4h_to_h", "down", ("width", "mlp"), (c.width, c.mlp_width)),
  ):
    source, path = f"{layer}mlp.{hf_name}", f"{block}mlp.{name}"
    rows += [
        _row(f"{source}.weight", f"{path}.kernel", " ".join(axes), *shape),
        _row(f"{source}.bias", f"{path}.bias", axes[0], shape[0]),
    ]
  return rows + _head(c, "embed_out.weight")


def _gpt2(c: ModelConfig) -> list[Row]:
  """GPT-2: input axes first; one tensor has all queries, then keys, values."""
  layer, block = "transformer.h.{layer}.", "blocks."
  rows = [
      _row(
          *("transformer.wte.weight", "embed.embedding", "vocab width"),
          *(c.vocab_size, c.width),
      ),
      _row(
          *("transformer.wpe.weight", "positions", "positions width"),
          *(c.max_positions, c.width),
      ),
      *_norm(c, "transformer.ln_f", "final_norm"),
      *_norm(c, f"{layer}ln_1", f"{block}attention_norm"),
      *_norm(c, f"{layer}ln_2", f"{block}mlp_norm"),
  ]
  fused = (3, c.num_heads, c.head_dim)
  source = f"{layer}attn.c_attn"
  for i, (name, axis) in enumerate(_QKV):
    path, axes = f"{block}attention.{name}", f"{axis} head_dim"
    rows += [
        _row(
            *(f"{source}.weight", f"{path}.kernel", f"{axes} width"),
            *(c.width, fused),
            part=(1, i),
            order=(1, 2, 0),
        ),
        _row(f"{source}.bias", f"{path}.bias", axes, fused, part=(0, i)),
    ]
  source, path = f"{layer}attn.c_proj", f"{block}attention.o"
  rows += [
      _row(
          *(f"{source}.weight", f"{path}.kernel", "width heads head_dim"),
          *((c.num_heads, c.head_dim), c.width),
          order=(2, 0, 1),
      ),
      _row(f"{source}.bias", f"{path}.bias", "width", c.width),
  ]
  for hf_name, name, axes, shape in (
      ("c_fc", "up", ("mlp", "width"), (c.width, c.mlp_width)),
      ("c_proj", "down", ("width", "mlp"), (c.mlp_width, c.width)),
  ):
    source, path = f"{layer}mlp.{hf_name}", f"{block}mlp.{name}"
    axes_text, order = " ".join(axes), (1, 0)
    rows += [
        _row(
            *(f"{source}.weight", f"{path}.kernel", axes_text, *shape),
            order=order,
        ),
        _row(f"{source}.bias", f"{path}.bias", axes[0], shape[1]),
    ]
  return rows + _head(c, "lm_head.weight")


def _head(c: ModelConfig, hf_name: str) -> list[Row]:
  if c.num_labels:
    shape = (c.num_labels, c.width)
    return [_row("score.weight", "score.kernel", "labels width", *shape)]
  if c.tie_embeddings:
    return []
  return [_row(hf_name, "head.kernel", "vocab width", c.vocab_size, c.width)]


_QKV = (("q", "heads"), ("k", "kv_heads"), ("v", "kv_heads"))

# Family -> prefix of all tensors but the head, unless it is "model.".
_PREFIXES = {"gpt2": "transformer.", "gpt_neox": "gpt_neox."}
_TABLES: dict[str, Callable[[ModelConfig], list[Row]]] = {
    "gpt2": _gpt2,
    "gpt_neox": _gpt_neox,
    "llama": _llama,
    "mistral": _llama,
    "qwen2": _llama,
    "qwen3": _llama,
}


def rows(config: ModelConfig) -> list[Row]:
  """Returns the table of a shape, with each leaf of params once."""
  return _TABLES[config.family](config)


def match_prefix(
    names: Container[str], config: ModelConfig, rows: Sequence[Row]
) -> list[Row]:
  """Returns the rows, with the prefix removed if a file's names lack it.

  Files of a model saved without its head, as GPT-2's own, do.
  """
  prefix = _prefix(config)
  first = next(row for row in rows if row.hf_name.startswith(prefix))
  if first.hf_name in names or first.hf_name.removeprefix(prefix) not in names:
    return list(rows)
  return [
      dataclasses.replace(row, hf_name=row.hf_name.removeprefix(prefix))
      for row in rows
  ]


def _prefix(config: ModelConfig) -> str:
  return _PREFIXES.get(config.family, "model.")


def ignored(config: ModelConfig) -> tuple[str, ...]:
  """Returns regular expressions of redundant tensors.

  Old files store rotary frequencies and causal masks, and some tied models
  their head.
  """
  prefix = f"({re.escape(_prefix(config))})?"
  patterns = [
      rf"{prefix}layers\.\d+\.self_attn\.rotary_emb\.inv_freq",
      rf"{prefix}layers\.\d+\.attention\.rotary_emb\.inv_freq",
      rf"{prefix}layers\.\d+\.attention\.(masked_)?bias",
      rf"{prefix}h\.\d+\.attn\.(masked_)?bias",
  ]
  if config.tie_embeddings:
    patterns.append(r"(lm_head|embed_out)\.weight")
  return tuple(patterns)
