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
    dict(
        family="gpt2",
        num_kv_heads=4,
        head_dim=8,
        scale_attention_by_layer=True,
        activation="gelu_new",
    ),
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
