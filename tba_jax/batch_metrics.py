# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""What every objective tells of a batch, as totals with their weights.

The totals of several micro-batches add up exactly; `finish` turns their sum
into means. docs/objectives.md has the list.
"""

import dataclasses

import jax
import jax.numpy as jnp

from tba_jax import types
from tba_jax.losses import groups as groups_lib
from tba_jax.losses import tb

# Metric name -> (sum, weight), both [] float32.
Totals = dict[str, tuple[jax.Array, jax.Array]]

# Second moment of log Z: becomes `log_z_std`.
_LOG_Z_SQUARE = "log_z_square"
# Second moment of the ratio of completions: becomes
# `effective_sample_share`, (Σ w)² / (N Σ w²).
_RATIO_SQUARE = "ratio_square"
# Of what values should be and were: become `value_explained_variance`.
_RETURN_SQUARE = "return_square"
_VALUE_ERROR_SQUARE = "value_error_square"
# Nats a token: no mean of perplexities is infinite for one odd completion.
_MAX_TOKEN_NATS = 20.0


def total(
    values: jax.Array, weights: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
  """Returns the weighted sum and the sum of the weights (default: all 1)."""
  if weights is None:
    return values.sum(), jnp.asarray(values.size, jnp.float32)
  return jnp.where(weights > 0, values * weights, 0.0).sum(), weights.sum()


def of_ratios(ratio_BxK: jax.Array) -> Totals:
  """Returns how far completions are from the policy that sampled them."""
  return {
      "ratio_mean": total(ratio_BxK),
      _RATIO_SQUARE: total(jnp.square(ratio_BxK)),
  }


def of_residuals(
    groups: groups_lib.Groups, aux: dict[str, jax.Array], beta: jax.Array
) -> Totals:
  """Returns how far the policy is from the reference and from balance.

  Log Z and residual are those of the objective, and of VarGrad trajectory
  balance on whole completions for objectives without.
  """
  log_ratio_BxKxT = groups.logprobs_BxKxT - groups.ref_logprobs_BxKxT
  if "residual_BxK" not in aux:
    whole = dataclasses.replace(groups, weights_BxKxT=groups.mask_BxKxT)
    _, aux = tb.vargrad_tb_loss(
        whole.seq_BxK,
        whole.ref_seq_BxK,
        whole.rewards_BxK,
        beta=beta,
        scale="unit",
    )
  residual_BxK, log_z_Bx1 = aux["residual_BxK"], aux["log_z_Bx1"]
  centered_BxK = residual_BxK - residual_BxK.mean(axis=1, keepdims=True)
  kl_BxK = groups_lib.weighted_sums(log_ratio_BxKxT, groups.mask_BxKxT)
  return {
      "kl": total(kl_BxK),
      "kl_per_token": total(log_ratio_BxKxT, groups.mask_BxKxT),
      "log_z_mean": total(log_z_Bx1),
      _LOG_Z_SQUARE: total(jnp.square(log_z_Bx1)),
      "residual_abs": total(jnp.abs(residual_BxK)),
      "residual_variance": total(jnp.square(centered_BxK)),
  }


def of_pairs(aux: dict[str, jax.Array]) -> Totals:
  """Returns how well the policy ranks the pairs, of losses that have them."""
  if "margin_Bx1" not in aux:
    return {}
  margin_Bx1, pair_Bx1 = aux["margin_Bx1"], aux["pair_Bx1"]
  return {
      "pair_margin": total(margin_Bx1, pair_Bx1),
      "pair_accuracy": total((margin_Bx1 > 0).astype(jnp.float32), pair_Bx1),
  }


def of_values(groups: groups_lib.Groups, aux: dict[str, jax.Array]) -> Totals:
  """Returns how well the value model knows the returns, where it has them."""
  if groups.targets is None:
    return {}
  returns, mask = groups.targets.returns_BxKxT, groups.mask_BxKxT
  return {
      "value_mean": total(groups.values_BxKxT, mask),
      "return_mean": total(returns, mask),
      _RETURN_SQUARE: total(jnp.square(returns), mask),
      _VALUE_ERROR_SQUARE: total(
          jnp.square(returns - groups.values_BxKxT), mask
      ),
      "value_clip_share": total(aux["value_held_BxKxT"], mask),
  }


def of_batch(batch: types.Batch, logprobs_BxKxT: jax.Array) -> Totals:
  """Returns what does not depend on the loss."""
  rewards_BxK = batch.rewards
  equal_B = rewards_BxK.max(axis=1) == rewards_BxK.min(axis=1)
  # Of the very weights that sampled, trainer and sampler must agree.
  on_policy_BxK = (batch.staleness_steps == 0).astype(jnp.float32)
  gap_BxKxT = jnp.abs(logprobs_BxKxT - batch.behavior_logprobs)
  return {
      "reward_mean": total(rewards_BxK),
      "equal_reward_groups": total(equal_B.astype(jnp.float32)),
      "on_policy_share": total(on_policy_BxK),
      "logprob_gap": total(
          gap_BxKxT, batch.completion_mask * on_policy_BxK[:, :, None]
      ),
      **_of_perplexity(batch),
  }


def finish(totals: Totals) -> dict[str, jax.Array]:
  """Returns the means, [] float32; a metric without any weight is 0."""
  tiny = jnp.finfo(jnp.float32).tiny
  out = {
      name: value / jnp.maximum(weight, 1.0)
      for name, (value, weight) in totals.items()
  }
  if _LOG_Z_SQUARE in out:
    variance = out.pop(_LOG_Z_SQUARE) - jnp.square(out["log_z_mean"])
    out["log_z_std"] = jnp.sqrt(jnp.maximum(variance, 0.0))
  if _RATIO_SQUARE in out:
    square = jnp.maximum(out.pop(_RATIO_SQUARE), tiny)
    out["effective_sample_share"] = jnp.square(out["ratio_mean"]) / square
  if _RETURN_SQUARE in out:
    variance = out.pop(_RETURN_SQUARE) - jnp.square(out["return_mean"])
    error = out.pop(_VALUE_ERROR_SQUARE) / jnp.maximum(variance, tiny)
    # Of returns that are all equal nothing is left to explain.
    out["value_explained_variance"] = jnp.where(variance > 0, 1 - error, 0.0)
  return out


def _of_perplexity(batch: types.Batch) -> Totals:
  """Returns the perplexity of the completions under the reference.

      ref_perplexity                 mean exp(NLL / |y|)
      ref_perplexity_prompt_diluted  mean exp(NLL / (|x| + |y| - 1))

  NLL is of the completion alone, so the second one, which the papers' code
  prints (Noukhovitch et al. 2024, arXiv:2410.18252; Bartoldson et al. 2025,
  arXiv:2503.18929), falls with the length of the prompt.
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
