# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""The frozen reference policy that the KL is measured against."""

from typing import Any

import jax
import jax.numpy as jnp

from tba_jax import logprobs
from tba_jax import types


class Reference:
  """Log-probs of completions under params that never change.

  version: names these params; log-probs cached under another version of the
    reference are not valid for this one.
  """

  def __init__(
      self,
      model: Any,
      params: types.PyTree,
      *,
      temperature: float,
      version: int = 0,
  ):
    """Copies the params, in their shardings.

    The copy is its own: the policy starts from the same arrays, and the train
    step donates them.

    Args:
      model: a `models.build.Model`; its `completion_logits` is called.
      params: of π_ref, sharded as they shall stay.
      temperature: of sampling, above 0: policy and reference are both tempered.
      version: see the class.

    Raises:
      ValueError: `temperature` is not above 0.
    """
    if temperature <= 0:
      raise ValueError(f"sampling.temperature={temperature}: must be above 0")
    self.version = version
    self._params = jax.tree.map(jnp.copy, params)

    def run(
        params: types.PyTree,
        prompt_tokens_BxP: jax.Array,
        prompt_mask_BxP: jax.Array,
        completion_tokens_BxKxT: jax.Array,
        completion_mask_BxKxT: jax.Array,
    ) -> jax.Array:
      logits_BxKxTxV = model.completion_logits(
          params, prompt_tokens_BxP, prompt_mask_BxP, completion_tokens_BxKxT
      )
      logprobs_BxKxT = logprobs.token_logprobs(
          logits_BxKxTxV, completion_tokens_BxKxT, temperature=temperature
      )
      return jnp.where(completion_mask_BxKxT > 0, logprobs_BxKxT, 0.0)

    self._run = jax.jit(run)

  def logprobs(
      self,
      prompt_tokens_BxP: jax.Array,
      prompt_mask_BxP: jax.Array,
      completion_tokens_BxKxT: jax.Array,
      completion_mask_BxKxT: jax.Array,
  ) -> jax.Array:
    """Returns log π_ref of each completion token, by the policy's numerics.

    Compiled once for each shape. Returns before the result is there.

    Args:
      prompt_tokens_BxP: [B, P] int32, left-padded.
      prompt_mask_BxP: [B, P], 1 on prompt tokens.
      completion_tokens_BxKxT: [B, K, T] int32, right-padded.
      completion_mask_BxKxT: [B, K, T], 1 on the tokens that count.

    Returns:
      [B, K, T] float32, nats, 0 where the mask is 0.
    """
    return self._run(
        self._params,
        prompt_tokens_BxP,
        prompt_mask_BxP,
        completion_tokens_BxKxT,
        completion_mask_BxKxT,
    )
