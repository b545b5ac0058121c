# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Trajectory balance under its other names: CoPG and GVPO.

With R_θ = r - β (log π - log π_ref), the reward that is left once its KL is
paid, both are a variance of R_θ within a group, as VarGrad trajectory balance
is: its residual is -(R_θ - R̄_θ)/β. They differ in a factor alone. In "unit"
scale both have K/(K-1) times the unit gradient of `tb.py`, that of RLOO.
"""

import chex
import jax
import jax.numpy as jnp

from tba_jax.losses import tb

_Loss = tuple[jax.Array, dict[str, jax.Array]]


def copg_loss(
    seq_logprobs_BxK: jax.Array,
    ref_seq_logprobs_BxK: jax.Array,
    rewards_BxK: jax.Array,
    *,
    beta: jax.Array | float,
    scale: str,
) -> _Loss:
  """Returns the contrastive policy gradient loss over all pairs of a group.

      loss = 1/B Σ_b 1/(K-1) Σ_{i>j} (R_θ(y_i) - R_θ(y_j))²

  Source: Flet-Berliac et al. 2024 (arXiv:2406.19185). With
  Σ_{i>j} (a_i - a_j)² = K Σ_i (a_i - ā)², its gradient is
  β² K²/(K-1) times that of the paper's trajectory balance, which is a mean over
  K. The "unit" scale, ours, is 1/(2βK) times that.

  Args:
    seq_logprobs_BxK: [B, K] float32, log π(y|x) of each completion, nats.
    ref_seq_logprobs_BxK: [B, K] float32, log π_ref(y|x), nats, no gradient.
    rewards_BxK: [B, K] float32, task units; a shift per prompt changes nothing.
    beta: KL coefficient in reward per nat, above 0; may be traced.
    scale: "unit" or "paper".

  Returns:
    Loss, [] float32 (reward² in the paper's scale).

  Raises:
    ValueError: `scale` is not known, or K is 1.
  """
  left_BxK = _left_reward(
      seq_logprobs_BxK, ref_seq_logprobs_BxK, rewards_BxK, beta, scale
  )
  K = left_BxK.shape[1]
  pairs_BxKxK = left_BxK[:, :, None] - left_BxK[:, None, :]
  # Each pair stands twice in the sum.
  loss = jnp.mean(jnp.square(pairs_BxKxK).sum(axis=(1, 2))) / (2 * (K - 1))
  return (loss / (2 * beta * K) if scale == "unit" else loss), {}


def gvpo_loss(
    seq_logprobs_BxK: jax.Array,
    ref_seq_logprobs_BxK: jax.Array,
    rewards_BxK: jax.Array,
    *,
    beta: jax.Array | float,
    scale: str,
) -> _Loss:
  """Returns the group variance policy optimization loss.

      loss = 1/B Σ_b 1/(2(K-1)) Σ_i (R_θ(y_i) - R̄_θ)²

  Source: Zhang et al. 2025 (arXiv:2504.19599), with the run's reference as the
  policy that the KL is to. Its gradient is β² K/(2(K-1)) times that of the
  paper's trajectory balance. The "unit" scale, ours, is 1/β times that.

  Args, returns and raises: as `copg_loss`.
  """
  left_BxK = _left_reward(
      seq_logprobs_BxK, ref_seq_logprobs_BxK, rewards_BxK, beta, scale
  )
  K = left_BxK.shape[1]
  centered_BxK = left_BxK - left_BxK.mean(axis=1, keepdims=True)
  loss = jnp.mean(jnp.square(centered_BxK).sum(axis=1)) / (2 * (K - 1))
  return (loss / beta if scale == "unit" else loss), {}


def _left_reward(
    seq_logprobs_BxK: jax.Array,
    ref_seq_logprobs_BxK: jax.Array,
    rewards_BxK: jax.Array,
    beta: jax.Array | float,
    scale: str,
) -> jax.Array:
  groups = [seq_logprobs_BxK, ref_seq_logprobs_BxK, rewards_BxK]
  chex.assert_rank(groups, 2)
  chex.assert_equal_shape(groups)
  if scale not in tb.SCALES:
    raise ValueError(f"loss.scale={scale!r}: allowed {tb.SCALES}")
  if rewards_BxK.shape[1] < 2:
    raise ValueError("train.completions_per_prompt=1: 2 or more for a variance")
  rho_BxK = seq_logprobs_BxK - jax.lax.stop_gradient(ref_seq_logprobs_BxK)
  return rewards_BxK - beta * rho_BxK
