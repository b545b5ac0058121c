# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Policy gradients on groups: REINFORCE, RLOO, GRPO, Dr. GRPO, TBA'.

All are score-function losses, L = -1/(BK) Σ_b Σₖ sg[A] log π(yₖ|x_b), and
differ in the advantage A (`ADVANTAGES`). log π(y|x) is Σ_t m_t log π(y_t|…),
where m_t is the mask, or the mask divided by a length. The ratio to the
behavior policy and its clip are in `corrections.py`.
"""

from collections.abc import Callable, Mapping
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tba_jax.losses import groups as groups_lib

# Added to a group's standard deviation, which is 0 for equal rewards.
_STD_EPSILON = 1e-4
# Nats; bounds a token's log-ratio in the KL of TBA', as in its code.
_MAX_TOKEN_KL = 10.0
# Nats; bounds a token's log-ratio in the k3 estimate.
_MAX_LOG_RATIO = 20.0

_Loss = groups_lib.Loss


def std_advantages(rewards_BxK: jax.Array, c: Any) -> jax.Array:
  """Returns (r - r̄) / (std r + 1e-4), with the population's deviation.

  Source: Shao et al. 2024 (arXiv:2402.03300), GRPO.
  """
  del c
  std_Bx1 = jnp.std(rewards_BxK, axis=1, keepdims=True)
  return _mean_baseline(rewards_BxK) / (std_Bx1 + _STD_EPSILON)


def maxrl_advantages(rewards_BxK: jax.Array, c: Any) -> jax.Array:
  """Returns (r - r̄) / r̄, and 0 where r̄ is not above 0.

  For rewards of 0 and 1, the gradient is unbiased for -Σ_{k<K} (1 - p)^k/k, a
  truncated series of the log of the success rate p. Source: Tajwar et al. 2026
  (arXiv:2602.02710), MaxRL.
  """
  del c
  mean_Bx1 = rewards_BxK.mean(axis=1, keepdims=True)
  advantages_BxK = _mean_baseline(rewards_BxK) / jnp.maximum(mean_Bx1, 1e-6)
  return jnp.where(mean_Bx1 > 0, advantages_BxK, 0.0)


def pass_at_k_advantages(rewards_BxK: jax.Array, c: Any) -> jax.Array:
  """Returns the advantages if k completions share their largest reward.

      A_i = (mean of max r over the subsets with i - mean over all) / (σ + 1e-4)

  over subsets of k of the K completions; σ is the standard deviation of max r
  over all. Source: Chen et al. 2025 (arXiv:2508.10751), §2.4, where rewards are
  0 or 1; the maximum extends it to other rewards.

  Args:
    rewards_BxK: [B, K] float32.
    c: `config.loss`: `pass_k` is k, below K.
  """
  K, k = rewards_BxK.shape[1], c.pass_k
  # From the smallest reward to the largest: the share of subsets in which the
  # reward at each rank is the largest, of all and of those with completion i.
  if k >= K:
    raise ValueError(
        f"config.loss.pass_k = {k}: must be below {K}, the number of a prompt's"
        " completions"
    )
  all_sets, sets_with_i = math.comb(K, k), math.comb(K - 1, k - 1)
  of_all_K = np.array(
      [math.comb(j, k - 1) / all_sets for j in range(K)], np.float32
  )
  with_i_KxK = np.zeros((K, K), np.float32)
  for i in range(K):
    with_i_KxK[i, i] = math.comb(i, k - 1) / sets_with_i
    for j in range(i + 1, K):
      count = math.comb(j - 1, k - 2) if k > 1 else 0
      with_i_KxK[i, j] = count / sets_with_i
  order_BxK = jnp.argsort(rewards_BxK, axis=1)
  sorted_BxK = jnp.take_along_axis(rewards_BxK, order_BxK, axis=1)
  mean_Bx1 = (sorted_BxK * of_all_K[None]).sum(axis=1, keepdims=True)
  deviation_BxK = sorted_BxK - mean_Bx1
  variance_Bx1 = (jnp.square(deviation_BxK) * of_all_K[None]).sum(
      axis=1, keepdims=True
  )
  # Sums of deviations, as the shares of each row sum to 1; not a product of
  # matrices, which accelerators round.
  gains_BxK = (deviation_BxK[:, None] * with_i_KxK[None]).sum(axis=2)
  places_BxK = jnp.argsort(order_BxK, axis=1)
  gains_BxK = jnp.take_along_axis(gains_BxK, places_BxK, axis=1)
  return gains_BxK / (jnp.sqrt(variance_Bx1) + _STD_EPSILON)


def _mean_baseline(returns_BxK: jax.Array) -> jax.Array:
  return returns_BxK - returns_BxK.mean(axis=1, keepdims=True)


# `loss.advantage` -> function of (rewards_BxK, `config.loss`).
ADVANTAGES: Mapping[str, Callable[[jax.Array, Any], jax.Array]] = {
    "mean": lambda rewards_BxK, c: _mean_baseline(rewards_BxK),
    "std": std_advantages,
    "maxrl": maxrl_advantages,
    "pass_at_k": pass_at_k_advantages,
}


def reinforce_loss(groups: groups_lib.Groups, c: Any, beta: jax.Array) -> _Loss:
  """Returns the score-function loss with the group's mean as baseline.

      A = R - R̄,   R = r - β (log π_behavior - log π_ref)

  Source: Williams 1992. On-policy this is the gradient of trajectory balance
  (Bartoldson et al. 2025, arXiv:2503.18929, appendix A).
  """
  del c
  returns_BxK = groups.rewards_BxK - beta * groups.behavior_kl_BxK
  return _score_loss(groups, _mean_baseline(returns_BxK))


def rloo_loss(groups: groups_lib.Groups, c: Any, beta: jax.Array) -> _Loss:
  """Returns the score-function loss with the leave-one-out baseline.

      A_i = R_i - 1/(K-1) Σ_{j≠i} R_j = K/(K-1) (R_i - R̄)

  with R of `reinforce_loss`. Source: Kool et al. 2019 (Buy 4 REINFORCE samples,
  get a baseline for free); Ahmadian et al. 2024 (arXiv:2402.14740). With the
  clipped ratio of whole completions it is the proximal RLOO of Noukhovitch et
  al. 2024 (arXiv:2410.18252).
  """
  del c
  returns_BxK = groups.rewards_BxK - beta * groups.behavior_kl_BxK
  K = returns_BxK.shape[1]
  return _score_loss(groups, K / (K - 1) * _mean_baseline(returns_BxK))


def grpo_loss(groups: groups_lib.Groups, c: Any, beta: jax.Array) -> _Loss:
  """Returns group relative policy optimization, with the KL in the loss.

      L = 1/(BK) Σ_b Σₖ Σ_t m_t [-A log π(y_t|…) + β k3_t]
      k3_t = exp(δ) - δ - 1,  δ = log π_ref(y_t|…) - log π(y_t|…)

  with m_t = 1/|y| and A of `std_advantages`, or of `loss.advantage`. The KL is
  outside the ratio and its clip. Source: Shao et al. 2024 (arXiv:2402.03300),
  eq. 3.
  """
  advantages = ADVANTAGES[c.advantage or "std"]
  loss, aux = _score_loss(groups, advantages(groups.rewards_BxK, c))
  return loss + beta * _mean_k3(groups), aux


def dr_grpo_loss(groups: groups_lib.Groups, c: Any, beta: jax.Array) -> _Loss:
  """Returns GRPO without its difficulty and length biases.

  A = r - r̄, or of `loss.advantage`, and m_t = 1/T. Source: Liu et al. 2025
  (arXiv:2503.20783).
  """
  advantages = ADVANTAGES[c.advantage or "mean"]
  loss, aux = _score_loss(groups, advantages(groups.rewards_BxK, c))
  return loss + beta * _mean_k3(groups), aux


def tba_prime_loss(groups: groups_lib.Groups, c: Any, beta: jax.Array) -> _Loss:
  """Returns the score-function form of trajectory balance (TBA').

      kl = Σ_t mask_t clip(log π(y_t|…) - log π_ref(y_t|…), -10, 10)
      A = (r - r̄) - β (kl - mean kl)

  Source: Bartoldson et al. 2025 (arXiv:2503.18929), eq. 7 and section 4, and
  its code (tba-prime). kl uses the current policy. If no token's log-ratio is
  clipped, m_t is the mask and no completion is masked, the gradient equals
  `tb.tb_loss`'s.
  """
  del c
  log_ratio_BxKxT = jnp.clip(
      groups.logprobs_BxKxT - groups.ref_logprobs_BxKxT,
      -_MAX_TOKEN_KL,
      _MAX_TOKEN_KL,
  )
  kl_BxK = groups_lib.weighted_sums(log_ratio_BxKxT, groups.mask_BxKxT)
  return _score_loss(groups, _mean_baseline(groups.rewards_BxK - beta * kl_BxK))


def _score_loss(groups: groups_lib.Groups, advantages_BxK: jax.Array) -> _Loss:
  advantages_BxK = jax.lax.stop_gradient(advantages_BxK)
  loss = -jnp.mean(advantages_BxK * groups.seq_BxK)
  return loss, {"advantages_BxK": advantages_BxK}


def _mean_k3(groups: groups_lib.Groups) -> jax.Array:
  """Returns [], the mean over completions of Σ_t m_t k3_t.

  k3 is an unbiased estimate of KL(π || π_ref) that is never negative. Source:
  J. Schulman, http://joschu.net/blog/kl-approx.html (2020).
  """
  log_ratio_BxKxT = jnp.where(
      groups.weights_BxKxT > 0,
      groups.kl_logprobs_BxKxT
      - jax.lax.stop_gradient(groups.ref_logprobs_BxKxT),
      0.0,
  )
  # Bounded, so that exp and its gradient stay finite.
  delta_BxKxT = -jnp.maximum(log_ratio_BxKxT, -_MAX_LOG_RATIO)
  k3_BxKxT = jnp.expm1(delta_BxKxT) - delta_BxKxT
  return jnp.mean((groups.weights_BxKxT * k3_BxKxT).sum(axis=2))
