# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""A bandit trained with the real losses, whose exact target is known.

One prompt has N completions of one token; the policy is a table of N logits.
The target of the trajectory balance objectives,

    π*(y) = π_ref(y) exp(r(y)/β) / Z,    Z = Σ_y π_ref(y) exp(r(y)/β),

is then a vector, and the distance to it can be computed. Losses, corrections
and optimizer are those used in training.
"""

from collections.abc import Callable
import dataclasses

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
import optax

from tba_jax import types
from tba_jax.learning import optimizer
from tba_jax.losses import objective
from tba_jax.losses import objective_table
from tba_jax.system import ramps


@dataclasses.dataclass(frozen=True)
class Space:
  """A prompt with N completions.

  ref_logprobs_N: [N] float32, log π_ref, nats; their exp sums to 1.
  rewards_N: [N] float32, task units.
  """

  ref_logprobs_N: np.ndarray
  rewards_N: np.ndarray


def make_space(num_completions: int, *, seed: int) -> Space:
  """Returns a space with Gaussian logits of π_ref and rewards in [0, 1)."""
  rng = np.random.default_rng(seed)
  logits_N = rng.normal(size=num_completions)
  return Space(
      ref_logprobs_N=np.asarray(_log_softmax(logits_N), np.float32),
      rewards_N=rng.uniform(size=num_completions).astype(np.float32),
  )


def target(space: Space, *, beta: float) -> np.ndarray:
  """Returns π*, [N] float64: π_ref exp(r/β) / Z."""
  logits_N = space.ref_logprobs_N + space.rewards_N.astype(float) / beta
  return np.exp(_log_softmax(logits_N))


def value(config: ml_collections.ConfigDict, space: Space) -> float:
  """Returns V* = β₁ log Σ π_ref exp(r/β₁), which A*-PO reads from a file.

  β₁ is `loss.baseline_temperature`, task units.
  """
  temperature = config.loss.baseline_temperature
  logits_N = space.ref_logprobs_N + space.rewards_N.astype(float) / temperature
  return float(temperature * np.logaddexp.reduce(logits_N))


def distance(probs_SxN: np.ndarray, target_N: np.ndarray) -> np.ndarray:
  """Returns [S], the total variation distance of each row to the target."""
  return np.abs(probs_SxN - target_N).sum(axis=-1) / 2


def make_learner(
    config: ml_collections.ConfigDict, space: Space
) -> Callable[..., np.ndarray]:
  """Returns a jitted function that trains a policy, starting from π_ref.

      learn(*, behavior_N=None, lag_steps=0) -> probs_SxN

  A step draws `train.prompts_per_batch` groups of
  `train.completions_per_prompt` completions. Args of `learn`:

    behavior_N: [N], fixed sampling distribution, with positive probabilities;
      None samples from the policy.
    lag_steps: age of the sampling policy in steps; 0 is on-policy. The first
      `lag_steps` steps sample from π_ref. Completions of a fixed distribution
      count as one step old.

  `learn` returns the policy's probabilities before the first step (π_ref) and
  after each of S steps, [S + 1, N] float32. It raises ValueError if
  `behavior_N` is not a distribution or `lag_steps` is negative.

  Args:
    config: reads `loss` (beta is constant), `optimizer`, `train` and `seed`.
  """
  num_steps = config.train.num_steps
  ref_logprobs_N = jnp.asarray(space.ref_logprobs_N)
  policy = optimizer.make_optimizer(
      config.optimizer, num_steps, per_round_steps=config.train.per_round_steps
  )
  has_values = objective_table.find(config.loss.name).has_values
  loss_tx = optax.adam(config.loss.log_z_learning_rate)
  loss_of = _loss_function(config, space)

  def step(carry, t, lag_steps, fixed_N):
    logits_N, loss_params, states, past_SxN, rng = carry
    sampler_N = past_SxN[jnp.maximum(t - lag_steps, 0)]
    sampler_N = jnp.where(lag_steps < 0, fixed_N, sampler_N)
    grads = jax.grad(loss_of, argnums=(0, 1))(
        logits_N,
        loss_params,
        sampler_N,
        jnp.where(lag_steps < 0, 1, jnp.minimum(t, lag_steps)),
        jax.random.fold_in(rng, t),
    )
    logits_N, state = policy.update(
        grads[0], states[0], logits_N, jnp.asarray(policy.learning_rate(t))
    )
    loss_updates, loss_state = loss_tx.update(grads[1], states[1], loss_params)
    loss_params = optax.apply_updates(loss_params, loss_updates)
    past_SxN = past_SxN.at[t + 1].set(jax.nn.log_softmax(logits_N))
    return logits_N, loss_params, (state, loss_state), past_SxN, rng

  @jax.jit
  def run(lag_steps, fixed_N):
    loss_params = objective.make_loss_params(config)
    if has_values:
      loss_params = {"value": jnp.zeros(())}
    states = policy.tx.init(ref_logprobs_N), loss_tx.init(loss_params)
    past_SxN = jnp.tile(ref_logprobs_N, (num_steps + 1, 1))
    rng = jax.random.PRNGKey(config.seed)
    carry = ref_logprobs_N, loss_params, states, past_SxN, rng
    carry = jax.lax.fori_loop(
        0, num_steps, lambda t, c: step(c, t, lag_steps, fixed_N), carry
    )
    return jnp.exp(carry[3])

  def learn(
      *, behavior_N: np.ndarray | None = None, lag_steps: int = 0
  ) -> np.ndarray:
    if lag_steps < 0:
      raise ValueError(f"lag_steps={lag_steps}: must be 0 or more")
    if behavior_N is None:
      return np.asarray(run(lag_steps, ref_logprobs_N))
    return np.asarray(run(-1, _log_behavior(behavior_N, space)))

  return learn


def _loss_function(
    config: ml_collections.ConfigDict, space: Space
) -> Callable[..., jax.Array]:
  """Returns the loss of a step, [], as a function.

  Its arguments are the policy's logits, the loss params, the sampling policy's
  log-probs, that policy's age in steps, and a key.
  """
  pure_loss = objective.make_pure_loss(config)
  shape = config.train.prompts_per_batch, config.train.completions_per_prompt
  ref_logprobs_N = jnp.asarray(space.ref_logprobs_N)
  rewards_N = jnp.asarray(space.rewards_N)

  baselines_Bx1 = jnp.full((shape[0], 1), value(config, space))

  def loss_of(logits_N, loss_params, sampler_logprobs_N, age_steps, rng):
    y_BxK = jax.random.categorical(rng, sampler_logprobs_N, shape=shape)
    of_tokens = lambda values_N: values_N[y_BxK][:, :, None]
    batch = types.Batch(
        prompt_tokens=jnp.zeros((shape[0], 1), jnp.int32),
        prompt_mask=jnp.ones((shape[0], 1)),
        completion_tokens=y_BxK[:, :, None],
        completion_mask=jnp.ones((*shape, 1)),
        behavior_logprobs=of_tokens(sampler_logprobs_N),
        ref_logprobs=of_tokens(ref_logprobs_N),
        rewards=rewards_N[y_BxK],
        staleness_steps=jnp.full(shape, age_steps, jnp.float32),
        prepared={"baselines_Bx1": baselines_Bx1},
    )
    logprobs_BxKx1 = of_tokens(jax.nn.log_softmax(logits_N))
    beta, values_BxKx1 = jnp.float32(ramps.parse(config.loss.beta).start), None
    if "value" in loss_params:
      values_BxKx1 = jnp.broadcast_to(loss_params["value"], (*shape, 1))
    return pure_loss(logprobs_BxKx1, loss_params, batch, beta, values_BxKx1)[0]

  return loss_of


def _log_behavior(behavior_N: np.ndarray, space: Space) -> jax.Array:
  """Returns the log of a distribution over the completions."""
  behavior_N = np.asarray(behavior_N, float)
  if (
      behavior_N.shape != space.rewards_N.shape
      or not (behavior_N > 0).all()
      or abs(behavior_N.sum() - 1) > 1e-5
  ):
    raise ValueError(
        f"behavior_N={behavior_N}: must be {len(space.rewards_N)} probabilities"
        " above 0 that sum to 1"
    )
  return jnp.asarray(np.log(behavior_N), jnp.float32)


def _log_softmax(logits_N: np.ndarray) -> np.ndarray:
  return logits_N - np.logaddexp.reduce(logits_N)
