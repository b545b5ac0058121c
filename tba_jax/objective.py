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
import ml_collections

from tba_jax import batch_metrics
from tba_jax import forward
from tba_jax import logprobs
from tba_jax import types
from tba_jax.losses import build
from tba_jax.losses import corrections
from tba_jax.losses import groups as groups_lib
from tba_jax.losses import ppo
from tba_jax.losses import supervised
from tba_jax.losses import tb

PyTree = types.PyTree
Totals = batch_metrics.Totals
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
      values_BxKxT = forward.completion_values(value_model, loss_params, batch)
    loss, totals = pure_loss(
        logprobs_BxKxT, loss_params, batch, beta, values_BxKxT
    )
    totals["entropy"] = batch_metrics.total(
        entropy_BxKxT, batch.completion_mask
    )
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
        "ratio_clip_share": batch_metrics.total(changed_BxKxT, mask_BxKxT),
        **batch_metrics.of_ratios(ratio_BxK),
        **_residual_totals(groups, batch, aux, beta),
        **batch_metrics.of_pairs(aux),
        **batch_metrics.of_values(groups, aux),
        **batch_metrics.of_batch(batch, logprobs_BxKxT),
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
    return loss, {
        "token_accuracy": batch_metrics.total(right_BxKxT, mask_BxKxT)
    }

  return loss_fn


def _residual_totals(
    groups: groups_lib.Groups,
    batch: types.Batch,
    aux: dict[str, jax.Array],
    beta: jax.Array,
) -> Totals:
  """Returns the totals of residuals, of the reference as it is."""
  plain = dataclasses.replace(groups, ref_logprobs_BxKxT=batch.ref_logprobs)
  return batch_metrics.of_residuals(plain, aux, beta)


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
