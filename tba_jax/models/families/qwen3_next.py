# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Qwen3-Next: Qwen3.5-MoE with fused inputs of delta nets.

One matrix computes the query, key, values and gates of a key head next to each
other, another one its numbers b and a. Layers may have an MLP in place of
experts.

Source: `qwen3_5_text.py`, as computed by Hugging Face's `Qwen3NextForCausalLM`.
Its multi-token prediction layer is not read.
"""

import dataclasses
import functools

from tba_jax.models.families import family
from tba_jax.models.families import qwen3_5_moe_text
from tba_jax.models.families import qwen3_5_text

_INPUTS = (
    ("qkvz", "delta_groups*delta_qkvz"),
    ("ba", "delta_groups*delta_ba"),
)

FAMILY = dataclasses.replace(
    qwen3_5_moe_text.FAMILY,
    class_name="Qwen3Next",
    scalar_class_name="",
    keys={
        **qwen3_5_moe_text.KEYS,
        "vocab_size": ("vocab_size", int, 151936),
        "num_layers": ("num_hidden_layers", int, 48),
        "dense_mlp_width": ("intermediate_size", int, 5632),
        "num_experts": ("num_experts", int, 512),
        "experts_per_token": ("num_experts_per_tok", int, 10),
        "norm_router": ("norm_topk_prob", bool, True),
    },
    tensors=functools.partial(
        qwen3_5_text.tensors, mlp=family.experts, inputs=_INPUTS
    ),
    fields=qwen3_5_moe_text.FAMILY.fields
    | {"dense_layers", "dense_mlp_width", "norm_router"},
    part_of="",
    part_prefixes=(),
    part_others=r"mtp\..*",
    fuses_delta_inputs=True,
    unused_rope=(),
    only=lambda hf: {},
)
