# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Qwen3.5's language model: gated delta nets between layers of attention.

Three of every four layers have a gated delta net (`net/delta.py`). The fourth
has attention whose output is gated, and whose rotary positions rotate a quarter
of each head. Norms have scales 1 + w, except inside the delta nets.

Source: Yang et al. 2024 (arXiv:2412.06464) for the delta net, as computed by
Hugging Face's `Qwen3_5ForCausalLM`. The models are published as
`Qwen3_5ForConditionalGeneration`, which is read without its vision tower; the
multi-token prediction layer of either class is not read.
"""

from collections.abc import Callable, Iterator
from typing import Any

from tba_jax.models.families import family

# Settings of delta nets: our field -> Hugging Face's name and default.
DELTA_KEYS: family.Keys = {
    "delta_key_heads": ("linear_num_key_heads", int, 16),
    "delta_value_heads": ("linear_num_value_heads", int, 32),
    "delta_key_dim": ("linear_key_head_dim", int, 128),
    "delta_value_dim": ("linear_value_head_dim", int, 128),
    "delta_taps": ("linear_conv_kernel_dim", int, 4),
}


_VALUE = "delta_heads*delta_dim"
# Input matrices of a delta net, and their output axes.
_INPUTS = (
    ("qkv", "delta_channels"),
    ("z", _VALUE),
    ("b", "delta_heads"),
    ("a", "delta_heads"),
)


def tensors(
    c: Any,
    mlp: Callable[[Any], Iterator[family.Line]] | None = None,
    inputs: tuple[tuple[str, str], ...] = _INPUTS,
) -> Iterator[family.Line]:
  """Yields the tensors; the query's also holds its gate."""
  yield from family.gated(
      c,
      head_norms=True,
      qkv=(("q", "heads*gates"), ("k", "kv_heads"), ("v", "kv_heads")),
      mlp=mlp,
  )
  if not any(c.delta_layers):
    return
  source, path = "model.layers.{layer}.linear_attn", "blocks.delta"
  for name, out in inputs:
    hf_name = f"{source}.in_proj_{name}"
    yield from family.linear(
        *(hf_name, f"{path}.in_{name}", out, "width"), bias=False
    )
  conv = f"{source}.conv1d.weight"
  yield conv, f"{path}.conv", "delta_channels 0of1 taps"
  yield f"{source}.dt_bias", f"{path}.step_bias", "delta_heads"
  yield f"{source}.A_log", f"{path}.log_rate", "delta_heads"
  yield f"{source}.norm.weight", f"{path}.norm.scale", "delta_dim"
  yield from family.linear(
      *(f"{source}.out_proj", f"{path}.out", "width", _VALUE), bias=False
  )


FAMILY = family.Family(
    class_name="Qwen3_5",
    scalar_class_name="Qwen3_5Text",
    keys={
        **family.GATED,
        **family.max_positions(32768),
        **DELTA_KEYS,
        "vocab_size": ("vocab_size", int, 248320),
        "num_layers": ("num_hidden_layers", int, 32),
        "width": ("hidden_size", int, 4096),
        "num_heads": ("num_attention_heads", int, 16),
        "num_kv_heads": ("num_key_value_heads", int, 4),
        "head_dim": ("head_dim", int, 256),
        "mlp_width": ("intermediate_size", int, 12288),
        "attention_bias": ("attention_bias", bool, False),
    },
    tensors=tensors,
    fields=family.ROPE
    | {*DELTA_KEYS, "attention_bias", "delta_layers", "rotary_fraction"},
    part_of="qwen3_5",
    part_prefixes=("model.language_model.",),
    part_others=r"(model\.)?visual\..*|mtp\..*",
    norm_offset=1.0,
    has_head_norms=True,
    has_output_gate=True,
    rotary_fraction=0.25,
    old_rope=("rope_theta", "partial_rotary_factor"),
    # Image coordinates; in text they all equal the token's position.
    unused_rope=("mrope_section", "mrope_interleaved"),
    only=lambda hf: {
        "attn_output_gate": (True,),
        "mamba_ssm_dtype": ("float32",),
        "mlp_only_layers": ([], None),
        # The gate of a delta net's output.
        "output_gate_type": ("swish",),
    },
)
