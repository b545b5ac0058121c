# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Schedules of the learning rate, β, tempering and the reward temperature.

All are functions of the optimizer step, counted from 0. With
`train.per_round_steps` = R > 0 they change once per R steps, as in code that
steps its scheduler once per generated batch. β and temperatures then use their
values at the round's first step, the learning rate its value at the round's
end.
"""

from collections.abc import Callable
import dataclasses

import jax
import jax.numpy as jnp
import ml_collections
import optax

from tba_jax.system import ramps

Schedule = Callable[[jax.Array | int], jax.Array]


def learning_rate(
    config_optimizer: ml_collections.ConfigDict,
    *,
    num_steps: int,
    per_round_steps: int,
) -> Schedule:
  """Returns step -> learning rate: a linear warm-up, then the named decay.

  Step s of the warm-up has rate learning_rate · (s + 1) / warmup_steps, so the
  first update is not zero. "linear" and "cosine" decay after the warm-up and
  would reach learning_rate_final at num_steps, one past the last step.
  "warmup_stable_decay" is constant for stable_steps, then a cosine over
  decay_steps (0 = until num_steps), which may extend past the run.

  With per_round_steps = R, step s has the rate after (s // R + 1) R steps, at
  most num_steps: "linear" to 0 gives round r (from 1) the rate
  learning_rate · (1 - r / rounds), and the last round 0.

  Source: Bartoldson et al. 2025 (arXiv:2503.18929), table 2 (warm-up, stable,
  decay); per round: the code of Noukhovitch et al. 2025 (arXiv:2410.18252).
  """
  c, R = config_optimizer, per_round_steps
  peak, final = c.learning_rate, c.learning_rate_final
  start, length = c.warmup_steps, num_steps - c.warmup_steps
  if c.schedule == "warmup_stable_decay":
    start += c.stable_steps
    length = c.decay_steps or num_steps - start
  if c.schedule == "constant":
    decay = optax.constant_schedule(peak)
  elif c.schedule == "linear":
    decay = optax.linear_schedule(peak, final, length)
  else:
    decay = optax.cosine_decay_schedule(peak, length, alpha=final / peak)
  parts, ends = [optax.constant_schedule(peak), decay], [start]
  if c.warmup_steps:
    # Counts steps including the current one; per-round steps already do.
    first = 0.0 if R else peak / c.warmup_steps
    warmup = optax.linear_schedule(
        first, peak, max(c.warmup_steps - (not R), 1)
    )
    parts, ends = [warmup, *parts], [c.warmup_steps, start]
  rate = optax.join_schedules(parts, ends)

  def schedule(step: jax.Array | int) -> jax.Array:
    if R:
      step = jnp.minimum((step // R + 1) * R, num_steps)
    # Rounding may put a rate of 0 slightly below 0.
    return jnp.maximum(jnp.asarray(rate(step), jnp.float32), 0.0)

  return schedule


def lag_scale(
    config_optimizer: ml_collections.ConfigDict,
    staleness_steps: jax.Array,
    effective_sample_share: jax.Array,
) -> jax.Array:
  """Returns [] float32, the learning rate's factor for a batch's staleness.

      min(1, L / S) · e^p

  with S the mean staleness of the batch in steps, L = `full_lag_steps` (0
  drops the first factor), e the effective sample share (Σ w)²/(N Σ w²) of its
  completions and p = `sample_share_power`. It applies only to the policy.

  Source: the largest stable rate falls as 1/S (arXiv:2607.01083); scaling the
  rate by effective sample size is from VCPO (arXiv:2602.17616).

  Args:
    config_optimizer: `config.optimizer`.
    staleness_steps: [B, K, ...], staleness of each completion.
    effective_sample_share: [] float32, share from 0 to 1.
  """
  c, scale = config_optimizer, jnp.ones((), jnp.float32)
  if c.full_lag_steps:
    lag = jnp.maximum(staleness_steps.mean(), c.full_lag_steps)
    scale *= c.full_lag_steps / lag
  if c.sample_share_power:
    scale *= effective_sample_share**c.sample_share_power
  return scale


def beta(
    config_loss: ml_collections.ConfigDict, *, per_round_steps: int
) -> Schedule:
  """Returns step -> β, the KL coefficient of that step's update.

      β = END (u-1)/STEPS + START (1 - (u-1)/STEPS)   while u < STOP
      β = END                                         from then on

  with u = step + 1 and `loss.beta` = START:END:STEPS:STOP, where STOP defaults
  to STEPS. A STOP before STEPS makes β jump, as in the paper's summarization
  runs. With per_round_steps = R, a step has the β of step (step // R) R.

  Source: Bartoldson et al. 2025 (arXiv:2503.18929), tables 2 and 3, and their
  released code.
  """
  ramp, R = ramps.parse(config_loss.beta), per_round_steps or 1
  schedule = _linear(dataclasses.replace(ramp, stop=ramp.stop or ramp.steps))
  return lambda step: jnp.asarray(schedule(step // R * R), jnp.float32)


def tempering(
    config_tempering: ml_collections.ConfigDict, *, per_round_steps: int
) -> Callable[[jax.Array | int], tuple[jax.Array, jax.Array]] | None:
  """Returns step -> (τ, γ) of a tempered target, or None if both stay 1.

      log R(y) = (log π_ref(y)/γ + r(y)/β) / τ

  With per_round_steps = R, a step has the values of step (step // R) R.

  Source: Lee et al. 2025 (arXiv:2405.18540), in their released code.
  """
  c, R = config_tempering, per_round_steps or 1
  both = ramps.parse(c.tau), ramps.parse(c.gamma)
  if all(ramp.start == ramp.end == 1 for ramp in both):
    return None
  tau, gamma = map(_linear, both)

  def schedule(step: jax.Array | int) -> tuple[jax.Array, jax.Array]:
    first = step // R * R
    return jnp.float32(tau(first)), jnp.float32(gamma(first))

  return schedule


def reward_temperature(
    config_replay: ml_collections.ConfigDict, *, per_round_steps: int
) -> Callable[[int], float]:
  """Returns step -> temperature of reward-weighted draws, on the host.

  With per_round_steps = R, a step has the value of step (step // R) R.

  Source: the linear schedule of Lee et al. 2025 (arXiv:2405.18540) for the
  reward temperature, applied here to the weights of replay draws.
  """
  ramp = ramps.parse(config_replay.reward_temperature)
  R = per_round_steps or 1

  def schedule(step: int) -> float:
    step = step // R * R
    if not ramp.steps:
      return float(ramp.start)
    done = min(step / ramp.steps, 1.0)
    if ramp.stop and step >= ramp.stop - 1:
      done = 1.0
    return ramp.end * done + ramp.start * (1 - done)

  return schedule


def _linear(ramp: ramps.Ramp) -> optax.Schedule:
  """Returns the ramp as a schedule; it jumps to its end at update `stop`."""
  if not ramp.steps:
    return optax.constant_schedule(ramp.start)
  schedule = optax.linear_schedule(ramp.start, ramp.end, ramp.steps)
  if not ramp.stop:
    return schedule
  rest = optax.constant_schedule(ramp.end)
  return optax.join_schedules([schedule, rest], [ramp.stop - 1])
