# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""What a model family is: its blocks, its config.json, its tensors. No JAX.

A family is one file of this folder, with a `Family`, and an entry in
`FAMILIES`. `blocks.py` builds its modules from these facts; a mechanism that
no family has yet also needs code there.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
import dataclasses
import importlib
from typing import Any

# Hugging Face's names; "gelu" is the exact one, "gelu_new" the tanh form.
ACTIVATIONS = ("silu", "gelu", "gelu_new", "relu")
# Other names of the same functions -> ours.
HF_ACTIVATIONS = {
    **{name: name for name in ACTIVATIONS},
    "gelu_python": "gelu",
    "gelu_pytorch_tanh": "gelu_new",
    "gelu_python_tanh": "gelu_new",
    "swish": "silu",
}

# Fields of a shape for rotary positions of a longer context.
ROPE = frozenset(
    (
        "rope_type",
        "rope_factor",
        "rope_low_freq_factor",
        "rope_high_freq_factor",
        "rope_original_positions",
        "rope_beta_fast",
        "rope_beta_slow",
        "rope_attention_factor",
        "rope_mscale",
        "rope_mscale_all_dim",
        "rope_truncate",
    )
)

# Our field -> name in config.json; its types, or its allowed values with ours;
# and its default, where `...` means that it is required.
Keys = Mapping[str, tuple[str, Any, Any]]
# Name of the tensor, path of the leaf, axes of the tensor as in `hf_names.py`,
# and axes of the leaf where their order is another.
Line = tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Family:
  """A model family.

  class_name: start of Hugging Face's class names, as "Llama".
  scalar_class_name: likewise of models with a scalar head, "" for class_name.
  keys: settings of config.json.
  tensors: (config) -> a line for each leaf of params.
  fields: names of shape fields that its models may set.
  token_head: end of the class name of a model that predicts tokens.
  eos_id: default of eos_token_id.
  prefix: start of the names of all tensors but the head.
  part_of: model_type of models whose language model it is, "" for none.
  part_class: start of their class name, "" for class_name.
  part_prefixes: prefixes of the names in their folders.
  part_others: regular expression of their other tensors, which are not read.
  norm: "rms" or "layer".
  positions: "rotary", or "learned" ones added to the embeddings.
  norm_offset: number added to the scales of norms, which start at 1 less it.
  has_in_norms: whether attention and MLP have a norm of their inputs.
  has_out_norms: whether attention and MLP have a norm of their results.
  scales_embeddings: whether embeddings are multiplied by sqrt(width).
  is_gated: whether MLPs are gated (SwiGLU).
  has_experts: whether a layer has several MLPs, of which a token uses few.
  has_expert_biases: whether these and their router have biases.
  clamps_experts: whether they have gpt-oss's hidden units.
  has_grouped_heads: whether there may be fewer key-value heads than query
    heads, and heads of any size; if not, heads * head_dim = width.
  qkv_bias, out_bias: whether query, key and value, and the output, always have
    biases.
  has_head_norms: whether each query and key head has a norm.
  joins_head_norms: whether it is over all heads of a token together.
  has_sinks: whether each query head has a sink.
  rope_theta: default of the base of rotary frequencies.
  unused_rope: settings in "rope_parameters" without effect on texts.
  has_output_gate: whether attention's results are multiplied by a gate.
  has_local_rope: whether layers with a sliding window have a base of their own.
  local_rope_theta: default of it.
  old_local_rope: old names of it and of `global_every`, "" for none.
  global_every: every layer of this number sees all tokens, if config.json
    lists no layers.
  rotary_fraction: default of the rotated share of a head.
  rope: rotary settings of a config.json without any; {} is "default".
  old_rope: old names of rope_theta and of the rotated share, "" for none.
  aliases: other names of settings -> those in `keys`.
  only: (config.json) -> settings that must have one of these values, the
    default first.
  written: further settings of config.json, as we train.
  """

  class_name: str
  keys: Keys
  tensors: Callable[[Any], Iterator[Line]]
  fields: frozenset[str] = ROPE
  scalar_class_name: str = ""
  token_head: str = "ForCausalLM"
  eos_id: int | None = None
  prefix: str = "model."
  part_of: str = ""
  part_class: str = ""
  part_prefixes: tuple[str, ...] = ()
  part_others: str = ""
  norm: str = "rms"
  norm_offset: float = 0.0
  has_in_norms: bool = True
  has_out_norms: bool = False
  scales_embeddings: bool = False
  positions: str = "rotary"
  is_gated: bool = True
  has_experts: bool = False
  has_expert_biases: bool = False
  clamps_experts: bool = False
  has_grouped_heads: bool = True
  qkv_bias: bool = False
  out_bias: bool = False
  has_head_norms: bool = False
  joins_head_norms: bool = False
  has_sinks: bool = False
  rope_theta: float = 10000.0
  unused_rope: tuple[str, ...] = ()
  has_output_gate: bool = False
  has_local_rope: bool = False
  local_rope_theta: float = 10000.0
  old_local_rope: tuple[str, str] = (
      *("rope_local_base_freq", "sliding_window_pattern"),
  )
  global_every: int = 6
  rotary_fraction: float = 1.0
  rope: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  old_rope: tuple[str, str] = ("rope_theta", "")
  aliases: Mapping[str, str] = dataclasses.field(default_factory=dict)
  only: Callable[[Mapping[str, Any]], dict[str, tuple]] = lambda hf: {}
  written: Mapping[str, Any] = dataclasses.field(default_factory=dict)


# Parts of config.json that families share.
INT_OR_NONE = (int, type(None))
COMMON: Keys = {
    "vocab_size": ("vocab_size", int, ...),
    "pad_id": ("pad_token_id", INT_OR_NONE, None),
    "bos_id": ("bos_token_id", INT_OR_NONE, None),
}
SIZES: Keys = {
    **COMMON,
    "num_layers": ("num_hidden_layers", int, ...),
    "width": ("hidden_size", int, ...),
    "num_heads": ("num_attention_heads", int, ...),
    "mlp_width": ("intermediate_size", int, ...),
    "tie_embeddings": ("tie_word_embeddings", bool, False),
}
GATED: Keys = {
    **SIZES,
    "num_kv_heads": ("num_key_value_heads", INT_OR_NONE, None),
    "head_dim": ("head_dim", INT_OR_NONE, None),
    "norm_epsilon": ("rms_norm_eps", float, 1e-6),
}


def max_positions(
    default: int, name: str = "max_position_embeddings"
) -> dict[str, tuple[str, Any, Any]]:
  """Returns the setting of the longest sequence."""
  return {"max_positions": (name, int, default)}


# Parts of tables of tensors that families share.
# Norms of a block: Hugging Face's name, ours.
NORMS = (
    ("input_layernorm", "attention_norm"),
    ("post_attention_layernorm", "mlp_norm"),
)
# Products of a gated MLP: name, axes of outputs and inputs.
GATED_MLP = (
    ("gate", "mlp", "width"),
    ("up", "mlp", "width"),
    ("down", "width", "mlp"),
)
# Query, key and value, with the axis of their heads.
QKV = (("q", "heads"), ("k", "kv_heads"), ("v", "kv_heads"))


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


def gated(
    c: Any,
    *,
    qkv_bias: bool = False,
    head_norms: bool = False,
    norms: Sequence[tuple[str, str]] = NORMS,
    qkv: Sequence[tuple[str, str]] = QKV,
    mlp: Callable[[Any], Iterator[Line]] | None = None,
) -> Iterator[Line]:
  """Yields the tensors of Llama and its descendants: one per leaf."""
  layer, attention = "model.layers.{layer}", "model.layers.{layer}.self_attn"
  yield "model.embed_tokens.weight", "embed.embedding", "vocab width"
  yield "model.norm.weight", "final_norm.scale", "width"
  for name, path in norms:
    yield f"{layer}.{name}.weight", f"blocks.{path}.scale", "width"
  for name, axis in qkv:
    source, path = f"{attention}.{name}_proj", f"blocks.attention.{name}"
    bias = c.attention_bias or qkv_bias
    yield from linear(source, path, f"{axis}*head_dim", "width", bias=bias)
    if head_norms and name != "v":
      yield f"{attention}.{name}_norm.weight", f"{path}_norm.scale", "head_dim"
  yield from linear(
      *(f"{attention}.o_proj", "blocks.attention.o", "width"),
      *("heads*head_dim",),
      bias=c.attention_bias,
  )
  yield from (mlp or gated_mlp)(c)
  yield from head(c, "lm_head.weight")


def gated_mlp(c: Any) -> Iterator[Line]:
  """Yields the tensors of a layer's gated MLP."""
  for name, out, inputs in GATED_MLP:
    source, path = (
        f"model.layers.{{layer}}.mlp.{name}_proj",
        f"blocks.mlp.{name}",
    )
    yield from linear(source, path, out, inputs, bias=c.mlp_bias)


def experts(c: Any) -> Iterator[Line]:
  """Yields the tensors of a layer's router and of each of its experts."""
  del c
  mlp = "model.layers.{layer}.mlp"
  yield f"{mlp}.gate.weight", "blocks.mlp.router", "experts width"
  for name, *axes in GATED_MLP:
    source = f"{mlp}.experts.{{expert}}.{name}_proj.weight"
    yield source, f"blocks.mlp.{name}", " ".join(axes)


def head(c: Any, hf_name: str) -> Iterator[Line]:
  """Yields the kernel of the head, if the model has one of its own."""
  if c.num_labels:
    yield "score.weight", "score.kernel", "labels width"
  elif not c.tie_embeddings:
    yield hf_name, "head.kernel", "vocab width"


# Each is `FAMILY` of the file of its name.
_NAMES = (
    "gemma3_text",
    "gpt2",
    "gpt_neox",
    "gpt_oss",
    "llama",
    "ministral3",
    "mistral",
    "olmo3",
    "qwen2",
    "qwen3",
    "qwen3_5_text",
    "qwen3_moe",
    "smollm3",
)


class _Families(Mapping[str, Family]):
  """Families by name; a file is imported when its family is used."""

  def __getitem__(self, name: str) -> Family:
    if name not in _NAMES:
      raise KeyError(name)
    return importlib.import_module(f"tba_jax.models.families.{name}").FAMILY

  def __iter__(self) -> Iterator[str]:
    return iter(_NAMES)

  def __len__(self) -> int:
    return len(_NAMES)


FAMILIES: Mapping[str, Family] = _Families()
