# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Qwen3: Llama with a norm on each query and key head.

Source: Yang et al. 2025 (arXiv:2505.09388), as computed by Hugging Face's
`Qwen3ForCausalLM`.
"""

import functools

from tba_jax.models.families import family

FAMILY = family.Family(
    class_name="Qwen3",
    keys={
        **family.GATED,
        **family.max_positions(32768),
        "head_dim": ("head_dim", family.INT_OR_NONE, 128),
        "attention_bias": ("attention_bias", bool, False),
    },
    tensors=functools.partial(family.gated, head_norms=True),
    fields=family.ROPE | {"attention_bias"},
    has_head_norms=True,
    # Without use_sliding_window its layers have no window.
    only=lambda hf: {"sliding_window": (None, hf.get("sliding_window"))},
)
