# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""From a config to the function that a step differentiates.

A loss function here is `(params, loss_params, batch, beta) -> (loss, totals)`:
the forward pass, then one pure loss of `losses/`. Its metrics are totals with
their weights, so that those of several micro-batches add up exactly;
`batch_metrics.finish` turns them into means.
"""

from collections.abc import Callable
import dataclasses
from typing import Any

import chex
import jax
import jax.numpy as jnp
import ml_collections

from tba_jax import types
from tba_jax.losses import build
from tba_jax.losses import corrections
from tba_jax.losses import groups as groups_lib
from tba_jax.losses import logprobs
from tba_jax.losses import ppo
from tba_jax.losses import supervised
from tba_jax.losses import tb

# What every objective tells of a batch, as totals with their weights.
#
# The totals of several micro-batches add up exactly; `finish` turns their sum
# into means. docs/objectives.md has the list.


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


def ratio_totals(ratio_BxK: jax.Array) -> Totals:
  """Returns how far completions are from the policy that sampled them."""
  return {
      "ratio_mean": total(ratio_BxK),
      _RATIO_SQUARE: total(jnp.square(ratio_BxK)),
  }


def residual_totals(
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


def pair_totals(aux: dict[str, jax.Array]) -> Totals:
  """Returns how well the policy ranks the pairs, of losses that have them."""
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


def batch_totals(batch: types.Batch, logprobs_BxKxT: jax.Array) -> Totals:
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


def finish_totals(totals: Totals) -> dict[str, jax.Array]:
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


PyTree = types.PyTree

LossFn = Callable[
    [PyTree, PyTree, types.Batch, jax.Array], tuple[jax.Array, Totals]
]

PureLoss = Callable[..., tuple[jax.Array, Totals]]


def make_loss_params(
    config: ml_collections.ConfigDict,
    value_model: Any = None,
    params: PyTree = None,
    value_params: PyTree = None,
) -> PyTree:
  """Returns what the loss learns beside the policy, at the start.

  Args:
    config: reads `loss.name`.
    value_model: a `models.heads.ScalarModel` where the objective learns one.
    params: of the policy; a value model starts from a copy, with a head of
      zeros, where it has no `value_params` of its own.
    value_params: of the value model.

  Returns:
    {}, {"log_z": [1]} or {"value": params of the value model}.

  Raises:
    ValueError: `config.loss.name` is not known.
  """
  loss_params = build.find(config.loss.name).init_params()
  if value_model is not None:
    if value_params is None:
      value_params = value_model.from_policy(params)
    loss_params["value"] = value_params
  return loss_params


def make_loss_fn(
    config: ml_collections.ConfigDict,
    model: Any,
    value_model: Any = None,
) -> LossFn:
  """Returns the objective that `config.loss` describes.

  Its gradient on each token is multiplied by the importance correction; its
  value stays, so that runs with and without one can be compared.

  Args:
    config: reads `loss` and `sampling.temperature`.
    model: a `models.build.Model`; `forward.py` calls it.
    value_model: a `models.heads.ScalarModel` where the objective learns one.

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
    values_BxKxT = None
    if value_model is not None:
      values_BxKxT = logprobs.completion_values(value_model, loss_params, batch)
    loss, totals = pure_loss(
        logprobs_BxKxT, loss_params, batch, beta, values_BxKxT
    )
    totals["entropy"] = total(entropy_BxKxT, batch.completion_mask)
    return loss, jax.lax.stop_gradient(totals)

  return loss_fn


def make_pure_loss(config: ml_collections.ConfigDict) -> PureLoss:
  """Returns what of `make_loss_fn` comes after the forward pass.

  Args:
    config: reads `loss`.

  Returns:
    pure_loss(logprobs_BxKxT, loss_params, batch, beta, values_BxKxT) ->
    (loss [], totals), with the values of a value model, or None.

  Raises:
    ValueError: a setting of `config.loss` is out of its range.
  """
  c, row = config.loss, build.find(config.loss.name)
  settings = _correction_settings(c, row)
  own = {name: c[name] for name in row.settings}

  def pure_loss(
      logprobs_BxKxT: jax.Array,
      loss_params: PyTree,
      batch: types.Batch,
      beta: jax.Array,
      values_BxKxT: jax.Array | None = None,
  ) -> tuple[jax.Array, Totals]:
    mask_BxKxT = batch.completion_mask
    proximal_BxKxT = batch.prepared.get(
        "proximal_logprobs", jax.lax.stop_gradient(logprobs_BxKxT)
    )
    behavior_BxKxT = batch.behavior_logprobs
    if c.behavior_logprobs == "recomputed":
      behavior_BxKxT = proximal_BxKxT
    ratio_BxKxT, ratio_BxK = corrections.ratios(
        logprobs_BxKxT, behavior_BxKxT, mask_BxKxT
    )
    groups = _make_groups(
        c, row, logprobs_BxKxT, behavior_BxKxT, values_BxKxT, batch, beta
    )

    def row_loss(x_BxKxT: jax.Array) -> build.Loss:
      some = dataclasses.replace(groups, logprobs_BxKxT=x_BxKxT)
      return row.loss(some, loss_params, beta=beta, scale=c.scale, **own)

    # Of small arrays, so next to nothing beside the forward pass.
    push_BxKxT = -jax.grad(row_loss, has_aux=True)(
        jax.lax.stop_gradient(logprobs_BxKxT)
    )[0]
    factor_BxKxT, changed_BxKxT = corrections.factors(
        ratio_BxKxT,
        ratio_BxK,
        push_BxKxT,
        proximal=(
            corrections.ratios(logprobs_BxKxT, proximal_BxKxT, mask_BxKxT)[0],
            corrections.ratios(proximal_BxKxT, behavior_BxKxT, mask_BxKxT)[0],
        ),
        **settings,
    )
    loss, aux = row_loss(
        corrections.scale_gradient(logprobs_BxKxT, factor_BxKxT)
    )
    totals = {
        "ratio_clip_share": total(changed_BxKxT, mask_BxKxT),
        **ratio_totals(ratio_BxK),
        **_residual_totals(groups, batch, aux, beta),
        **pair_totals(aux),
        **value_totals(groups, aux),
        **batch_totals(batch, logprobs_BxKxT),
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
    return loss, {"token_accuracy": total(right_BxKxT, mask_BxKxT)}

  return loss_fn


def _residual_totals(
    groups: groups_lib.Groups,
    batch: types.Batch,
    aux: dict[str, jax.Array],
    beta: jax.Array,
) -> Totals:
  """Returns the totals of residuals, of the reference as it is."""
  plain = dataclasses.replace(groups, ref_logprobs_BxKxT=batch.ref_logprobs)
  return residual_totals(plain, aux, beta)


def _make_groups(
    c: ml_collections.ConfigDict,
    row: build.Objective,
    logprobs_BxKxT: jax.Array,
    behavior_BxKxT: jax.Array,
    values_BxKxT: jax.Array | None,
    batch: types.Batch,
    beta: jax.Array,
) -> groups_lib.Groups:
  """Returns what the objective may read; targets are of here or prepared."""
  prepared, targets = batch.prepared, None
  if row.has_targets and "returns_BxKxT" in prepared:
    fields = dataclasses.fields(groups_lib.Targets)
    targets = groups_lib.Targets(**{f.name: prepared[f.name] for f in fields})
  elif row.has_targets:
    targets = ppo.make_targets(
        values_BxKxT,
        behavior_BxKxT - batch.ref_logprobs,
        batch.completion_mask,
        batch.rewards,
        beta=beta,
        **{name: c[name] for name in ppo.TARGET_SETTINGS},
    )
  mean_length = (
      prepared["mean_tokens"][0] if "mean_tokens" in prepared else None
  )
  ref_logprobs = batch.ref_logprobs
  if "ref_weight" in prepared:
    ref_logprobs = ref_logprobs * prepared["ref_weight"][:, None, None]
  return groups_lib.Groups(
      logprobs_BxKxT=logprobs_BxKxT,
      behavior_logprobs_BxKxT=behavior_BxKxT,
      ref_logprobs_BxKxT=ref_logprobs,
      mask_BxKxT=batch.completion_mask,
      weights_BxKxT=groups_lib.length_weights(
          batch.completion_mask, c.length_norm or row.length_norm, mean_length
      ),
      rewards_BxK=batch.rewards,
      values_BxKxT=values_BxKxT,
      targets=targets,
  )


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
  return logprobs.map_logits(
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
