# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Qwen3-MoE: Qwen3 with many small MLPs per layer, of which a token uses a few.

Source: Yang et al. 2025 (arXiv:2505.09388), as computed by Hugging Face's
`Qwen3MoeForCausalLM`.
"""

import functools

from tba_jax.models.families import family

FAMILY = family.Family(
    class_name="Qwen3Moe",
    keys={
        **family.GATED,
        **family.max_positions(32768),
        "attention_bias": ("attention_bias", bool, False),
        "mlp_width": ("moe_intermediate_size", int, 768),
        "dense_mlp_width": ("intermediate_size", int, 6144),
        "num_experts": ("num_experts", int, 128),
        "experts_per_token": ("num_experts_per_tok", int, 8),
        "norm_router": ("norm_topk_prob", bool, False),
    },
    tensors=functools.partial(
        family.gated, head_norms=True, mlp=family.experts
    ),
    fields=family.ROPE
    | {
        "attention_bias",
        "dense_layers",
        "dense_mlp_width",
        "experts_per_token",
        "norm_router",
        "num_experts",
    },
    has_experts=True,
    has_head_norms=True,
    aliases={"num_local_experts": "num_experts"},
    only=lambda hf: {
        # Without use_sliding_window its layers have no window.
        "sliding_window": (None, hf.get("sliding_window")),
    },
)
