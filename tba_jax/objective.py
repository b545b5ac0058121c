# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""From a config to the function that a step differentiates.

A loss function here is `(params, loss_params, batch, beta) -> (loss, totals)`:
the forward pass, then one pure loss of `losses/`. Its metrics are totals with
their weights, so that those of several micro-batches add up exactly;
`finish_metrics` turns them into means.
"""

from collections.abc import Callable
from typing import Any

import chex
import jax
import jax.numpy as jnp
import ml_collections

from tba_jax import logprobs
from tba_jax import types
from tba_jax.losses import supervised
from tba_jax.losses import tb

PyTree = types.PyTree
# Metric name -> (sum, weight), both [] float32.
Totals = dict[str, tuple[jax.Array, jax.Array]]
LossFn = Callable[
    [PyTree, PyTree, types.Batch, jax.Array], tuple[jax.Array, Totals]
]

# Second moment of log Z: becomes `log_z_std`.
_LOG_Z_SQUARE = "log_z_square"


def _vargrad(seq_BxK, ref_seq_BxK, batch, loss_params, **settings):
  del loss_params  # Its log Z is the group's mean.
  return tb.vargrad_tb_loss(seq_BxK, ref_seq_BxK, batch.rewards, **settings)


def _learned_z(seq_BxK, ref_seq_BxK, batch, loss_params, **settings):
  log_z_Bx1 = jnp.broadcast_to(
      loss_params["log_z"][None, :], (batch.rewards.shape[0], 1)
  )
  return tb.learned_z_tb_loss(
      seq_BxK, ref_seq_BxK, batch.rewards, log_z_Bx1, **settings
  )


# Name -> (its loss on summed log-probs, its learned parameters at the start).
LOSSES = {
    "tb": (_vargrad, lambda: {}),
    # One scalar, so for tasks with one prompt.
    "tb_learned_z": (
        _learned_z,
        lambda: {"log_z": jnp.zeros((1,), jnp.float32)},
    ),
}


def make_loss_params(config: ml_collections.ConfigDict) -> PyTree:
  """Returns what the loss learns beside the policy: {} or {"log_z": [1]}.

  Raises:
    ValueError: `config.loss.name` is not known.
  """
  return _find(config)[1]()


def make_loss_fn(config: ml_collections.ConfigDict, model: Any) -> LossFn:
  """Returns the trajectory balance loss that `config.loss` describes.

  With `loss.ratio_clip` above 0 the policy's gradient is that of the clipped
  surrogate (`tb.clipped_tb_loss`), while the value stays the TB loss, so that
  runs with and without the trust region can be compared.

  Args:
    config: reads `loss` and `sampling.temperature`.
    model: a `models.build.Model`; its `completion_logits` is called.

  Returns:
    loss_fn(params, loss_params, batch, beta) -> (loss [], totals), all float32.

  Raises:
    ValueError: a setting of `config.loss` is out of its range.
  """
  base_loss, _ = _find(config)
  _check_config(config)
  scale, ratio_clip = config.loss.scale, config.loss.ratio_clip
  temperature = config.sampling.temperature

  def loss_fn(
      params: PyTree,
      loss_params: PyTree,
      batch: types.Batch,
      beta: jax.Array,
  ) -> tuple[jax.Array, Totals]:
    _check_batch(batch)
    logprobs_BxKxT, logits_BxKxTxV = _forward(model, params, batch, temperature)
    entropy_BxKxT = logprobs.entropy(
        jax.lax.stop_gradient(logits_BxKxTxV), temperature=temperature
    )
    mask_BxKxT = batch.completion_mask
    seq_BxK = logprobs.sequence_logprobs(logprobs_BxKxT, mask_BxKxT)
    ref_seq_BxK = logprobs.sequence_logprobs(batch.ref_logprobs, mask_BxKxT)
    settings = dict(beta=beta, scale=scale)
    base = lambda seq: base_loss(
        seq, ref_seq_BxK, batch, loss_params, **settings
    )
    if ratio_clip:
      # The policy's gradient comes from the surrogate alone; log Z keeps its.
      loss, aux = base(jax.lax.stop_gradient(seq_BxK))
      surrogate, clip_aux = tb.clipped_tb_loss(
          logprobs_BxKxT,
          batch.behavior_logprobs,
          mask_BxKxT,
          aux["residual_BxK"],
          ratio_clip=ratio_clip,
          **settings,
      )
      loss = loss + surrogate - jax.lax.stop_gradient(surrogate)
      clipped_BxKxT = clip_aux["clipped_BxKxT"]
    else:
      loss, aux = base(seq_BxK)
      clipped_BxKxT = jnp.zeros_like(mask_BxKxT)
    totals = {
        "kl": _total(seq_BxK - ref_seq_BxK),
        "entropy": _total(entropy_BxKxT, mask_BxKxT),
        "ratio_clip_share": _total(clipped_BxKxT, mask_BxKxT),
        "log_z_mean": _total(aux["log_z_Bx1"]),
        _LOG_Z_SQUARE: _total(jnp.square(aux["log_z_Bx1"])),
        "residual_abs": _total(jnp.abs(aux["residual_BxK"])),
        **_batch_totals(batch, logprobs_BxKxT),
    }
    return loss, jax.lax.stop_gradient(totals)

  return loss_fn


def make_supervised_loss_fn(model: Any) -> LossFn:
  """Returns next-token cross-entropy on the completions, at temperature 1.

  Args:
    model: a `models.build.Model`; its `completion_logits` is called.

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
    logprobs_BxKxT, logits_BxKxTxV = _forward(
        model, params, batch, temperature=1.0
    )
    mask_BxKxT = batch.completion_mask
    loss, _ = supervised.cross_entropy_loss(logprobs_BxKxT, mask_BxKxT)
    right_BxKxT = logits_BxKxTxV.argmax(axis=-1) == batch.completion_tokens
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
  return out


def _find(config: ml_collections.ConfigDict) -> tuple[Callable, Callable]:
  if config.loss.name not in LOSSES:
    raise ValueError(
        f"loss.name={config.loss.name!r}: allowed {sorted(LOSSES)}"
    )
  return LOSSES[config.loss.name]


def _check_config(config: ml_collections.ConfigDict) -> None:
  scale, ratio_clip = config.loss.scale, config.loss.ratio_clip
  if scale not in tb.SCALES:
    raise ValueError(f"loss.scale={scale!r}: allowed {tb.SCALES}")
  if ratio_clip < 0:
    raise ValueError(f"loss.ratio_clip={ratio_clip}: at least 0 (0 = off)")
  if config.sampling.temperature <= 0:
    raise ValueError(
        f"sampling.temperature={config.sampling.temperature}: above 0 to train,"
        " since the loss is on the tempered policy"
    )


def _forward(
    model: Any, params: PyTree, batch: types.Batch, temperature: float
) -> tuple[jax.Array, jax.Array]:
  """Returns the completion tokens' log-probs [B, K, T] and the raw logits."""
  logits_BxKxTxV = model.completion_logits(
      params, batch.prompt_tokens, batch.prompt_mask, batch.completion_tokens
  )
  logprobs_BxKxT = logprobs.token_logprobs(
      logits_BxKxTxV, batch.completion_tokens, temperature=temperature
  )
  return logprobs_BxKxT, logits_BxKxTxV


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
