# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Token losses, by their names in the Tinker API.

Each loss is summed, not averaged, over the tokens of all sequences, so that it
does not depend on how a batch is split. Source: Tinker's documentation, "Loss
Functions"; ppo is eq. 7 of Schulman et al. 2017 (arXiv:1707.06347), cispo is
from MiniMax 2025 (arXiv:2506.13585).

Axes: B sequences, L tokens.
"""

from collections.abc import Callable, Mapping
import dataclasses

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class TokenLoss:
  """A loss of tokens.

  fn: function (logprobs_BxL, inputs, config) -> loss of each token, [B, L]
    float32.
  inputs: names of the arrays that it reads in addition to the targets;
    `logprobs` are the behavior policy's.
  optional: inputs that may be left out, with their defaults.
  """

  fn: Callable[
      [jax.Array, Mapping[str, jax.Array], Mapping[str, jax.Array]], jax.Array
  ]
  inputs: tuple[str, ...]
  optional: Mapping[str, float] = dataclasses.field(default_factory=dict)
  config: Mapping[str, float] = dataclasses.field(default_factory=dict)


def cross_entropy(
    logprobs_BxL: jax.Array,
    inputs: Mapping[str, jax.Array],
    config: Mapping[str, jax.Array],
) -> jax.Array:
  """Returns -w log π, [B, L]: weighted negative log-likelihood."""
  del config
  return -inputs["weights"] * logprobs_BxL


def importance_sampling(
    logprobs_BxL: jax.Array,
    inputs: Mapping[str, jax.Array],
    config: Mapping[str, jax.Array],
) -> jax.Array:
  """Returns -(π / q) A, [B, L], with q the policy that sampled."""
  del config
  return -jnp.exp(logprobs_BxL - inputs["logprobs"]) * inputs["advantages"]


def ppo(
    logprobs_BxL: jax.Array,
    inputs: Mapping[str, jax.Array],
    config: Mapping[str, jax.Array],
) -> jax.Array:
  """Returns -min(ρ A, clip(ρ, low, high) A), [B, L], with ρ = π / q."""
  ratio_BxL = jnp.exp(logprobs_BxL - inputs["logprobs"])
  clipped_BxL = _clip(ratio_BxL, config)
  advantages_BxL = inputs["advantages"]
  return -jnp.minimum(ratio_BxL * advantages_BxL, clipped_BxL * advantages_BxL)


def cispo(
    logprobs_BxL: jax.Array,
    inputs: Mapping[str, jax.Array],
    config: Mapping[str, jax.Array],
) -> jax.Array:
  """Returns -sg[clip(ρ, low, high)] A log π, [B, L], with ρ = π / q."""
  ratio_BxL = jnp.exp(logprobs_BxL - inputs["logprobs"])
  weight_BxL = jax.lax.stop_gradient(_clip(ratio_BxL, config))
  return -weight_BxL * inputs["advantages"] * logprobs_BxL


def _clip(ratio_BxL: jax.Array, config: Mapping[str, jax.Array]) -> jax.Array:
  return jnp.clip(
      ratio_BxL, config["clip_low_threshold"], config["clip_high_threshold"]
  )


_OF_POLICY = ("logprobs", "advantages")
_PPO = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}
# Without a lower bound, as published.
_CISPO = {"clip_low_threshold": 0.0, "clip_high_threshold": 4.0}

LOSSES = {
    "cross_entropy": TokenLoss(
        cross_entropy, ("weights",), optional={"weights": 1.0}
    ),
    "importance_sampling": TokenLoss(importance_sampling, _OF_POLICY),
    "ppo": TokenLoss(ppo, _OF_POLICY, config=_PPO),
    "cispo": TokenLoss(cispo, _OF_POLICY, config=_CISPO),
}
