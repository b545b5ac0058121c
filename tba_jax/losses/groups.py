# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""What an objective may read of a batch, and how a completion is summed."""

import dataclasses

import chex
import jax
import jax.numpy as jnp

# How the tokens of a completion are weighted: 1 each, 1 over their number, over
# the longest that may be, or over the mean number in the batch.
LENGTH_NORMS = ("none", "tokens", "max_tokens", "mean_tokens")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Targets:
  """What a policy with a value model is pushed to; no gradient flows.

  old_values_BxKxT: [B, K, T] float32, of which the other two were made.
  advantages_BxKxT: [B, K, T] float32, 0 on tokens that do not count.
  returns_BxKxT: [B, K, T] float32, of the values.
  """

  old_values_BxKxT: jax.Array
  advantages_BxKxT: jax.Array
  returns_BxKxT: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Groups:
  """K completions of each of B prompts.

  logprobs_BxKxT: [B, K, T] float32, log π of each token in nats; the gradient
    flows through it.
  behavior_logprobs_BxKxT: [B, K, T] float32, of the policy that sampled.
  ref_logprobs_BxKxT: [B, K, T] float32, log π_ref.
  mask_BxKxT: [B, K, T] float32, 1 on the tokens that count.
  weights_BxKxT: [B, K, T] float32, `length_weights` of the mask.
  rewards_BxK: [B, K] float32, task units.
  values_BxKxT: [B, K, T] float32, of the state before each token, in units of
    reward; None without a value model. The gradient flows through it.
  targets: of objectives that estimate advantages by a value model; else None.
  """

  logprobs_BxKxT: jax.Array
  behavior_logprobs_BxKxT: jax.Array
  ref_logprobs_BxKxT: jax.Array
  mask_BxKxT: jax.Array
  weights_BxKxT: jax.Array
  rewards_BxK: jax.Array
  values_BxKxT: jax.Array | None = None
  targets: Targets | None = None

  @property
  def seq_BxK(self) -> jax.Array:
    """Weighted log π(y|x)."""
    return weighted_sums(self.logprobs_BxKxT, self.weights_BxKxT)

  @property
  def ref_seq_BxK(self) -> jax.Array:
    """Log π_ref(y|x), weighted as the policy's."""
    return weighted_sums(self.ref_logprobs_BxKxT, self.weights_BxKxT)

  @property
  def behavior_kl_BxK(self) -> jax.Array:
    """Log π_behavior - log π_ref, summed: of it only whole sums are a KL."""
    return weighted_sums(
        self.behavior_logprobs_BxKxT - self.ref_logprobs_BxKxT, self.mask_BxKxT
    )


def weighted_sums(
    values_BxKxT: jax.Array, weights_BxKxT: jax.Array
) -> jax.Array:
  """Returns [B, K], Σ_t weight_t value_t; a weight of 0 hides inf and nan."""
  chex.assert_equal_shape([values_BxKxT, weights_BxKxT])
  shown_BxKxT = jnp.where(weights_BxKxT > 0, values_BxKxT, 0.0)
  return jnp.sum(weights_BxKxT * shown_BxKxT, axis=2)


def mean_tokens(mask: jax.Array) -> jax.Array:
  """Returns [], counted tokens of a mean completion of a mask [..., T]."""
  return jnp.maximum(mask.sum(axis=-1).mean(), 1.0)


def length_weights(
    mask_BxKxT: jax.Array,
    length_norm: str,
    mean_length: jax.Array | None = None,
) -> jax.Array:
  """Returns the mask divided by a length.

  Args:
    mask_BxKxT: [B, K, T] float32, 1 on the tokens that count.
    length_norm: "none" divides by 1: a completion's log-prob is the sum of its
      tokens'. "tokens" divides by their number (1 where there is none).
      "max_tokens" divides by T, "mean_tokens" by `mean_length`: then the mean
      over completions is one over the tokens of the batch.
    mean_length: [], `mean_tokens` of the whole batch; None takes this mask's.

  Raises:
    ValueError: `length_norm` is not known.
  """
  if length_norm not in LENGTH_NORMS:
    raise ValueError(
        f"loss.length_norm={length_norm!r}: allowed {LENGTH_NORMS}"
    )
  if length_norm == "none":
    return mask_BxKxT
  if length_norm == "max_tokens":
    return mask_BxKxT / mask_BxKxT.shape[2]
  if length_norm == "mean_tokens":
    if mean_length is None:
      mean_length = mean_tokens(mask_BxKxT)
    return mask_BxKxT / mean_length
  num_tokens_BxKx1 = mask_BxKxT.sum(axis=2, keepdims=True)
  return mask_BxKxT / jnp.maximum(num_tokens_BxKx1, 1.0)
