# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Masked next-token cross-entropy."""

import chex
import jax
import jax.numpy as jnp


def cross_entropy_loss(
    logprobs_BxKxT: jax.Array, mask_BxKxT: jax.Array
) -> tuple[jax.Array, dict[str, jax.Array]]:
  """Returns the mean negative log-prob of the tokens under the mask.

      loss = - Σ mask · log π(y_t | x, y_<t) / Σ mask

  Args:
    logprobs_BxKxT: [B, K, T] float32, log π of each target token, nats.
    mask_BxKxT: [B, K, T] float32, 1 on target tokens; prompt and padding are 0.

  Returns:
    Loss, [] float32 in nats a token (0 where the mask is empty), and
    `num_tokens`, [] float32, the tokens that the mean is over.
  """
  chex.assert_rank(logprobs_BxKxT, 3)
  chex.assert_equal_shape([logprobs_BxKxT, mask_BxKxT])
  num_tokens = mask_BxKxT.sum()
  # `where`, not a product: a padding log-prob may be -inf.
  total = jnp.where(mask_BxKxT > 0, logprobs_BxKxT, 0.0).sum()
  return -total / jnp.maximum(num_tokens, 1.0), {"num_tokens": num_tokens}
