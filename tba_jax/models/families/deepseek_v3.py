# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""DeepSeek-V3, and Kimi K2: latent attention and experts with shared ones.

Keys and values of all heads are made of one latent per token (`latent.py`). The
first layers are dense; the others have experts, which a router with sigmoids
chooses within the best groups, and experts that serve every token.

Sources: DeepSeek-AI 2024 (arXiv:2412.19437), as computed by Hugging Face's
`DeepseekV3ForCausalLM`; Moonshot AI 2025 (arXiv:2507.20534) for Kimi K2, which
has other sizes only. The layer for multi-token prediction is not read.
"""

from collections.abc import Iterator, Mapping
import functools
from typing import Any

from tba_jax.models.families import family

# Settings of experts: our field -> Hugging Face's name and default.
EXPERT_KEYS: family.Keys = {
    "mlp_width": ("moe_intermediate_size", int, 2048),
    "dense_mlp_width": ("intermediate_size", int, 18432),
    "num_experts": ("n_routed_experts", int, 256),
    "experts_per_token": ("num_experts_per_tok", int, 8),
    "num_shared_experts": ("n_shared_experts", int, 1),
    "num_dense_layers": ("first_k_dense_replace", int, 3),
    "num_expert_groups": ("n_group", int, 8),
    "groups_per_token": ("topk_group", int, 4),
    "norm_router": ("norm_topk_prob", bool, True),
    "router_scale": ("routed_scaling_factor", float, 2.5),
}


# Fields that these set, apart from every family's.
_COUNTS = {"num_dense_layers", "num_shared_experts"}
EXPERT_FIELDS = (EXPERT_KEYS.keys() - _COUNTS - {"mlp_width"}) | {
    "dense_layers",
    "shared_expert_width",
}


def _attention(c: Any) -> Iterator[family.Line]:
  """Yields the tensors of latent attention."""
  source, path = "model.layers.{layer}.self_attn", "blocks.attention"
  linear = lambda name, ours, *axes, bias=False: family.linear(
      f"{source}.{name}", f"{path}.{ours}", *axes, bias=bias
  )
  bias, query = c.attention_bias, "heads*head_dim"
  if c.query_rank:
    yield from linear("q_a_proj", "q_a", "query_rank", "width", bias=bias)
    name = f"{source}.q_a_layernorm.weight"
    yield name, f"{path}.q_a_norm.scale", "query_rank"
    yield from linear("q_b_proj", "q_b", query, "query_rank")
  else:
    yield from linear("q_proj", "q", query, "width")
  yield from linear(
      "kv_a_proj_with_mqa", "kv_a", "latent_and_key", "width", bias=bias
  )
  name = f"{source}.kv_a_layernorm.weight"
  yield name, f"{path}.kv_a_norm.scale", "latent"
  yield from linear("kv_b_proj", "kv_b", "heads*key_and_value", "latent")
  yield from linear("o_proj", "o", "width", "heads*value_dim", bias=bias)


def _only(hf: Mapping[str, Any]) -> dict[str, tuple]:
  """Returns settings with fixed values."""
  rope = hf.get("qk_rope_head_dim", 64)
  nope = hf.get("qk_nope_head_dim", 128)
  whole = nope + rope if type(nope) is type(rope) is int else None
  return {
      # transformers writes both.
      "head_dim": (None, rope),
      "qk_head_dim": (None, whole),
      "moe_layer_freq": (1,),
      "rope_interleave": (True,),
      "scoring_func": ("sigmoid",),
      "topk_method": ("noaux_tc",),
  }


FAMILY = family.Family(
    class_name="DeepseekV3",
    keys={
        **family.SIZES,
        **family.max_positions(4096),
        **EXPERT_KEYS,
        "bos_id": ("bos_token_id", family.INT_OR_NONE, 0),
        "vocab_size": ("vocab_size", int, 129280),
        "num_layers": ("num_hidden_layers", int, 61),
        "width": ("hidden_size", int, 7168),
        "num_heads": ("num_attention_heads", int, 128),
        "num_kv_heads": ("num_key_value_heads", family.INT_OR_NONE, 128),
        "norm_epsilon": ("rms_norm_eps", float, 1e-6),
        "attention_bias": ("attention_bias", bool, False),
        "latent_rank": ("kv_lora_rank", int, 512),
        "query_rank": ("q_lora_rank", family.INT_OR_NONE, 1536),
        "nope_dim": ("qk_nope_head_dim", int, 128),
        "rope_dim": ("qk_rope_head_dim", int, 64),
        "value_dim": ("v_head_dim", int, 128),
    },
    tensors=functools.partial(
        family.gated, attention=_attention, mlp=family.biased_experts
    ),
    fields=family.ROPE
    | EXPERT_FIELDS
    | {
        "attention_bias",
        "latent_rank",
        "query_rank",
        "rope_dim",
        "value_dim",
    },
    eos_id=1,
    has_experts=True,
    has_latents=True,
    has_next_layer=True,
    has_sigmoid_router=True,
    other_types=("kimi_k2",),
    aliases={"num_local_experts": "n_routed_experts"},
    only=_only,
    # Other tools read these; exports have no layer of multi-token prediction.
    written={
        "moe_layer_freq": 1,
        "num_nextn_predict_layers": 0,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
    },
)
