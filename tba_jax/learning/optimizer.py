# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Optimizers of the policy and of the loss params."""

import dataclasses

import jax
import jax.numpy as jnp
import ml_collections
import optax

from tba_jax import types
from tba_jax.learning import schedules
from tba_jax.models.net import layers

PyTree = types.PyTree


@dataclasses.dataclass(frozen=True)
class Optimizer:
  """A gradient transformation and a separate learning rate schedule.

  The schedule depends on the train state's step, so skipped updates do not
  delay it.
  """

  tx: optax.GradientTransformation
  learning_rate: schedules.Schedule

  def update(
      self,
      grads: PyTree,
      opt_state: optax.OptState,
      params: PyTree,
      learning_rate: jax.Array,
  ) -> tuple[PyTree, optax.OptState]:
    """Returns new params and optimizer state."""
    updates, opt_state = self.tx.update(grads, opt_state, params)
    updates = jax.tree.map(
        lambda u: -learning_rate.astype(u.dtype) * u, without_fixed(updates)
    )
    return optax.apply_updates(params, updates), opt_state


def without_fixed(updates: PyTree) -> PyTree:
  """Returns updates with zeros for `layers.FIXED`."""
  return jax.tree_util.tree_map_with_path(
      lambda path, u: jnp.zeros_like(u)
      if path and getattr(path[-1], "key", "") in layers.FIXED
      else u,
      updates,
  )


def make_optimizer(
    config_optimizer: ml_collections.ConfigDict,
    num_steps: int,
    *,
    per_round_steps: int,
) -> Optimizer:
  """Returns AdamW with gradients clipped by global norm.

  Args:
    config_optimizer: `config.optimizer`.
    num_steps: optimizer steps of the whole run, for the schedule.
    per_round_steps: see `schedules`.
  """
  c = config_optimizer
  # `identity` gives the state the same structure without clipping.
  norm = c.grad_clip_norm
  tx = optax.chain(
      optax.clip_by_global_norm(norm) if norm else optax.identity(),
      optax.scale_by_adam(c.b1, c.b2, c.epsilon),
      optax.add_decayed_weights(c.weight_decay),
  )
  schedule = schedules.learning_rate(
      c, num_steps=num_steps, per_round_steps=per_round_steps
  )
  return Optimizer(tx, schedule)


def make_optimizers(
    config: ml_collections.ConfigDict, *, has_values: bool
) -> tuple[Optimizer, Optimizer]:
  """Returns the optimizers of the policy and of the loss params.

  A value model uses the policy's optimizer and schedule, with a peak rate of
  `loss.value_learning_rate` and separate gradient clipping. log Z uses Adam at
  a constant rate.
  """
  policy = make_optimizer(
      config.optimizer,
      config.train.num_steps,
      per_round_steps=config.train.per_round_steps,
  )
  if not has_values:
    rate = optax.constant_schedule(jnp.float32(config.loss.log_z_learning_rate))
    return policy, Optimizer(optax.scale_by_adam(), rate)
  ratio = config.loss.value_learning_rate / config.optimizer.learning_rate
  return policy, Optimizer(
      policy.tx, lambda step: ratio * policy.learning_rate(step)
  )
