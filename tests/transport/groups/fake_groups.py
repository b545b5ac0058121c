# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Groups and small buffers for tests of replay."""

from collections.abc import Callable, Collection, Mapping, Sequence
import dataclasses
from typing import Any

import ml_collections
import numpy as np

from tba_jax import types
from tba_jax.config import settings
from tba_jax.replay import buffer

PROMPT_TOKENS = 5
COMPLETION_TOKENS = 4


def make_group(
    prompt_id: int,
    completions: Sequence[Sequence[int]],
    *,
    rewards: Sequence[float] | None = None,
    version: int = 0,
    width: int = COMPLETION_TOKENS,
    inserted: Collection[tuple[int, int]] = (),
    **changes: Any,
) -> types.Group:
  """Returns a group of completions; pads are 7, log-probs minus the tokens.

  `inserted` are (completion, place) of tokens that the policy did not sample.
  """
  count = len(completions)
  tokens = np.full((count, width), 7, np.int32)
  for row, completion in zip(tokens, completions, strict=True):
    row[: len(completion)] = completion
  lengths = np.array([len(c) for c in completions], np.int32)
  sampled_mask = np.arange(width) < lengths[:, None]
  for index in inserted:
    sampled_mask[index] = False
  rewards = np.arange(count) if rewards is None else rewards
  group = types.Group(
      prompt_id=prompt_id,
      visit=0,
      position=prompt_id,
      prompt_tokens=np.arange(1, 2 + prompt_id % PROMPT_TOKENS, dtype=np.int32),
      completion_tokens=tokens,
      completion_lengths=lengths,
      sampled_mask=sampled_mask,
      stopped=np.array([c[-1] == 0 for c in completions]),
      behavior_logprobs=-tokens.astype(np.float32),
      rewards=np.array(rewards, np.float32),
      versions=np.full(count, version, np.int32),
      epoch=0,
  )
  return dataclasses.replace(group, **changes)


def distinct(first: int, count: int) -> list[list[int]]:
  """Returns completions of one token each, all different."""
  return [[first + i] for i in range(count)]


def buffer_config(**changes: Any) -> ml_collections.ConfigDict:
  """Returns the config of a small buffer; `changes` are keys of any section."""
  config = settings.get_config()
  sections = (
      config.replay, config.replay_filter, config.sampling, config.loss, config
  )  # fmt: skip
  small = dict(
      capacity_per_prompt=10,
      capacity=40,
      recent_window_steps=1,
      max_prompt_tokens=PROMPT_TOKENS,
      max_completion_tokens=COMPLETION_TOKENS,
  )
  for key, value in {**small, **changes}.items():
    (section,) = (one for one in sections if key in one)
    section[key] = value
  return config


def _content_mask(tokens: np.ndarray, sampled_mask: np.ndarray) -> np.ndarray:
  """Returns the mask without stop tokens, which are 0."""
  return sampled_mask & (tokens != 0)


def make_buffer(
    *,
    reward_temperature: Callable[[int], float] = lambda step: 1.0,
    embed: Any = None,
    columns: Mapping[str, tuple[int, ...]] | None = None,
    fallback: float | None = None,
    **changes: Any,
) -> buffer.ReplayBuffer:
  """Returns a small buffer of recent draws, with some settings changed."""
  return buffer.ReplayBuffer(
      buffer_config(**changes),
      reward_temperature=reward_temperature,
      embed=embed,
      content_mask=_content_mask,
      columns=columns,
      fallback=fallback,
  )


def first_tokens(draw: types.Draw) -> set[int]:
  """Returns the first token of each drawn completion."""
  return set(draw.completion_tokens[..., 0].ravel().tolist())
