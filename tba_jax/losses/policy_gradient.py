# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Policy gradients on groups: REINFORCE, RLOO, GRPO, Dr. GRPO, TBA'.

All are score-function losses, L = -1/(BK) Σ_b Σₖ sg[A] log π(yₖ|x_b), and
differ in the advantage A. Their value says little; their gradient is what
matters. A ratio to the policy that sampled, with or without a trust region, is
a matter of `corrections.py`: PPO's clipped surrogate is such a loss times it.

Where a loss takes `seq_logprobs_BxK`, it is Σ_t m_t log π(y_t|…), with weights
m_t that are the mask, or the mask over a length.
"""

import chex
import jax
import jax.numpy as jnp

from tba_jax.losses import groups
from tba_jax.losses import logprobs

# Added to a group's standard deviation: that of equal rewards is 0.
_STD_EPSILON = 1e-4
# Nats, of one token's log-ratio in the KL of TBA'.
_MAX_TOKEN_KL = 10.0
# Nats; bounds exp in the k3 estimate, and with it its gradient.
_MAX_LOG_RATIO = 20.0

_Loss = tuple[jax.Array, dict[str, jax.Array]]


def mean_baseline(returns_BxK: jax.Array) -> jax.Array:
  """Returns [B, K], each return minus the mean of its group."""
  chex.assert_rank(returns_BxK, 2)
  return returns_BxK - returns_BxK.mean(axis=1, keepdims=True)


def leave_one_out(returns_BxK: jax.Array) -> jax.Array:
  """Returns [B, K], each return minus the mean of the others of its group.

      A_i = R_i - 1/(K-1) Σ_{j≠i} R_j = K/(K-1) (R_i - R̄)

  Raises:
    ValueError: K is 1, which leaves nobody.
  """
  K = returns_BxK.shape[1]
  if K < 2:
    raise ValueError("train.completions_per_prompt=1: 2 or more to leave one")
  return K / (K - 1) * mean_baseline(returns_BxK)


def kl_in_reward(
    rewards_BxK: jax.Array, log_ratio_BxK: jax.Array, *, beta: jax.Array | float
) -> jax.Array:
  """Returns [B, K], R = r - β (log π - log π_ref), without gradient.

  Args:
    rewards_BxK: [B, K] float32, task units.
    log_ratio_BxK: [B, K] float32, log π - log π_ref of each completion in nats;
      with π the policy that sampled it, R does not change as π is trained.
    beta: reward per nat; may be traced.
  """
  chex.assert_rank([rewards_BxK, log_ratio_BxK], 2)
  return jax.lax.stop_gradient(rewards_BxK - beta * log_ratio_BxK)


def reinforce_loss(
    seq_logprobs_BxK: jax.Array, returns_BxK: jax.Array
) -> _Loss:
  """Returns the score-function loss with the group's mean as baseline.

      L = -1/(BK) Σ_b Σₖ (R - R̄) log π(yₖ|x_b)

  Source: Williams 1992. With R of `kl_in_reward` on-policy this is the
  gradient of trajectory balance (Bartoldson et al. 2025, arXiv:2503.18929,
  appendix A).

  Args:
    seq_logprobs_BxK: [B, K] float32, log π(y|x), nats.
    returns_BxK: [B, K] float32, no gradient flows through it.

  Returns:
    Loss, [] float32, and `advantages_BxK`.
  """
  return _score_loss(seq_logprobs_BxK, mean_baseline(returns_BxK))


def rloo_loss(seq_logprobs_BxK: jax.Array, returns_BxK: jax.Array) -> _Loss:
  """Returns the score-function loss with the leave-one-out baseline.

      L = -1/(BK) Σ_b Σₖ A log π(yₖ|x_b),   A of `leave_one_out`

  Source: Kool et al. 2019 (Buy 4 REINFORCE samples, get a baseline for free);
  Ahmadian et al. 2024 (arXiv:2402.14740). With the clipped ratio of whole
  completions it is the proximal RLOO of Noukhovitch et al. 2024
  (arXiv:2410.18252).

  Args and returns: as `reinforce_loss`.

  Raises:
    ValueError: K is 1.
  """
  return _score_loss(seq_logprobs_BxK, leave_one_out(returns_BxK))


def grpo_loss(
    logprobs_BxKxT: jax.Array,
    ref_logprobs_BxKxT: jax.Array,
    weights_BxKxT: jax.Array,
    rewards_BxK: jax.Array,
    *,
    beta: jax.Array | float,
    divide_by_std: bool,
) -> _Loss:
  """Returns group relative policy optimization, with the KL in the loss.

      A = (r - r̄) / (std r + 1e-4)        or r - r̄ without `divide_by_std`
      L = 1/(BK) Σ_b Σₖ Σ_t m_t [-A log π(y_t|…) + β k3_t]
      k3_t = exp(δ) - δ - 1,  δ = log π_ref(y_t|…) - log π(y_t|…)

  Source: Shao et al. 2024 (arXiv:2402.03300), eq. 3, with m_t = 1/|y|; without
  the standard deviation and with a constant m_t, Dr. GRPO, Liu et al. 2025
  (arXiv:2503.20783). The standard deviation is of the K rewards (divided by K).

  Args:
    logprobs_BxKxT: [B, K, T] float32, log π of each token, nats.
    ref_logprobs_BxKxT: [B, K, T] float32, log π_ref, nats, no gradient.
    weights_BxKxT: [B, K, T] float32, m_t, 0 on tokens that do not count.
    rewards_BxK: [B, K] float32, task units.
    beta: of the KL; may be traced.
    divide_by_std: whether a group's advantages are divided by its spread.

  Returns:
    Loss, [] float32, and `advantages_BxK`.
  """
  chex.assert_rank([logprobs_BxKxT, rewards_BxK], [3, 2])
  chex.assert_equal_shape([logprobs_BxKxT, ref_logprobs_BxKxT, weights_BxKxT])
  advantages_BxK = mean_baseline(rewards_BxK)
  if divide_by_std:
    std_Bx1 = jnp.std(rewards_BxK, axis=1, keepdims=True)
    advantages_BxK = advantages_BxK / (std_Bx1 + _STD_EPSILON)
  log_ratio_BxKxT = jnp.where(
      weights_BxKxT > 0,
      logprobs_BxKxT - jax.lax.stop_gradient(ref_logprobs_BxKxT),
      0.0,
  )
  k3_BxKxT = logprobs.kl_estimators(
      jnp.maximum(log_ratio_BxKxT, -_MAX_LOG_RATIO),
      jnp.zeros_like(log_ratio_BxKxT),
  )["k3"]
  seq_BxK = groups.weighted_sums(logprobs_BxKxT, weights_BxKxT)
  loss, aux = _score_loss(seq_BxK, advantages_BxK)
  return loss + beta * jnp.mean((weights_BxKxT * k3_BxKxT).sum(axis=2)), aux


def tba_prime_loss(
    logprobs_BxKxT: jax.Array,
    ref_logprobs_BxKxT: jax.Array,
    mask_BxKxT: jax.Array,
    weights_BxKxT: jax.Array,
    rewards_BxK: jax.Array,
    *,
    beta: jax.Array | float,
) -> _Loss:
  """Returns the score-function form of trajectory balance (TBA').

      kl = Σ_t mask_t clip(log π(y_t|…) - log π_ref(y_t|…), -10, 10)
      A = (r - r̄) - β (kl - mean kl)
      L = -1/(BK) Σ_b Σₖ Σ_t m_t A log π(y_t|…)

  Source: Bartoldson et al. 2025 (arXiv:2503.18929), eq. 7 and section 4, and
  its code (tba-prime). kl is of the present policy in both places. Where no
  token's log-ratio is clipped and m_t is the mask, the gradient is that of
  VarGrad trajectory balance in unit scale.

  Args:
    logprobs_BxKxT: [B, K, T] float32, log π of each token, nats.
    ref_logprobs_BxKxT: [B, K, T] float32, log π_ref, nats, no gradient.
    mask_BxKxT: [B, K, T] float32, 1 on the tokens that count.
    weights_BxKxT: [B, K, T] float32, m_t; the published code's is 1/length.
    rewards_BxK: [B, K] float32, task units.
    beta: KL coefficient in reward per nat; may be traced.

  Returns:
    Loss, [] float32, and `advantages_BxK`.
  """
  chex.assert_rank([logprobs_BxKxT, rewards_BxK], [3, 2])
  chex.assert_equal_shape(
      [logprobs_BxKxT, ref_logprobs_BxKxT, mask_BxKxT, weights_BxKxT]
  )
  log_ratio_BxKxT = jnp.clip(
      jax.lax.stop_gradient(logprobs_BxKxT - ref_logprobs_BxKxT),
      -_MAX_TOKEN_KL,
      _MAX_TOKEN_KL,
  )
  kl_BxK = logprobs.sequence_logprobs(log_ratio_BxKxT, mask_BxKxT)
  returns_BxK = kl_in_reward(rewards_BxK, kl_BxK, beta=beta)
  seq_BxK = groups.weighted_sums(logprobs_BxKxT, weights_BxKxT)
  return reinforce_loss(seq_BxK, returns_BxK)


def _score_loss(
    seq_logprobs_BxK: jax.Array, advantages_BxK: jax.Array
) -> _Loss:
  chex.assert_rank(seq_logprobs_BxK, 2)
  chex.assert_equal_shape([seq_logprobs_BxK, advantages_BxK])
  advantages_BxK = jax.lax.stop_gradient(advantages_BxK)
  loss = -jnp.mean(advantages_BxK * seq_logprobs_BxK)
  return loss, {"advantages_BxK": advantages_BxK}
