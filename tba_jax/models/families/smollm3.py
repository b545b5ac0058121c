# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""SmolLM3: Llama in which every fourth layer has no positions (NoPE).

Source: Bakouch et al. 2025, "SmolLM3: smol, multilingual, long-context
reasoner", after Yang et al. 2025 (arXiv:2501.18795), as computed by Hugging
Face's `SmolLM3ForCausalLM`.
"""

from tba_jax.models.families import family

FAMILY = family.Family(
    class_name="SmolLM3",
    keys={
        **family.GATED,
        **family.max_positions(32768),
        "pad_id": ("pad_token_id", family.INT_OR_NONE, 128004),
        "bos_id": ("bos_token_id", family.INT_OR_NONE, 128000),
        "num_kv_heads": ("num_key_value_heads", family.INT_OR_NONE, 4),
        "tie_embeddings": ("tie_word_embeddings", bool, True),
        "attention_bias": ("attention_bias", bool, False),
        "mlp_bias": ("mlp_bias", bool, False),
    },
    tensors=family.gated,
    fields=family.ROPE | {"attention_bias", "mlp_bias", "rotary_layers"},
    rope_theta=2000000.0,
    # Without use_sliding_window its layers have no window.
    only=lambda hf: {"sliding_window": (None, hf.get("sliding_window"))},
)
