# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""gpt-oss: experts with biases, sinks, and a window in every other layer.

Source: OpenAI 2025 (arXiv:2508.10925), as computed by Hugging Face's
`GptOssForCausalLM`. Published folders store experts in MXFP4, which
`mxfp4_tensors.py` reads.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from tba_jax.models.families import family


def _experts(c: Any) -> Iterator[family.Line]:
  """Yields the tensors of a layer's router and experts.

  Each tensor stacks all experts; one interleaves gate and up columns.
  """
  del c
  mlp = "model.layers.{layer}.mlp"
  yield f"{mlp}.router.weight", "blocks.mlp.router", "experts width"
  yield f"{mlp}.router.bias", "blocks.mlp.router_bias", "experts"
  for i, name in enumerate(("gate", "up")):
    source, path = f"{mlp}.experts.gate_up_proj", f"blocks.mlp.{name}"
    yield source, path, f"experts width mlp*{i}of2", "experts mlp width"
    yield f"{source}_bias", f"{path}_bias", f"experts mlp*{i}of2"
  source, path = f"{mlp}.experts.down_proj", "blocks.mlp.down"
  yield source, path, "experts mlp width", "experts width mlp"
  yield f"{source}_bias", f"{path}_bias", "experts width"


def _tensors(c: Any) -> Iterator[family.Line]:
  """Yields the tensors."""
  yield from family.gated(c, mlp=_experts)
  source = "model.layers.{layer}.self_attn.sinks"
  yield source, "blocks.attention.sinks", "heads"


def _only(hf: Mapping[str, Any]) -> dict[str, tuple]:
  """Returns settings with fixed values, and those that are read elsewhere."""
  quantization = hf.get("quantization_config")
  mxfp4 = {"quant_method": "mxfp4"}
  if isinstance(quantization, dict):
    # The files show which tensors are in MXFP4.
    names = ("modules_to_not_convert", "dequantize")
    if {k: v for k, v in quantization.items() if k not in names} == mxfp4:
      mxfp4 = quantization
  rope = hf.get("rope_parameters") or hf.get("rope_scaling")
  length = 4096
  if isinstance(rope, dict):
    length = rope.get("original_max_position_embeddings", length)
  return {
      "quantization_config": (None, mxfp4),
      # OpenAI's name for the original context length of YaRN.
      "initial_context_length": (None, length),
  }


FAMILY = family.Family(
    class_name="GptOss",
    keys={
        **family.GATED,
        **family.max_positions(131072),
        "num_layers": ("num_hidden_layers", int, 36),
        "vocab_size": ("vocab_size", int, 201088),
        "width": ("hidden_size", int, 2880),
        "mlp_width": ("intermediate_size", int, 2880),
        "num_heads": ("num_attention_heads", int, 64),
        "num_kv_heads": ("num_key_value_heads", family.INT_OR_NONE, 8),
        "head_dim": ("head_dim", family.INT_OR_NONE, 64),
        "norm_epsilon": ("rms_norm_eps", float, 1e-5),
        "attention_bias": ("attention_bias", bool, True),
        "sliding_window": ("sliding_window", family.INT_OR_NONE, 128),
        "num_experts": ("num_local_experts", int, 128),
        "experts_per_token": ("num_experts_per_tok", int, 4),
        "swiglu_alpha": ("swiglu_alpha", float, 1.702),
        "swiglu_limit": ("swiglu_limit", float, 7.0),
    },
    tensors=_tensors,
    fields=family.ROPE
    | {
        "attention_bias",
        "experts_per_token",
        "global_layers",
        "num_experts",
        "sliding_window",
        "swiglu_alpha",
        "swiglu_limit",
    },
    has_experts=True,
    has_expert_biases=True,
    clamps_experts=True,
    has_sinks=True,
    rope_theta=150000.0,
    rope={
        "rope_type": "yarn",
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "truncate": False,
    },
    global_every=2,
    aliases={
        "num_experts": "num_local_experts",
        "experts_per_token": "num_experts_per_tok",
    },
    only=_only,
)
