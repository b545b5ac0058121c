# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""The differentiated function of a step: forward pass, loss, metrics.

An `Objective` has two halves: `forward` computes outputs per token, and `loss`
reads the outputs of a full batch. A `LossFn` composes them: `(params,
loss_params, batch, beta) -> (loss, totals)`, where `loss_params` belong to the
loss and `totals` are metrics (`loss_metrics.py`). Teacher params, if any, are a
fifth argument.
"""

from collections.abc import Callable
import dataclasses
from typing import Any

import chex
import jax
import jax.numpy as jnp
import ml_collections

from tba_jax import types
from tba_jax.losses import corrections
from tba_jax.losses import custom_loss
from tba_jax.losses import distillation
from tba_jax.losses import groups as groups_lib
from tba_jax.losses import logprobs
from tba_jax.losses import loss_metrics
from tba_jax.losses import objective_table
from tba_jax.losses import ppo
from tba_jax.models.net import packed

PyTree = types.PyTree
LossFn = Callable[..., tuple[jax.Array, loss_metrics.Totals]]


def make_loss_params(
    config: ml_collections.ConfigDict,
    value_model: Any = None,
    params: PyTree = None,
    value_params: PyTree = None,
) -> PyTree:
  """Returns the initial loss params.

  Args:
    config: reads `loss.name`.
    value_model: a `models.heads.ScalarModel` if the objective learns one.
    value_params: params of the value model; None uses the policy's, with a zero
      head.

  Returns:
    {}, {"log_z": [1]} or {"value": params of the value model}.
  """
  if value_model is not None:
    if value_params is None:
      value_params = value_model.from_policy(params)
    return {"value": value_params}
  if objective_table.find(config.loss.name).learns_log_z:
    return {"log_z": jnp.zeros((1,), jnp.float32)}
  return {}


@dataclasses.dataclass(frozen=True)
class Objective:
  """The two halves of the objective of `config.loss`.

  forward: (params, loss_params, batch, teacher_params, token_indices_RxL) ->
    (outputs, totals): the models' outputs at each completion token, by name,
    [B, K, T], or [R, L] for a micro-batch of packed rows.
  loss: (outputs_BxKxT, loss_params, batch, beta) -> (loss [], totals), float32.
  placeholders: (batch) -> outputs_BxKxT that stand for micro-batches not
    computed yet; the loss is finite with them.
  """

  forward: Callable[..., tuple[PyTree, loss_metrics.Totals]]
  loss: Callable[..., tuple[jax.Array, loss_metrics.Totals]]
  placeholders: Callable[[types.Batch], PyTree]


def make_loss_fn(
    config: ml_collections.ConfigDict,
    model: Any,
    value_model: Any = None,
    teacher: Any = None,
) -> LossFn:
  """Returns the objective of `config.loss` as one function.

  For tests and benchmarks: the train step calls the halves of `make_objective`,
  which has the arguments.

  Returns:
    loss_fn(params, loss_params, batch, beta, teacher_params = None) -> (loss
    [], totals), float32.
  """
  functions = make_objective(config, model, value_model, teacher)

  def loss_fn(
      params: PyTree,
      loss_params: PyTree,
      batch: types.Batch,
      beta: jax.Array,
      teacher_params: PyTree = None,
  ) -> tuple[jax.Array, loss_metrics.Totals]:
    outputs, totals = functions.forward(
        params, loss_params, batch, teacher_params
    )
    loss, others = functions.loss(outputs, loss_params, batch, beta)
    return loss, jax.lax.stop_gradient(totals | others)

  return loss_fn


def make_objective(
    config: ml_collections.ConfigDict,
    model: Any,
    value_model: Any = None,
    teacher: Any = None,
) -> Objective:
  """Returns the objective of `config.loss`.

  Args:
    config: reads `loss`, `sampling.temperature`, `offline.path` and
      `reference.role`. With `entropy_weight` w, the loss is reduced by
      w/(BK) Σ_b Σₖ 1/|y| Σ_t H(π(·|x, y_<t)).
    model: the policy's `models.transformer.Model`.
    value_model: a `models.heads.ScalarModel` if the objective learns one.
    teacher: the reference's `models.transformer.Model` if the objective
      compares distributions; `batch.ref_logprobs` are then ignored.
  """
  name = config.loss.name
  if objective_table.find(name).has_teacher != (teacher is not None):
    raise ValueError(
        f"config.loss.name = {name!r}: must get a teacher exactly if it"
        " compares distributions"
    )
  forward_model = model
  if teacher is not None:
    forward_model = distillation.SideBySide(model, teacher)
  pure_loss = make_pure_loss(config)
  temperature = config.sampling.temperature
  entropy_weight = config.loss.entropy_weight

  def outputs_of(logits: jax.Array, tokens: jax.Array) -> dict[str, jax.Array]:
    out = {}
    if teacher is not None:
      logits, teacher_logits = jnp.split(logits, 2, axis=-1)
      out["ref_logprobs"] = logprobs.token_logprobs(
          teacher_logits, tokens, temperature=temperature
      )
      out["divergences"] = distillation.divergence(
          logits,
          teacher_logits,
          temperature=temperature,
          gkd_beta=config.loss.gkd_beta,
      )
    out["logprobs"] = logprobs.token_logprobs(
        logits, tokens, temperature=temperature
    )
    out["entropies"] = logprobs.entropy(
        logits if entropy_weight else jax.lax.stop_gradient(logits),
        temperature=temperature,
    )
    return out

  def forward(
      params: PyTree,
      loss_params: PyTree,
      batch: types.Batch,
      teacher_params: PyTree = None,
      token_indices_RxL: jax.Array | None = None,
  ) -> tuple[PyTree, loss_metrics.Totals]:
    if teacher is not None:
      params = distillation.pair(params, teacher_params)
    outputs, totals = _map_logits(
        forward_model, params, batch, outputs_of, token_indices_RxL
    )
    if value_model is not None:
      outputs["values"] = completion_values(
          value_model, loss_params, batch, token_indices_RxL
      )
    return outputs, totals

  def placeholders(batch: types.Batch) -> PyTree:
    zeros = jnp.zeros_like(batch.behavior_logprobs)
    # The ratios' denominators, so that no ratio overflows.
    near = batch.prepared.get("proximal_logprobs", batch.behavior_logprobs)
    outputs = {"logprobs": near, "entropies": zeros}
    if teacher is not None:
      outputs |= {"ref_logprobs": zeros, "divergences": zeros}
    if value_model is not None:
      outputs["values"] = zeros
    return outputs

  def loss(
      outputs: PyTree,
      loss_params: PyTree,
      batch: types.Batch,
      beta: jax.Array,
  ) -> tuple[jax.Array, loss_metrics.Totals]:
    mask_BxKxT = batch.completion_mask
    chex.assert_equal_shape(
        [mask_BxKxT, batch.behavior_logprobs, batch.ref_logprobs]
    )
    chex.assert_shape(
        [batch.rewards, batch.staleness_steps], mask_BxKxT.shape[:2]
    )
    if teacher is not None:
      ref_BxKxT = jnp.where(mask_BxKxT > 0, outputs["ref_logprobs"], 0.0)
      batch = dataclasses.replace(batch, ref_logprobs=ref_BxKxT)
    value, totals = pure_loss(
        outputs["logprobs"],
        loss_params,
        batch,
        beta,
        outputs.get("values"),
        outputs.get("divergences"),
    )
    entropies_BxKxT = outputs["entropies"]
    if entropy_weight:
      weights_BxKxT = groups_lib.length_weights(mask_BxKxT, "tokens")
      entropy_BxK = groups_lib.weighted_sums(entropies_BxKxT, weights_BxKxT)
      value -= entropy_weight * jnp.mean(entropy_BxK)
    totals["entropy"] = loss_metrics.total(entropies_BxKxT, mask_BxKxT)
    return value, jax.lax.stop_gradient(totals)

  return Objective(forward, loss, placeholders)


def make_pure_loss(
    config: ml_collections.ConfigDict,
) -> Callable[..., tuple[jax.Array, loss_metrics.Totals]]:
  """Returns the loss as a function of the forward pass's outputs.

  The importance correction scales each token's gradient, not the loss.

  Returns:
    pure_loss(logprobs_BxKxT, loss_params, batch, beta, values_BxKxT = None,
    divergences_BxKxT = None) -> (loss [], totals).
  """
  c, row = config.loss, objective_table.find(config.loss.name)
  correction = objective_table.correction(c)
  has_reference = objective_table.has_reference(config)

  def pure_loss(
      logprobs_BxKxT: jax.Array,
      loss_params: PyTree,
      batch: types.Batch,
      beta: jax.Array,
      values_BxKxT: jax.Array | None = None,
      divergences_BxKxT: jax.Array | None = None,
  ) -> tuple[jax.Array, loss_metrics.Totals]:
    mask_BxKxT = batch.completion_mask
    proximal_BxKxT = batch.prepared.get(
        "proximal_logprobs", jax.lax.stop_gradient(logprobs_BxKxT)
    )
    behavior_BxKxT = batch.behavior_logprobs
    if config.offline.path:
      # All zeros mean unknown log-probs: the ratio is 1.
      is_known = jnp.any(behavior_BxKxT < 0, axis=2, keepdims=True)
      behavior_BxKxT = jnp.where(
          is_known, behavior_BxKxT, jax.lax.stop_gradient(logprobs_BxKxT)
      )
    if c.behavior_logprobs == "recomputed":
      behavior_BxKxT = proximal_BxKxT
    groups = _make_groups(
        c,
        row,
        logprobs_BxKxT,
        behavior_BxKxT,
        values_BxKxT,
        loss_params,
        batch,
        beta,
    )
    groups = dataclasses.replace(groups, divergences_BxKxT=divergences_BxKxT)

    def loss_of(x_BxKxT: jax.Array) -> groups_lib.Loss:
      some = dataclasses.replace(groups, logprobs_BxKxT=x_BxKxT)
      return row.loss(some, c, beta)

    # The cost is negligible next to the forward pass.
    advantages_BxKxT = -jax.grad(loss_of, has_aux=True)(
        jax.lax.stop_gradient(logprobs_BxKxT)
    )[0]
    ratio_BxKxT, ratio_BxK = corrections.ratios(
        logprobs_BxKxT, behavior_BxKxT, mask_BxKxT
    )
    factor_BxKxT, changed_BxKxT = corrections.factors(
        ratio_BxKxT,
        ratio_BxK,
        advantages_BxKxT,
        correction=correction,
        ratio_clip=c.ratio_clip,
        clip_high=c.clip_high,
        ratio_cap=c.ratio_cap,
        ratio_floor=c.ratio_floor,
        moment_cap=c.moment_cap,
        divergence_cap=c.divergence_cap,
        mask_BxKxT=mask_BxKxT,
        behavior_logprobs_BxKxT=jnp.where(
            mask_BxKxT > 0, jax.lax.stop_gradient(behavior_BxKxT), 0.0
        ),
        proximal=(
            corrections.ratios(logprobs_BxKxT, proximal_BxKxT, mask_BxKxT)[0],
            corrections.ratios(proximal_BxKxT, behavior_BxKxT, mask_BxKxT)[0],
        ),
    )
    loss, aux = loss_of(
        corrections.scale_gradient(logprobs_BxKxT, factor_BxKxT)
    )
    # The reported KL is to the reference itself, even with a tempered target.
    plain = dataclasses.replace(groups, ref_logprobs_BxKxT=batch.ref_logprobs)
    totals = {
        "ratio_clip_share": loss_metrics.total(changed_BxKxT, mask_BxKxT),
        **loss_metrics.ratio_totals(
            groups_lib.weighted_sums(
                logprobs_BxKxT - behavior_BxKxT, mask_BxKxT
            )
        ),
        **loss_metrics.residual_totals(
            plain, aux, beta, has_reference=has_reference
        ),
        **loss_metrics.pair_totals(aux),
        **(custom_loss.totals(aux, mask_BxKxT) if ".py:" in c.name else {}),
        **loss_metrics.value_totals(groups, aux),
        **loss_metrics.batch_totals(
            batch, logprobs_BxKxT, has_reference=has_reference
        ),
    }
    return loss, jax.lax.stop_gradient(totals)

  return pure_loss


def make_supervised_loss_fn(model: Any) -> LossFn:
  """Returns next-token cross-entropy on the completions, at temperature 1.

      loss = - Σ mask · log π(y_t | x, y_<t) / Σ mask

  in nats per token, as a `LossFn` that ignores loss_params and beta. In a
  micro-batch, the denominator is its share of the whole batch's Σ mask.
  """

  def loss_fn(
      params: PyTree,
      loss_params: PyTree,
      batch: types.Batch,
      beta: jax.Array,
  ) -> tuple[jax.Array, loss_metrics.Totals]:
    del loss_params, beta

    def outputs_of(logits, tokens):
      right = logits.argmax(axis=-1) == tokens
      return logprobs.token_logprobs(logits, tokens, temperature=1.0), right

    (logprobs_BxKxT, right_BxKxT), experts = _map_logits(
        model, params, batch, outputs_of
    )
    mask_BxKxT = batch.completion_mask
    value, num_tokens = loss_metrics.total(logprobs_BxKxT, mask_BxKxT)
    if "mean_tokens" in batch.prepared:
      num_tokens = batch.prepared["mean_tokens"][0] * mask_BxKxT[..., 0].size
    loss = -value / jnp.maximum(num_tokens, 1.0)
    accuracy = loss_metrics.total(right_BxKxT, mask_BxKxT)
    return loss, {"token_accuracy": accuracy, **experts}

  return loss_fn


def completion_values(
    value_model: Any,
    loss_params: PyTree,
    batch: types.Batch,
    token_indices_RxL: jax.Array | None = None,
) -> jax.Array:
  """Returns the value of the state before each token, [B, K, T] or [R, L]."""
  inputs = batch.prompt_tokens, batch.prompt_mask, batch.completion_tokens
  others = () if token_indices_RxL is None else (token_indices_RxL,)
  return value_model.completion_values(loss_params["value"], *inputs, *others)


def _make_groups(
    c: ml_collections.ConfigDict,
    row: objective_table.ObjectiveSpec,
    logprobs_BxKxT: jax.Array,
    behavior_BxKxT: jax.Array,
    values_BxKxT: jax.Array | None,
    loss_params: PyTree,
    batch: types.Batch,
    beta: jax.Array,
) -> groups_lib.Groups:
  """Returns the objective's inputs; uses targets from `batch.prepared`."""
  prepared, targets, log_z_Bx1 = batch.prepared, None, None
  if row.has_targets and "returns_BxKxT" in prepared:
    fields = dataclasses.fields(groups_lib.Targets)
    targets = groups_lib.Targets(**{f.name: prepared[f.name] for f in fields})
  elif row.has_targets:
    targets = ppo.make_targets(
        values_BxKxT,
        behavior_BxKxT - batch.ref_logprobs,
        batch.completion_mask,
        batch.rewards,
        c,
        beta,
        batch.turn_rewards,
    )
  if row.learns_log_z:
    log_z_Bx1 = jnp.broadcast_to(
        loss_params["log_z"][None, :], (batch.rewards.shape[0], 1)
    )
  mean_length = (
      prepared["mean_tokens"][0] if "mean_tokens" in prepared else None
  )
  ref_logprobs = batch.ref_logprobs
  if "ref_weight" in prepared:
    ref_logprobs = ref_logprobs * prepared["ref_weight"][:, None, None]
  return groups_lib.Groups(
      logprobs_BxKxT=logprobs_BxKxT,
      kl_logprobs_BxKxT=logprobs_BxKxT,
      behavior_logprobs_BxKxT=behavior_BxKxT,
      ref_logprobs_BxKxT=ref_logprobs,
      mask_BxKxT=batch.completion_mask,
      weights_BxKxT=groups_lib.length_weights(
          batch.completion_mask,
          c.length_norm or row.length_norm or "none",
          mean_length,
      ),
      rewards_BxK=batch.rewards,
      log_z_Bx1=log_z_Bx1,
      values_BxKxT=values_BxKxT,
      targets=targets,
      staleness_BxK=batch.staleness_steps,
      baselines_Bx1=prepared.get("baselines_Bx1"),
  )


def _map_logits(
    model: Any,
    params: PyTree,
    batch: types.Batch,
    fn: Callable[..., PyTree],
    token_indices_RxL: jax.Array | None = None,
) -> tuple[PyTree, loss_metrics.Totals]:
  """Returns `logprobs.map_logits` of a batch, and metrics of experts."""
  has_experts = model.stream_and_routes is not None
  out = logprobs.map_logits(
      model,
      params,
      batch.prompt_tokens,
      batch.prompt_mask,
      batch.completion_tokens,
      fn,
      token_indices_RxL=token_indices_RxL,
      routes=batch.experts,
      with_routes=has_experts,
      kept_BxKxTxC=batch.kept_ids,
  )
  if not has_experts:
    return out, {}
  out, routes = out
  mask = batch.completion_mask
  if token_indices_RxL is not None:
    mask = packed.predicted(
        token_indices_RxL, mask, batch.prompt_tokens.shape[1]
    )
  return out, loss_metrics.expert_totals(routes, mask, model.config.num_experts)
