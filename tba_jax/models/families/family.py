# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""What a model family is: its blocks, its config.json, its tensors. No JAX.

A family is one file in this folder that defines a `Family`, and an entry in
`FAMILIES`. `blocks.py` builds its modules from this description; a mechanism
that no family has yet also needs code there.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
import dataclasses
import importlib
from typing import Any

# Hugging Face's names; "gelu" is exact, "gelu_new" the tanh approximation.
ACTIVATIONS = ("silu", "gelu", "gelu_new", "relu")
# Other names of the same functions -> ours.
HF_ACTIVATIONS = {
    **{name: name for name in ACTIVATIONS},
    "gelu_python": "gelu",
    "gelu_pytorch_tanh": "gelu_new",
    "gelu_python_tanh": "gelu_new",
    "swish": "silu",
}

# Fields of a shape that extend rotary positions to a longer context.
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

# Our field -> name in config.json; its types, or a map from its allowed values
# to ours; and its default, where `...` means that it is required.
Keys = Mapping[str, tuple[str, Any, Any]]
# Name of the tensor, path of the leaf, axes of the tensor as in `hf_names.py`,
# and axes of the leaf if their order differs.
Line = tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Family:
  """A model family.

  class_name: prefix of Hugging Face's class names, such as "Llama".
  scalar_class_name: prefix for models with a scalar head, "" for class_name.
  keys: settings of config.json.
  tensors: (config) -> a line for each leaf of params.
  fields: names of shape fields that its models may set.
  token_head: suffix of the class name of a model that predicts tokens.
  eos_id: default of eos_token_id.
  prefix: start of all tensor names except the head's.
  normalized: config.json -> the same with settings in the form of `keys`.
  part_of: model_type of multimodal models that contain this language model, ""
    for none.
  part_class: prefix of the multimodal class name, "" for class_name.
  part_prefixes: prefixes of tensor names in multimodal folders.
  part_others: regular expression of tensors that are not read: multimodal ones
    and layers of multi-token prediction.
  norm: "rms" or "layer".
  positions: "rotary", or "learned" ones added to the embeddings.
  norm_offset: constant added to the scales of norms.
  has_in_norms: whether the inputs of attention and MLP are normalized.
  has_out_norms: whether the outputs of attention and MLP are normalized.
  scales_embeddings: whether embeddings are multiplied by sqrt(width).
  is_gated: whether MLPs are gated (SwiGLU).
  has_experts: whether a layer has several MLPs, of which a token uses a few.
  has_expert_biases: whether experts and their router have biases.
  has_sigmoid_router: whether an expert's weight is a sigmoid instead of a
    softmax, and a bias takes part in the choice of experts alone.
  has_latents: whether keys and values are made of a latent per token.
  has_next_layer: whether folders may have one more layer, which predicts the
    token after the next one and is not read.
  other_types: further values of model_type, of the same computation; exports
    have the family's name.
  clamps_experts: whether experts have gpt-oss's clamped activation.
  norms_experts: whether the router, the experts and the MLP next to them have
    norms of their own, and weights of experts a factor (Gemma 4).
  gates_shared_expert: whether the shared expert's output is multiplied by a
    sigmoid gate.
  has_grouped_heads: whether there may be fewer key-value heads than query
    heads, and heads of any size; if not, heads * head_dim = width.
  has_out_bias: whether `attention_bias` includes the output's.
  qkv_bias, out_bias: whether biases are always present on query, key and value,
    and on the output.
  has_head_norms: whether query and key heads are normalized.
  joins_head_norms: whether that norm is over all heads of a token together.
  has_value_norms: whether value heads are normalized, without a scale.
  divides_scores: whether scores are divided by the square root of head_dim.
  has_layer_scalars: whether each layer's output is multiplied by a number,
    which training does not change.
  ends_global: whether the last layer sees all tokens, even against config.json.
  has_sinks: whether each query head has a sink.
  rope_theta: default base of rotary frequencies.
  unused_rope: settings in "rope_parameters" that do not affect text.
  has_output_gate: whether attention's output is multiplied by a gate.
  fuses_delta_inputs: whether a delta net has two input matrices, whose outputs
    are grouped by key head, in place of four.
  has_local_rope: whether sliding-window layers have their own rotary base.
  local_rope_theta: default of that base.
  old_local_rope: old names of that base and of `global_every`, "" for none.
  global_every: period n; every n-th layer sees all tokens if config.json lists
    no layers.
  rotary_fraction: default fraction of a head that is rotated.
  rope: rotary settings for a config.json without any; {} is "default".
  old_rope: old names of rope_theta and of rotary_fraction, "" for none.
  aliases: other name of a setting -> its name in `keys`.
  only: (config.json) -> settings that must have one of the listed values, the
    default first.
  written: further settings that we write to config.json.
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
  has_sigmoid_router: bool = False
  has_latents: bool = False
  has_next_layer: bool = False
  other_types: tuple[str, ...] = ()
  clamps_experts: bool = False
  norms_experts: bool = False
  gates_shared_expert: bool = False
  has_grouped_heads: bool = True
  has_out_bias: bool = True
  qkv_bias: bool = False
  out_bias: bool = False
  has_head_norms: bool = False
  joins_head_norms: bool = False
  has_value_norms: bool = False
  divides_scores: bool = True
  has_layer_scalars: bool = False
  ends_global: bool = False
  has_sinks: bool = False
  rope_theta: float = 10000.0
  unused_rope: tuple[str, ...] = ()
  has_output_gate: bool = False
  fuses_delta_inputs: bool = False
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
  normalized: Callable[[Mapping[str, Any]], Mapping[str, Any]] = lambda hf: hf
  only: Callable[[Mapping[str, Any]], dict[str, tuple]] = lambda hf: {}
  written: Mapping[str, Any] = dataclasses.field(default_factory=dict)


# Settings of config.json that families share.
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


# Tensor table entries that families share.
# Norms of a block: Hugging Face's name, ours.
NORMS = (
    ("input_layernorm", "attention_norm"),
    ("post_attention_layernorm", "mlp_norm"),
)
# Matrices of a gated MLP: name, output axis, input axis.
GATED_MLP = (
    ("gate", "mlp", "width"),
    ("up", "mlp", "width"),
    ("down", "width", "mlp"),
)
# Query, key and value, with the names of their head axes.
QKV = (("q", "heads"), ("k", "kv_heads"), ("v", "kv_heads"))


def norm(hf_name: str, path: str) -> Iterator[Line]:
  """Yields the scale and bias of a layer norm."""
  yield f"{hf_name}.weight", f"{path}.scale", "width"
  yield f"{hf_name}.bias", f"{path}.bias", "width"


def linear(
    hf_name: str, path: str, out: str, inputs: str, *, bias: bool = True
) -> Iterator[Line]:
  """Yields the kernel, output axes first, and the bias of a linear map."""
  yield f"{hf_name}.weight", f"{path}.kernel", f"{out} {inputs}"
  if bias:
    yield f"{hf_name}.bias", f"{path}.bias", out


def gated(
    c: Any,
    *,
    qkv_bias: bool = False,
    out_bias: bool = True,
    head_norms: bool = False,
    norms: Sequence[tuple[str, str]] = NORMS,
    qkv: Sequence[tuple[str, str]] = QKV,
    mlp: Callable[[Any], Iterator[Line]] | None = None,
    attention: Callable[[Any], Iterator[Line]] | None = None,
) -> Iterator[Line]:
  """Yields the tensors of Llama and its descendants: one per leaf."""
  layer = "model.layers.{layer}"
  yield "model.embed_tokens.weight", "embed.embedding", "vocab width"
  yield "model.norm.weight", "final_norm.scale", "width"
  for name, path in norms:
    yield f"{layer}.{name}.weight", f"blocks.{path}.scale", "width"
  if attention is None:
    bias = c.attention_bias or qkv_bias
    yield from _attention(c, qkv, bias, out_bias, head_norms)
  else:
    yield from attention(c)
  yield from (mlp or gated_mlp)(c)
  yield from head(c, "lm_head.weight")


def _attention(
    c: Any,
    qkv: Sequence[tuple[str, str]],
    qkv_bias: bool,
    out_bias: bool,
    head_norms: bool,
) -> Iterator[Line]:
  """Yields the tensors of grouped-query attention."""
  attention = "model.layers.{layer}.self_attn"
  for name, axis in qkv:
    source, path = f"{attention}.{name}_proj", f"blocks.attention.{name}"
    yield from linear(source, path, f"{axis}*head_dim", "width", bias=qkv_bias)
    if head_norms and name != "v":
      yield f"{attention}.{name}_norm.weight", f"{path}_norm.scale", "head_dim"
  yield from linear(
      *(f"{attention}.o_proj", "blocks.attention.o", "width"),
      *("heads*head_dim",),
      bias=c.attention_bias and out_bias,
  )


def gated_mlp(
    c: Any, hf_name: str = "mlp", path: str = "mlp"
) -> Iterator[Line]:
  """Yields the tensors of a layer's gated MLP; `path` also names its axis."""
  for name, *axes in GATED_MLP:
    source = f"model.layers.{{layer}}.{hf_name}.{name}_proj"
    out, inputs = (path if axis == "mlp" else axis for axis in axes)
    yield from linear(
        *(source, f"blocks.{path}.{name}", out, inputs), bias=c.mlp_bias
    )


def experts(
    c: Any, shared: str = "mlp.shared_expert", has_gate: bool = True
) -> Iterator[Line]:
  """Yields the tensors of routers, experts, shared experts and dense MLPs.

  `shared` is Hugging Face's name of the shared expert, which may have a gate.
  """
  mlp = "model.layers.{layer}.mlp"
  yield f"{mlp}.gate.weight", "blocks.mlp.router", "experts width"
  for name, *axes in GATED_MLP:
    source = f"{mlp}.experts.{{expert}}.{name}_proj.weight"
    yield source, f"blocks.mlp.{name}", " ".join(axes)
  if c.shared_expert_width:
    yield from gated_mlp(c, shared, "shared_mlp")
  if c.shared_expert_width and has_gate:
    source = f"{mlp}.shared_expert_gate.weight"
    yield source, "blocks.shared_mlp.out_gate", "0of1 width"
  if any(c.dense_layers):
    yield from gated_mlp(c, path="dense_mlp")


def biased_experts(c: Any) -> Iterator[Line]:
  """Yields the tensors of DeepSeek-V3's experts, whose choice has a bias."""
  yield from experts(c, "mlp.shared_experts", has_gate=False)
  source = "model.layers.{layer}.mlp.gate.e_score_correction_bias"
  yield source, "blocks.mlp.choice_bias", "experts"


def head(c: Any, hf_name: str) -> Iterator[Line]:
  """Yields the kernel of the head, unless it is tied to the embedding."""
  if c.num_labels:
    yield "score.weight", "score.kernel", "labels width"
  elif not c.tie_embeddings:
    yield hf_name, "head.kernel", "vocab width"


# Each file of this name defines `FAMILY`.
_NAMES = (
    "deepseek_v3",
    "gemma3_text",
    "gemma4_text",
    "glm4_moe",
    "gpt2",
    "gpt_neox",
    "gpt_oss",
    "llama",
    "ministral3",
    "mistral",
    "olmo3",
    "qwen2",
    "qwen3",
    "qwen3_5_moe_text",
    "qwen3_5_text",
    "qwen3_moe",
    "qwen3_next",
    "smollm3",
)


class _Families(Mapping[str, Family]):
  """Families by name; each family's file is imported on first use."""

  def __getitem__(self, name: str) -> Family:
    if name not in _NAMES:
      raise KeyError(name)
    return importlib.import_module(f"tba_jax.models.families.{name}").FAMILY

  def __iter__(self) -> Iterator[str]:
    return iter(_NAMES)

  def __len__(self) -> int:
    return len(_NAMES)


FAMILIES: Mapping[str, Family] = _Families()
