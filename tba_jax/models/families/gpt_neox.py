# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""GPT-NeoX and Pythia: attention and MLP in parallel.

Source: Black et al. 2022 (arXiv:2204.06745) and Biderman et al. 2023
(arXiv:2304.01373), as computed by Hugging Face's `GPTNeoXForCausalLM`: the MLP
has its own norm even with a parallel residual.
"""

from collections.abc import Iterator
from typing import Any

from tba_jax.models.families import family


def _tensors(c: Any) -> Iterator[family.Line]:
  """Yields the tensors; one fuses query, key and value, head by head."""
  layer = "gpt_neox.layers.{layer}"
  yield "gpt_neox.embed_in.weight", "embed.embedding", "vocab width"
  yield from family.norm("gpt_neox.final_layer_norm", "final_norm")
  yield from family.norm(f"{layer}.input_layernorm", "blocks.attention_norm")
  yield from family.norm(f"{layer}.post_attention_layernorm", "blocks.mlp_norm")
  for i, (name, axis) in enumerate(family.QKV):
    yield from family.linear(
        *(f"{layer}.attention.query_key_value", f"blocks.attention.{name}"),
        *(f"{axis}*{i}of3*head_dim", "width"),
        bias=c.attention_bias,
    )
  yield from family.linear(
      *(f"{layer}.attention.dense", "blocks.attention.o", "width"),
      *("heads*head_dim",),
      bias=c.attention_bias,
  )
  up, down = f"{layer}.mlp.dense_h_to_4h", f"{layer}.mlp.dense_4h_to_h"
  yield from family.linear(up, "blocks.mlp.up", "mlp", "width")
  yield from family.linear(down, "blocks.mlp.down", "width", "mlp")
  yield from family.head(c, "embed_out.weight")


FAMILY = family.Family(
    class_name="GPTNeoX",
    keys={
        **family.SIZES,
        **family.max_positions(2048),
        "norm_epsilon": ("layer_norm_eps", float, 1e-5),
        "activation": ("hidden_act", family.HF_ACTIVATIONS, "gelu"),
        "attention_bias": ("attention_bias", bool, True),
        "parallel_residual": ("use_parallel_residual", bool, True),
    },
    tensors=_tensors,
    fields=family.ROPE
    | {"activation", "attention_bias", "parallel_residual", "rotary_fraction"},
    prefix="gpt_neox.",
    norm="layer",
    is_gated=False,
    has_grouped_heads=False,
    rotary_fraction=0.25,
    old_rope=("rotary_emb_base", "rotary_pct"),
)
