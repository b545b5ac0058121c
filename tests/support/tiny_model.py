# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Models, a config and batches small enough for a test."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np

from tba_jax import types
from tba_jax.config import settings
from tba_jax.models import config as config_lib
from tba_jax.models.families import family as family_lib
from tba_jax.models.net import packed
from tba_jax.models.net import transformer

VOCAB = 16


class BigramModel:
  """The part of `transformer.Model` that a step uses, quick to compile.

  A token's logits depend on the previous token only.
  """

  logical_axes = {"embedding": ("vocab", "width"), "head": ("width", "vocab")}
  config = None
  stream_and_routes = None

  def init(self, rng: jax.Array) -> types.PyTree:
    first, second = jax.random.split(rng)
    return {
        "embedding": jax.random.normal(first, (VOCAB, 8)),
        "head": jax.random.normal(second, (8, VOCAB)),
    }

  def completion_stream(
      self,
      params,
      prompt_tokens,
      prompt_mask,
      completion_tokens,
      token_indices_RxL=None,
  ) -> jax.Array:
    del prompt_mask  # Prompts are left-padded: their last token is real.
    if token_indices_RxL is not None:
      fed = packed.fed(token_indices_RxL, prompt_tokens, completion_tokens)
      return params["embedding"][fed]
    B, K, _ = completion_tokens.shape
    last = jnp.broadcast_to(prompt_tokens[:, None, -1:], (B, K, 1))
    before = jnp.concatenate([last, completion_tokens[:, :, :-1]], axis=2)
    return params["embedding"][before]

  def unembed(self, params, stream) -> jax.Array:
    return stream @ params["head"]


BIGRAM = BigramModel()

# Changed fields of a model with a recurrent first layer.
STATES = dict(
    family="qwen3_5_text",
    delta_layers=(True, False),
    delta_key_heads=1,
    delta_value_heads=2,
    delta_key_dim=4,
    delta_value_dim=6,
)
# Changed fields of a model whose layers with a state have no experts.
SPARSE = dict(
    STATES,
    family="qwen3_next",
    dense_layers=(True, False),
    dense_mlp_width=24,
    num_experts=4,
    experts_per_token=2,
    shared_expert_width=12,
)


# Changed fields of a model with latent attention, whose first layer is dense.
LATENTS = dict(
    family="deepseek_v3",
    num_kv_heads=4,
    head_dim=10,
    rope_dim=4,
    value_dim=5,
    latent_rank=8,
    query_rank=7,
    num_experts=8,
    experts_per_token=3,
    num_expert_groups=4,
    groups_per_token=2,
    router_scale=1.7,
    shared_expert_width=32,
    dense_layers=(True, False),
    dense_mlp_width=24,
)
# Changed fields of a model whose last layers share keys and values.
SHARED = dict(
    family="gemma4_text",
    num_layers=4,
    sliding_window=3,
    global_layers=(False, True) * 2,
    global_head_dim=8,
    num_shared_layers=2,
    dense_layers=(False, False, True, True),
    dense_mlp_width=64,
    layer_input_width=8,
    # A layer's embedding is normed whatever its size: if small, noise.
    norm_epsilon=1e-2,
    activation="gelu_new",
)


# Changed fields of a model with experts next to the MLP of each layer.
BOTH = dict(
    family="gemma4_text",
    sliding_window=3,
    global_layers=(False, True),
    global_head_dim=8,
    num_experts=4,
    experts_per_token=2,
    shared_expert_width=24,
    norm_epsilon=1e-2,
    activation="gelu_new",
)


@functools.cache
def make_model(**changes) -> transformer.Model:
  """Returns a two-layer Llama of width 16, with changed fields."""
  fields = dict(
      family="llama",
      vocab_size=VOCAB,
      num_layers=2,
      width=16,
      num_heads=4,
      num_kv_heads=2,
      head_dim=4,
      mlp_width=32,
      rope_theta=10000.0,
      norm_epsilon=1e-5,
      tie_embeddings=False,
      max_positions=64,
      param_dtype="float32",
      compute_dtype="float32",
      pad_id=0,
      bos_id=None,
      eos_id=1,
  )
  shape = config_lib.ModelConfig(**{**fields, **changes})
  return transformer.make_model(shape, remat=settings.get_config().train.remat)


def make_config(**changes) -> ml_collections.ConfigDict:
  """Returns the base config; a change is `section__key=value`."""
  config = settings.get_config()
  config.train.num_steps = 100
  config.train.micro_batch_prompts = 4
  config.optimizer.learning_rate = 1e-2
  config.optimizer.learning_rate_final = 1e-3
  for name, value in changes.items():
    section, key = name.split("__")
    config[section][key] = value
  return config


def make_batch(
    *, num_prompts: int = 4, num_completions: int = 3, seed: int = 0
) -> types.Batch:
  """Returns a batch of random tokens and log-probs, as host arrays."""
  rng = np.random.default_rng(seed)
  B, K, P, T = num_prompts, num_completions, 5, 6
  prompt_lengths_B = rng.integers(2, P + 1, B)
  lengths_BxK = rng.integers(1, T + 1, (B, K))
  prompt_mask = np.arange(P) >= P - prompt_lengths_B[:, None]
  mask = np.arange(T) < lengths_BxK[:, :, None]
  tokens = lambda *shape: rng.integers(2, VOCAB, shape).astype(np.int32)
  logprobs = lambda: rng.uniform(-4, -1, (B, K, T)).astype(np.float32) * mask
  return types.Batch(
      prompt_tokens=tokens(B, P) * prompt_mask,
      prompt_mask=prompt_mask.astype(np.float32),
      completion_tokens=tokens(B, K, T) * mask,
      completion_mask=mask.astype(np.float32),
      behavior_logprobs=logprobs(),
      ref_logprobs=logprobs(),
      rewards=rng.integers(0, 2, (B, K)).astype(np.float32),
      staleness_steps=np.zeros((B, K), np.float32),
  )


def init_params(model: Any, seed: int = 0) -> types.PyTree:
  """Returns random params without compiling the model's init."""
  rng = np.random.default_rng(seed)
  shapes = jax.eval_shape(model.init, jax.random.PRNGKey(0))
  config = getattr(model, "config", None)  # `BigramModel` has none.
  family = config and family_lib.FAMILIES[config.family]
  norm_scale = 1.0 - family.norm_offset if family else 1.0

  def fill(path, shape: jax.ShapeDtypeStruct) -> jax.Array:
    name = jax.tree_util.keystr(path)
    mean = norm_scale if "norm" in name else float("scalar" in name)
    values = rng.normal(mean, 0.2, shape.shape)
    return jnp.asarray(values, shape.dtype)

  return jax.tree_util.tree_map_with_path(fill, shapes)
