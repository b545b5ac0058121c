# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Llama: pre-norm blocks of grouped-query attention, SwiGLU.

Source: Touvron et al. 2023 (arXiv:2302.13971, arXiv:2307.09288), as computed by
Hugging Face's `LlamaForCausalLM`.
"""

from tba_jax.models.families import family

FAMILY = family.Family(
    class_name="Llama",
    keys={
        **family.GATED,
        **family.max_positions(2048),
        "attention_bias": ("attention_bias", bool, False),
        "mlp_bias": ("mlp_bias", bool, False),
    },
    tensors=family.gated,
    fields=family.ROPE | {"attention_bias", "mlp_bias"},
)
