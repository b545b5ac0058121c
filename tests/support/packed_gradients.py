# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Gradients of a batch in packed rows, and of each sequence computed alone."""

import dataclasses
import functools
import types as python_types
from typing import Any

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np

from tba_jax import types
from tba_jax.learning import train_step
from tba_jax.losses import objective
from tba_jax.losses import objective_table
from tba_jax.models.net import heads
from tests.support import tiny_model

BETA = 0.25
# Fully padded rows differ from single sequences as much, in float32.
TOLERANCE = 3e-6
# Rows of this length split groups and repeat their prompts.
ROW_LENGTH = 24


def make_batch(
    *,
    has_turns: bool = False,
    route_shape: tuple[int, int, int] | None = None,
    seed: int = 0,
) -> types.Batch:
  """Returns six groups of four stale completions, with some duplicates.

  `route_shape` is (layers, experts per token, experts).
  """
  batch = tiny_model.make_batch(num_prompts=6, num_completions=4, seed=seed)
  rng = np.random.default_rng(seed)
  tokens, mask = batch.completion_tokens, batch.completion_mask
  tokens[1, 2], mask[1, 2] = tokens[1, 0], mask[1, 0]
  shape = mask.shape
  others = {}
  if has_turns:  # The model reads an environment's tokens; losses ignore them.
    others["turn_rewards"] = rng.normal(size=shape).astype(np.float32) * mask
    mask = mask * (rng.uniform(size=shape) < 0.6)
  if route_shape is not None:
    *rest, num_experts = route_shape
    routes = lambda x: np.argsort(
        rng.uniform(size=(*x.shape, rest[0], num_experts)), -1
    )[..., : rest[1]].astype(np.uint8)
    others["prompt_routes"] = routes(batch.prompt_tokens)
    own = routes(tokens)
    own[1, 2] = own[1, 0]
    others["routes"] = own
  near = batch.behavior_logprobs + rng.normal(size=shape) * 0.1
  return dataclasses.replace(
      batch,
      completion_mask=mask.astype(np.float32),
      behavior_logprobs=(batch.behavior_logprobs * mask).astype(np.float32),
      ref_logprobs=(near * mask).astype(np.float32),
      staleness_steps=np.ones(shape[:2], np.float32),
      prepared={"baselines_Bx1": np.linspace(0, 1, 6)[:, None]},
      **others,
  )


class _Alone:
  """Model that computes each sequence separately, by `Model.logits`.

  Its residual stream is its logits.
  """

  stream_and_routes = None

  def __init__(self, model: Any):
    # A value model outputs values.
    self._outputs = getattr(model, "values", None) or model.logits
    self.config = python_types.SimpleNamespace(
        width=model.config.vocab_size, compute_dtype="float32"
    )

  def completion_stream(self, params, prompts, prompt_mask, completions):
    (B, P), (K, T) = prompts.shape, completions.shape[1:]
    each = lambda x: jnp.broadcast_to(x[:, None], (B, K, P))
    both = lambda x, y: jnp.concatenate([each(x), y], -1).reshape(B * K, P + T)
    tokens = both(prompts, completions)
    mask = both(prompt_mask, jnp.ones(completions.shape))
    outputs = self._outputs(params, tokens, mask)[:, P - 1 : -1]
    return outputs.reshape(B, K, T, *outputs.shape[2:])

  def unembed(self, params, stream):
    return stream

  completion_values = completion_stream


def make_parts(
    config: ml_collections.ConfigDict, model: Any
) -> tuple[Any, Any, types.PyTree, types.PyTree]:
  """Returns value model, teacher, the loss's params, and the teacher's."""
  row = objective_table.find(config.loss.name)
  value_model = value_params = teacher = teacher_params = None
  if row.has_values:
    value_model = heads.ScalarModel(heads.config_of(model.config))
    value_params = tiny_model.init_params(value_model, seed=2)
  if row.has_teacher:
    teacher = tiny_model.make_model(width=32, num_heads=8, num_kv_heads=4)
    teacher_params = tiny_model.init_params(teacher, seed=1)
  loss_params = objective.make_loss_params(
      config, value_model, None, value_params
  )
  return value_model, teacher, loss_params, teacher_params


def of_rows(
    config: ml_collections.ConfigDict,
    model: Any,
    params: types.PyTree,
    batch: types.Batch,
    *,
    cuts_groups: bool = False,
    adapters: Any = None,
    base: types.PyTree = None,
    wrap: Any = lambda fn: fn,
) -> types.PyTree:
  """Returns the loss and its gradients, accumulated over micro-batches.

  `wrap` transforms the function before compilation.
  """
  value_model, teacher, loss_params, teacher_params = make_parts(config, model)
  attach = adapters.attach if adapters else lambda _, own: own
  whole = objective.make_objective(config, model, value_model, teacher)

  def run(params, batch):
    batch = train_step.prepare(
        config, model, value_model, {}, loss_params, batch, BETA
    )
    forward = lambda params, tokens: whole.forward(
        attach(base, params[0]), params[1], batch, teacher_params, tokens
    )
    loss, _, grads = train_step.accumulate_micro_batches(
        whole,
        forward,
        (params, loss_params),
        batch,
        BETA,
        needs_all=cuts_groups,
    )
    return loss, grads

  return jax.device_get(jax.jit(wrap(run))(params, batch))


def of_sequences(
    config: ml_collections.ConfigDict,
    model: Any,
    params: types.PyTree,
    batch: types.Batch,
    *,
    adapters: Any = None,
    base: types.PyTree = None,
) -> types.PyTree:
  """Returns the result of `of_rows`, with sequences computed separately."""
  value_model, teacher, loss_params, teacher_params = make_parts(config, model)
  attach = adapters.attach if adapters else lambda _, own: own
  loss_fn = objective.make_loss_fn(
      config,
      _Alone(model),
      value_model and _Alone(value_model),
      teacher and _Alone(teacher),
  )

  def run(params, batch):
    both = params, loss_params
    loss = lambda both: loss_fn(
        attach(base, both[0]), both[1], batch, BETA, teacher_params
    )
    (value, _), grads = jax.value_and_grad(loss, has_aux=True)(both)
    return value, grads

  return jax.device_get(jax.jit(run)(params, batch))


def relative_gap(found: types.PyTree, expected: types.PyTree) -> float:
  """Returns |found - expected| / |expected| of all leaves as one vector."""
  flat = lambda tree: np.concatenate(
      [np.ravel(x).astype(np.float64) for x in jax.tree.leaves(tree)]
  )
  found, expected = flat(found), flat(expected)
  return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))


make_config = functools.partial(tiny_model.make_config, train__num_steps=2)
