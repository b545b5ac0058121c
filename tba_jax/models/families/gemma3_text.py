# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Gemma 3's language model: layers with a sliding window between global ones.

Local layers have their own rotary base. Attention and MLP have a norm before
and after, and each query and key head has one; all norms have scales 1 + w.
Embeddings are multiplied by sqrt(width).

Source: Gemma Team 2025 (arXiv:2503.19786), as computed by Hugging Face's
`Gemma3ForCausalLM`. Models from 4B on are published as
`Gemma3ForConditionalGeneration`, which is read without its vision tower.
"""

import functools

from tba_jax.models.families import family

# Norms of a block: Hugging Face's name, ours.
NORMS = (
    ("input_layernorm", "attention_norm"),
    ("post_attention_layernorm", "attention_out_norm"),
    ("pre_feedforward_layernorm", "mlp_norm"),
    ("post_feedforward_layernorm", "mlp_out_norm"),
)

FAMILY = family.Family(
    class_name="Gemma3",
    scalar_class_name="Gemma3Text",
    keys={
        **family.GATED,
        **family.max_positions(131072),
        # Settings that published configs of larger models omit.
        "vocab_size": ("vocab_size", int, 262208),
        "num_layers": ("num_hidden_layers", int, 26),
        "width": ("hidden_size", int, 2304),
        "num_heads": ("num_attention_heads", int, 8),
        "mlp_width": ("intermediate_size", int, 9216),
        "pad_id": ("pad_token_id", family.INT_OR_NONE, 0),
        "bos_id": ("bos_token_id", family.INT_OR_NONE, 2),
        "head_dim": ("head_dim", int, 256),
        "num_kv_heads": ("num_key_value_heads", int, 4),
        "tie_embeddings": ("tie_word_embeddings", bool, True),
        "attention_bias": ("attention_bias", bool, False),
        "sliding_window": ("sliding_window", family.INT_OR_NONE, 4096),
        "score_dim": ("query_pre_attn_scalar", int, 256),
        "activation": (
            "hidden_activation",
            # First, the name that other tools know.
            {"gelu_pytorch_tanh": "gelu_new", **family.HF_ACTIVATIONS},
            "gelu_pytorch_tanh",
        ),
    },
    tensors=functools.partial(family.gated, head_norms=True, norms=NORMS),
    fields=family.ROPE
    | {
        "activation",
        "attention_bias",
        "global_layers",
        "local_rope_theta",
        "score_dim",
        "sliding_window",
    },
    part_of="gemma3",
    part_prefixes=("language_model.model.", "model.language_model."),
    part_others=r"(model\.)?(vision_tower|multi_modal_projector)\..*",
    norm_offset=1.0,
    has_out_norms=True,
    scales_embeddings=True,
    has_head_norms=True,
    rope_theta=1000000.0,
    has_local_rope=True,
    only=lambda hf: {
        "attn_logit_softcapping": (None,),
        "final_logit_softcapping": (None,),
        "use_bidirectional_attention": (False, None),
    },
)
