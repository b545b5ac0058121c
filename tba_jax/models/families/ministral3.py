# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Ministral 3: Mistral with YaRN, and queries that grow with their position.

Source: Mistral AI 2026 (arXiv:2601.08584), as computed by Hugging Face's
`Ministral3ForCausalLM`. The models are published as
`Mistral3ForConditionalGeneration`, which is read without its vision tower.
"""

from tba_jax.models.families import family

FAMILY = family.Family(
    class_name="Ministral3",
    keys={
        **family.GATED,
        **family.max_positions(262144),
        # Settings that published text_configs omit.
        "vocab_size": ("vocab_size", int, 131072),
        "pad_id": ("pad_token_id", family.INT_OR_NONE, 11),
        "bos_id": ("bos_token_id", family.INT_OR_NONE, 1),
        "num_kv_heads": ("num_key_value_heads", family.INT_OR_NONE, 8),
        "head_dim": ("head_dim", family.INT_OR_NONE, 128),
        "norm_epsilon": ("rms_norm_eps", float, 1e-5),
        "sliding_window": ("sliding_window", family.INT_OR_NONE, None),
    },
    tensors=family.gated,
    fields=family.ROPE | {"query_growth", "sliding_window"},
    eos_id=2,
    part_of="mistral3",
    part_class="Mistral3",
    part_prefixes=("language_model.model.", "model.language_model."),
    part_others=r"(model\.)?(vision_tower|multi_modal_projector)\..*",
    rope_theta=1000000.0,
)
