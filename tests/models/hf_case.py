# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Small shapes, one of each family, and their params."""

import jax
import jax.numpy as jnp
import numpy as np

from tba_jax.config import settings as settings_lib
from tba_jax.models import config as config_lib
from tba_jax.models.net import transformer

VOCAB = 40

DEEPSEEK = dict(
    family="deepseek_v3",
    num_kv_heads=4,
    head_dim=14,
    rope_dim=6,
    value_dim=10,
    latent_rank=12,
    query_rank=9,
    num_experts=8,
    experts_per_token=3,
    num_expert_groups=4,
    groups_per_token=2,
    router_scale=1.7,
    shared_expert_width=96,
    dense_layers=(True, False),
    dense_mlp_width=20,
    rope_type="yarn",
    rope_factor=4.0,
    rope_original_positions=4,
    rope_mscale_all_dim=0.8,
)
GLM = dict(
    family="glm4_moe",
    attention_bias=True,
    head_norms=True,
    num_experts=8,
    experts_per_token=3,
    dense_layers=(True, False),
    shared_expert_width=48,
    dense_mlp_width=20,
    rotary_fraction=0.5,
)
# Local and global layers, with keys and values and without.
GEMMA4 = dict(
    family="gemma4_text",
    num_layers=5,
    sliding_window=4,
    global_layers=(False, False, True, False, True),
    global_head_dim=24,
    global_kv_heads=1,
    keys_as_values=True,
    num_shared_layers=2,
    dense_layers=(False,) * 3 + (True,) * 2,
    mlp_width=48,
    dense_mlp_width=96,
    layer_input_width=12,
    # A layer's embedding is normed whatever its size: if small, noise.
    norm_epsilon=0.1,
    logit_cap=30.0,
    local_rope_theta=100.0,
    rope_type="proportional",
    rotary_fraction=0.25,
    activation="gelu_new",
    tie_embeddings=True,
)
# Experts next to each layer's MLP.
GEMMA4_EXPERTS = dict(
    GEMMA4,
    num_layers=3,
    global_layers=(False, False, True),
    num_shared_layers=0,
    layer_input_width=0,
    dense_layers=(),
    dense_mlp_width=config_lib.ModelConfig.dense_mlp_width,
    mlp_width=20,
    shared_expert_width=48,
    num_experts=8,
    experts_per_token=3,
)
# Shapes of each family, as itself.
FAMILIES = (
    dict(
        family="gemma3_text",
        sliding_window=4,
        global_layers=(False, True),
        local_rope_theta=100.0,
        score_dim=12,
        activation="gelu_new",
        tie_embeddings=True,
    ),
    GEMMA4,
    GEMMA4_EXPERTS,
    dict(family="llama", attention_bias=True, mlp_bias=True),
    dict(family="mistral", sliding_window=4),
    dict(family="qwen2"),
    dict(family="qwen3"),
    dict(
        family="qwen3_5_text",
        delta_layers=(True, False),
        delta_key_heads=2,
        delta_value_heads=4,
        delta_key_dim=6,
        delta_value_dim=10,
        delta_taps=3,
        rotary_fraction=0.25,
    ),
    dict(family="qwen3_moe", num_experts=4, experts_per_token=2),
    dict(
        family="qwen3_5_moe_text",
        delta_layers=(True, False),
        delta_key_heads=2,
        delta_value_heads=4,
        delta_key_dim=6,
        delta_value_dim=10,
        num_experts=4,
        experts_per_token=2,
        shared_expert_width=20,
    ),
    # A period of a layer without experts and one with.
    dict(
        family="qwen3_next",
        num_layers=4,
        delta_layers=(True, False) * 2,
        dense_layers=(True, False) * 2,
        delta_key_heads=2,
        delta_value_heads=4,
        delta_key_dim=6,
        delta_value_dim=10,
        dense_mlp_width=44,
        num_experts=4,
        experts_per_token=2,
        norm_router=False,
        shared_expert_width=20,
        rotary_fraction=0.25,
    ),
    dict(
        family="ministral3",
        query_growth=0.25,
        rope_type="yarn",
        rope_factor=4.0,
        rope_original_positions=3,
        sliding_window=5,
    ),
    dict(
        family="olmo3",
        sliding_window=4,
        global_layers=(False, True),
        local_rope_theta=100.0,
        rope_type="yarn",
        rope_factor=4.0,
        rope_original_positions=4,
    ),
    dict(
        family="smollm3",
        attention_bias=True,
        rotary_layers=(True, False),
        tie_embeddings=True,
    ),
    dict(
        family="gpt_neox",
        num_kv_heads=4,
        head_dim=8,
        attention_bias=True,
        parallel_residual=True,
        rotary_fraction=0.5,
        activation="gelu",
    ),
    dict(
        family="gpt_oss",
        attention_bias=True,
        sliding_window=4,
        global_layers=(False, True),
        num_experts=4,
        experts_per_token=2,
        swiglu_alpha=1.3,
        swiglu_limit=1.5,
    ),
    DEEPSEEK,
    GLM,
    dict(
        family="gpt2",
        num_kv_heads=4,
        head_dim=8,
        scale_attention_by_layer=True,
        activation="gelu_new",
    ),
)
# One family for each kind of layer: windows, shared keys and values, experts
# and sinks, states, latents.
KINDS = tuple(
    shape
    for shape in FAMILIES
    if shape is not GEMMA4_EXPERTS
    and shape["family"]
    in ("gemma3_text", "gemma4_text", "gpt_oss", "qwen3_next", "deepseek_v3")
)


def make_config(**overrides) -> config_lib.ModelConfig:
  settings = settings_lib.get_config().model
  settings.update(num_kv_heads=2, num_layers=2, width=32, mlp_width=48)
  settings.update(overrides)
  return config_lib.ModelConfig.from_config(
      settings, VOCAB, pad_id=0, bos_id=None, eos_id=1
  )


def make_params(config, seed=0):
  """Returns distinct numbers in every entry, norms included."""
  shapes = jax.eval_shape(
      transformer.make_model(config).init, jax.random.key(0)
  )
  rng = np.random.default_rng(seed)
  return jax.tree.map(
      lambda x: jnp.asarray(rng.normal(size=x.shape), x.dtype), shapes
  )
