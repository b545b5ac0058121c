# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""GPT-2: learned positions, biases everywhere.

Source: Radford et al. 2019, "Language Models are Unsupervised Multitask
Learners", as computed by Hugging Face's `GPT2LMHeadModel`.
"""

from collections.abc import Iterator
from typing import Any

from tba_jax.models.families import family


def _tensors(c: Any) -> Iterator[family.Line]:
  """Yields the tensors, input axes first; one fuses query, key and value."""
  layer = "transformer.h.{layer}"
  yield "transformer.wte.weight", "embed.embedding", "vocab width"
  yield "transformer.wpe.weight", "positions", "positions width"
  yield from family.norm("transformer.ln_f", "final_norm")
  yield from family.norm(f"{layer}.ln_1", "blocks.attention_norm")
  yield from family.norm(f"{layer}.ln_2", "blocks.mlp_norm")
  for i, (name, axis) in enumerate(family.QKV):
    source, path = f"{layer}.attn.c_attn", f"blocks.attention.{name}"
    out = f"{i}of3*{axis}*head_dim"
    kernel = f"{axis} head_dim width"
    yield f"{source}.weight", f"{path}.kernel", f"width {out}", kernel
    yield f"{source}.bias", f"{path}.bias", out
  for name, path, inputs, out in (
      ("attn.c_proj", "attention.o", "heads*head_dim", "width"),
      ("mlp.c_fc", "mlp.up", "width", "mlp"),
      ("mlp.c_proj", "mlp.down", "mlp", "width"),
  ):
    source, path = f"{layer}.{name}", f"blocks.{path}"
    kernel = f"{out} {inputs.replace('*', ' ')}"
    yield f"{source}.weight", f"{path}.kernel", f"{inputs} {out}", kernel
    yield f"{source}.bias", f"{path}.bias", out
  yield from family.head(c, "lm_head.weight")


FAMILY = family.Family(
    class_name="GPT2",
    keys={
        **family.COMMON,
        **family.max_positions(1024, "n_positions"),
        "num_layers": ("n_layer", int, ...),
        "width": ("n_embd", int, ...),
        "num_heads": ("n_head", int, ...),
        "mlp_width": ("n_inner", family.INT_OR_NONE, None),
        "tie_embeddings": ("tie_word_embeddings", bool, True),
        "norm_epsilon": ("layer_norm_epsilon", float, 1e-5),
        "activation": (
            *("activation_function", family.HF_ACTIVATIONS, "gelu_new"),
        ),
        "scale_attention": ("scale_attn_weights", bool, True),
        "scale_attention_by_layer": (
            *("scale_attn_by_inverse_layer_idx", bool, False),
        ),
    },
    tensors=_tensors,
    fields=frozenset(
        ("activation", "scale_attention", "scale_attention_by_layer")
    ),
    token_head="LMHeadModel",
    prefix="transformer.",
    norm="layer",
    positions="learned",
    is_gated=False,
    has_grouped_heads=False,
    qkv_bias=True,
    out_bias=True,
    # n_ctx is an older name of n_positions.
    only=lambda hf: {"n_ctx": (None, hf.get("n_positions", 1024))},
    # We train without dropout.
    written=dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0),
)
