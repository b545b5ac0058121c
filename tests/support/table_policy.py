# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""A tabular policy, its batches and its objective."""

import dataclasses
import types as python_types

import jax
import jax.numpy as jnp
import numpy as np

from tba_jax import types
from tba_jax.config import settings
from tba_jax.losses import loss_metrics as metrics_lib
from tba_jax.losses import objective
from tba_jax.losses import objective_table

B, K, T, V, P = 2, 4, 5, 7, 3
BETA = 0.25
EOS = 1


def completion_logits(
    params,
    prompt_tokens,
    prompt_mask,
    completion_tokens,
    token_indices_RxL=None,
):
  """A table of logits by position and by the prompt's last token."""
  del prompt_mask
  return _of_places(
      params["table"][prompt_tokens[:, -1]],
      completion_tokens,
      token_indices_RxL,
  )


MODEL = python_types.SimpleNamespace(
    config=python_types.SimpleNamespace(width=V, compute_dtype="float32"),
    completion_stream=completion_logits,
    stream_and_routes=None,
    unembed=lambda params, stream: stream,
)


def completion_values(
    params,
    prompt_tokens,
    prompt_mask,
    completion_tokens,
    token_indices_RxL=None,
):
  """A table of values by position and by the prompt's last token."""
  del prompt_mask
  return _of_places(
      params["table"][prompt_tokens[:, -1]],
      completion_tokens,
      token_indices_RxL,
  )


def _of_places(x_BxTx, completion_tokens, token_indices_RxL):
  """Returns [B, K, T, ...], or [R, L, ...] of packed rows."""
  B, K, T = completion_tokens.shape
  x = jnp.broadcast_to(x_BxTx[:, None], (B, K, *x_BxTx.shape[1:]))
  if token_indices_RxL is None:
    return x
  own_RxL = jnp.maximum(token_indices_RxL - B * P, 0)
  return x.reshape(B * K * T, *x.shape[3:])[own_RxL]


VALUE_MODEL = python_types.SimpleNamespace(completion_values=completion_values)


def value_model_of(config):
  has_values = objective_table.find(config.loss.name).has_values
  return VALUE_MODEL if has_values else None


def teacher_of(config):
  """Returns a loss's additional arguments: the teacher and its params."""
  has_teacher = objective_table.find(config.loss.name).has_teacher
  return (MODEL, (make_params(9),)) if has_teacher else (None, ())


def make_loss_params(config, seed=5):
  """Returns random values for the loss's params."""
  values = np.random.default_rng(seed).normal(size=(V, T))
  value_params = {"table": jnp.asarray(values, jnp.float32)}
  return objective.make_loss_params(
      config, value_model_of(config), None, value_params
  )


def make_config(**loss):
  config = settings.get_config()
  config.sampling.temperature = 0.7
  config.loss.update(loss)
  return config


def make_params(seed=0):
  table = np.random.default_rng(seed).normal(size=(V, T, V))
  return {"table": jnp.asarray(table, jnp.float32), "blocks": {}}


def token_logprobs(params, batch, temperature=0.7):
  logits = completion_logits(
      params, batch.prompt_tokens, None, batch.completion_tokens
  )
  every = jax.nn.log_softmax(logits / temperature)
  out = jnp.take_along_axis(every, batch.completion_tokens[..., None], axis=-1)
  return out[..., 0]


def make_batch(behavior_params=None, ref_params=None, seed=1):
  rng = np.random.default_rng(seed)
  lengths_BxK = rng.integers(1, T + 1, (B, K))
  mask = (np.arange(T) < lengths_BxK[:, :, None]).astype(np.float32)
  batch = types.Batch(
      prompt_tokens=jnp.asarray([[0, 2, 3], [0, 0, 5]], jnp.int32),
      prompt_mask=jnp.asarray([[0, 1, 1], [0, 0, 1]], jnp.float32),
      completion_tokens=jnp.asarray(rng.integers(2, V, (B, K, T)), jnp.int32),
      completion_mask=jnp.asarray(mask),
      behavior_logprobs=jnp.zeros((B, K, T)),
      ref_logprobs=jnp.zeros((B, K, T)),
      rewards=jnp.asarray(rng.integers(0, 2, (B, K)), jnp.float32),
      staleness_steps=jnp.zeros((B, K)),
  )
  behavior = token_logprobs(behavior_params or make_params(0), batch)
  ref = token_logprobs(ref_params or make_params(9), batch)
  return dataclasses.replace(
      batch, behavior_logprobs=behavior * mask, ref_logprobs=ref * mask
  )


def evaluate(config, params, batch, loss_params=None):
  """Returns (loss, metrics, gradients of params and loss params)."""
  teacher, others = teacher_of(config)
  loss_fn = objective.make_loss_fn(
      config, MODEL, value_model_of(config), teacher
  )
  if loss_params is None:
    loss_params = make_loss_params(config)
  (loss, totals), grads = jax.value_and_grad(
      loss_fn, argnums=(0, 1), has_aux=True
  )(params, loss_params, batch, jnp.float32(BETA), *others)
  return loss, metrics_lib.finish(totals), grads
