# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Variants of a config that change several settings together. No JAX here."""

import ml_collections


def set_rounds(
    c: ml_collections.ConfigDict,
    *,
    mini_batches: int,
    passes: int = 1,
    lag_rounds: int = 1,
) -> None:
  """Changes a config to rounds, with all settings that must fit them.

  The number of optimizer steps is cut to whole rounds.
  """
  steps = mini_batches * passes
  c.rounds.mini_batches = mini_batches
  c.rounds.passes = passes
  c.rounds.lag_rounds = lag_rounds
  c.train.num_steps = max(c.train.num_steps // steps, 1) * steps
  c.publish.every_steps = steps
  c.search.samples_per_prompt = c.train.completions_per_prompt
  c.search.prompts_per_round = min(
      c.search.prompts_per_round, mini_batches * c.train.prompts_per_batch
  )
  c.replay.recent_fraction = 1.0
  c.replay.dedupe = False
  c.replay.warm_start_completions = 0
