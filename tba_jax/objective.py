# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""From a config to the function that a step differentiates.

A loss function here is `(params, loss_params, batch, beta) -> (loss, totals)`:
the forward pass, then one pure loss of `losses/`. Its metrics are totals with
their weights, so that those of several micro-batches add up exactly;
`finish_metrics` turns them into means.
"""

from collections.abc import Callable
import dataclasses
from typing import Any

import chex
import jax
import jax.numpy as jnp
import ml_collections

from tba_jax import forward
from tba_jax import logprobs
from tba_jax import types
from tba_jax.losses import build
from tba_jax.losses import corrections
from tba_jax.losses import groups as groups_lib
from tba_jax.losses import supervised
from tba_jax.losses import tb

PyTree = types.PyTree
# Metric name -> (sum, weight), both [] float32.
Totals = dict[str, tuple[jax.Array, jax.Array]]
LossFn = Callable[
    [PyTree, PyTree, types.Batch, jax.Array], tuple[jax.Array, Totals]
]

PureLoss = Callable[
    [jax.Array, PyTree, types.Batch, jax.Array], tuple[jax.Array, Totals]
]

# Second moment of log Z: becomes `log_z_std`.
_LOG_Z_SQUARE = "log_z_square"
# Second moment of the ratio of completions: becomes
# `effective_sample_share`, (Σ w)² / (N Σ w²).
_RATIO_SQUARE = "ratio_square"


def make_loss_params(config: ml_collections.ConfigDict) -> PyTree:
  """Returns what the loss learns beside the policy: {} or {"log_z": [1]}.

  Raises:
    ValueError: `config.loss.name` is not known.
  """
  return build.find(config.loss.name).init_params()


def make_loss_fn(config: ml_collections.ConfigDict, model: Any) -> LossFn:
  """Returns the objective that `config.loss` describes.

  Its gradient on each token is multiplied by the importance correction; its
  value stays, so that runs with and without one can be compared.

  Args:
    config: reads `loss` and `sampling.temperature`.
    model: a `models.build.Model`; `forward.py` calls it.

  Returns:
    loss_fn(params, loss_params, batch, beta) -> (loss [], totals), all float32.

  Raises:
    ValueError: a setting of `config.loss` is out of its range.
  """
  pure_loss = make_pure_loss(config)
  temperature = config.sampling.temperature
  if temperature <= 0:
    raise ValueError(
        f"sampling.temperature={temperature}: above 0 to train, since the loss"
        " is on the tempered policy"
    )

  def loss_fn(
      params: PyTree,
      loss_params: PyTree,
      batch: types.Batch,
      beta: jax.Array,
  ) -> tuple[jax.Array, Totals]:
    _check_batch(batch)

    def read(logits, tokens):
      entropy = logprobs.entropy(
          jax.lax.stop_gradient(logits), temperature=temperature
      )
      return _token_logprobs(logits, tokens, temperature), entropy

    logprobs_BxKxT, entropy_BxKxT = _read(model, params, batch, read)
    loss, totals = pure_loss(logprobs_BxKxT, loss_params, batch, beta)
    totals["entropy"] = _total(entropy_BxKxT, batch.completion_mask)
    return loss, jax.lax.stop_gradient(totals)

  return loss_fn


def make_pure_loss(config: ml_collections.ConfigDict) -> PureLoss:
  """Returns what of `make_loss_fn` comes after the forward pass.

  Args:
    config: reads `loss`.

  Returns:
    pure_loss(logprobs_BxKxT, loss_params, batch, beta) -> (loss [], totals).

  Raises:
    ValueError: a setting of `config.loss` is out of its range.
  """
  c, row = config.loss, build.find(config.loss.name)
  settings = _correction_settings(c, row)
  length_norm = c.length_norm or row.length_norm

  def pure_loss(
      logprobs_BxKxT: jax.Array,
      loss_params: PyTree,
      batch: types.Batch,
      beta: jax.Array,
  ) -> tuple[jax.Array, Totals]:
    mask_BxKxT = batch.completion_mask
    ratio_BxKxT, ratio_BxK = corrections.ratios(
        logprobs_BxKxT, batch.behavior_logprobs, mask_BxKxT
    )
    groups = groups_lib.Groups(
        logprobs_BxKxT=logprobs_BxKxT,
        behavior_logprobs_BxKxT=batch.behavior_logprobs,
        ref_logprobs_BxKxT=batch.ref_logprobs,
        mask_BxKxT=mask_BxKxT,
        weights_BxKxT=groups_lib.length_weights(mask_BxKxT, length_norm),
        rewards_BxK=batch.rewards,
    )

    def row_loss(x_BxKxT: jax.Array) -> build.Loss:
      some = dataclasses.replace(groups, logprobs_BxKxT=x_BxKxT)
      return row.loss(some, loss_params, beta=beta, scale=c.scale)

    # Of small arrays, so next to nothing beside the forward pass.
    push_BxKxT = -jax.grad(row_loss, has_aux=True)(
        jax.lax.stop_gradient(logprobs_BxKxT)
    )[0]
    factor_BxKxT, changed_BxKxT = corrections.factors(
        ratio_BxKxT, ratio_BxK, push_BxKxT, **settings
    )
    loss, aux = row_loss(
        corrections.scale_gradient(logprobs_BxKxT, factor_BxKxT)
    )
    totals = {
        "ratio_clip_share": _total(changed_BxKxT, mask_BxKxT),
        **_ratio_totals(ratio_BxK),
        **_residual_totals(groups, aux, beta),
        **_pair_totals(aux),
        **_batch_totals(batch, logprobs_BxKxT),
    }
    return loss, jax.lax.stop_gradient(totals)

  return pure_loss


def make_supervised_loss_fn(model: Any) -> LossFn:
  """Returns next-token cross-entropy on the completions, at temperature 1.

  Args:
    model: a `models.build.Model`; `forward.py` calls it.

  Returns:
    loss_fn(params, loss_params, batch, beta) -> (loss [] in nats a token,
    totals): of the batch it reads the prompts, the completions and their mask;
    loss_params and beta play no part.
  """

  def loss_fn(
      params: PyTree,
      loss_params: PyTree,
      batch: types.Batch,
      beta: jax.Array,
  ) -> tuple[jax.Array, Totals]:
    del loss_params, beta

    def read(logits, tokens):
      right = logits.argmax(axis=-1) == tokens
      return _token_logprobs(logits, tokens, temperature=1.0), right

    logprobs_BxKxT, right_BxKxT = _read(model, params, batch, read)
    mask_BxKxT = batch.completion_mask
    loss, _ = supervised.cross_entropy_loss(logprobs_BxKxT, mask_BxKxT)
    return loss, {"token_accuracy": _total(right_BxKxT, mask_BxKxT)}

  return loss_fn


def finish_metrics(totals: Totals) -> dict[str, jax.Array]:
  """Returns the means, [] float32; a metric without any weight is 0."""
  out = {
      name: total / jnp.maximum(weight, 1.0)
      for name, (total, weight) in totals.items()
  }
  if _LOG_Z_SQUARE in out:
    variance = out.pop(_LOG_Z_SQUARE) - jnp.square(out["log_z_mean"])
    out["log_z_std"] = jnp.sqrt(jnp.maximum(variance, 0.0))
  if _RATIO_SQUARE in out:
    square = jnp.maximum(out.pop(_RATIO_SQUARE), jnp.finfo(jnp.float32).tiny)
    out["effective_sample_share"] = jnp.square(out["ratio_mean"]) / square
  return out


def _correction_settings(
    c: ml_collections.ConfigDict, row: build.Objective
) -> dict[str, str | float]:
  """Returns what `corrections.factors` takes of `config.loss`."""
  if c.scale not in tb.SCALES:
    raise ValueError(f"loss.scale={c.scale!r}: allowed {tb.SCALES}")
  if c.ratio_clip < 0:
    raise ValueError(f"loss.ratio_clip={c.ratio_clip}: at least 0 (0 = off)")
  if row.needs_ratio_clip and not c.correction and not c.ratio_clip:
    raise ValueError(
        f"loss.ratio_clip={c.ratio_clip}: above 0 with loss.name={c.name!r}"
    )
  own_correction = row.correction if c.ratio_clip else "none"
  return dict(
      correction=c.correction or own_correction,
      ratio_clip=c.ratio_clip,
      ratio_cap=c.ratio_cap,
  )


def _read(
    model: Any, params: PyTree, batch: types.Batch, fn: Callable[..., PyTree]
) -> PyTree:
  """Returns `fn` of the logits and the token at each completion token."""
  return forward.map_logits(
      model,
      params,
      batch.prompt_tokens,
      batch.prompt_mask,
      batch.completion_tokens,
      fn,
  )


def _token_logprobs(
    logits: jax.Array, tokens: jax.Array, temperature: float
) -> jax.Array:
  return logprobs.token_logprobs(logits, tokens, temperature=temperature)


def _check_batch(batch: types.Batch) -> None:
  """A batch is [B, K, T] throughout: whole groups."""
  B, K, T = batch.completion_tokens.shape
  chex.assert_shape(
      [batch.completion_mask, batch.behavior_logprobs, batch.ref_logprobs],
      (B, K, T),
  )
  chex.assert_shape([batch.rewards, batch.staleness_steps], (B, K))


def _total(
    values: jax.Array, weights: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
  """Returns the weighted sum and the sum of the weights (default: all 1)."""
  if weights is None:
    return values.sum(), jnp.asarray(values.size, jnp.float32)
  return jnp.where(weights > 0, values * weights, 0.0).sum(), weights.sum()


def _ratio_totals(ratio_BxK: jax.Array) -> Totals:
  return {
      "ratio_mean": _total(ratio_BxK),
      _RATIO_SQUARE: _total(jnp.square(ratio_BxK)),
  }


def _residual_totals(
    groups: groups_lib.Groups, aux: dict[str, jax.Array], beta: jax.Array
) -> Totals:
  """Returns how far the policy is from the reference and from balance.

  Log Z and residual are those of the objective, and of VarGrad trajectory
  balance for objectives without.
  """
  log_ratio_BxKxT = groups.logprobs_BxKxT - groups.ref_logprobs_BxKxT
  if "residual_BxK" not in aux:
    _, aux = tb.vargrad_tb_loss(
        groups.seq_BxK,
        groups.ref_seq_BxK,
        groups.rewards_BxK,
        beta=beta,
        scale="unit",
    )
  residual_BxK, log_z_Bx1 = aux["residual_BxK"], aux["log_z_Bx1"]
  centered_BxK = residual_BxK - residual_BxK.mean(axis=1, keepdims=True)
  kl_BxK = groups_lib.weighted_sums(log_ratio_BxKxT, groups.mask_BxKxT)
  return {
      "kl": _total(kl_BxK),
      "kl_per_token": _total(log_ratio_BxKxT, groups.mask_BxKxT),
      "log_z_mean": _total(log_z_Bx1),
      _LOG_Z_SQUARE: _total(jnp.square(log_z_Bx1)),
      "residual_abs": _total(jnp.abs(residual_BxK)),
      "residual_variance": _total(jnp.square(centered_BxK)),
  }


def _pair_totals(aux: dict[str, jax.Array]) -> Totals:
  """Returns how well the policy ranks the pairs, of losses that have them."""
  if "margin_Bx1" not in aux:
    return {}
  margin_Bx1, pair_Bx1 = aux["margin_Bx1"], aux["pair_Bx1"]
  return {
      "pair_margin": _total(margin_Bx1, pair_Bx1),
      "pair_accuracy": _total((margin_Bx1 > 0).astype(jnp.float32), pair_Bx1),
  }


def _batch_totals(batch: types.Batch, logprobs_BxKxT: jax.Array) -> Totals:
  """Returns what does not depend on the loss."""
  rewards_BxK = batch.rewards
  equal_B = rewards_BxK.max(axis=1) == rewards_BxK.min(axis=1)
  # Of the very weights that sampled, trainer and sampler must agree.
  on_policy_BxK = (batch.staleness_steps == 0).astype(jnp.float32)
  gap_BxKxT = jnp.abs(logprobs_BxKxT - batch.behavior_logprobs)
  return {
      "reward_mean": _total(rewards_BxK),
      "equal_reward_groups": _total(equal_B.astype(jnp.float32)),
      "on_policy_share": _total(on_policy_BxK),
      "logprob_gap": _total(
          gap_BxKxT, batch.completion_mask * on_policy_BxK[:, :, None]
      ),
  }
