# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Preferences: online DPO, IPO, SLiC and best-of-n; Bradley-Terry rewards.

By reward, the best and worst of a prompt's K completions form a pair, with

    h = [log π(y⁺) - log π(y⁻)] - [log π_ref(y⁺) - log π_ref(y⁻)]

and each pairwise loss is a function of h. If all K rewards are equal,
`config.loss.ties` = "skip" sets the prompt's loss to 0, still averaging over
all prompts; "first" prefers the first completion to the last, as in the code of
Noukhovitch et al. 2024 (arXiv:2410.18252).
"""

from collections.abc import Callable
from typing import Any

import chex
import jax
import jax.numpy as jnp

from tba_jax.losses import groups as groups_lib

_Loss = groups_lib.Loss


def online_dpo_loss(
    groups: groups_lib.Groups, c: Any, beta: jax.Array
) -> _Loss:
  """Returns direct preference optimization on best against worst.

      loss = -1/B Σ_b log sigmoid(β h)

  Source: Rafailov et al. 2023 (arXiv:2305.18290), eq. 7; online, Guo et al.
  2024 (arXiv:2402.04792) and Noukhovitch et al. 2024 (arXiv:2410.18252).

  Returns:
    Loss, [] float32, and `margin_Bx1` (h, in nats) with `pair_Bx1`, 1 where the
    prompt has a pair.
  """
  return _pair_loss(groups, c, lambda h: -jax.nn.log_sigmoid(beta * h))


def ipo_loss(groups: groups_lib.Groups, c: Any, beta: jax.Array) -> _Loss:
  """Returns identity preference optimization on best against worst.

      loss = 1/B Σ_b (h - 1/(2β))²

  Source: Azar et al. 2023 (arXiv:2310.12036), eq. 17.
  """
  return _pair_loss(groups, c, lambda h: jnp.square(h - 1 / (2 * beta)))


def slic_loss(groups: groups_lib.Groups, c: Any, beta: jax.Array) -> _Loss:
  """Returns the hinge loss of sequence likelihood calibration.

      loss = 1/B Σ_b max(0, 1 - β h)

  Source: Zhao et al. 2023 (arXiv:2305.10425), its rank calibration, with the
  margin relative to the reference as in Liu et al. 2023 (arXiv:2309.06657).
  """
  return _pair_loss(groups, c, lambda h: jax.nn.relu(1 - beta * h))


def best_of_n_loss(groups: groups_lib.Groups, c: Any, beta: jax.Array) -> _Loss:
  """Returns supervised learning on the best completion of each prompt.

      loss = -1/B Σ_b log π(y⁺|x_b)

  Ties go to the first completion; there is no KL. Source: Noukhovitch et al.
  2024 (arXiv:2410.18252), best-of-2 fine-tuning.
  """
  del c, beta
  best_Bx1 = jnp.argmax(groups.rewards_BxK, axis=1, keepdims=True)
  return -jnp.mean(_take(groups.seq_BxK, best_Bx1)), {}


def bradley_terry_loss(rewards_Bx2: jax.Array) -> jax.Array:
  """Returns the negative log-likelihood of preferences, for a reward model.

      loss = -1/B Σ_b log sigmoid(r(x_b, y⁺_b) - r(x_b, y⁻_b))

  Source: Bradley and Terry 1952; for reward models, Stiennon et al. 2020
  (arXiv:2009.01325) §3.4. Unchanged by a constant added to all rewards.

  Args:
    rewards_Bx2: [B, 2] float32, rewards of the chosen and the rejected
      completion.
  """
  chex.assert_shape(rewards_Bx2, (None, 2))
  margin_B = rewards_Bx2[:, 0] - rewards_Bx2[:, 1]
  return -jnp.mean(jax.nn.log_sigmoid(margin_B))


def _pair_loss(
    groups: groups_lib.Groups,
    c: Any,
    loss_of_margin: Callable[[jax.Array], jax.Array],
) -> _Loss:
  rewards_BxK = groups.rewards_BxK
  best_Bx1 = jnp.argmax(rewards_BxK, axis=1, keepdims=True)
  worst_Bx1 = jnp.argmin(rewards_BxK, axis=1, keepdims=True)
  pair_Bx1 = _take(rewards_BxK, best_Bx1) > _take(rewards_BxK, worst_Bx1)
  if c.ties == "first":
    worst_Bx1 = jnp.where(pair_Bx1, worst_Bx1, rewards_BxK.shape[1] - 1)
    pair_Bx1 = jnp.ones_like(pair_Bx1)
  margin_Bx1 = _take(groups.rho_BxK, best_Bx1) - _take(
      groups.rho_BxK, worst_Bx1
  )
  loss = jnp.mean(jnp.where(pair_Bx1, loss_of_margin(margin_Bx1), 0.0))
  return loss, jax.lax.stop_gradient(
      {"margin_Bx1": margin_Bx1, "pair_Bx1": pair_Bx1.astype(loss.dtype)}
  )


def _take(values_BxK: jax.Array, index_Bx1: jax.Array) -> jax.Array:
  """Selects by compare and sum: the gradient of a gather is a slow scatter."""
  k_1xK = jnp.arange(values_BxK.shape[1])[None, :]
  chosen_BxK = jnp.where(k_1xK == index_Bx1, values_BxK, 0.0)
  return chosen_BxK.sum(axis=1, keepdims=True)
