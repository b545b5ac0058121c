# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""The arrays that an objective reads, and sums over a completion's tokens."""

from collections.abc import Callable
import dataclasses

import chex
import jax
import jax.numpy as jnp

# Result of a loss: its value, [] float32, and arrays that metrics read.
Loss = tuple[jax.Array, dict[str, jax.Array]]

MoveFn = Callable[[jax.Array], jax.Array]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Targets:
  """Targets of an actor-critic objective, without gradient.

  old_values_BxKxT: [B, K, T] float32, values that the targets were computed
    from.
  advantages_BxKxT: [B, K, T] float32, 0 on uncounted tokens.
  returns_BxKxT: [B, K, T] float32, regression target of the values.
  """

  old_values_BxKxT: jax.Array
  advantages_BxKxT: jax.Array
  returns_BxKxT: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Groups:
  """K completions of each of B prompts; the input of every loss.

  logprobs_BxKxT: [B, K, T] float32, log π of each token in nats. Its gradient
    is multiplied by the importance correction.
  kl_logprobs_BxKxT: [B, K, T] float32, the same values with an uncorrected
    gradient, for KL terms outside ratio and clip.
  behavior_logprobs_BxKxT: [B, K, T] float32, log π_behavior.
  ref_logprobs_BxKxT: [B, K, T] float32, log π_ref.
  mask_BxKxT: [B, K, T] float32, 1 on counted tokens.
  weights_BxKxT: [B, K, T] float32, `length_weights` of the mask.
  rewards_BxK: [B, K] float32, task units.
  log_z_Bx1: [B, 1] float32, learned log Z(x) in nats; None where not learned.
  values_BxKxT: [B, K, T] float32, learned value of the state before each token,
    in units of reward; None without a value model.
  targets: PPO targets; None for other objectives.
  staleness_BxK: [B, K] float32, age of the behavior policy in steps; None
    counts as fresh.
  baselines_Bx1: [B, 1] float32, value of the prompt under the optimal policy,
    in units of reward, from `loss.baseline_file`; None without a file.
  divergences_BxKxT: [B, K, T] float32, divergence of the next-token
    distribution from the reference's before each token, nats; None for
    objectives that compare log-probs.
  """

  logprobs_BxKxT: jax.Array
  kl_logprobs_BxKxT: jax.Array
  behavior_logprobs_BxKxT: jax.Array
  ref_logprobs_BxKxT: jax.Array
  mask_BxKxT: jax.Array
  weights_BxKxT: jax.Array
  rewards_BxK: jax.Array
  log_z_Bx1: jax.Array | None = None
  values_BxKxT: jax.Array | None = None
  targets: Targets | None = None
  staleness_BxK: jax.Array | None = None
  baselines_Bx1: jax.Array | None = None
  divergences_BxKxT: jax.Array | None = None

  @property
  def counted_BxK(self) -> jax.Array:
    """1 on completions with a counted token, else 0."""
    return (self.mask_BxKxT.max(axis=2) > 0).astype(self.rewards_BxK.dtype)

  @property
  def seq_BxK(self) -> jax.Array:
    """Weighted log π(y|x)."""
    return weighted_sums(self.logprobs_BxKxT, self.weights_BxKxT)

  @property
  def ref_seq_BxK(self) -> jax.Array:
    """Weighted log π_ref(y|x), without gradient."""
    return jax.lax.stop_gradient(
        weighted_sums(self.ref_logprobs_BxKxT, self.weights_BxKxT)
    )

  @property
  def rho_BxK(self) -> jax.Array:
    """Weighted log π(y|x) - log π_ref(y|x)."""
    return self.seq_BxK - self.ref_seq_BxK

  @property
  def behavior_kl_BxK(self) -> jax.Array:
    """log π_behavior - log π_ref, summed over the tokens (never weighted)."""
    return weighted_sums(
        self.behavior_logprobs_BxKxT - self.ref_logprobs_BxKxT, self.mask_BxKxT
    )


def weighted_sums(
    values_BxKxT: jax.Array, weights_BxKxT: jax.Array
) -> jax.Array:
  """Returns [B, K], Σ_t weight_t value_t; a weight of 0 masks inf and nan."""
  chex.assert_equal_shape([values_BxKxT, weights_BxKxT])
  shown_BxKxT = jnp.where(weights_BxKxT > 0, values_BxKxT, 0.0)
  return jnp.sum(weights_BxKxT * shown_BxKxT, axis=2)


def counted_first(mask_BxKxT: jax.Array) -> tuple[MoveFn, MoveFn]:
  """Returns functions that move counted tokens to the front, and back.

  Both map [B, K, T] to [B, K, T]. They let a recursion over tokens skip
  uncounted tokens, such as environment tokens between turns.
  """
  order_BxKxT = jnp.argsort(mask_BxKxT <= 0, axis=2, stable=True)
  places_BxKxT = jnp.argsort(order_BxKxT, axis=2)

  def front(x_BxKxT: jax.Array) -> jax.Array:
    return jnp.take_along_axis(x_BxKxT, order_BxKxT, axis=2)

  def back(x_BxKxT: jax.Array) -> jax.Array:
    return jnp.take_along_axis(x_BxKxT, places_BxKxT, axis=2)

  return front, back


def mean_tokens(mask: jax.Array) -> jax.Array:
  """Returns [], the mean number of counted tokens in a mask [..., T]."""
  return jnp.maximum(mask.sum(axis=-1).mean(), 1.0)


def length_weights(
    mask_BxKxT: jax.Array,
    length_norm: str,
    mean_length: jax.Array | None = None,
) -> jax.Array:
  """Returns the mask divided by a length.

  Args:
    mask_BxKxT: [B, K, T] float32, 1 on counted tokens.
    length_norm: "none" divides by 1, "tokens" by the completion's number of
      tokens (at least 1), "max_tokens" by T, "mean_tokens" by `mean_length`:
      the mean over completions is then a mean over the batch's tokens.
    mean_length: [], `mean_tokens` of the whole batch; None takes this mask's.
  """
  if length_norm == "none":
    return mask_BxKxT
  if length_norm == "max_tokens":
    return mask_BxKxT / mask_BxKxT.shape[2]
  if length_norm == "mean_tokens":
    return mask_BxKxT / (
        mean_tokens(mask_BxKxT) if mean_length is None else mean_length
    )
  num_tokens_BxKx1 = mask_BxKxT.sum(axis=2, keepdims=True)
  return mask_BxKxT / jnp.maximum(num_tokens_BxKx1, 1.0)
