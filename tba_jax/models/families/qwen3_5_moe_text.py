# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Qwen3.5-MoE's language model: Qwen3.5 with experts in every layer.

One more expert, which all tokens use, is multiplied by a sigmoid gate.

Source: `qwen3_5_text.py`, as computed by Hugging Face's
`Qwen3_5MoeForCausalLM`, which has no scalar head. The models are published as
`Qwen3_5MoeForConditionalGeneration`, with a tensor for all experts of a layer.
"""

import dataclasses
import functools

from tba_jax.models.families import family
from tba_jax.models.families import qwen3_5_text

DENSE = qwen3_5_text.FAMILY
KEYS = {
    **DENSE.keys,
    "num_layers": ("num_hidden_layers", int, 40),
    "width": ("hidden_size", int, 2048),
    "num_kv_heads": ("num_key_value_heads", int, 2),
    "mlp_width": ("moe_intermediate_size", int, 512),
    "num_experts": ("num_experts", int, 256),
    "experts_per_token": ("num_experts_per_tok", int, 8),
    "shared_expert_width": ("shared_expert_intermediate_size", int, 512),
}
FAMILY = dataclasses.replace(
    DENSE,
    class_name="Qwen3_5Moe",
    scalar_class_name="Qwen3_5MoeText",
    keys=KEYS,
    tensors=functools.partial(qwen3_5_text.tensors, mlp=family.experts),
    fields=DENSE.fields
    | {"experts_per_token", "num_experts", "shared_expert_width"},
    part_of="qwen3_5_moe",
    has_experts=True,
    gates_shared_expert=True,
    only=lambda hf: {
        **DENSE.only(hf),
        # Settings of Qwen3-Next, which this class does not read.
        "decoder_sparse_step": (1,),
        "norm_topk_prob": (True,),
    },
)
