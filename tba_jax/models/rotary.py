# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Rotary positions: Su et al. 2021 (arXiv:2104.09864).

Axes: Dh head width, E rotated entries of a head.
"""

import math
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np

if TYPE_CHECKING:
  from tba_jax.models import config as model_config_lib


def frequencies(config: "model_config_lib.ModelConfig") -> np.ndarray:
  """Returns [E / 2] float32, the angle per position of each pair.

  Frequency i is theta^(-2i / E) (eq. 15), then scaled as `config.rope_type`
  says. "llama3" is that of Llama 3.1 (Dubey et al. 2024, arXiv:2407.21783), as
  `transformers` computes it.
  """
  E = config.rotary_dim
  exponents = np.arange(0, E, 2, dtype=np.float32) / np.float32(E)
  plain = np.float32(1.0) / np.float32(config.rope_theta) ** exponents
  if config.rope_type == "default":
    return plain
  scaled = plain / np.float32(config.rope_factor)
  if config.rope_type == "linear":
    return scaled
  # How many turns a pair makes over the positions of the first training.
  turns = config.rope_original_positions * plain / (2 * math.pi)
  low, high = config.rope_low_freq_factor, config.rope_high_freq_factor
  share = np.clip((turns - low) / (high - low), 0.0, 1.0)
  return ((1.0 - share) * scaled + share * plain).astype(np.float32)


def tables(
    config: "model_config_lib.ModelConfig", positions: jax.Array
) -> tuple[jax.Array, jax.Array]:
  """Returns cosines and sines [..., E / 2] float32 of positions [...]."""
  axes = tuple(range(positions.ndim))
  frequencies_E2 = jnp.expand_dims(jnp.asarray(frequencies(config)), axes)
  angles = positions.astype(jnp.float32)[..., None] * frequencies_E2
  return jnp.cos(angles), jnp.sin(angles)
