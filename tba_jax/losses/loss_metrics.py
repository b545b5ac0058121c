# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Metrics of a batch, as (sum, weight) pairs that add over micro-batches.

`finish` turns the sums into means. docs/reference/objectives.md lists them.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np

from tba_jax import types
from tba_jax.losses import groups as groups_lib

# Metric name -> (sum, weight), both [] float32, except that the sum is [N, E]
# for `_EXPERTS`, and [C] for ratios around C centers.
Totals = dict[str, tuple[jax.Array, jax.Array]]

# Number of tokens per expert, which `finish` turns into other metrics.
_EXPERTS = "expert_tokens"
# Moments, which `finish` turns into other metrics. Log Z and returns are
# centered first: squares of large numbers would hide small differences.
_LOG_Z, _LOG_Z_SQUARE = "log_z_from_center", "log_z_square"
# Moments of the ratios divided by e^c, for each c in `_RATIO_CENTERS`: ratios
# of long completions, or their squares, can exceed the range of float32.
_RATIO_FROM_CENTERS, _RATIO_SQUARE = "ratio_from_centers", "ratio_square"
_RETURN, _RETURN_SQUARE = "return_from_center", "return_square"
_VALUE_ERROR_SQUARE = "value_error_square"
# Nats per token; keeps an outlier from making the mean infinite.
_MAX_TOKEN_NATS = 20.0
# Nats; one center is within 20 of the largest log-ratio of a batch, so squares
# around it neither vanish nor reach `_MAX_FROM_CENTER`.
_RATIO_CENTERS = np.arange(-8000.0, 801.0, 40.0, dtype=np.float32)
_MAX_FROM_CENTER = 40.0
_LEAST_SQUARE = math.exp(-42.0)


def total(
    values: jax.Array, weights: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
  """Returns the weighted sum and the sum of the weights (default: all 1)."""
  if weights is None:
    return values.sum(), jnp.asarray(values.size, jnp.float32)
  return jnp.where(weights > 0, values * weights, 0.0).sum(), weights.sum()


def ratio_totals(log_ratio_BxK: jax.Array) -> Totals:
  """Returns metrics of each completion's log π/π_behavior, nats.

  The mean ratio clips ratios at e^20.
  """
  from_BxKxC = log_ratio_BxK[..., None] - _RATIO_CENTERS[None, None]
  ratio_BxKxC = jnp.exp(jnp.minimum(from_BxKxC, _MAX_FROM_CENTER))
  num = jnp.asarray(log_ratio_BxK.size, jnp.float32)
  return {
      "ratio_mean": total(jnp.exp(jnp.minimum(log_ratio_BxK, 20.0))),
      _RATIO_FROM_CENTERS: (ratio_BxKxC.sum((0, 1)), num),
      _RATIO_SQUARE: (jnp.square(ratio_BxKxC).sum((0, 1)), num),
  }


def log_z_center(rewards: jax.Array, beta: jax.Array) -> jax.Array:
  """Returns a batch's mean reward / β, [], which its log Z are close to."""
  return jnp.where(beta > 0, rewards.mean() / jnp.where(beta > 0, beta, 1), 0.0)


def return_center(returns: jax.Array, mask: jax.Array) -> jax.Array:
  """Returns the mean of a batch's returns over counted tokens, []."""
  value, weight = total(returns, mask)
  return value / jnp.maximum(weight, 1.0)


def residual_totals(
    groups: groups_lib.Groups,
    aux: dict[str, jax.Array],
    beta: jax.Array,
    *,
    has_reference: bool = True,
) -> Totals:
  """Returns the KL to the reference, log Z and the residual.

  Objectives without a residual report the residual of VarGrad trajectory
  balance. At β = 0 there is no target, and log Z and residual are 0. Without a
  reference there is no KL, and no residual unless the objective has one.

  Args:
    groups, aux: completions, and the arrays that the objective returned.
    beta: [] float32.
    has_reference: whether there is a reference.
  """
  if not has_reference and "residual_BxK" not in aux:
    return {}
  center = log_z_center(groups.rewards_BxK, beta)
  mask_BxKxT = groups.mask_BxKxT
  groups = dataclasses.replace(groups, weights_BxKxT=mask_BxKxT)
  if "residual_BxK" in aux:
    residual_BxK, log_z_Bx1 = aux["residual_BxK"], aux["log_z_Bx1"]
  else:
    divisor = jnp.where(beta > 0, beta, 1.0)
    left_BxK = groups.rewards_BxK / divisor - groups.rho_BxK
    left_BxK = jnp.where(beta > 0, left_BxK, 0.0)
    log_z_Bx1 = left_BxK.mean(axis=1, keepdims=True)
    residual_BxK = log_z_Bx1 - left_BxK
  centered_BxK = residual_BxK - residual_BxK.mean(axis=1, keepdims=True)
  kl = {}
  if has_reference:
    log_ratio_BxKxT = groups.logprobs_BxKxT - groups.ref_logprobs_BxKxT
    kl = {
        "kl": total(groups_lib.weighted_sums(log_ratio_BxKxT, mask_BxKxT)),
        "kl_per_token": total(log_ratio_BxKxT, mask_BxKxT),
    }
  return kl | {
      "log_z_mean": total(log_z_Bx1),
      _LOG_Z: total(log_z_Bx1 - center),
      _LOG_Z_SQUARE: total(jnp.square(log_z_Bx1 - center)),
      "residual_abs": total(jnp.abs(residual_BxK)),
      "residual_variance": total(jnp.square(centered_BxK)),
  }


def pair_totals(aux: dict[str, jax.Array]) -> Totals:
  """Returns margin and accuracy of pairwise losses, {} for others."""
  if "margin_Bx1" not in aux:
    return {}
  margin_Bx1, pair_Bx1 = aux["margin_Bx1"], aux["pair_Bx1"]
  return {
      "pair_margin": total(margin_Bx1, pair_Bx1),
      "pair_accuracy": total((margin_Bx1 > 0).astype(jnp.float32), pair_Bx1),
  }


def value_totals(
    groups: groups_lib.Groups, aux: dict[str, jax.Array]
) -> Totals:
  """Returns metrics of PPO's value model, {} for other objectives.

  `aux` are the arrays that the objective returned.
  """
  if groups.targets is None:
    return {}
  returns, mask = groups.targets.returns_BxKxT, groups.mask_BxKxT
  error = returns - groups.values_BxKxT
  center = return_center(returns, mask)
  return {
      "value_mean": total(groups.values_BxKxT, mask),
      "return_mean": total(returns, mask),
      _RETURN: total(returns - center, mask),
      _RETURN_SQUARE: total(jnp.square(returns - center), mask),
      _VALUE_ERROR_SQUARE: total(jnp.square(error), mask),
      "value_clip_share": total(aux["value_clipped_BxKxT"], mask),
  }


def batch_totals(
    batch: types.Batch,
    logprobs_BxKxT: jax.Array,
    *,
    has_reference: bool = True,
) -> Totals:
  """Returns totals of metrics that do not depend on the loss."""
  rewards_BxK = batch.rewards
  equal_B = rewards_BxK.max(axis=1) == rewards_BxK.min(axis=1)
  # Trainer and sampler must agree on data sampled with the current params.
  on_policy_BxK = (batch.staleness_steps == 0).astype(jnp.float32)
  gap_BxKxT = jnp.abs(logprobs_BxKxT - batch.behavior_logprobs)
  return {
      "reward_mean": total(rewards_BxK),
      "equal_reward_groups": total(equal_B.astype(jnp.float32)),
      "on_policy_share": total(on_policy_BxK),
      "logprob_gap": total(
          gap_BxKxT, batch.completion_mask * on_policy_BxK[:, :, None]
      ),
      **(_perplexity_totals(batch) if has_reference else {}),
  }


def expert_totals(
    routes: jax.Array, mask: jax.Array, num_experts: int
) -> Totals:
  """Returns the number of counted tokens routed to each expert.

  Args:
    routes: [..., N, A], experts that predict each token, in each of N layers.
    mask: [...], 1 on counted tokens.
    num_experts: E.
  """
  experts = jnp.arange(num_experts, dtype=routes.dtype)
  tokens_NxE = jax.vmap(
      lambda expert: jnp.sum(
          jnp.where(routes == expert, mask[..., None, None], 0.0),
          axis=(*range(mask.ndim), mask.ndim + 1),
      ),
      out_axes=1,
  )(experts)
  return {_EXPERTS: (tokens_NxE, mask.sum())}


def finish(totals: Totals) -> dict[str, jax.Array]:
  """Returns the means, [] float32; a metric with a weight of 0 is 0."""
  tiny = jnp.finfo(jnp.float32).tiny
  out = {
      name: value / jnp.maximum(weight, 1.0)
      for name, (value, weight) in totals.items()
  }
  if _LOG_Z_SQUARE in out:
    variance = out.pop(_LOG_Z_SQUARE) - jnp.square(out.pop(_LOG_Z))
    out["log_z_std"] = jnp.sqrt(jnp.maximum(variance, 0.0))
  if _RATIO_SQUARE in out:
    # (Σ w)² / (N Σ w²), around the largest center whose squares do not vanish.
    mean_C, square_C = out.pop(_RATIO_FROM_CENTERS), out.pop(_RATIO_SQUARE)
    at = jnp.maximum(jnp.sum(square_C >= _LEAST_SQUARE) - 1, 0)
    square = jnp.maximum(square_C[at], tiny)
    out["effective_sample_share"] = jnp.square(mean_C[at]) / square
  if _EXPERTS in out:
    tokens_NxE = out.pop(_EXPERTS)
    load_NxE = tokens_NxE / jnp.maximum(
        tokens_NxE.mean(axis=1, keepdims=True), tiny
    )
    out["expert_load_max"] = load_NxE.max()
    out["expert_idle_share"] = (load_NxE == 0).astype(jnp.float32).mean()
  if _RETURN_SQUARE in out:
    variance = out.pop(_RETURN_SQUARE) - jnp.square(out.pop(_RETURN))
    error = out.pop(_VALUE_ERROR_SQUARE) / jnp.maximum(variance, tiny)
    # Equal returns leave nothing to explain.
    out["value_explained_variance"] = jnp.where(variance > 0, 1 - error, 0.0)
  return out


def _perplexity_totals(batch: types.Batch) -> Totals:
  """Returns the perplexity of the completions under the reference.

      ref_perplexity                 mean exp(NLL / |y|)
      ref_perplexity_prompt_diluted  mean exp(NLL / (|x| + |y| - 1))

  NLL covers only the completion, so the second metric falls with the length of
  the prompt. The papers' code prints it (Noukhovitch et al. 2024,
  arXiv:2410.18252; Bartoldson et al. 2025, arXiv:2503.18929).
  """
  nll_BxK = -groups_lib.weighted_sums(batch.ref_logprobs, batch.completion_mask)
  tokens_BxK = batch.completion_mask.sum(axis=2)
  prompt_Bx1 = batch.prompt_mask.sum(axis=1)[:, None]

  def perplexity(length_BxK: jax.Array) -> tuple[jax.Array, jax.Array]:
    rate_BxK = nll_BxK / jnp.maximum(length_BxK, 1.0)
    return total(jnp.exp(jnp.minimum(rate_BxK, _MAX_TOKEN_NATS)))

  return {
      "ref_perplexity": perplexity(tokens_BxK),
      "ref_perplexity_prompt_diluted": perplexity(prompt_Bx1 + tokens_BxK - 1),
  }
