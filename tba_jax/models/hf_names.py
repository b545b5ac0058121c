# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Tables from Hugging Face's tensor names to paths of our params.

Both sides store a linear map with its output axes first, and only our heads
have an axis of their own: a tensor is reshaped on the way, never transposed.
"""

from collections.abc import Callable
import dataclasses

from tba_jax.models import config as model_config_lib

ModelConfig = model_config_lib.ModelConfig


@dataclasses.dataclass(frozen=True)
class Row:
  """One tensor, or one of each layer.

  hf_name: its name; `{layer}` stands for the layer's index.
  path: keys of our nested dict; under "blocks" the leaf stacks all layers.
  shape: our shape of one layer's tensor.
  hf_shape: its shape in the file, of the same elements in the same order.
  """

  hf_name: str
  path: tuple[str, ...]
  shape: tuple[int, ...]
  hf_shape: tuple[int, ...]

  @property
  def stacked(self) -> bool:
    return self.path[0] == "blocks"

  def hf_names(self, num_layers: int) -> list[str]:
    """Returns the tensor's name, or the name of each layer's in order."""
    if not self.stacked:
      return [self.hf_name]
    return [self.hf_name.format(layer=layer) for layer in range(num_layers)]


def _llama(config: ModelConfig) -> list[Row]:
  c = config
  rows = []

  def add(hf_name: str, path: str, shape: tuple[int, ...], *hf_shape: int):
    rows.append(
        Row(f"{hf_name}.weight", tuple(path.split(".")), shape, hf_shape)
    )

  def add_heads(name: str, heads: int):
    add(
        f"model.layers.{{layer}}.self_attn.{name}_proj",
        f"blocks.attention.{name}.kernel",
        (heads, c.head_dim, c.width),
        *(heads * c.head_dim, c.width),
    )

  def add_same(hf_name: str, path: str, *shape: int):
    add(hf_name, path, shape, *shape)

  layer = "model.layers.{layer}."
  add_same("model.embed_tokens", "embed.embedding", c.vocab_size, c.width)
  add_same(f"{layer}input_layernorm", "blocks.attention_norm.scale", c.width)
  add_heads("q", c.num_heads)
  add_heads("k", c.num_kv_heads)
  add_heads("v", c.num_kv_heads)
  add(
      f"{layer}self_attn.o_proj",
      "blocks.attention.o.kernel",
      (c.width, c.num_heads, c.head_dim),
      *(c.width, c.num_heads * c.head_dim),
  )
  norm = f"{layer}post_attention_layernorm"
  add_same(norm, "blocks.mlp_norm.scale", c.width)
  mlp, kernel = f"{layer}mlp", "blocks.mlp.{}.kernel".format
  add_same(f"{mlp}.gate_proj", kernel("gate"), c.mlp_width, c.width)
  add_same(f"{mlp}.up_proj", kernel("up"), c.mlp_width, c.width)
  add_same(f"{mlp}.down_proj", kernel("down"), c.width, c.mlp_width)
  add_same("model.norm", "final_norm.scale", c.width)
  if not c.tie_embeddings:
    add_same("lm_head", "head.kernel", c.vocab_size, c.width)
  return rows


# Family -> its table.
_TABLES: dict[str, Callable[[ModelConfig], list[Row]]] = {"llama": _llama}


def rows(config: ModelConfig) -> list[Row]:
  """Returns the table of a shape: each tensor of a file exactly once."""
  return _TABLES[config.family](config)


def ignored(config: ModelConfig) -> tuple[str, ...]:
  """Returns regular expressions of tensors that carry nothing of their own.

  Old files store the rotary frequencies, and some tied models their head.
  """
  patterns = [r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq"]
  if config.tie_embeddings:
    patterns.append(r"lm_head\.weight")
  return tuple(patterns)
