# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Qwen2: Llama with biases on query, key and value.

Source: Yang et al. 2024 (arXiv:2407.10671), as computed by Hugging Face's
`Qwen2ForCausalLM`.
"""

import functools

from tba_jax.models.families import family

FAMILY = family.Family(
    class_name="Qwen2",
    keys={**family.GATED, **family.max_positions(32768)},
    tensors=functools.partial(family.gated, qkv_bias=True),
    qkv_bias=True,
    # Without use_sliding_window its layers have no window.
    only=lambda hf: {"sliding_window": (None, hf.get("sliding_window"))},
)
