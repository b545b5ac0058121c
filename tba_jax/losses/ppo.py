# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Proximal policy optimization: token rewards, GAE, policy and value loss.

Token t is an action in the state of the prompt and the tokens before it; V_t is
the value of that state. A completion ends after its last counted token, stop
token or not; V is 0 from there on.

Source: Schulman et al. 2017 (arXiv:1707.06347), with the constants of
Noukhovitch et al. 2024 (arXiv:2410.18252). Where we differ from that paper's
code: the reward is on the last token, not one position after it.
"""

from typing import Any

import chex
import jax
import jax.numpy as jnp

from tba_jax.losses import groups as groups_lib

_WHITEN_EPSILON = 1e-8


def token_rewards(
    rewards_BxK: jax.Array,
    log_ratio_BxKxT: jax.Array,
    mask_BxKxT: jax.Array,
    *,
    beta: jax.Array | float,
    rewards_BxKxT: jax.Array | None = None,
) -> jax.Array:
  """Returns [B, K, T], the reward of each token, without gradient.

      r_t = -β (log π - log π_ref)(y_t) + [t is the last token] r

  Turn rewards replace the last term.

  Args:
    rewards_BxK: [B, K] float32, r, task units.
    log_ratio_BxKxT: [B, K, T] float32, log π - log π_ref of each token in nats;
      π is the policy that sampled it.
    mask_BxKxT: [B, K, T] float32, 1 on counted tokens, which come first.
    beta: reward per nat; may be traced.
    rewards_BxKxT: [B, K, T] float32, result of `turn_rewards`; None puts r on
      the last token.
  """
  chex.assert_equal_shape([log_ratio_BxKxT, mask_BxKxT])
  if rewards_BxKxT is None:
    # 1 only on the last counted token.
    after_BxKxT = jnp.pad(mask_BxKxT[..., 1:], ((0, 0), (0, 0), (0, 1)))
    last_BxKxT = mask_BxKxT * (1 - after_BxKxT)
    rewards_BxKxT = last_BxKxT * rewards_BxK[:, :, None]
  kl_BxKxT = jnp.where(mask_BxKxT > 0, log_ratio_BxKxT, 0.0)
  return jax.lax.stop_gradient(rewards_BxKxT - beta * kl_BxKxT)


def turn_rewards(rewards_BxKxT: jax.Array, mask_BxKxT: jax.Array) -> jax.Array:
  """Returns [B, K, T], rewards of the counted tokens, which come first.

  The reward of an uncounted token, such as some stop tokens, moves to the last
  counted token before it, or else to the first counted token.

  Args:
    rewards_BxKxT: [B, K, T] float32, rewards anywhere in a completion.
    mask_BxKxT: [B, K, T] float32, 1 on counted tokens.
  """
  front, _ = groups_lib.counted_first(mask_BxKxT)
  mask_front_BxKxT = front(mask_BxKxT)
  total_BxKx1 = rewards_BxKxT.sum(axis=2, keepdims=True)
  before_BxKxT = front(jnp.cumsum(rewards_BxKxT, axis=2) - rewards_BxKxT)
  # After the last counted token, no reward is left.
  before_BxKxT = jnp.where(mask_front_BxKxT > 0, before_BxKxT, total_BxKx1)
  after_BxKxT = jnp.concatenate([before_BxKxT[..., 1:], total_BxKx1], axis=2)
  before_BxKxT = before_BxKxT.at[..., 0].set(0.0)
  return mask_front_BxKxT * (after_BxKxT - before_BxKxT)


def gae(
    token_rewards_BxKxT: jax.Array,
    values_BxKxT: jax.Array,
    mask_BxKxT: jax.Array,
    *,
    gamma: float,
    lam: float,
) -> tuple[jax.Array, jax.Array]:
  """Returns the generalized advantage estimate and the returns.

      δ_t = r_t + γ V_{t+1} - V_t
      A_t = δ_t + γ λ A_{t+1}
      R_t = A_t + V_t

  Source: Schulman et al. 2015 (arXiv:1506.02438), eq. 16.

  Args:
    token_rewards_BxKxT: [B, K, T] float32, r_t.
    values_BxKxT: [B, K, T] float32, V_t; ignored on uncounted tokens.
    mask_BxKxT: [B, K, T] float32, 1 on counted tokens, which come first.
    gamma: discount γ per token, from 0 to 1.
    lam: λ, from 0 (one step) to 1 (all later steps).

  Returns:
    A and R, [B, K, T] float32, without gradient, 0 on uncounted tokens.
  """
  chex.assert_rank(values_BxKxT, 3)
  chex.assert_equal_shape([token_rewards_BxKxT, values_BxKxT, mask_BxKxT])
  values_BxKxT = jnp.where(mask_BxKxT > 0, values_BxKxT, 0.0)
  next_BxKxT = jnp.pad(values_BxKxT[..., 1:], ((0, 0), (0, 0), (0, 1)))
  delta_BxKxT = mask_BxKxT * (
      token_rewards_BxKxT + gamma * next_BxKxT - values_BxKxT
  )

  def step(after_BxK, delta_BxK):
    advantage_BxK = delta_BxK + gamma * lam * after_BxK
    return advantage_BxK, advantage_BxK

  _, advantages_TxBxK = jax.lax.scan(
      step,
      jnp.zeros_like(delta_BxKxT[..., 0]),
      jnp.moveaxis(delta_BxKxT, -1, 0),
      reverse=True,
  )
  advantages_BxKxT = jnp.moveaxis(advantages_TxBxK, 0, -1)
  return jax.lax.stop_gradient(
      (advantages_BxKxT, advantages_BxKxT + values_BxKxT)
  )


def whiten(values: jax.Array, mask: jax.Array) -> jax.Array:
  """Returns the values with mean 0 and variance 1 over the mask, 0 outside.

  Args:
    values: [...] float32.
    mask: [...] float32, 1 on counted values; a single one is only centered.
  """
  count = jnp.maximum(mask.sum(), 1.0)
  mean = jnp.where(mask > 0, values, 0.0).sum() / count
  centered = jnp.where(mask > 0, values - mean, 0.0)
  # Unbiased, as in the paper's code.
  variance = jnp.square(centered).sum() / jnp.maximum(count - 1, 1.0)
  return centered * jax.lax.rsqrt(variance + _WHITEN_EPSILON)


def make_targets(
    values_BxKxT: jax.Array,
    log_ratio_BxKxT: jax.Array,
    mask_BxKxT: jax.Array,
    rewards_BxK: jax.Array,
    c: Any,
    beta: jax.Array,
    turn_rewards_BxKxT: jax.Array | None = None,
) -> groups_lib.Targets:
  """Returns the advantages and returns of a whole batch.

  Args:
    values_BxKxT: [B, K, T] float32, V_t.
    log_ratio_BxKxT, mask_BxKxT, rewards_BxK, beta: arguments of
      `token_rewards`.
    c: `config.loss`: gae_gamma, gae_lambda, whiten_advantages.
    turn_rewards_BxKxT: [B, K, T] float32, reward of each turn at its last
      token; None puts the whole reward on the last counted token.
  """
  front, back = groups_lib.counted_first(mask_BxKxT)
  if turn_rewards_BxKxT is not None:
    turn_rewards_BxKxT = turn_rewards(turn_rewards_BxKxT, mask_BxKxT)
  front_values_BxKxT, mask_BxKxT = front(values_BxKxT), front(mask_BxKxT)
  rewards_BxKxT = token_rewards(
      rewards_BxK,
      front(log_ratio_BxKxT),
      mask_BxKxT,
      beta=beta,
      rewards_BxKxT=turn_rewards_BxKxT,
  )
  advantages_BxKxT, returns_BxKxT = gae(
      rewards_BxKxT,
      front_values_BxKxT,
      mask_BxKxT,
      gamma=c.gae_gamma,
      lam=c.gae_lambda,
  )
  if c.whiten_advantages:
    advantages_BxKxT = whiten(advantages_BxKxT, mask_BxKxT)
  return jax.lax.stop_gradient(
      groups_lib.Targets(
          values_BxKxT, back(advantages_BxKxT), back(returns_BxKxT)
      )
  )


def value_loss(
    groups: groups_lib.Groups, clip: float
) -> tuple[jax.Array, jax.Array]:
  """Returns half the squared error of the values, clipped around the old ones.

      1/(BK) Σ_b Σₖ Σ_t m_t max((V - R)², (V_old + clip(V - V_old, ±c) - R)²)/2

  Args:
    groups: completions with values V, and targets R and V_old.
    clip: c; 0 = no clip.

  Returns:
    Loss, [] float32, and 1 where the clip bounds the error, [B, K, T] float32.
  """
  values_BxKxT, targets = groups.values_BxKxT, groups.targets
  error_BxKxT = jnp.square(values_BxKxT - targets.returns_BxKxT)
  clipped_BxKxT = jnp.zeros_like(error_BxKxT)
  if clip:
    near_BxKxT = targets.old_values_BxKxT + jnp.clip(
        values_BxKxT - targets.old_values_BxKxT, -clip, clip
    )
    near_error_BxKxT = jnp.square(near_BxKxT - targets.returns_BxKxT)
    clipped_BxKxT = (near_error_BxKxT > error_BxKxT).astype(error_BxKxT.dtype)
    error_BxKxT = jnp.maximum(error_BxKxT, near_error_BxKxT)
  loss_BxK = groups_lib.weighted_sums(error_BxKxT, groups.weights_BxKxT)
  return jnp.mean(loss_BxK) / 2, jax.lax.stop_gradient(clipped_BxKxT)


def ppo_loss(
    groups: groups_lib.Groups, c: Any, beta: jax.Array
) -> groups_lib.Loss:
  """Returns the policy's score-function loss plus the weighted value loss.

      L = -1/(BK) Σ_b Σₖ Σ_t m_t A_t log π(y_t|…) + c_V value_loss

  With the correction "clip_token", L has the gradient of PPO's clipped
  surrogate. β enters through the token rewards in the targets; c_V is
  `value_weight`.

  Returns:
    Loss, [] float32, and `value_clipped_BxKxT`.
  """
  del beta
  score_BxK = groups_lib.weighted_sums(
      groups.targets.advantages_BxKxT * groups.logprobs_BxKxT,
      groups.weights_BxKxT,
  )
  error, clipped_BxKxT = value_loss(groups, c.value_clip)
  loss = c.value_weight * error - jnp.mean(score_BxK)
  return loss, {"value_clipped_BxKxT": clipped_BxKxT}
