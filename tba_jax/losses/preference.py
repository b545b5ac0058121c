# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Preferences: online DPO, IPO, SLiC and best-of-n; Bradley-Terry rewards.

Of the K completions of a prompt the best and the worst by reward are a pair
(the first of equals). A prompt whose rewards are all equal has no pair: it adds
nothing to the loss of pairs, whose mean stays over all prompts; the metric
`equal_reward_groups` counts it. With

    h = [log π(y⁺) - log π(y⁻)] - [log π_ref(y⁺) - log π_ref(y⁻)]

the three losses of pairs are one function of h each. The policy that sampled
plays no part in them.
"""

from collections.abc import Callable

import chex
import jax
import jax.numpy as jnp

_Loss = tuple[jax.Array, dict[str, jax.Array]]


def online_dpo_loss(
    seq_logprobs_BxK: jax.Array,
    ref_seq_logprobs_BxK: jax.Array,
    rewards_BxK: jax.Array,
    *,
    beta: jax.Array | float,
) -> _Loss:
  """Returns direct preference optimization on best against worst.

      loss = -1/B Σ_b log sigmoid(β h)

  Source: Rafailov et al. 2023 (arXiv:2305.18290), eq. 7; online, Guo et al.
  2024 (arXiv:2402.04792) and Noukhovitch et al. 2024 (arXiv:2410.18252).

  Args:
    seq_logprobs_BxK: [B, K] float32, log π(y|x) of each completion, nats.
    ref_seq_logprobs_BxK: [B, K] float32, log π_ref(y|x), nats, no gradient.
    rewards_BxK: [B, K] float32; only their order plays a part.
    beta: of the margin, above 0; may be traced.

  Returns:
    Loss, [] float32, and `margin_Bx1` (h, in nats) with `pair_Bx1`, 1 where the
    prompt has a pair.
  """
  return _pair_loss(
      lambda h: -jax.nn.log_sigmoid(beta * h),
      seq_logprobs_BxK,
      ref_seq_logprobs_BxK,
      rewards_BxK,
  )


def ipo_loss(
    seq_logprobs_BxK: jax.Array,
    ref_seq_logprobs_BxK: jax.Array,
    rewards_BxK: jax.Array,
    *,
    beta: jax.Array | float,
) -> _Loss:
  """Returns identity preference optimization on best against worst.

      loss = 1/B Σ_b (h - 1/(2β))²

  Source: Azar et al. 2023 (arXiv:2310.12036), eq. 17.

  Args and returns: as `online_dpo_loss`.
  """
  return _pair_loss(
      lambda h: jnp.square(h - 1 / (2 * beta)),
      seq_logprobs_BxK,
      ref_seq_logprobs_BxK,
      rewards_BxK,
  )


def slic_loss(
    seq_logprobs_BxK: jax.Array,
    ref_seq_logprobs_BxK: jax.Array,
    rewards_BxK: jax.Array,
    *,
    beta: jax.Array | float,
) -> _Loss:
  """Returns the hinge loss of sequence likelihood calibration.

      loss = 1/B Σ_b max(0, 1 - β h)

  Source: Zhao et al. 2023 (arXiv:2305.10425), its rank calibration, with the
  margin relative to the reference as in Liu et al. 2023 (arXiv:2309.06657).

  Args and returns: as `online_dpo_loss`.
  """
  return _pair_loss(
      lambda h: jax.nn.relu(1 - beta * h),
      seq_logprobs_BxK,
      ref_seq_logprobs_BxK,
      rewards_BxK,
  )


def best_of_n_loss(
    seq_logprobs_BxK: jax.Array, rewards_BxK: jax.Array
) -> _Loss:
  """Returns supervised learning on the best completion of each prompt.

      loss = -1/B Σ_b log π(y⁺|x_b)

  Source: Noukhovitch et al. 2024 (arXiv:2410.18252), best-of-2 fine-tuning. The
  first of equals is the best, of all-equal groups too. No KL.

  Args:
    seq_logprobs_BxK: [B, K] float32, log π(y|x) of each completion, nats.
    rewards_BxK: [B, K] float32; only their order plays a part.

  Returns:
    Loss, [] float32.
  """
  chex.assert_rank(seq_logprobs_BxK, 2)
  chex.assert_equal_shape([seq_logprobs_BxK, rewards_BxK])
  best_Bx1 = jnp.argmax(rewards_BxK, axis=1, keepdims=True)
  return -jnp.mean(_take(seq_logprobs_BxK, best_Bx1)), {}


def bradley_terry_loss(rewards_Bx2: jax.Array) -> jax.Array:
  """Returns the negative log-likelihood of preferences, for a reward model.

      loss = -1/B Σ_b log sigmoid(r(x_b, y⁺_b) - r(x_b, y⁻_b))

  Source: Bradley and Terry 1952; of reward models Stiennon et al. 2020
  (arXiv:2009.01325) §3.4. Unchanged by a constant added to all rewards.

  Args:
    rewards_Bx2: [B, 2] float32, of the chosen and of the rejected completion.

  Returns:
    Loss, [] float32, nats a pair.
  """
  chex.assert_shape(rewards_Bx2, (None, 2))
  margin_B = rewards_Bx2[:, 0] - rewards_Bx2[:, 1]
  return -jnp.mean(jax.nn.log_sigmoid(margin_B))


def _pair_loss(
    loss_of_margin: Callable[[jax.Array], jax.Array],
    seq_logprobs_BxK: jax.Array,
    ref_seq_logprobs_BxK: jax.Array,
    rewards_BxK: jax.Array,
) -> _Loss:
  groups = [seq_logprobs_BxK, ref_seq_logprobs_BxK, rewards_BxK]
  chex.assert_rank(groups, 2)
  chex.assert_equal_shape(groups)
  best_Bx1 = jnp.argmax(rewards_BxK, axis=1, keepdims=True)
  worst_Bx1 = jnp.argmin(rewards_BxK, axis=1, keepdims=True)
  rho_BxK = seq_logprobs_BxK - jax.lax.stop_gradient(ref_seq_logprobs_BxK)
  margin_Bx1 = _take(rho_BxK, best_Bx1) - _take(rho_BxK, worst_Bx1)
  pair_Bx1 = _take(rewards_BxK, best_Bx1) > _take(rewards_BxK, worst_Bx1)
  loss = jnp.mean(jnp.where(pair_Bx1, loss_of_margin(margin_Bx1), 0.0))
  return loss, jax.lax.stop_gradient(
      {"margin_Bx1": margin_Bx1, "pair_Bx1": pair_Bx1.astype(loss.dtype)}
  )


def _take(values_BxK: jax.Array, index_Bx1: jax.Array) -> jax.Array:
  """A compare and a sum: the gradient of a gather is a scatter."""
  k_1xK = jnp.arange(values_BxK.shape[1])[None, :]
  chosen_BxK = jnp.where(k_1xK == index_Bx1, values_BxK, 0.0)
  return chosen_BxK.sum(axis=1, keepdims=True)
