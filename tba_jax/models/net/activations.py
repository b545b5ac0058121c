# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Nonlinearities of MLPs."""

from collections.abc import Callable, Mapping
import functools

import jax
import jax.numpy as jnp

from tba_jax.models import config as config_lib
from tba_jax.models.families import family as family_lib

# `config.activation` -> function.
ACTIVATIONS: Mapping[str, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "gelu": functools.partial(jax.nn.gelu, approximate=False),
    "gelu_new": functools.partial(jax.nn.gelu, approximate=True),
    "relu": jax.nn.relu,
}


def gated(
    config: config_lib.ModelConfig,
) -> Callable[[jax.Array, jax.Array], jax.Array]:
  """Returns (gate, up) -> hidden units of an expert.

  They are activation(gate) * up; of gpt-oss, with its alpha and limit,

      min(gate, limit) · σ(alpha · min(gate, limit)) · (clip(up, ±limit) + 1)

  Source: OpenAI 2025 (arXiv:2508.10925, §2.1), as computed by Hugging Face's
  `GptOssExperts`.
  """
  if not family_lib.FAMILIES[config.family].clamps_experts:
    activation = ACTIVATIONS[config.activation]
    return lambda gate, up: activation(gate) * up
  alpha, limit = config.swiglu_alpha, config.swiglu_limit

  def clamped(gate: jax.Array, up: jax.Array) -> jax.Array:
    gate, up = jnp.minimum(gate, limit), jnp.clip(up, -limit, limit)
    return gate * jax.nn.sigmoid(alpha * gate) * (up + 1)

  return clamped
