# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""The table of model families, by `config.model.family`. No JAX."""

from collections.abc import Mapping

from tba_jax.models import family
from tba_jax.models import gemma3_text
from tba_jax.models import gpt2
from tba_jax.models import gpt_neox
from tba_jax.models import llama
from tba_jax.models import mistral
from tba_jax.models import qwen2
from tba_jax.models import qwen3
from tba_jax.models import qwen3_moe

FAMILIES: Mapping[str, family.Family] = {
    "gemma3_text": gemma3_text.FAMILY,
    "gpt2": gpt2.FAMILY,
    "gpt_neox": gpt_neox.FAMILY,
    "llama": llama.FAMILY,
    "mistral": mistral.FAMILY,
    "qwen2": qwen2.FAMILY,
    "qwen3": qwen3.FAMILY,
    "qwen3_moe": qwen3_moe.FAMILY,
}
