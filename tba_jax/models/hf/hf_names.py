# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Maps Hugging Face's tensors to leaves of our params, by a family's table.

A tensor differs from our leaf in how its axes are split and ordered, and it may
fuse several leaves (query, key and value). A table describes this in terms of
axes, so that a slice of a leaf maps to a slice of a tensor:

    "width heads*head_dim"        two axes; the second splits into two
    "heads*1of3*head_dim width"   the leaf is the second third, head by head

Does not import JAX.
"""

from collections.abc import Container, Mapping, Sequence
import dataclasses
import itertools
import math
import re

from tba_jax.models import config as config_lib
from tba_jax.models.families import family as family_lib

ModelConfig = config_lib.ModelConfig

# Leaves in float32: rounding would change the choice of experts.
FLOAT32 = ("choice_bias",)
# Matrices whose adapters vLLM loads, as `lora.targets` names them.
_SERVED = ("q", "k", "v", "o", "gate", "up", "down")
# Regular expression of the names of a token head.
TOKEN_HEAD = r"(language_model\.)?(lm_head|embed_out)\.weight"


@dataclasses.dataclass(frozen=True)
class TensorRow:
  """A leaf and the tensors that hold it: one, or one per layer and expert.

  hf_name: name of the tensor; `{layer}` and `{expert}` stand for the index of a
    layer and of an expert.
  path: keys of our nested dict; under "blocks" the leaf stacks layers, and
    within a layer the experts.
  axes: logical axes of one layer's (or expert's) leaf.
  split: sizes that each axis of the tensor splits into.
  part: (axis, index) that selects our leaf in the split tensor; None if the
    leaf is all of it.
  order: permutation of the remaining split axes into ours.
  num_experts: number of experts that the leaf stacks, 0 for none.
  layers: indices of the layers that a leaf under "blocks" stacks; None is all.
  """

  hf_name: str
  path: tuple[str, ...]
  axes: tuple[str, ...]
  split: tuple[tuple[int, ...], ...]
  part: tuple[int, int] | None
  order: tuple[int, ...]
  num_experts: int = 0
  layers: tuple[int, ...] | None = None

  @property
  def is_float32(self) -> bool:
    """Whether the leaf and its tensors are float32 whatever the param dtype."""
    return self.path[-1] in FLOAT32

  @property
  def is_plain(self) -> bool:
    """Whether the tensor is the leaf, as a matrix [out, in]."""
    in_order = self.order == (*range(len(self.order)),)
    return self.part is None and in_order and len(self.split) == 2

  @property
  def target(self) -> str:
    """Name of the leaf in `lora.targets`; "" if it has no adapters."""
    if self.path[0] != "blocks":
      return ""
    if self.path[-1] == "kernel":
      return self.path[-2]
    is_experts = {"experts", "mlp", "width"} <= {*self.stacked_axes, *self.axes}
    return f"expert_{self.path[-1]}" * is_experts

  @property
  def stacked_axes(self) -> tuple[str, ...]:
    """Logical axes along which the leaf stacks tensors."""
    stacked = ("layers",) * (self.path[0] == "blocks")
    return stacked + ("experts",) * bool(self.num_experts)

  def stack(self, num_layers: int) -> tuple[int, ...]:
    """Returns the sizes of `stacked_axes`."""
    layers = num_layers if self.layers is None else len(self.layers)
    sizes = {"layers": layers, "experts": self.num_experts}
    return tuple(sizes[axis] for axis in self.stacked_axes)

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
    """Shape of the part of the leaf that one tensor holds."""
    left = list(self.split_shape)
    if self.part is not None:
      del left[self.part[0]]
    return tuple(left[i] for i in self.order)

  def hf_names(self, num_layers: int) -> list[str]:
    """Returns the names of the tensors, in the order of the stack."""
    layers = range(num_layers) if self.layers is None else self.layers
    numbers = {"layers": layers, "experts": range(self.num_experts)}
    indices = itertools.product(*(numbers[axis] for axis in self.stacked_axes))
    # The stacked axes are "layers" and "experts".
    names = [axis.removesuffix("s") for axis in self.stacked_axes]
    return [self.hf_name.format(**dict(zip(names, i))) for i in indices]


def make_row(
    sizes: Mapping[str, int], hf_name: str, path: str, spec: str, axes: str = ""
) -> TensorRow:
  """Returns the row for a line of a table, given the sizes of axes."""
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
  num_experts = sizes["experts"] if "{expert}" in hf_name else 0
  path = tuple(path.split("."))
  return TensorRow(hf_name, path, leaf, split, part, order, num_experts)


def rows(config: ModelConfig) -> list[TensorRow]:
  """Returns the table of a shape, in which each leaf of params occurs once."""
  sizes = {
      "vocab": config.vocab_size,
      "positions": config.max_positions,
      "labels": config.num_labels,
      "width": config.width,
      "mlp": config.mlp_width,
      "dense_mlp": config.dense_mlp_width,
      "shared_mlp": config.shared_expert_width,
      "experts": config.num_experts,
      "heads": config.num_heads,
      "kv_heads": config.num_kv_heads,
      "head_dim": config.head_dim,
      "global_kv_heads": config.global_kv_heads or config.num_kv_heads,
      "global_head_dim": config.global_head_dim or config.head_dim,
      "layer_input": config.layer_input_width,
      "layer_inputs": config.layer_inputs_width,
      "one": 1,
      "all_heads": config.num_heads * config.head_dim,
      "all_kv_heads": config.num_kv_heads * config.head_dim,
      "gates": 2,  # The query, and the gate of the attention output.
      "delta_channels": config.delta_channels,
      "delta_heads": config.delta_value_heads,
      "delta_dim": config.delta_value_dim,
      "taps": config.delta_taps,
      "delta_groups": config.delta_fused[0],
      "delta_qkvz": config.delta_fused[1],
      "delta_ba": config.delta_fused[2],
      "query_rank": config.query_rank,
      "latent": config.latent_rank,
      "latent_and_key": config.latent_rank + config.rope_dim,
      "key_and_value": config.nope_dim + config.value_dim,
      "value_dim": config.value_dim,
  }
  lines = family_lib.FAMILIES[config.family].tensors(config)
  made = [make_row(sizes, *line) for line in lines]
  return [
      dataclasses.replace(row, layers=config.layers_with(row.path[1]))
      if row.path[0] == "blocks" and len(set(config.kinds)) > 1
      else row
      for row in made
  ]


def num_params(config: ModelConfig) -> int:
  """Returns the number of params of a model."""
  return sum(
      math.prod(row.shape) * math.prod(row.stack(config.num_layers))
      for row in rows(config)
  )


def are_served(config: ModelConfig, targets: Sequence[str]) -> bool:
  """Returns whether vLLM loads adapters of these matrices.

  Its base must also be one of `hf_config.takes_adapters`.

  Args:
    targets: names as in `lora.targets`; () for all.
  """
  named = [row for row in rows(config) if row.target]
  adapted = [row for row in named if not targets or row.target in targets]
  return all(row.target in _SERVED and row.is_plain for row in adapted)


def match_prefix(
    names: Container[str], config: ModelConfig, rows: Sequence[TensorRow]
) -> list[TensorRow]:
  """Returns the rows with the names that the tensors of a file have.

  A model saved without its head, such as GPT-2, has no prefix; a larger model
  that contains this one has a different prefix. One tensor may stack all
  experts of a layer.
  """
  family = family_lib.FAMILIES[config.family]
  own = family.prefix
  first = next(row for row in rows if row.hf_name.startswith(own))
  tail = first.hf_name.removeprefix(own)
  others = ("", *family.part_prefixes)
  prefix = next((p for p in (own, *others) if p + tail in names), own)
  # In a multimodal model the head is outside the language model.
  head = prefix.removesuffix(own) if prefix in family.part_prefixes else ""
  rows = [
      dataclasses.replace(row, hf_name=prefix + row.hf_name.removeprefix(own))
      if row.hf_name.startswith(own)
      else dataclasses.replace(row, hf_name=head + row.hf_name)
      if head + row.hf_name in names
      else row
      for row in rows
  ]
  return [_packed(row, names) if row.num_experts else row for row in rows]


def _packed(row: TensorRow, names: Container[str]) -> TensorRow:
  """Returns the row of the tensor that stacks a layer's experts, if it exists.

  In `gate_up_proj` the rows of an expert's gate precede its up matrix.
  """
  head, _, tail = row.hf_name.partition(".{expert}.")
  fused = ("gate_proj.weight", "up_proj.weight")
  is_fused = tail in fused
  name = "gate_up_proj" if is_fused else tail.removesuffix(".weight")
  first, *_ = row.layers or (0,)
  if f"{head}.{name}".format(layer=first) not in names:
    return row
  out, inputs = row.split
  return dataclasses.replace(
      row,
      hf_name=f"{head}.{name}",
      axes=("experts", *row.axes),
      split=((row.num_experts,), (2,) * is_fused + out, inputs),
      part=(1, fused.index(tail)) if is_fused else None,
      order=(0, 1, 2),
      num_experts=0,
  )


def unread(config: ModelConfig) -> str:
  """Returns a regular expression of tensors of other parts of a model.

  These are multimodal ones, layers of multi-token prediction, and keys and
  values of shared layers; "" if the family has none.
  """
  family = family_lib.FAMILIES[config.family]
  prefixes = map(re.escape, (family.prefix, *family.part_prefixes))
  prefix = f"({'|'.join(prefixes)})?"
  parts = [family.part_others] if family.part_others else []
  if family.has_next_layer:
    parts.append(rf"{prefix}layers\.{config.num_layers}\..*")
  if config.num_shared_layers:
    shared = range(config.num_own_layers, config.num_layers)
    layers = "|".join(map(str, shared))
    parts.append(rf"{prefix}layers\.({layers})\.self_attn\.[kv]_.*")
  return "|".join(parts)


def ignored(config: ModelConfig) -> str:
  """Returns a regular expression of the tensors to ignore.

  Old files store rotary frequencies and causal masks, and some tied models
  store their head; larger models have parts and layers that are not read.
  """
  family = family_lib.FAMILIES[config.family]
  prefix = f"({re.escape(family.prefix)})?"
  buffers = (
      rf"{prefix}(layers|h)\.\d+\.(self_attn|attention|attn)"
      r"\.(rotary_emb\.inv_freq|(masked_)?bias)"
  )
  heads = f"|{TOKEN_HEAD}"
  others = unread(config)
  parts = f"|{others}" if others else ""
  return buffers + heads * config.tie_embeddings + parts
