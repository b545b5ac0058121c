# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""CPU time of inserts and draws in small and large replay buffers.

Buffers are full, so every insert also evicts.
"""

from collections.abc import Sequence
import time
from typing import Any

import ml_collections
import numpy as np

from tba_jax import types
from tba_jax.learning import schedules
from tba_jax.replay import buffer as buffer_lib

_PROMPT_TOKENS = 16
_COMPLETION_TOKENS = 64
_SAMPLES = 8  # S and K
_BATCH_PROMPTS = 32
_COMPLETIONS_PER_PROMPT = 50
_POOL_GROUPS = 512


def run(
    config: ml_collections.ConfigDict,
    operands: Sequence[str],
    *,
    sizes: Sequence[int] = (1_000, 1_000_000),
    rounds: int = 200,
) -> dict[str, Any]:
  """Returns CPU microseconds for each completion inserted and drawn, by size.

  Completions are distinct and have 64 tokens; S = K = 8, B = 32. A draw is
  followed by `mark_drawn`, as in training.

  Args:
    config: `seed` and `replay` are read: `recent_fraction`, `selection`,
      `reward_temperature`, `recent_window_steps` and `dedupe`.
    operands: none.
    sizes: stored completions, ascending.
    rounds: timed rounds of a batch of inserts and a draw; the median counts.

  Returns:
    `insert_us`, `draw_us` and `total_us` by stored completions, and
    `insert_ratio`, `draw_ratio` and `total_ratio`, largest size to smallest.

  Raises:
    ValueError: an operand is given.
  """
  if operands:
    raise ValueError(f"operands {list(operands)}; must be none")
  out: dict[str, Any] = {
      "completion_tokens": _COMPLETION_TOKENS,
      "insert_us": {},
      "draw_us": {},
      "total_us": {},
  }
  for size in sizes:
    insert_us, draw_us = _measure(config, size, rounds)
    out["insert_us"][str(size)] = round(insert_us, 3)
    out["draw_us"][str(size)] = round(draw_us, 3)
    out["total_us"][str(size)] = round(insert_us + draw_us, 3)
  small, large = str(sizes[0]), str(sizes[-1])
  for part in ("insert", "draw", "total"):
    us = out[f"{part}_us"]
    out[f"{part}_ratio"] = round(us[large] / us[small], 3)
  return out


def make_buffer(
    config: ml_collections.ConfigDict, size: int
) -> buffer_lib.ReplayBuffer:
  """Returns an empty buffer for `size` completions of 64 tokens."""
  config = config.copy_and_resolve_references()
  config.replay.capacity_per_prompt = 2 * _COMPLETIONS_PER_PROMPT
  config.replay.capacity = size
  config.sampling.max_prompt_tokens = _PROMPT_TOKENS
  config.sampling.max_completion_tokens = _COMPLETION_TOKENS
  return buffer_lib.ReplayBuffer(
      config,
      reward_temperature=schedules.reward_temperature(
          config.replay, per_round_steps=config.train.per_round_steps
      ),
  )


def make_groups(config: ml_collections.ConfigDict, size: int) -> "Groups":
  """Returns the groups that fill such a buffer, 50 completions per prompt."""
  return Groups(max(1, size // _COMPLETIONS_PER_PROMPT), config.seed)


def fill(buffer: buffer_lib.ReplayBuffer, groups: "Groups", size: int) -> None:
  """Inserts `size` completions, rounded up to whole groups."""
  for _ in range(-(-size // _SAMPLES)):
    buffer.insert(groups.next(), 0)


def _measure(
    config: ml_collections.ConfigDict, size: int, rounds: int
) -> tuple[float, float]:
  """Returns microseconds per completion of an insert and of a draw."""
  buffer = make_buffer(config, size)
  groups = make_groups(config, size)
  fill(buffer, groups, size)
  insert_s, draw_s = [], []
  for step in range(1, rounds + 1):
    arrived = [groups.next() for _ in range(_BATCH_PROMPTS)]
    start = time.process_time()
    for group in arrived:
      buffer.insert(group, step)
    middle = time.process_time()
    buffer.mark_drawn(buffer.sample(_BATCH_PROMPTS, _SAMPLES, step).ids)
    insert_s.append(middle - start)
    draw_s.append(time.process_time() - middle)
  scale = 1e6 / (_BATCH_PROMPTS * _SAMPLES)
  return float(np.median(insert_s)) * scale, float(np.median(draw_s)) * scale


class Groups:
  """Groups of distinct completions, prompts in turn."""

  def __init__(self, num_prompts: int, seed: int):
    rng = np.random.default_rng(seed)
    shape = (_POOL_GROUPS, _SAMPLES, _COMPLETION_TOKENS)
    self._tokens = rng.integers(1, 30_000, shape, np.int32)
    self._logprobs = -rng.random(shape, np.float32)
    self._rewards = rng.random(shape[:2], np.float32)
    self._num_prompts = num_prompts
    self._count = 0

  def next(self) -> types.Group:
    count = self._count
    self._count += 1
    index, turn = count % _POOL_GROUPS, count // _POOL_GROUPS
    tokens = self._tokens[index].copy()
    # The turn's number makes completions of different turns distinct.
    tokens[:, 0] = turn
    return types.Group(
        prompt_id=count % self._num_prompts,
        visit=count // self._num_prompts,
        position=count,
        prompt_tokens=np.arange(1, _PROMPT_TOKENS + 1, dtype=np.int32),
        completion_tokens=tokens,
        completion_lengths=np.full(_SAMPLES, _COMPLETION_TOKENS, np.int32),
        sampled_mask=np.ones(tokens.shape, np.bool_),
        stopped=np.ones(_SAMPLES, np.bool_),
        behavior_logprobs=self._logprobs[index],
        rewards=self._rewards[index],
        versions=np.zeros(_SAMPLES, np.int32),
        epoch=0,
    )
