# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Schedules of the learning rate, of β and of the reward temperature.

All are functions of the optimizer step, counted from 0. With
`train.per_round_steps` = R above 0 they hold their value through every R steps,
as code does that moves them once for each generated batch: β and the reward
temperature have the value of the round's first step, and the learning rate that
of the round's *end*, since its scheduler was moved before the round's updates.
"""

from collections.abc import Callable
import math

import jax
import jax.numpy as jnp
import ml_collections

Schedule = Callable[[jax.Array | int], jax.Array]

LEARNING_RATES = ("constant", "linear", "cosine", "warmup_stable_decay")


def learning_rate(
    config_optimizer: ml_collections.ConfigDict,
    *,
    num_steps: int,
    per_round_steps: int,
) -> Schedule:
  """Returns step -> learning rate: a linear warm-up, then the named decay.

  Step s of the warm-up has learning_rate · (s + 1) / warmup_steps: the first
  update already moves. "linear" and "cosine" begin to decay at the step after
  the warm-up and would reach learning_rate_final at num_steps, one past the
  last step. "warmup_stable_decay" stays at its peak for stable_steps first, and
  then falls as a cosine over decay_steps, which may end after the run: the rate
  of the last step is then above learning_rate_final.

  With per_round_steps = R the rate of step s is the one at
  (s // R + 1) R steps done, num_steps at most: "linear" to 0 gives round r
  (from 1) the rate learning_rate · (1 - r / rounds), and the last round 0.

  Source: Bartoldson et al. 2025 (arXiv:2503.18929), table 2 (warm-up, stable,
  decay); per round: the code that Noukhovitch et al. 2025 (arXiv:2410.18252)
  released.

  Args:
    config_optimizer: learning_rate (the peak), learning_rate_final (plays no
      part in "constant"), schedule, warmup_steps, stable_steps, decay_steps (0
      = up to num_steps).
    num_steps: optimizer steps of the whole run.
    per_round_steps: R; 0 follows each optimizer step.

  Raises:
    ValueError: a setting out of its range, by its config key.
  """
  c = config_optimizer
  _check_learning_rate(c, num_steps, per_round_steps)
  start, length = c.warmup_steps, num_steps - c.warmup_steps
  if c.schedule == "warmup_stable_decay":
    start += c.stable_steps
    length = c.decay_steps or num_steps - start
  peak, final = c.learning_rate, c.learning_rate_final
  final = peak if c.schedule == "constant" else final

  def schedule(step: jax.Array | int) -> jax.Array:
    step = jnp.asarray(step, jnp.int32)
    moved = step + 1
    if per_round_steps:
      moved = (step // per_round_steps + 1) * per_round_steps
      step = moved = jnp.minimum(moved, num_steps)
    warmup = jnp.minimum(moved.astype(jnp.float32) / max(c.warmup_steps, 1), 1)
    done = jnp.clip((step - start).astype(jnp.float32) / length, 0, 1)
    line, arc = 1 - done, (1 + jnp.cos(jnp.pi * done)) / 2
    share = line if c.schedule == "linear" else arc
    return warmup * (final + share * (peak - final))

  return schedule


def beta(
    config_loss: ml_collections.ConfigDict, *, per_round_steps: int
) -> Schedule:
  """Returns step -> β, the KL coefficient of the update that the step makes.

      β = β_final (u-1)/T + β_0 (1 - (u-1)/T)   while u < beta_stop_steps
      β = β_final                               from then on

  with u = step + 1 and T = beta_decay_steps. A stop before T is a jump, as in
  the paper's summarization runs. T = 0 is a constant β. With per_round_steps =
  R a step has the β of its round's first one, (step // R) R.

  Source: Bartoldson et al. 2025 (arXiv:2503.18929), tables 2 and 3, and the
  code that they released.

  Raises:
    ValueError: a β that is not above 0, or a stop that is not in 1 … T, where
      the line would pass β_final.
  """
  first, final = config_loss.beta, config_loss.beta_final
  decay_steps = config_loss.beta_decay_steps
  stop_steps = config_loss.beta_stop_steps
  if first <= 0 or final <= 0:
    raise ValueError(
        f"loss.beta={first}, loss.beta_final={final}: must be above 0"
    )
  if decay_steps < 0:
    raise ValueError(f"loss.beta_decay_steps={decay_steps}: at least 0")
  if decay_steps and not 1 <= stop_steps <= decay_steps:
    raise ValueError(
        f"loss.beta_stop_steps={stop_steps}: allowed 1 up to"
        f" loss.beta_decay_steps={decay_steps}"
    )

  def schedule(step: jax.Array | int) -> jax.Array:
    if not decay_steps:
      return jnp.asarray(first, jnp.float32)
    step = jnp.asarray(step, jnp.int32)  # u - 1
    if per_round_steps:
      step = step // per_round_steps * per_round_steps
    done = step.astype(jnp.float32) / decay_steps
    line = final * done + first * (1 - done)
    return jnp.where(step + 1 < stop_steps, line, final)

  return schedule


def tempering(
    config_tempering: ml_collections.ConfigDict, *, per_round_steps: int
) -> Callable[[jax.Array | int], tuple[jax.Array, jax.Array]] | None:
  """Returns step -> (τ, γ) of a tempered target; None where both stay 1.

      log R(y) = (log π_ref(y)/γ + r(y)/β) / τ

  Each is linear from its first to its final value over its decay steps, and
  constant from then on; 0 steps keep the first one. With per_round_steps = R a
  step has the values of its round's first one.

  Source: Lee et al. 2025 (arXiv:2405.18540), in the code that they released.

  Raises:
    ValueError: a value that is not above 0, or fewer than 0 steps.
  """
  c = config_tempering
  lines = []
  for name in ("tau", "gamma"):
    first, final = c[name], c[f"{name}_final"]
    decay_steps = c[f"{name}_decay_steps"]
    if first <= 0 or final <= 0:
      raise ValueError(
          f"tempering.{name}={first}, tempering.{name}_final={final}: must be"
          " above 0"
      )
    if decay_steps < 0:
      raise ValueError(
          f"tempering.{name}_decay_steps={decay_steps}: at least 0"
      )
    lines.append((first, final if decay_steps else first, max(decay_steps, 1)))
  if all(first == final == 1 for first, final, _ in lines):
    return None

  def schedule(step: jax.Array | int) -> tuple[jax.Array, jax.Array]:
    step = jnp.asarray(step, jnp.int32)
    if per_round_steps:
      step = step // per_round_steps * per_round_steps
    done = step.astype(jnp.float32)
    values = [
        first + (final - first) * jnp.minimum(done / steps, 1.0)
        for first, final, steps in lines
    ]
    return values[0], values[1]

  return schedule


def reward_temperature(
    config_replay: ml_collections.ConfigDict, *, per_round_steps: int
) -> Callable[[int], float]:
  """Returns step -> temperature of reward draws; on the host, without JAX.

  Linear from reward_temperature to reward_temperature_final over
  reward_temperature_decay_steps, then reward_temperature_final; 0 steps keep
  it constant. With per_round_steps = R a step has the value of its round's
  first one.

  Source: the linear rule of Lee et al. 2025 (arXiv:2405.18540) for the reward's
  temperature, on which the red-teaming runs of arXiv:2503.18929 build; applied
  here to the weights of replay draws.

  Raises:
    ValueError: a temperature that is not above 0, or fewer than 0 steps.
  """
  first = config_replay.reward_temperature
  final = config_replay.reward_temperature_final
  decay_steps = config_replay.reward_temperature_decay_steps
  if first <= 0 or final <= 0:
    raise ValueError(
        f"replay.reward_temperature={first},"
        f" replay.reward_temperature_final={final}: must be above 0"
    )
  if decay_steps < 0:
    raise ValueError(
        f"replay.reward_temperature_decay_steps={decay_steps}: at least 0"
    )

  def schedule(step: int) -> float:
    if not decay_steps:
      return float(first)
    if per_round_steps:
      step = step // per_round_steps * per_round_steps
    done = min(step / decay_steps, 1.0)
    return final * done + first * (1 - done)

  return schedule


def _check_learning_rate(
    c: ml_collections.ConfigDict, num_steps: int, per_round_steps: int
) -> None:
  key = "optimizer."
  if c.schedule not in LEARNING_RATES:
    raise ValueError(f"{key}schedule={c.schedule!r}: allowed {LEARNING_RATES}")
  if not 0 <= c.warmup_steps < num_steps:
    raise ValueError(
        f"{key}warmup_steps={c.warmup_steps}: allowed 0 up to below the"
        f" {num_steps} steps of the run"
    )
  if not all(
      0 <= rate < math.inf for rate in (c.learning_rate, c.learning_rate_final)
  ):
    raise ValueError(
        f"{key}learning_rate={c.learning_rate},"
        f" {key}learning_rate_final={c.learning_rate_final}: at least 0"
    )
  if not 0 <= c.stable_steps < num_steps - c.warmup_steps:
    raise ValueError(
        f"{key}stable_steps={c.stable_steps}: allowed 0 up to below the"
        f" {num_steps - c.warmup_steps} steps after the warm-up"
    )
  if c.decay_steps < 0:
    raise ValueError(f"{key}decay_steps={c.decay_steps}: at least 0")
  if per_round_steps < 0:
    raise ValueError(f"train.per_round_steps={per_round_steps}: at least 0")
