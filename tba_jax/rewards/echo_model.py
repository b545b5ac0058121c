# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""A tiny model that repeats words of its prompt: the synthetic victim."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from tba_jax import types
from tba_jax.models import config as config_lib

_SHARPNESS = 2.0
# Weight of the attention average relative to the last token.
_SEEN = 8.0


def echo_config(
    vocab_size: int, *, pad_id: int, eos_id: int, max_positions: int
) -> config_lib.ModelConfig:
  """Returns the shape of a victim that repeats words of its prompt.

  One Llama block with fixed weights: one-hot embeddings, uniform attention that
  averages the context, a zero MLP, and a head that reads the average. A token's
  logit is `_SHARPNESS` √V times its share of the context over the norm of all
  shares; special tokens have logit 0.
  """
  width = vocab_size + vocab_size % 2
  return config_lib.ModelConfig(
      family="llama",
      vocab_size=vocab_size,
      num_layers=1,
      width=width,
      num_heads=1,
      num_kv_heads=1,
      head_dim=width,
      mlp_width=1,
      norm_epsilon=1e-6,
      tie_embeddings=False,
      max_positions=max_positions,
      param_dtype="float32",
      compute_dtype="float32",
      pad_id=pad_id,
      bos_id=None,
      eos_id=eos_id,
  )


def echo_params(params: types.PyTree, silent: Sequence[int]) -> types.PyTree:
  """Returns params of the echo model, shaped as `params`.

  Args:
    params: any values of an `echo_config` model.
    silent: ids of the special tokens, which are never preferred.
  """
  out = jax.tree.map(jnp.zeros_like, params)
  vocab_size, width = params["embed"]["embedding"].shape
  one_hot = jnp.eye(vocab_size, width)
  out["embed"]["embedding"] = one_hot
  for norm in ("attention_norm", "mlp_norm"):
    out["blocks"][norm]["scale"] = jnp.ones_like(
        params["blocks"][norm]["scale"]
    )
  out["final_norm"]["scale"] = jnp.ones((width,))
  attention = out["blocks"]["attention"]
  attention["v"]["kernel"] = jnp.eye(width)[None, None]
  attention["o"]["kernel"] = _SEEN * jnp.eye(width)[None, :, None]
  heard = jnp.ones((vocab_size, 1)).at[jnp.array(list(silent))].set(0.0)
  out["head"]["kernel"] = _SHARPNESS * heard * one_hot
  return out
