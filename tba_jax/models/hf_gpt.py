# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""The config.json of GPT-2 and GPT-NeoX; defaults are transformers' own.

jax is not imported.
"""

from typing import Any

from tba_jax.models import config as model_config_lib
from tba_jax.models import hf_reader

ModelConfig = model_config_lib.ModelConfig

# Other names of the same functions -> ours.
_ACTIVATIONS = {
    **{name: name for name in model_config_lib.ACTIVATIONS},
    "gelu_python": "gelu",
    "gelu_pytorch_tanh": "gelu_new",
    "gelu_python_tanh": "gelu_new",
    "swish": "silu",
}


def _activation(
    reader: hf_reader.Reader, name: str, default: str
) -> dict[str, str]:
  value = reader.take(name, default, str)
  if value not in _ACTIVATIONS:
    reader.problem(name, value, " or ".join(map(repr, _ACTIVATIONS)))
  return {"activation": _ACTIVATIONS.get(value, default)}


def _heads(num_heads: int, width: int) -> dict[str, int]:
  return {
      "width": width,
      "num_heads": num_heads,
      "num_kv_heads": num_heads,
      "head_dim": width // max(num_heads, 1),
  }


def read_gpt_neox(reader: hf_reader.Reader) -> dict[str, Any]:
  """Returns the fields of a `GPTNeoXConfig`."""
  for name in ("attention_dropout", "hidden_dropout"):
    reader.only(name, 0.0)
  reader.only("is_decoder", False)
  reader.skip("classifier_dropout")  # Of no head that we have.
  num_heads = reader.need("num_attention_heads")
  return {
      "vocab_size": reader.need("vocab_size"),
      "num_layers": reader.need("num_hidden_layers"),
      **_heads(num_heads, reader.need("hidden_size")),
      "mlp_width": reader.need("intermediate_size"),
      "norm_epsilon": reader.take("layer_norm_eps", 1e-5, float),
      "tie_embeddings": reader.take("tie_word_embeddings", False, bool),
      "max_positions": reader.take("max_position_embeddings", 2048, int),
      "attention_bias": reader.take("attention_bias", True, bool),
      "parallel_residual": reader.take("use_parallel_residual", True, bool),
      **_activation(reader, "hidden_act", "gelu"),
      **hf_reader.read_rope(
          reader,
          theta_names=("rotary_emb_base", "rope_theta"),
          fraction_names=("rotary_pct", "partial_rotary_factor"),
          fraction=0.25,
      ),
  }


def write_gpt_neox(config: ModelConfig) -> dict[str, Any]:
  rope = hf_reader.write_rope(config)
  rope["rope_parameters"]["partial_rotary_factor"] = config.rotary_fraction
  return {
      "name": "GPTNeoX",
      "hidden_size": config.width,
      "intermediate_size": config.mlp_width,
      "num_hidden_layers": config.num_layers,
      "num_attention_heads": config.num_heads,
      "hidden_act": config.activation,
      "max_position_embeddings": config.max_positions,
      "layer_norm_eps": config.norm_epsilon,
      "attention_bias": config.attention_bias,
      "attention_dropout": 0.0,
      "hidden_dropout": 0.0,
      "use_parallel_residual": config.parallel_residual,
      # Readers before transformers 5 take these names.
      "rotary_emb_base": rope.pop("rope_theta"),
      "rotary_pct": config.rotary_fraction,
      **rope,
  }


def read_gpt2(reader: hf_reader.Reader) -> dict[str, Any]:
  """Returns the fields of a `GPT2Config`.

  Its dropout is of training alone; we train every model without.
  """
  reader.skip("attn_pdrop", "embd_pdrop", "resid_pdrop")
  # Of a head that we do not have.
  reader.skip("summary_type", "summary_use_proj", "summary_activation")
  reader.skip("summary_proj_to_labels", "summary_first_dropout")
  # Our scores are float32 in any case.
  reader.skip("reorder_and_upcast_attn")
  reader.only("add_cross_attention", False)
  width = reader.need("n_embd")
  positions = reader.take("n_positions", 1024, int)
  reader.only("n_ctx", None, positions)
  inner = reader.take("n_inner", None, (int, type(None)))
  by_layer = reader.take("scale_attn_by_inverse_layer_idx", False, bool)
  return {
      "vocab_size": reader.need("vocab_size"),
      "num_layers": reader.need("n_layer"),
      **_heads(reader.need("n_head"), width),
      "mlp_width": 4 * width if inner is None else inner,
      "rope_theta": 10000.0,  # Of no effect.
      "norm_epsilon": reader.take("layer_norm_epsilon", 1e-5, float),
      "tie_embeddings": reader.take("tie_word_embeddings", True, bool),
      "max_positions": positions,
      "scale_attention": reader.take("scale_attn_weights", True, bool),
      "scale_attention_by_layer": by_layer,
      **_activation(reader, "activation_function", "gelu_new"),
  }


def write_gpt2(config: ModelConfig) -> dict[str, Any]:
  return {
      "name": "GPT2",
      "n_embd": config.width,
      "n_inner": config.mlp_width,
      "n_layer": config.num_layers,
      "n_head": config.num_heads,
      "n_positions": config.max_positions,
      "activation_function": config.activation,
      "layer_norm_epsilon": config.norm_epsilon,
      "attn_pdrop": 0.0,
      "embd_pdrop": 0.0,
      "resid_pdrop": 0.0,
      "scale_attn_weights": config.scale_attention,
      "scale_attn_by_inverse_layer_idx": config.scale_attention_by_layer,
  }
