# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""The optimizer and the schedules, all functions of the optimizer step."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import ml_collections
import optax

Schedule = Callable[[jax.Array | int], jax.Array]

SCHEDULES = ("constant", "linear", "cosine")


def make_schedule(
    name: str,
    *,
    learning_rate: float,
    learning_rate_final: float,
    warmup_steps: int,
    num_steps: int,
) -> Schedule:
  """Returns step -> learning rate: a linear warm-up, then the named decay.

  Step s of the warm-up has learning_rate · (s + 1) / warmup_steps: the first
  update already moves. The decay starts at the step after the warm-up and would
  reach learning_rate_final at num_steps, one past the last step.

  Args:
    name: "constant" (learning_rate_final plays no part), "linear" or "cosine".
    learning_rate: the peak, at least 0.
    learning_rate_final: where the decay ends, at least 0.
    warmup_steps: at least 0, below num_steps; 0 starts at the peak.
    num_steps: optimizer steps of the whole run.

  Raises:
    ValueError: a setting out of its range, by its config key.
  """
  key = "optimizer."
  if name not in SCHEDULES:
    raise ValueError(f"{key}schedule={name!r}: allowed {SCHEDULES}")
  if not 0 <= warmup_steps < num_steps:
    raise ValueError(
        f"{key}warmup_steps={warmup_steps}: allowed 0 up to below the"
        f" {num_steps} steps of the run"
    )
  if learning_rate < 0 or learning_rate_final < 0:
    raise ValueError(
        f"{key}learning_rate={learning_rate},"
        f" {key}learning_rate_final={learning_rate_final}: at least 0"
    )

  end = learning_rate if name == "constant" else learning_rate_final

  def schedule(step: jax.Array | int) -> jax.Array:
    step = jnp.asarray(step, jnp.float32)
    warmup = jnp.minimum((step + 1) / max(warmup_steps, 1), 1.0)
    done = jnp.clip((step - warmup_steps) / (num_steps - warmup_steps), 0, 1)
    share = {
        "constant": jnp.ones_like(done),
        "linear": 1 - done,
        "cosine": (1 + jnp.cos(jnp.pi * done)) / 2,
    }[name]
    return warmup * (end + share * (learning_rate - end))

  return schedule


def beta_schedule(config_loss: ml_collections.ConfigDict) -> Schedule:
  """Returns step -> β, the KL coefficient of the update that the step makes.

      β = β_final (u-1)/T + β_0 (1 - (u-1)/T)   while u < beta_stop_steps
      β = β_final                               from then on

  with u = step + 1 and T = beta_decay_steps. A stop before T is a jump, as in
  the paper's summarization runs. T = 0 is a constant β.

  Source: Bartoldson et al. 2025 (arXiv:2503.18929), tables 2 and 3, and the
  code that they released.

  Raises:
    ValueError: a β that is not above 0, or a stop that is not in 1 … T, where
      the line would pass β_final.
  """
  beta, final = config_loss.beta, config_loss.beta_final
  decay_steps = config_loss.beta_decay_steps
  stop_steps = config_loss.beta_stop_steps
  if beta <= 0 or final <= 0:
    raise ValueError(
        f"loss.beta={beta}, loss.beta_final={final}: must be above 0"
    )
  if decay_steps < 0:
    raise ValueError(f"loss.beta_decay_steps={decay_steps}: at least 0")
  if decay_steps and not 1 <= stop_steps <= decay_steps:
    raise ValueError(
        f"loss.beta_stop_steps={stop_steps}: allowed 1 up to"
        f" loss.beta_decay_steps={decay_steps}"
    )

  def schedule(step: jax.Array | int) -> jax.Array:
    step = jnp.asarray(step, jnp.float32)  # u - 1
    if not decay_steps:
      return jnp.asarray(beta, jnp.float32)
    done = step / decay_steps
    line = final * done + beta * (1 - done)
    return jnp.where(step + 1 < stop_steps, line, final)

  return schedule


def make_optimizer(
    config_optimizer: ml_collections.ConfigDict, num_steps: int
) -> tuple[optax.GradientTransformation, Schedule]:
  """Returns AdamW behind a clip of the global norm, and its learning rate.

  Args:
    config_optimizer: learning_rate, learning_rate_final, schedule,
      warmup_steps, b1, b2, epsilon, weight_decay (decoupled, so scaled by the
      learning rate) and grad_clip_norm (0 = off).
    num_steps: optimizer steps of the whole run, for the schedule.

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
  schedule = make_schedule(
      c.schedule,
      learning_rate=c.learning_rate,
      learning_rate_final=c.learning_rate_final,
      warmup_steps=c.warmup_steps,
      num_steps=num_steps,
  )
  adamw = optax.adamw(
      schedule, b1=c.b1, b2=c.b2, eps=c.epsilon, weight_decay=c.weight_decay
  )
  if not c.grad_clip_norm:
    return adamw, schedule
  clip = optax.clip_by_global_norm(c.grad_clip_norm)
  return optax.chain(clip, adamw), schedule
