# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""What is known of a whole batch before it is cut: advantages, proximal policy.

A proximal policy is one that is held for some steps while the policy moves away
from it: the one that a trust region is around ("decoupled"), or that stands for
the one that sampled (`loss.behavior_logprobs`). The values of which PPO makes
its advantages are held as long. Within rounds that is a round.
"""

from collections.abc import Callable
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import ml_collections

from tba_jax import forward
from tba_jax import rounds
from tba_jax import types
from tba_jax.losses import build
from tba_jax.losses import groups as groups_lib
from tba_jax.losses import ppo

PyTree = types.PyTree
Prepare = Callable[[PyTree, PyTree, types.Batch, jax.Array], types.Batch]

BEHAVIORS = ("sampler", "recomputed")


def every_steps(config: ml_collections.ConfigDict) -> int:
  """Returns for how many steps a proximal policy is held."""
  return config.loss.proximal_every_steps or rounds.num_steps(config)


def hold(
    config: ml_collections.ConfigDict,
    held: PyTree | None,
    params: PyTree,
    loss_params: PyTree,
    step: jax.Array,
) -> PyTree:
  """Returns what is held at a step: `params`, `loss_params`, both or neither.

  Args:
    config: reads `loss` and `rounds`.
    held: at the step before; None before the first one.
    params, loss_params: before the step.
    step: [] int32, about to be made.

  Raises:
    ValueError: a setting of `config.loss` is out of its range.
  """
  c, every = config.loss, every_steps(config)
  if c.behavior_logprobs not in BEHAVIORS:
    raise ValueError(
        f"loss.behavior_logprobs={c.behavior_logprobs!r}: allowed {BEHAVIORS}"
    )
  recomputed = c.behavior_logprobs == "recomputed"
  if every == 1:
    if recomputed:
      raise ValueError(
          f"loss.behavior_logprobs={c.behavior_logprobs!r}: the proximal policy"
          " must be held for more than one step"
      )
    # The policy itself is the proximal one.
    return {}
  new = {}
  if recomputed or c.correction == "decoupled":
    new["params"] = params
  if build.find(c.name).has_targets:
    new["loss_params"] = loss_params
  copy = lambda: jax.tree.map(jnp.copy, new)
  if held is None or not new:
    return copy()
  return jax.lax.cond(step % every == 0, copy, lambda: held)


def hold_of_state(config: ml_collections.ConfigDict, state: Any) -> Any:
  """Returns a `TrainState` whose held params are those of its step."""
  return dataclasses.replace(
      state,
      sampling_params=rounds.hold(
          config, state.sampling_params, state.params, state.step
      ),
      proximal_params=hold(
          config,
          state.proximal_params,
          state.params,
          state.loss_params,
          state.step,
      ),
  )


def temper(
    batch: types.Batch, beta: jax.Array, *, tau: jax.Array, gamma: jax.Array
) -> tuple[types.Batch, jax.Array]:
  """Returns the batch and β of a tempered target.

      (log π_ref/γ + r/β) / τ = log π_ref · 1/(γ τ) + r/(β τ)

  so the loss takes β τ, and log π_ref times a weight that goes with the batch:
  what is told of the KL stays that to π_ref itself.

  Args:
    batch: of B prompts, nothing prepared yet.
    beta, tau, gamma: [] float32, above 0.
  """
  weight_B = jnp.broadcast_to(1 / (gamma * tau), batch.rewards.shape[:1])
  prepared = {**batch.prepared, "ref_weight": weight_B}
  return dataclasses.replace(batch, prepared=prepared), beta * tau


def make(
    config: ml_collections.ConfigDict,
    model: Any,
    value_model: Any,
) -> Prepare:
  """Returns what fills `Batch.prepared` of the micro-batches of a batch.

  What one micro-batch can work out for itself is left to it, so that nothing is
  computed twice: with one, and nothing held, that is all.

  Args:
    config: reads `loss`, `rounds` and `sampling.temperature`.
    model: of the policy, a `models.build.Model`.
    value_model: a `models.heads.ScalarModel` where the objective learns one.

  Returns:
    prepare(held, loss_params, micro_batches, beta) -> micro_batches, with held
    of `hold` and leaves [M, B, ...] of M micro-batches.
  """
  c, row = config.loss, build.find(config.loss.name)
  length_norm = c.length_norm or row.length_norm
  by_batch = lambda x: x.reshape(-1, *x.shape[2:])

  def proximal(params: PyTree, micro: types.Batch) -> jax.Array:
    return forward.completion_logprobs(
        model,
        params,
        micro.prompt_tokens,
        micro.prompt_mask,
        micro.completion_tokens,
        temperature=config.sampling.temperature,
    )

  def prepare(
      held: PyTree,
      loss_params: PyTree,
      micro_batches: types.Batch,
      beta: jax.Array,
  ) -> types.Batch:
    num_micro, num_prompts = micro_batches.rewards.shape[:2]
    behavior = micro_batches.behavior_logprobs
    prepared = dict(micro_batches.prepared)
    if "params" in held:
      prepared["proximal_logprobs"] = jax.lax.map(
          lambda micro: proximal(held["params"], micro), micro_batches
      )
      if c.behavior_logprobs == "recomputed":
        behavior = prepared["proximal_logprobs"]
    if row.has_targets and (num_micro > 1 or "loss_params" in held):
      old = held.get("loss_params", loss_params)
      values = jax.lax.map(
          lambda micro: forward.completion_values(value_model, old, micro),
          micro_batches,
      )
      found = ppo.make_targets(
          by_batch(values),
          by_batch(behavior - micro_batches.ref_logprobs),
          by_batch(micro_batches.completion_mask),
          by_batch(micro_batches.rewards),
          beta=beta,
          **{name: c[name] for name in ppo.TARGET_SETTINGS},
      )
      prepared |= {
          field.name: getattr(found, field.name).reshape(values.shape)
          for field in dataclasses.fields(found)
      }
    if length_norm == "mean_tokens" and num_micro > 1:
      prepared["mean_tokens"] = jnp.broadcast_to(
          groups_lib.mean_tokens(micro_batches.completion_mask),
          (num_micro, num_prompts),
      )
    return dataclasses.replace(micro_batches, prepared=prepared)

  return prepare
