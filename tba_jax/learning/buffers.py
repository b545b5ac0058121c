# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Makes the replay buffer of a run and its similarity features."""

import functools

import jax
import ml_collections

from tba_jax import collect
from tba_jax.learning import schedules
from tba_jax.models import tokenizer as tokenizer_lib
from tba_jax.policy import policy as policy_lib
from tba_jax.policy import red_team_models
from tba_jax.replay import buffer as buffer_lib


def make_buffer(
    config: ml_collections.ConfigDict,
    policy: policy_lib.Policy | None = None,
    mesh: jax.sharding.Mesh | None = None,
) -> buffer_lib.ReplayBuffer:
  """Returns an empty buffer.

  Args:
    policy: required for `replay_filter.similarity` and `train.router_replay`.
    mesh: placement of the frozen encoder for cosine similarity.
  """
  embed, content_mask = None, None
  if config.replay_filter.similarity != "none":
    content_mask = functools.partial(
        tokenizer_lib.content_mask, policy.tokenizer
    )
  if config.replay_filter.similarity == "cosine":
    of_texts = red_team_models.load_embed(policy.task, mesh)
    embed = lambda tokens: of_texts(
        [policy.tokenizer.decode(t) for t in tokens]
    )
  fallback = config.reward.fallback
  if fallback is not None:
    fallback *= config.loss.reward_weight
  return buffer_lib.ReplayBuffer(
      config,
      reward_temperature=schedules.reward_temperature(
          config.replay, per_round_steps=config.train.per_round_steps
      ),
      embed=embed,
      content_mask=content_mask,
      columns=collect.optional_columns(config, policy and policy.model.config),
      fallback=fallback,
  )
