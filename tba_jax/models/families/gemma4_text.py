# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Gemma 4's language model.

As in Gemma 3, layers with a sliding window stand between global ones. Here
global layers have heads of another size, may use their keys as values, and
rotate some pairs of each head. The last layers may attend to keys and values of
earlier ones, with wider MLPs; each layer may have an embedding of each token,
and experts next to its MLP, which is `shared_mlp` then.

Source: as computed by Hugging Face's `Gemma4ForCausalLM`. The models are
published as `Gemma4ForConditionalGeneration`, which is read without its vision
and audio towers.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from tba_jax.models.families import family
from tba_jax.models.families import gemma3_text

DENSE = gemma3_text.FAMILY


def _attention(c: Any) -> Iterator[family.Line]:
  """Yields the tensors of each kind of attention."""
  source = "model.layers.{layer}.self_attn"
  modules = dict.fromkeys(kind[0] for kind in c.kinds)
  for module in modules:
    path, bias = f"blocks.{module}", c.attention_bias
    prefix = "global_" * module.startswith("global")
    names = ["q"]
    if "shared" not in module:
      names += ["k"] if prefix and c.keys_as_values else ["k", "v"]
    heads = {"q": "heads", "k": f"{prefix}kv_heads", "v": f"{prefix}kv_heads"}
    for name in names:
      yield from family.linear(
          *(f"{source}.{name}_proj", f"{path}.{name}"),
          *(f"{heads[name]}*{prefix}head_dim", "width"),
          bias=bias,
      )
      if name != "v":
        norm = f"{source}.{name}_norm.weight"
        yield norm, f"{path}.{name}_norm.scale", f"{prefix}head_dim"
    yield from family.linear(
        *(f"{source}.o_proj", f"{path}.o"),
        *("width", f"heads*{prefix}head_dim"),
        bias=bias,
    )


def _mlps(c: Any) -> Iterator[family.Line]:
  """Yields the tensors of ordinary and wide MLPs, or of experts."""
  if not c.num_experts:
    for module in dict.fromkeys(kind[1] for kind in c.kinds):
      yield from family.gated_mlp(c, path=module)
    return
  yield from family.gated_mlp(c, path="shared_mlp")
  layer, path = "model.layers.{layer}", "blocks.mlp"
  yield f"{layer}.router.proj.weight", f"{path}.router", "experts width"
  yield f"{layer}.router.scale", f"{path}.router_norm", "width"
  yield f"{layer}.router.per_expert_scale", f"{path}.expert_factor", "experts"
  for i, name in enumerate(("gate", "up")):
    source = f"{layer}.experts.gate_up_proj"
    yield source, f"{path}.{name}", f"experts {i}of2*mlp width"
  yield f"{layer}.experts.down_proj", f"{path}.down", "experts width mlp"
  for name, ours in (
      ("post_feedforward_layernorm_1", "shared_out_norm"),
      ("pre_feedforward_layernorm_2", "experts_norm"),
      ("post_feedforward_layernorm_2", "experts_out_norm"),
  ):
    yield f"{layer}.{name}.weight", f"blocks.{ours}.scale", "width"


def _tensors(c: Any) -> Iterator[family.Line]:
  """Yields the tensors."""
  yield from family.gated(
      c, norms=gemma3_text.NORMS, attention=_attention, mlp=_mlps
  )
  layer = "model.layers.{layer}"
  yield f"{layer}.layer_scalar", "blocks.scalar", "one"
  if not c.layer_input_width:
    return
  name, path = "per_layer_input_gate", "blocks.layer_input.input_gate"
  yield f"{layer}.{name}.weight", f"{path}.kernel", "layer_input width"
  name, path = "per_layer_projection", "blocks.layer_input.input_out"
  yield f"{layer}.{name}.weight", f"{path}.kernel", "width layer_input"
  name, path = "post_per_layer_input_norm", "blocks.layer_input.norm"
  yield f"{layer}.{name}.weight", f"{path}.scale", "width"
  name, path = "embed_tokens_per_layer", "layer_embed.embedding"
  yield f"model.{name}.weight", path, "vocab layer_inputs"
  name, path = "per_layer_model_projection", "layer_map.kernel"
  yield f"model.{name}.weight", path, "layer_inputs width"
  name, path = "per_layer_projection_norm", "layer_map_norm.scale"
  yield f"model.{name}.weight", path, "layer_input"


def _normalized(hf: Mapping[str, Any]) -> Mapping[str, Any]:
  """Returns config.json with the shape of global layers by name.

  transformers 5.23 writes `per_layer_config`, an object of their settings by
  index; published files have the names that this returns.

  Raises:
    ValueError: `per_layer_config` has something else.
  """
  hf = {"vocab_size_per_layer_input": 262144, **hf}
  layers, types = hf.get("per_layer_config"), hf.get("layer_types")
  if layers is None:
    return hf
  names = {"head_dim": "global_head_dim"}
  older = {"per_layer_config", "global_head_dim", "num_global_key_value_heads"}
  if hf.get("attention_k_eq_v"):
    names["num_key_value_heads"] = "num_global_key_value_heads"
  listed = types if isinstance(types, list) else []
  expected = [n for n, kind in enumerate(listed) if kind == "full_attention"]
  values = list(layers.values()) if isinstance(layers, dict) else [None]
  first = values[0] if values else {}
  is_right = (
      isinstance(first, dict)
      and first.keys() <= names.keys()
      and all(value == first for value in values)
      and all(str(name).isdecimal() for name in layers)
      and sorted(map(int, layers)) == (expected if values else [])
  )
  if not is_right:
    raise ValueError(
        f"config.json: per_layer_config={layers!r} is not supported; supported:"
        f" an object with the same {' and '.join(names)} for each layer that is"
        " 'full_attention' in layer_types, and no other"
    )
  whole = {"head_dim": hf.get("head_dim", 256), **first}
  others = {k: v for k, v in hf.items() if k not in older}
  return others | {names[name]: value for name, value in whole.items()}


def _only(hf: Mapping[str, Any]) -> dict[str, tuple]:
  """Returns settings with fixed values."""
  size = hf.get("vocab_size", 262144)
  name = "vocab_size_per_layer_input"
  # Unused without these embeddings.
  has_inputs = hf.get("hidden_size_per_layer_input", 256)
  if not has_inputs and type(hf.get(name)) is int:
    size = hf[name]
  return {
      # Text is causal with "vision" too.
      "use_bidirectional_attention": (None, "vision"),
      name: (size, None) if not has_inputs else (size,),
  }


FAMILY = family.Family(
    class_name="Gemma4",
    scalar_class_name="Gemma4Text",
    keys={
        **{k: v for k, v in DENSE.keys.items() if k != "score_dim"},
        **family.max_positions(131072),
        "vocab_size": ("vocab_size", int, 262144),
        "num_layers": ("num_hidden_layers", int, 30),
        "sliding_window": ("sliding_window", int, 512),
        "global_head_dim": ("global_head_dim", int, 512),
        "global_kv_heads": (
            *("num_global_key_value_heads", family.INT_OR_NONE, None),
        ),
        "keys_as_values": ("attention_k_eq_v", bool, False),
        "num_shared_layers": ("num_kv_shared_layers", int, 0),
        "doubles_mlps": ("use_double_wide_mlp", bool, False),
        "layer_input_width": ("hidden_size_per_layer_input", int, 256),
        # Read only if the first is True; the first MLP is then another one.
        "adds_experts": ("enable_moe_block", bool, False),
        "expert_width": (*("moe_intermediate_size", family.INT_OR_NONE, None),),
        "num_experts": ("num_experts", family.INT_OR_NONE, None),
        "experts_per_token": ("top_k_experts", family.INT_OR_NONE, None),
        "logit_cap": (
            *("final_logit_softcapping", (int, float, type(None)), None),
        ),
    },
    tensors=_tensors,
    fields=(DENSE.fields - {"score_dim"})
    | {
        "dense_layers",
        "dense_mlp_width",
        "experts_per_token",
        "global_head_dim",
        "global_kv_heads",
        "keys_as_values",
        "layer_input_width",
        "logit_cap",
        "num_experts",
        "num_shared_layers",
        "rotary_fraction",
        "shared_expert_width",
    },
    eos_id=1,
    normalized=_normalized,
    part_of="gemma4",
    part_prefixes=("model.language_model.",),
    part_others=r"model\.(vision_tower|audio_tower|embed_vision|embed_audio)\..*",
    has_out_norms=True,
    scales_embeddings=True,
    has_head_norms=True,
    has_value_norms=True,
    divides_scores=False,
    has_layer_scalars=True,
    norms_experts=True,
    ends_global=True,
    rope_theta=1000000.0,
    rope={"rope_type": "proportional", "partial_rotary_factor": 0.25},
    old_rope=("", ""),
    has_local_rope=True,
    old_local_rope=("", ""),
    only=_only,
)
