# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Rounds of Asynchronous RLHF: their steps, and the params that a lag needs.

Source: Noukhovitch et al. 2025 (arXiv:2410.18252), in the order of Cleanba
(arXiv:2310.00036): round r (from 1) trains on what θ of round r-2 sampled.
"""

import jax
import jax.numpy as jnp
import ml_collections

from tba_jax import types


def num_steps(config: ml_collections.ConfigDict) -> int:
  """Returns the optimizer steps of a round, N T; 1 without rounds."""
  return max(config.rounds.mini_batches, 1) * config.rounds.passes


def keep_params(config: ml_collections.ConfigDict) -> bool:
  """True where a restart may need params that are a round old."""
  return config.rounds.mini_batches > 0 and config.rounds.lag_rounds > 0


def hold(
    config: ml_collections.ConfigDict,
    held: types.PyTree,
    params: types.PyTree,
    step: jax.Array,
) -> types.PyTree:
  """Returns the params that began the last begun round.

  Args:
    config: reads `rounds`.
    held: those of the step before; {} where none are kept.
    params: before the step.
    step: [] int32, about to be made.
  """
  if not keep_params(config):
    return held
  return jax.lax.cond(
      step % num_steps(config) == 0,
      lambda: jax.tree.map(jnp.copy, params),
      lambda: held,
  )
