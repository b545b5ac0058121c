# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Tables from Hugging Face's tensor names to paths of our params.

A row says where a tensor goes, our shape of it, and whether it is transposed
on the way: torch stores a linear map as [out, in], we as [in..., out...].
"""

from collections.abc import Callable
import dataclasses
import math

import numpy as np

from tba_jax.models import config as model_config_lib

ModelConfig = model_config_lib.ModelConfig


@dataclasses.dataclass(frozen=True)
class Row:
  """One tensor, or one of each layer.

  hf_name: its name; `{layer}` stands for the layer's index.
  path: keys of our nested dict; under "blocks" the leaf stacks all layers.
  shape: our shape of one layer's tensor.
  num_in: leading axes of `shape` that a linear map sums over; 0 where the
    tensor is stored as it is.
  """

  hf_name: str
  path: tuple[str, ...]
  shape: tuple[int, ...]
  num_in: int = 0

  @property
  def stacked(self) -> bool:
    return self.path[0] == "blocks"

  @property
  def hf_shape(self) -> tuple[int, ...]:
    """The shape in the file: as ours, or [out, in] of a linear map."""
    if not self.num_in:
      return self.shape
    size_in = math.prod(self.shape[: self.num_in])
    return math.prod(self.shape[self.num_in :]), size_in

  def hf_names(self, num_layers: int) -> list[str]:
    """Returns the tensor's name, or the name of each layer's in order."""
    if not self.stacked:
      return [self.hf_name]
    return [self.hf_name.format(layer=layer) for layer in range(num_layers)]

  def from_hf(self, tensor: np.ndarray) -> np.ndarray:
    """Returns our array of one of the file's tensors."""
    return (tensor.T if self.num_in else tensor).reshape(self.shape)

  def to_hf(self, array: np.ndarray) -> np.ndarray:
    """Returns the file's tensor of our array of one layer, contiguous."""
    if self.num_in:
      array = array.reshape(self.hf_shape[::-1]).T
    return np.ascontiguousarray(array)


def _llama(config: ModelConfig) -> list[Row]:
  c = config
  layer = "model.layers.{layer}."
  attention, mlp = ("blocks", "attention"), ("blocks", "mlp")
  queries = (c.width, c.num_heads, c.head_dim)
  keys = (c.width, c.num_kv_heads, c.head_dim)
  output = (c.num_heads, c.head_dim, c.width)
  up, down = (c.width, c.mlp_width), (c.mlp_width, c.width)
  rows = [
      Row(
          "model.embed_tokens.weight",
          ("embed", "embedding"),
          (c.vocab_size, c.width),
      ),
      Row(
          f"{layer}input_layernorm.weight",
          ("blocks", "attention_norm", "scale"),
          (c.width,),
      ),
      Row(
          f"{layer}post_attention_layernorm.weight",
          ("blocks", "mlp_norm", "scale"),
          (c.width,),
      ),
      Row(
          f"{layer}self_attn.q_proj.weight",
          (*attention, "q", "kernel"),
          queries,
          1,
      ),
      Row(
          f"{layer}self_attn.k_proj.weight",
          (*attention, "k", "kernel"),
          keys,
          1,
      ),
      Row(
          f"{layer}self_attn.v_proj.weight",
          (*attention, "v", "kernel"),
          keys,
          1,
      ),
      Row(
          f"{layer}self_attn.o_proj.weight",
          (*attention, "o", "kernel"),
          output,
          2,
      ),
      Row(f"{layer}mlp.gate_proj.weight", (*mlp, "gate", "kernel"), up, 1),
      Row(f"{layer}mlp.up_proj.weight", (*mlp, "up", "kernel"), up, 1),
      Row(f"{layer}mlp.down_proj.weight", (*mlp, "down", "kernel"), down, 1),
      Row("model.norm.weight", ("final_norm", "scale"), (c.width,)),
  ]
  if not c.tie_embeddings:
    rows.append(
        Row("lm_head.weight", ("head", "kernel"), (c.width, c.vocab_size), 1)
    )
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
