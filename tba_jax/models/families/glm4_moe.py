# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""GLM-4.5's experts: DeepSeek-V3's, with grouped-query attention.

Rotary positions rotate half of each head, biases are on query, key and value
alone, and only some models have norms of heads.

Source: GLM-4.5 Team 2025 (arXiv:2508.06471), as computed by Hugging Face's
`Glm4MoeForCausalLM`. The layer for multi-token prediction is not read.
"""

from collections.abc import Iterator
from typing import Any

from tba_jax.models.families import deepseek_v3
from tba_jax.models.families import family


def _tensors(c: Any) -> Iterator[family.Line]:
  """Yields the tensors."""
  yield from family.gated(
      c, head_norms=c.head_norms, out_bias=False, mlp=family.biased_experts
  )


FAMILY = family.Family(
    class_name="Glm4Moe",
    keys={
        **family.GATED,
        **family.max_positions(131072),
        **deepseek_v3.EXPERT_KEYS,
        "vocab_size": ("vocab_size", int, 151552),
        "num_layers": ("num_hidden_layers", int, 46),
        "width": ("hidden_size", int, 4096),
        "num_heads": ("num_attention_heads", int, 96),
        "num_kv_heads": ("num_key_value_heads", int, 8),
        "norm_epsilon": ("rms_norm_eps", float, 1e-5),
        "attention_bias": ("attention_bias", bool, False),
        "head_norms": ("use_qk_norm", bool, False),
        "mlp_width": ("moe_intermediate_size", int, 1408),
        "dense_mlp_width": ("intermediate_size", int, 10944),
        "num_experts": ("n_routed_experts", int, 128),
        "num_dense_layers": ("first_k_dense_replace", int, 1),
        "num_expert_groups": ("n_group", int, 1),
        "groups_per_token": ("topk_group", int, 1),
        "router_scale": ("routed_scaling_factor", float, 1.0),
    },
    tensors=_tensors,
    fields=family.ROPE
    | deepseek_v3.EXPERT_FIELDS
    | {"attention_bias", "head_norms", "rotary_fraction"},
    has_experts=True,
    has_next_layer=True,
    has_sigmoid_router=True,
    has_out_bias=False,
    rotary_fraction=0.5,
    old_rope=("rope_theta", "partial_rotary_factor"),
    aliases={"num_local_experts": "n_routed_experts"},
    written={"num_nextn_predict_layers": 0},
)
