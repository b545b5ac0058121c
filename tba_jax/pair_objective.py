# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""What a reward model learns from pairs, and how good it is on them."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np

from tba_jax import batch_metrics
from tba_jax import calibration
from tba_jax import preference_pairs
from tba_jax import types
from tba_jax.losses import preference
from tba_jax.models import heads

_NUM_BINS = 10


def make_loss_fn(model: heads.ScalarModel) -> Callable[..., Any]:
  """Returns the Bradley-Terry loss of a batch of pairs, K = 2.

  Args:
    model: gives the rewards.

  Returns:
    loss_fn(params, loss_params, batch, beta) -> (loss [], totals), as
    `objective.make_loss_fn`; loss_params and beta play no part.
  """

  def loss_fn(
      params: types.PyTree,
      loss_params: types.PyTree,
      batch: types.Batch,
      beta: jax.Array,
  ) -> tuple[jax.Array, dict[str, tuple[jax.Array, jax.Array]]]:
    del loss_params, beta
    rewards_Bx2 = _rewards(model, params, batch)
    right_B = rewards_Bx2[:, 0] > rewards_Bx2[:, 1]
    loss = preference.bradley_terry_loss(rewards_Bx2)
    totals = {"accuracy": batch_metrics.total(right_B, jnp.ones_like(right_B))}
    return loss, totals

  return loss_fn


def make_evaluate(
    config: ml_collections.ConfigDict,
    model: heads.ScalarModel,
    examples: preference_pairs.Examples,
    pairs: Sequence[preference_pairs.Pair],
) -> Callable[[types.PyTree], dict[str, Any]]:
  """Returns params -> what `calibration.summarize` says of the pairs.

  Args:
    config: reads `reward_model` and `evaluate`.
    model: gives the rewards.
    examples: makes batches of pairs.
    pairs: at least one.
  """
  size = config.reward_model.micro_batch_size or config.reward_model.batch_size
  rewards = jax.jit(lambda params, batch: _rewards(model, params, batch))

  def evaluate(params: types.PyTree) -> dict[str, Any]:
    margins = []
    for start in range(0, len(pairs), size):
      some = pairs[start : start + size]
      # Of one shape: what is missing is there twice.
      full = [*some, *[some[0]] * (size - len(some))]
      rewards_Bx2 = np.asarray(rewards(params, examples.batch(full, size)))
      margins.append((rewards_Bx2[:, 0] - rewards_Bx2[:, 1])[: len(some)])
    return calibration.summarize(
        np.concatenate(margins),
        num_bins=_NUM_BINS,
        resamples=config.evaluate.resamples,
        confidence=config.evaluate.confidence,
    )

  return evaluate


def _rewards(
    model: heads.ScalarModel, params: types.PyTree, batch: types.Batch
) -> jax.Array:
  return model.completion_rewards(
      params,
      batch.prompt_tokens,
      batch.prompt_mask,
      batch.completion_tokens,
      batch.completion_mask,
  )
