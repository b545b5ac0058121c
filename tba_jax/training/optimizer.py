# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""The optimizers: of the policy, and of what the loss learns itself."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import ml_collections
import optax

from tba_jax import types
from tba_jax.training import schedules

STATE_DTYPES = ("float32", "bfloat16")


@dataclasses.dataclass(frozen=True)
class Optimizers:
  """What one step applies.

  tx, learning_rate_fn: of the policy.
  loss_tx: of what the loss learns itself.
  value_learning_rate_fn: of the value model, where that is what it learns.
  """

  tx: optax.GradientTransformation
  learning_rate_fn: schedules.Schedule
  loss_tx: optax.GradientTransformation
  value_learning_rate_fn: schedules.Schedule | None = None


def make_optimizers(
    config: ml_collections.ConfigDict, *, has_values: bool
) -> Optimizers:
  """Returns the optimizers of a run.

  A value model has the policy's optimizer and schedule, from a learning rate of
  its own and with gradients clipped by themselves.

  Args:
    config: reads `optimizer`, `train` and the learning rates of `loss`.
    has_values: whether the loss learns a value model.

  Raises:
    ValueError: as `make_optimizer`.
  """
  make = functools.partial(
      make_optimizer,
      num_steps=config.train.num_steps,
      per_round_steps=config.train.per_round_steps,
  )
  tx, learning_rate_fn = make(config.optimizer)
  if not has_values:
    # log Z starts far from where it belongs, so it moves at its own rate.
    loss_tx = optax.adam(config.loss.log_z_learning_rate)
    return Optimizers(tx, learning_rate_fn, loss_tx)
  own = config.optimizer.copy_and_resolve_references()
  scale = config.loss.value_learning_rate / own.learning_rate
  for name in ("learning_rate", "learning_rate_final"):
    own[name] = scale * own[name]
  return Optimizers(tx, learning_rate_fn, *make(own))


def make_optimizer(
    config_optimizer: ml_collections.ConfigDict,
    num_steps: int,
    *,
    per_round_steps: int,
) -> tuple[optax.GradientTransformation, schedules.Schedule]:
  """Returns AdamW behind a clip of the global norm, and its learning rate.

  Args:
    config_optimizer: what `schedules.learning_rate` reads, and b1, b2, epsilon,
      weight_decay (decoupled, so scaled by the learning rate),
      grad_clip_norm (0 = off) and state_dtype, of the first moment. The second
      is float32: at b2 = .999 a step moves it by a thousandth, which bfloat16,
      with steps of 1/256, would round away.
    num_steps: optimizer steps of the whole run, for the schedule.
    per_round_steps: see `schedules`.

  Raises:
    ValueError: a setting out of its range, by its config key.
  """
  c = config_optimizer
  for name in ("b1", "b2"):
    if not 0 <= c[name] < 1:
      raise ValueError(f"optimizer.{name}={c[name]}: allowed 0 up to below 1")
  if c.epsilon <= 0:
    raise ValueError(f"optimizer.epsilon={c.epsilon}: must be above 0")
  for name in ("weight_decay", "grad_clip_norm"):
    if c[name] < 0:
      raise ValueError(f"optimizer.{name}={c[name]}: at least 0")
  if c.state_dtype not in STATE_DTYPES:
    raise ValueError(
        f"optimizer.state_dtype={c.state_dtype!r}: allowed {STATE_DTYPES}"
    )
  schedule = schedules.learning_rate(
      c, num_steps=num_steps, per_round_steps=per_round_steps
  )
  adamw = _with_float32_state(
      optax.adamw(
          schedule,
          b1=c.b1,
          b2=c.b2,
          eps=c.epsilon,
          weight_decay=c.weight_decay,
          mu_dtype=c.state_dtype,
      )
  )
  if not c.grad_clip_norm:
    return adamw, schedule
  clip = optax.clip_by_global_norm(c.grad_clip_norm)
  return optax.chain(clip, adamw), schedule


def _with_float32_state(
    tx: optax.GradientTransformation,
) -> optax.GradientTransformation:
  """It works as on float32 params, also where those are bfloat16."""
  to_float32 = lambda tree: jax.tree.map(lambda x: x.astype(jnp.float32), tree)

  def update(
      grads: types.PyTree, state: optax.OptState, params: types.PyTree
  ) -> tuple[types.PyTree, optax.OptState]:
    return tx.update(to_float32(grads), state, to_float32(params))

  init = lambda params: tx.init(to_float32(params))
  return optax.GradientTransformation(init, update)
