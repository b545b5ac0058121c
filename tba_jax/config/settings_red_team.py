# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Settings of searches for many different completions; part of `common`.

Their defaults change nothing. Lee et al. 2025 (arXiv:2405.18540) have them for
red-teaming, on which that of arXiv:2503.18929 builds; other tasks may use them.
"""

import ml_collections


def get_config() -> ml_collections.ConfigDict:
  """Returns the sections, by name."""
  d = lambda **fields: ml_collections.ConfigDict(fields)
  c = d()
  # How searchers sample to find what is new; evaluations sample without it.
  c.explore = d(
      # Share of the completions that are drawn at a temperature of their own,
      # uniform between the two; the others at sampling.temperature.
      fraction=0.0,
      min_temperature=1.0,
      max_temperature=1.0,
      min_tokens=0,  # before which no stop token is drawn
  )

  # Of "tb" and "tb_learned_z": the target is exp(r/beta) · π_ref^(1/gamma), all
  # of it to the power of 1/tau. Each is linear to its final value over its
  # decay_steps (0 = constant); 1 is the plain target.
  c.tempering = d(
      tau=1.0,
      tau_final=1.0,
      tau_decay_steps=0,
      gamma=1.0,
      gamma_final=1.0,
      gamma_decay_steps=0,
  )

  # What the replay buffer takes in and what it gives up for it.
  c.replay_filter = d(
      # Of equal completions of a prompt (replay.dedupe) the one that stays:
      # "newest" or "oldest".
      duplicates="newest",
      # Of completions of a prompt that are much alike only the one with the
      # highest reward stays. "none": not looked at. "edit": an edit distance of
      # tokens below similarity_limit times the sum of both lengths. "cosine": a
      # cosine of the sentence embeddings (task.encoder) above similarity_limit.
      similarity="none",
      similarity_limit=0.25,
      evict="oldest",  # or "lowest_reward", where a capacity is reached
      freeze_step=0,  # from this step on the buffer does not grow; 0 = never
  )
  return c
