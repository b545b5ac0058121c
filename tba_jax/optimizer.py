# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""The optimizer."""

import ml_collections
import optax

from tba_jax import schedules


def make_optimizer(
    config_optimizer: ml_collections.ConfigDict,
    num_steps: int,
    *,
    per_round_steps: int,
) -> tuple[optax.GradientTransformation, schedules.Schedule]:
  """Returns AdamW behind a clip of the global norm, and its learning rate.

  Args:
    config_optimizer: what `schedules.learning_rate` reads, and b1, b2, epsilon,
      weight_decay (decoupled, so scaled by the learning rate) and
      grad_clip_norm (0 = off).
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
  schedule = schedules.learning_rate(
      c, num_steps=num_steps, per_round_steps=per_round_steps
  )
  adamw = optax.adamw(
      schedule, b1=c.b1, b2=c.b2, eps=c.epsilon, weight_decay=c.weight_decay
  )
  if not c.grad_clip_norm:
    return adamw, schedule
  clip = optax.clip_by_global_norm(c.grad_clip_norm)
  return optax.chain(clip, adamw), schedule
