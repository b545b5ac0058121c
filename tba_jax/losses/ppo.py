# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Proximal policy optimization: rewards of tokens, GAE, both losses.

Token t is an action in the state of the prompt and the tokens before it; V_t is
that state's value. A completion ends with its last counted token, whether that
is a stop token or not: V is 0 behind it.

Source: Schulman et al. 2017 (arXiv:1707.06347), with the constants of
Noukhovitch et al. 2024 (arXiv:2410.18252). Where we differ from that paper's
code: the reward stands on the last token, not one position behind it.
"""

import chex
import jax
import jax.numpy as jnp

from tba_jax.losses import groups as groups_lib

_WHITEN_EPSILON = 1e-8

# Keys of `config.loss` that `make_targets` takes.
TARGET_SETTINGS = ("gae_gamma", "gae_lambda", "whiten_advantages")


def token_rewards(
    rewards_BxK: jax.Array,
    log_ratio_BxKxT: jax.Array,
    mask_BxKxT: jax.Array,
    *,
    beta: jax.Array | float,
) -> jax.Array:
  """Returns [B, K, T], the reward of each token, without gradient.

      r_t = -β (log π - log π_ref)(y_t) + [t is the last token] r

  Args:
    rewards_BxK: [B, K] float32, r, task units.
    log_ratio_BxKxT: [B, K, T] float32, log π - log π_ref of each token in nats;
      π is the policy that sampled it.
    mask_BxKxT: [B, K, T] float32, 1 on the tokens that count, which come first.
    beta: reward per nat; may be traced.
  """
  chex.assert_equal_shape([log_ratio_BxKxT, mask_BxKxT])
  # 1 on the last counted token alone.
  after_BxKxT = jnp.pad(mask_BxKxT[..., 1:], ((0, 0), (0, 0), (0, 1)))
  last_BxKxT = mask_BxKxT * (1 - after_BxKxT)
  kl_BxKxT = jnp.where(mask_BxKxT > 0, log_ratio_BxKxT, 0.0)
  return jax.lax.stop_gradient(
      last_BxKxT * rewards_BxK[:, :, None] - beta * kl_BxKxT
  )


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
    values_BxKxT: [B, K, T] float32, V_t; behind the mask they play no part.
    mask_BxKxT: [B, K, T] float32, 1 on the tokens that count, which come first.
    gamma: discount γ a token, from 0 to 1.
    lam: λ, from 0 (one step) to 1 (all that follows).

  Returns:
    A and R, [B, K, T] float32, without gradient, 0 behind the mask.
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
    mask: [...] float32, 1 on what counts. Of less than two only the mean goes.
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
    *,
    beta: jax.Array | float,
    gae_gamma: float,
    gae_lambda: float,
    whiten_advantages: bool,
) -> groups_lib.Targets:
  """Returns the advantages and returns of a whole batch.

  Args:
    values_BxKxT: [B, K, T] float32, V_t.
    log_ratio_BxKxT, mask_BxKxT, rewards_BxK, beta: as `token_rewards`.
    gae_gamma, gae_lambda: as `gae`.
    whiten_advantages: whether they have mean 0 and variance 1 over the batch.
  """
  rewards_BxKxT = token_rewards(
      rewards_BxK, log_ratio_BxKxT, mask_BxKxT, beta=beta
  )
  advantages_BxKxT, returns_BxKxT = gae(
      rewards_BxKxT, values_BxKxT, mask_BxKxT, gamma=gae_gamma, lam=gae_lambda
  )
  if whiten_advantages:
    advantages_BxKxT = whiten(advantages_BxKxT, mask_BxKxT)
  return jax.lax.stop_gradient(
      groups_lib.Targets(values_BxKxT, advantages_BxKxT, returns_BxKxT)
  )


def value_loss(
    values_BxKxT: jax.Array,
    old_values_BxKxT: jax.Array,
    returns_BxKxT: jax.Array,
    weights_BxKxT: jax.Array,
    *,
    clip: float,
) -> tuple[jax.Array, jax.Array]:
  """Returns half the squared error of the values, clipped around the old ones.

      1/(BK) Σ_b Σₖ Σ_t m_t max((V - R)², (V_old + clip(V - V_old, ±c) - R)²)/2

  Args:
    values_BxKxT: [B, K, T] float32, V; the gradient flows through it.
    old_values_BxKxT: [B, K, T] float32, V_old, of which R was made.
    returns_BxKxT: [B, K, T] float32, R.
    weights_BxKxT: [B, K, T] float32, m_t, 0 on tokens that do not count.
    clip: c, above 0; 0 is no clip.

  Returns:
    Loss, [] float32, and 1 where the clip holds the value, [B, K, T] float32.
  """
  chex.assert_equal_shape(
      [values_BxKxT, old_values_BxKxT, returns_BxKxT, weights_BxKxT]
  )
  error_BxKxT = jnp.square(values_BxKxT - returns_BxKxT)
  held_BxKxT = jnp.zeros_like(error_BxKxT)
  if clip:
    near_BxKxT = old_values_BxKxT + jnp.clip(
        values_BxKxT - old_values_BxKxT, -clip, clip
    )
    near_error_BxKxT = jnp.square(near_BxKxT - returns_BxKxT)
    held_BxKxT = (near_error_BxKxT > error_BxKxT).astype(error_BxKxT.dtype)
    error_BxKxT = jnp.maximum(error_BxKxT, near_error_BxKxT)
  loss_BxK = groups_lib.weighted_sums(error_BxKxT, weights_BxKxT)
  return jnp.mean(loss_BxK) / 2, held_BxKxT


def ppo_loss(
    groups: groups_lib.Groups, *, value_clip: float, value_weight: float
) -> tuple[jax.Array, dict[str, jax.Array]]:
  """Returns the policy's score-function loss plus the weighted value loss.

      L = -1/(BK) Σ_b Σₖ Σ_t m_t A_t log π(y_t|…) + c_V value_loss

  The ratio and its trust region are a matter of `corrections.py`: with
  "clip_token" the gradient is that of PPO's clipped surrogate.

  Args:
    groups: with `values_BxKxT` and `targets`.
    value_clip: of `value_loss`.
    value_weight: c_V.

  Returns:
    Loss, [] float32, and `value_held_BxKxT`.
  """
  targets = groups.targets
  score_BxK = groups_lib.weighted_sums(
      targets.advantages_BxKxT * groups.logprobs_BxKxT, groups.weights_BxKxT
  )
  error, held_BxKxT = value_loss(
      groups.values_BxKxT,
      targets.old_values_BxKxT,
      targets.returns_BxKxT,
      groups.weights_BxKxT,
      clip=value_clip,
  )
  return value_weight * error - jnp.mean(score_BxK), {
      "value_held_BxKxT": jax.lax.stop_gradient(held_BxKxT)
  }
