# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""OLMo 3: norms after attention and MLP, none before them.

Queries have one norm over all heads, and keys another. Three of every four
layers have a sliding window; their positions are not scaled.

Source: Olmo Team 2025 (arXiv:2512.13961), as computed by Hugging Face's
`Olmo3ForCausalLM`.
"""

from collections.abc import Iterator
from typing import Any

from tba_jax.models.families import family


def _tensors(c: Any) -> Iterator[family.Line]:
  """Yields the tensors."""
  yield from family.gated(
      c,
      norms=(
          ("post_attention_layernorm", "attention_out_norm"),
          ("post_feedforward_layernorm", "mlp_out_norm"),
      ),
  )
  for name, axis in family.QKV[:2]:
    source = f"model.layers.{{layer}}.self_attn.{name}_norm.weight"
    yield source, f"blocks.attention.{name}_norm.scale", f"all_{axis}"


FAMILY = family.Family(
    class_name="Olmo3",
    keys={
        **family.GATED,
        **family.max_positions(2048),
        "pad_id": ("pad_token_id", family.INT_OR_NONE, 1),
        "norm_epsilon": ("rms_norm_eps", float, 1e-5),
        "attention_bias": ("attention_bias", bool, False),
        "sliding_window": ("sliding_window", family.INT_OR_NONE, 4096),
    },
    tensors=_tensors,
    fields=family.ROPE
    | {
        "attention_bias",
        "global_layers",
        "local_rope_theta",
        "sliding_window",
    },
    has_in_norms=False,
    has_out_norms=True,
    has_head_norms=True,
    joins_head_norms=True,
    rope_theta=500000.0,
    has_local_rope=True,
    local_rope_theta=500000.0,
    old_local_rope=("", ""),
    global_every=4,
)
