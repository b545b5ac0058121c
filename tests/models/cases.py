# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of every family as `transformers` defines it, made without torch.

The entries of a tensor are a function of its name and a seed, so that what
torch computes of a case can be stored and compared where torch is not.
"""

import functools
import json
import math
import os
import pathlib
import zlib

import numpy as np
import safetensors.numpy
import transformers

from tba_jax.models import config as config_lib
from tba_jax.models.hf import hf_config
from tba_jax.models.hf import hf_names

VOCAB = 64
LENGTHS = np.array([24, 7, 13, 1])
NUM_PROMPT_TOKENS = 24
NUM_TOKENS = 64
TOLERANCE = 2e-4
# A file per case, made by make_stored_logits.py.
STORED = pathlib.Path(__file__).parent / "stored_logits"

_ROPE = dict(rope_type="linear", factor=4.0, rope_theta=500.0)
_ROPE_3 = dict(
    rope_type="llama3",
    rope_theta=500.0,
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=16,
)
_YARN = dict(
    rope_type="yarn",
    rope_theta=100.0,
    factor=4.0,
    original_max_position_embeddings=24,
)
_SHAPE = dict(
    hidden_size=32,
    intermediate_size=40,
    num_hidden_layers=3,
    num_attention_heads=4,
    max_position_embeddings=128,
)
_GATED = dict(_SHAPE, num_key_value_heads=2)
_ODD = dict(
    _GATED,
    hidden_size=30,
    intermediate_size=37,
    num_attention_heads=5,
    num_key_value_heads=1,
)
_DELTA = dict(
    # A first token's result is normed whatever its size: if small, noise.
    rms_norm_eps=1e-3,
    linear_num_key_heads=2,
    linear_num_value_heads=6,
    linear_key_head_dim=12,
    linear_value_head_dim=10,
    linear_conv_kernel_dim=4,
)
_EXPERTS = dict(
    moe_intermediate_size=24,
    num_experts=8,
    num_experts_per_tok=3,
    shared_expert_intermediate_size=20,
)
# Qwen3.5-MoE has no layers without experts.
_without_mlp = lambda shape: {
    name: x for name, x in shape.items() if name != "intermediate_size"
}
_DEEPSEEK = dict(
    _SHAPE,
    num_key_value_heads=4,
    q_lora_rank=20,
    kv_lora_rank=24,
    qk_nope_head_dim=12,
    qk_rope_head_dim=8,
    v_head_dim=10,
    moe_intermediate_size=24,
    n_routed_experts=12,
    n_shared_experts=2,
    num_experts_per_tok=3,
    n_group=4,
    topk_group=2,
    first_k_dense_replace=1,
)
_GLM = dict(
    _GATED,
    head_dim=16,
    moe_intermediate_size=24,
    n_routed_experts=12,
    num_experts_per_tok=3,
)
_GEMMA4 = dict(
    _GATED,
    head_dim=16,
    global_head_dim=24,
    sliding_window=6,
    hidden_size_per_layer_input=10,
    # A layer's embedding is normed whatever its size: if small, noise.
    rms_norm_eps=1e-3,
    vocab_size_per_layer_input=VOCAB,
)
_LOCAL, _GLOBAL = "sliding_attention", "full_attention"
_GPT2 = dict(n_embd=32, n_layer=3, n_head=4, n_positions=128)
# Name of a case -> class of transformers' and its settings.
CASES = {
    "llama": ("Llama", _GATED),
    "llama_bias": ("Llama", dict(_GATED, attention_bias=True, mlp_bias=True)),
    "llama_linear": ("Llama", dict(_GATED, rope_parameters=_ROPE)),
    "llama3": (
        "Llama",
        dict(_GATED, rope_parameters=_ROPE_3, tie_word_embeddings=True),
    ),
    "llama_yarn": (
        "Llama",
        dict(
            _GATED,
            head_dim=14,
            rope_parameters=dict(
                _YARN,
                beta_fast=3.0,
                beta_slow=0.3,
                mscale=0.7,
                mscale_all_dim=1.9,
                truncate=False,
            ),
        ),
    ),
    "ministral3": (
        "Ministral3",
        dict(
            _GATED,
            head_dim=16,
            rope_parameters=dict(
                _YARN,
                llama_4_scaling_beta=0.6,
                mscale=1.0,
                mscale_all_dim=1.0,
            ),
        ),
    ),
    "ministral3_plain": (
        "Ministral3",
        dict(
            _ODD,
            head_dim=6,
            sliding_window=7,
            tie_word_embeddings=True,
            rope_parameters=dict(
                rope_type="default",
                rope_theta=50.0,
                llama_4_scaling_beta=0.3,
                original_max_position_embeddings=10,
            ),
        ),
    ),
    "mistral": ("Mistral", dict(_GATED, sliding_window=6)),
    "mistral_wide": ("Mistral", dict(_GATED, sliding_window=None, head_dim=16)),
    "qwen2": ("Qwen2", dict(_GATED, tie_word_embeddings=True)),
    "qwen3": ("Qwen3", dict(_GATED, head_dim=16)),
    "qwen2_yarn": ("Qwen2", dict(_GATED, rope_parameters=_YARN)),
    "qwen3_yarn": (
        "Qwen3",
        dict(
            _GATED,
            head_dim=16,
            rope_parameters=dict(_YARN, attention_factor=1.4, beta_fast=4.0),
        ),
    ),
    "qwen3_bias": ("Qwen3", dict(_GATED, head_dim=16, attention_bias=True)),
    "qwen3_moe": (
        "Qwen3Moe",
        dict(
            _GATED,
            head_dim=16,
            moe_intermediate_size=24,
            num_experts=8,
            num_experts_per_tok=3,
            norm_topk_prob=True,
        ),
    ),
    "qwen3_moe_plain": (
        "Qwen3Moe",
        dict(
            _GATED,
            head_dim=16,
            attention_bias=True,
            moe_intermediate_size=24,
            num_experts=5,
            num_experts_per_tok=2,
            tie_word_embeddings=True,
        ),
    ),
    "qwen3_moe_dense": (
        "Qwen3Moe",
        dict(
            _GATED,
            head_dim=16,
            moe_intermediate_size=24,
            num_experts=5,
            num_experts_per_tok=2,
            mlp_only_layers=[0],
        ),
    ),
    "olmo3": (
        "Olmo3",
        dict(
            _GATED,
            num_hidden_layers=4,
            sliding_window=6,
            rope_parameters=dict(
                full_attention=dict(_YARN, attention_factor=1.3),
                sliding_attention=dict(rope_type="default", rope_theta=50.0),
            ),
        ),
    ),
    "olmo3_bias": (
        "Olmo3",
        dict(
            _ODD,
            head_dim=8,
            attention_bias=True,
            tie_word_embeddings=True,
            sliding_window=9,
            layer_types=["full_attention", "sliding_attention"]
            + ["full_attention"],
            rope_scaling=dict(rope_type="linear", factor=4.0),
        ),
    ),
    "smollm3": ("SmolLM3", dict(_GATED, no_rope_layers=[1, 0, 1])),
    "smollm3_yarn": (
        "SmolLM3",
        dict(
            _ODD,
            no_rope_layer_interval=2,
            attention_bias=True,
            mlp_bias=True,
            tie_word_embeddings=False,
            rope_parameters=_YARN,
        ),
    ),
    # Published ones: more value heads than key heads, a quarter of each head
    # rotated, and rotary settings of images.
    "qwen3_5_text": (
        "Qwen3_5",
        dict(
            _GATED,
            **_DELTA,
            head_dim=16,
            num_hidden_layers=4,
            full_attention_interval=2,
            rope_parameters=dict(
                rope_type="default",
                rope_theta=500.0,
                partial_rotary_factor=0.25,
                mrope_section=[1, 1, 0],
                mrope_interleaved=True,
            ),
        ),
    ),
    "qwen3_5_text_tied": (
        "Qwen3_5",
        dict(
            _GATED,
            **dict(_DELTA, linear_num_value_heads=2, linear_conv_kernel_dim=3),
            head_dim=8,
            attention_bias=True,
            layer_types=["full_attention"] + 2 * ["linear_attention"],
            tie_word_embeddings=True,
        ),
    ),
    "qwen3_5_moe_text": (
        "Qwen3_5Moe",
        dict(
            _without_mlp(_GATED),
            **_DELTA,
            **_EXPERTS,
            head_dim=16,
            num_hidden_layers=4,
            full_attention_interval=2,
            rope_parameters=dict(
                rope_type="default",
                rope_theta=500.0,
                partial_rotary_factor=0.25,
                mrope_section=[1, 1, 0],
                mrope_interleaved=True,
            ),
        ),
    ),
    "qwen3_5_moe_text_tied": (
        "Qwen3_5Moe",
        dict(
            _without_mlp(_ODD),
            hidden_size=28,
            **dict(_DELTA, linear_num_value_heads=2, linear_conv_kernel_dim=3),
            **dict(_EXPERTS, num_experts=5, shared_expert_intermediate_size=9),
            head_dim=8,
            attention_bias=True,
            layer_types=["full_attention"] + 2 * ["linear_attention"],
            tie_word_embeddings=True,
        ),
    ),
    # The published one's features, with a layer of each kind.
    "qwen3_next": (
        "Qwen3Next",
        dict(
            _GATED,
            **_DELTA,
            **_EXPERTS,
            head_dim=16,
            num_hidden_layers=4,
            full_attention_interval=2,
            mlp_only_layers=[3],
            rope_parameters=dict(rope_type="default", rope_theta=500.0),
        ),
    ),
    "qwen3_next_tied": (
        "Qwen3Next",
        dict(
            _ODD,
            hidden_size=28,
            **dict(_DELTA, linear_num_value_heads=2, linear_conv_kernel_dim=3),
            **dict(_EXPERTS, num_experts=5, shared_expert_intermediate_size=9),
            head_dim=8,
            attention_bias=True,
            layer_types=["full_attention"] + 2 * ["linear_attention"],
            decoder_sparse_step=2,
            norm_topk_prob=False,
            tie_word_embeddings=True,
        ),
    ),
    "gemma3_text": (
        "Gemma3",
        dict(
            _GATED,
            head_dim=16,
            sliding_window=6,
            layer_types=["sliding_attention", "full_attention"]
            + ["sliding_attention"],
            query_pre_attn_scalar=24,
            rope_parameters=dict(
                full_attention=_ROPE,
                sliding_attention=dict(rope_type="default", rope_theta=50.0),
            ),
        ),
    ),
    "gemma3_text_bias": (
        "Gemma3",
        dict(
            _GATED,
            head_dim=16,
            attention_bias=True,
            sliding_window=6,
            hidden_activation="silu",
            tie_word_embeddings=False,
        ),
    ),
    # As E2B: embeddings of each layer, shared keys and values, wider MLPs.
    "gemma4_text": (
        "Gemma4",
        dict(
            _GEMMA4,
            num_hidden_layers=8,
            num_key_value_heads=1,
            num_kv_shared_layers=3,
            layer_types=[_LOCAL, _LOCAL, _GLOBAL, _LOCAL, _GLOBAL]
            + [_LOCAL, _LOCAL, _GLOBAL],
            use_double_wide_mlp=True,
            final_logit_softcapping=3.0,
        ),
    ),
    # As 31B: fewer key-value heads in global layers, whose keys are values.
    "gemma4_text_odd": (
        "Gemma4",
        dict(
            _ODD,
            num_hidden_layers=7,
            num_key_value_heads=5,
            num_global_key_value_heads=1,
            attention_k_eq_v=True,
            attention_bias=True,
            head_dim=10,
            global_head_dim=12,
            sliding_window=9,
            hidden_size_per_layer_input=0,
            hidden_activation="silu",
            tie_word_embeddings=False,
            rope_parameters=dict(
                full_attention=dict(
                    rope_type="proportional",
                    rope_theta=500.0,
                    partial_rotary_factor=0.5,
                    factor=3.0,
                ),
                sliding_attention=dict(rope_type="default", rope_theta=50.0),
            ),
        ),
    ),
    # As 26B-A4B: experts next to the MLP of each layer.
    "gemma4_text_experts": (
        "Gemma4",
        dict(
            _GEMMA4,
            num_hidden_layers=3,
            hidden_size_per_layer_input=0,
            num_global_key_value_heads=1,
            attention_k_eq_v=True,
            layer_types=[_LOCAL, _LOCAL, _GLOBAL],
            enable_moe_block=True,
            moe_intermediate_size=20,
            num_experts=8,
            top_k_experts=3,
        ),
    ),
    # Layers share keys and values of heads of one size.
    "gemma4_text_yarn": (
        "Gemma4",
        dict(
            _GEMMA4,
            num_hidden_layers=5,
            global_head_dim=16,
            num_kv_shared_layers=2,
            layer_types=[_GLOBAL, _LOCAL, _LOCAL, _GLOBAL, _GLOBAL],
            rope_parameters=dict(
                full_attention=dict(_YARN, attention_factor=1.3),
                sliding_attention=dict(rope_type="default", rope_theta=50.0),
            ),
        ),
    ),
    "gpt_oss": (
        "GptOss",
        dict(
            _GATED,
            head_dim=16,
            num_local_experts=8,
            num_experts_per_tok=3,
            sliding_window=6,
            swiglu_limit=1.0,
            rope_parameters=dict(
                _YARN, beta_fast=3.0, beta_slow=0.3, truncate=False
            ),
        ),
    ),
    "gpt_oss_odd": (
        "GptOss",
        dict(
            _GATED,
            attention_bias=False,
            head_dim=10,
            intermediate_size=20,
            num_local_experts=5,
            num_experts_per_tok=2,
            sliding_window=5,
            layer_types=["full_attention"] + ["sliding_attention"] * 2,
            swiglu_alpha=1.1,
            rope_parameters=dict(rope_type="default", rope_theta=500.0),
            tie_word_embeddings=True,
        ),
    ),
    "deepseek_v3": (
        "DeepseekV3",
        dict(
            _DEEPSEEK,
            rope_scaling=dict(
                type="yarn",
                factor=4.0,
                original_max_position_embeddings=24,
                mscale=1.0,
                mscale_all_dim=1.0,
            ),
            rope_theta=100.0,
        ),
    ),
    # No latent of queries; wider values than keys; no groups; all layers but
    # the last are dense.
    "deepseek_v3_odd": (
        "DeepseekV3",
        dict(
            _DEEPSEEK,
            hidden_size=28,
            num_attention_heads=5,
            num_key_value_heads=5,
            attention_bias=True,
            q_lora_rank=None,
            kv_lora_rank=17,
            qk_nope_head_dim=6,
            qk_rope_head_dim=4,
            v_head_dim=13,
            moe_intermediate_size=20,
            n_routed_experts=7,
            n_shared_experts=1,
            n_group=1,
            topk_group=1,
            first_k_dense_replace=2,
            norm_topk_prob=False,
            routed_scaling_factor=1.3,
            tie_word_embeddings=True,
            rope_theta=500.0,
        ),
    ),
    # As Kimi K2 has them: YaRN with other weights, no groups, one dense layer.
    "deepseek_v3_plain": (
        "DeepseekV3",
        dict(
            _DEEPSEEK,
            n_group=1,
            topk_group=1,
            n_shared_experts=1,
            first_k_dense_replace=0,
            rms_norm_eps=1e-5,
            routed_scaling_factor=2.827,
            rope_parameters=dict(
                _YARN, beta_fast=1.0, mscale=0.7, mscale_all_dim=1.9
            ),
        ),
    ),
    "glm4_moe": (
        "Glm4Moe",
        dict(
            _GLM,
            attention_bias=True,
            use_qk_norm=True,
            routed_scaling_factor=2.5,
            n_shared_experts=2,
            partial_rotary_factor=0.25,
        ),
    ),
    "glm4_moe_groups": (
        "Glm4Moe",
        dict(
            _GLM,
            n_group=4,
            topk_group=2,
            first_k_dense_replace=2,
            norm_topk_prob=False,
            tie_word_embeddings=True,
            rope_parameters=dict(_YARN, partial_rotary_factor=0.5),
        ),
    ),
    "gpt_neox": ("GPTNeoX", dict(_SHAPE, rotary_pct=0.25)),
    "gpt_neox_serial": (
        "GPTNeoX",
        dict(
            _SHAPE,
            rope_parameters=dict(_ROPE, partial_rotary_factor=0.5),
            use_parallel_residual=False,
            hidden_act="gelu_new",
        ),
    ),
    "gpt_neox_plain": (
        "GPTNeoX",
        dict(
            _SHAPE,
            rotary_pct=1.0,
            attention_bias=False,
            hidden_act="relu",
            tie_word_embeddings=True,
        ),
    ),
    "gpt2": ("GPT2", _GPT2),
    "gpt2_by_layer": (
        "GPT2",
        dict(_GPT2, scale_attn_by_inverse_layer_idx=True, n_inner=40),
    ),
    "gpt2_unscaled": (
        "GPT2",
        dict(
            _GPT2,
            scale_attn_weights=False,
            activation_function="gelu",
            tie_word_embeddings=False,
        ),
    ),
}


@functools.cache
def stored(case: str) -> dict[str, np.ndarray]:
  """Returns a case's `seed`, `tokens`, `margin` and `logits`."""
  with np.load(STORED / f"{case}.npz", allow_pickle=False) as file:
    return dict(file)


def seed_of(case: str) -> int:
  """Returns a case's seed: its greedy completions come near no tie."""
  return int(stored(case)["seed"])


def hf_settings(case: str, num_labels: int = 0) -> dict:
  """Returns a case's config.json, as `transformers` writes it."""
  name, settings = CASES[case]
  head = "LMHeadModel" if name == "GPT2" else "ForCausalLM"
  has_parts = name in ("Gemma3", "Gemma4", "Qwen3_5", "Qwen3_5Moe")
  kind = name + "Text" * has_parts
  config = getattr(transformers, f"{kind}Config")(
      vocab_size=VOCAB,
      pad_token_id=0,
      bos_token_id=None,
      eos_token_id=1,
      architectures=[
          kind + "ForSequenceClassification" if num_labels else name + head
      ],
      dtype="float32",
      **({"num_labels": num_labels} if num_labels else {}),
      **settings,
  )
  return json.loads(config.to_json_string())


def tensors(config: config_lib.ModelConfig, seed: int) -> dict[str, np.ndarray]:
  """Returns the tensors of a shape; norms are not 1 and biases not 0."""
  found = {}
  for row in hf_names.rows(config):
    for name in row.hf_names(config.num_layers):
      rng = np.random.default_rng([seed, zlib.crc32(name.encode())])
      # Uniform with deviation 1: numpy keeps these numbers the same.
      values = (rng.random(row.hf_shape) - 0.5) * math.sqrt(12)
      if name.endswith("A_log"):
        # Some heads of a delta net forget in a few tokens, others in hundreds.
        values = 1.5 * values - 3
      elif name.endswith("conv1d.weight"):
        values = 0.5 * values
      elif len(row.hf_shape) == 1:
        has_mean_1 = name.endswith(("weight", "scalar", "scale"))
        values = 0.3 * values + has_mean_1
      else:
        values = (0.35 if config.family.startswith("gpt") else 0.2) * values
      found[name] = values.astype(np.float32)
  return found


def write(
    folder: str | os.PathLike[str],
    case: str,
    *,
    seed: int | None = None,
    num_labels: int = 0,
) -> None:
  """Writes a case's folder, of its own seed unless told another."""
  path = pathlib.Path(folder)
  path.mkdir(parents=True, exist_ok=True)
  settings = hf_settings(case, num_labels)
  (path / "config.json").write_text(json.dumps(settings))
  safetensors.numpy.save_file(
      tensors(
          hf_config.from_hf(settings), seed_of(case) if seed is None else seed
      ),
      path / "model.safetensors",
      metadata={"format": "pt"},
  )


def write_mxfp4(folder: pathlib.Path) -> None:
  """Writes gpt-oss with experts in MXFP4, as its folders are published."""
  quantized = {
      "modules_to_not_convert": [
          "model.layers.*.self_attn",
          "model.layers.*.mlp.router",
          "model.embed_tokens",
          "lm_head",
      ],
      "quant_method": "mxfp4",
  }
  settings = hf_settings("gpt_oss") | {"intermediate_size": 64}
  arrays = tensors(hf_config.from_hf(settings), 0)
  rng = np.random.default_rng(0)
  byte = lambda low, high, *shape: rng.integers(low, high, shape, np.uint8)
  for name in list(arrays):
    if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
      E, D, F = arrays.pop(name).shape
      arrays[f"{name}_blocks"] = byte(0, 256, E, F, D // 32, 16)
      arrays[f"{name}_scales"] = byte(121, 125, E, F, D // 32)
  folder.mkdir(parents=True, exist_ok=True)
  settings = settings | {"quantization_config": quantized}
  (folder / "config.json").write_text(json.dumps(settings))
  safetensors.numpy.save_file(
      arrays, folder / "model.safetensors", metadata={"format": "pt"}
  )


def batch() -> tuple[np.ndarray, np.ndarray]:
  """Returns tokens and mask, left-padded prompts of unequal lengths."""
  rng = np.random.default_rng(0)
  length = NUM_PROMPT_TOKENS
  tokens = rng.integers(2, VOCAB, (len(LENGTHS), length))
  mask = np.arange(length)[None] >= length - LENGTHS[:, None]
  return tokens, mask.astype(np.int64)


def extend(
    tokens: np.ndarray, mask: np.ndarray, completions: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
  """Returns tokens and mask of prompts and completions together."""
  ones = np.ones(completions.shape, mask.dtype)
  join = lambda *arrays: np.concatenate(arrays, axis=1)
  return join(tokens, completions), join(mask, ones)


# Columns of stored logits: in the prompts, at their ends, and far from there.
COLUMNS = np.array([17, 20, 23, 40, 60, 87])
