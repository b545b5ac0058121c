# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Tables that map Hugging Face's tensors to leaves of our params.

A tensor differs from our leaf in how axes are split, in their order, and may
fuse several leaves (query, key and value). A table describes that in terms of
axes, so that a slice of a leaf maps to a slice of a tensor:

    "width heads*head_dim"        two axes, of which the second splits into two
    "heads*1of3*head_dim width"   the leaf is the second third, head by head

Does not import JAX.
"""

from collections.abc import Container, Iterator, Mapping, Sequence
import dataclasses
import itertools
import math
import re

from tba_jax.models import config as config_lib

ModelConfig = config_lib.ModelConfig


@dataclasses.dataclass(frozen=True)
class Row:
  """A leaf and the tensor that holds it, or one tensor per layer.

  hf_name: name of the tensor; `{layer}` stands for the layer's index.
  path: keys of our nested dict; under "blocks" the leaf stacks all layers.
  axes: the logical axes of a layer's leaf.
  split: sizes that each axis of the tensor splits into.
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


# Name of the tensor, path of the leaf, axes of the tensor as above, and axes of
# the leaf where their order is another.
Line = tuple[str, ...]


def make_row(
    sizes: Mapping[str, int], hf_name: str, path: str, spec: str, axes: str = ""
) -> Row:
  """Returns the row of a line of a table, given the sizes of its axes."""
  split = tuple(
      tuple(
          sizes[name] if name in sizes else int(name.partition("of")[2])
          for name in axis.split("*")
      )
      for axis in spec.split()
  )
  names = spec.replace("*", " ").split()
  fused = next((name for name in names if name not in sizes), None)
  part = None
  if fused is not None:
    part = names.index(fused), int(fused.partition("of")[0])
    names.remove(fused)
  leaf = tuple(axes.split() or names)
  order = tuple(map(names.index, leaf) if axes else range(len(names)))
  return Row(hf_name, tuple(path.split(".")), leaf, split, part, order)


_QKV = (("q", "heads"), ("k", "kv_heads"), ("v", "kv_heads"))


def norm(hf_name: str, path: str) -> Iterator[Line]:
  """Yields scale and bias of a layer norm."""
  yield f"{hf_name}.weight", f"{path}.scale", "width"
  yield f"{hf_name}.bias", f"{path}.bias", "width"


def linear(
    hf_name: str, path: str, out: str, inputs: str, *, bias: bool = True
) -> Iterator[Line]:
  """Yields kernel and bias of a linear map with the output axes first."""
  yield f"{hf_name}.weight", f"{path}.kernel", f"{out} {inputs}"
  if bias:
    yield f"{hf_name}.bias", f"{path}.bias", out


def _llama(c: ModelConfig) -> Iterator[Line]:
  """Llama, Mistral, Qwen2, Qwen3: one tensor per leaf."""
  layer, attention = "model.layers.{layer}", "model.layers.{layer}.self_attn"
  yield "model.embed_tokens.weight", "embed.embedding", "vocab width"
  yield "model.norm.weight", "final_norm.scale", "width"
  for name, path in (
      ("input_layernorm", "attention_norm"),
      ("post_attention_layernorm", "mlp_norm"),
  ):
    yield f"{layer}.{name}.weight", f"blocks.{path}.scale", "width"
  for name, axis in _QKV:
    source, path = f"{attention}.{name}_proj", f"blocks.attention.{name}"
    bias = c.attention_bias or c.family == "qwen2"
    yield from linear(source, path, f"{axis}*head_dim", "width", bias=bias)
    if c.family == "qwen3" and name != "v":
      yield f"{attention}.{name}_norm.weight", f"{path}_norm.scale", "head_dim"
  yield from linear(
      *(f"{attention}.o_proj", "blocks.attention.o", "width"),
      *("heads*head_dim",),
      bias=c.attention_bias,
  )
  for name, out, inputs in (
      ("gate", "mlp", "width"),
      ("up", "mlp", "width"),
      ("down", "width", "mlp"),
  ):
    source, path = f"{layer}.mlp.{name}_proj", f"blocks.mlp.{name}"
    yield from linear(source, path, out, inputs, bias=c.mlp_bias)
  yield from _head(c, "lm_head.weight")


def _gpt_neox(c: ModelConfig) -> Iterator[Line]:
  """GPT-NeoX: one tensor fuses query, key and value, head by head."""
  layer = "gpt_neox.layers.{layer}"
  yield "gpt_neox.embed_in.weight", "embed.embedding", "vocab width"
  yield from norm("gpt_neox.final_layer_norm", "final_norm")
  yield from norm(f"{layer}.input_layernorm", "blocks.attention_norm")
  yield from norm(f"{layer}.post_attention_layernorm", "blocks.mlp_norm")
  for i, (name, axis) in enumerate(_QKV):
    yield from linear(
        *(f"{layer}.attention.query_key_value", f"blocks.attention.{name}"),
        *(f"{axis}*{i}of3*head_dim", "width"),
        bias=c.attention_bias,
    )
  yield from linear(
      *(f"{layer}.attention.dense", "blocks.attention.o", "width"),
      *("heads*head_dim",),
      bias=c.attention_bias,
  )
  up, down = f"{layer}.mlp.dense_h_to_4h", f"{layer}.mlp.dense_4h_to_h"
  yield from linear(up, "blocks.mlp.up", "mlp", "width")
  yield from linear(down, "blocks.mlp.down", "width", "mlp")
  yield from _head(c, "embed_out.weight")


def _gpt2(c: ModelConfig) -> Iterator[Line]:
  """GPT-2: input axes first; one tensor has all queries, then keys, values."""
  layer = "transformer.h.{layer}"
  yield "transformer.wte.weight", "embed.embedding", "vocab width"
  yield "transformer.wpe.weight", "positions", "positions width"
  yield from norm("transformer.ln_f", "final_norm")
  yield from norm(f"{layer}.ln_1", "blocks.attention_norm")
  yield from norm(f"{layer}.ln_2", "blocks.mlp_norm")
  for i, (name, axis) in enumerate(_QKV):
    source, path = f"{layer}.attn.c_attn", f"blocks.attention.{name}"
    out = f"{i}of3*{axis}*head_dim"
    kernel = f"{axis} head_dim width"
    yield f"{source}.weight", f"{path}.kernel", f"width {out}", kernel
    yield f"{source}.bias", f"{path}.bias", out
  for name, path, inputs, out in (
      ("attn.c_proj", "attention.o", "heads*head_dim", "width"),
      ("mlp.c_fc", "mlp.up", "width", "mlp"),
      ("mlp.c_proj", "mlp.down", "mlp", "width"),
  ):
    source, path = f"{layer}.{name}", f"blocks.{path}"
    kernel = f"{out} {inputs.replace('*', ' ')}"
    yield f"{source}.weight", f"{path}.kernel", f"{inputs} {out}", kernel
    yield f"{source}.bias", f"{path}.bias", out
  yield from _head(c, "lm_head.weight")


def _head(c: ModelConfig, hf_name: str) -> Iterator[Line]:
  if c.num_labels:
    yield "score.weight", "score.kernel", "labels width"
  elif not c.tie_embeddings:
    yield hf_name, "head.kernel", "vocab width"


# Family -> prefix of all tensors but the head, unless it is "model.".
_PREFIXES = {"gpt2": "transformer.", "gpt_neox": "gpt_neox."}
_TABLES = {"gpt2": _gpt2, "gpt_neox": _gpt_neox}


def rows(config: ModelConfig) -> list[Row]:
  """Returns the table of a shape, with each leaf of params once."""
  sizes = {
      "vocab": config.vocab_size,
      "positions": config.max_positions,
      "labels": config.num_labels,
      "width": config.width,
      "mlp": config.mlp_width,
      "heads": config.num_heads,
      "kv_heads": config.num_kv_heads,
      "head_dim": config.head_dim,
  }
  table = _TABLES.get(config.family, _llama)
  return [make_row(sizes, *line) for line in table(config)]


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


def ignored(config: ModelConfig) -> str:
  """Returns a regular expression of redundant tensors.

  Old files store rotary frequencies and causal masks, and some tied models
  their head.
  """
  prefix = f"({re.escape(_prefix(config))})?"
  buffers = (
      rf"{prefix}(layers|h)\.\d+\.(self_attn|attention|attn)"
      r"\.(rotary_emb\.inv_freq|(masked_)?bias)"
  )
  heads = r"|(lm_head|embed_out)\.weight"
  return buffers + heads * config.tie_embeddings
