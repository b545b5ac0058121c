# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Mistral: Llama with a sliding window.

Source: Jiang et al. 2023 (arXiv:2310.06825), as computed by Hugging Face's
`MistralForCausalLM`.
"""

from tba_jax.models.families import family

FAMILY = family.Family(
    class_name="Mistral",
    keys={
        **family.GATED,
        **family.max_positions(4096 * 32),
        "sliding_window": ("sliding_window", family.INT_OR_NONE, 4096),
    },
    tensors=family.gated,
    fields=family.ROPE | {"sliding_window"},
)
