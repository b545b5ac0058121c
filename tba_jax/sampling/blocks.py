# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""How the cache's columns are cut into blocks, and which a chunk reads.

A decode step reads the prompts' block and the first blocks of sampled tokens,
as many as hold what is there: its cost grows with the tokens that are live, not
with the most that there may be.
"""

import bisect
from collections.abc import Sequence
import itertools

# Each number of blocks is a program of its own, so they are few: at most so
# many for sampled tokens, and none halved below this length.
_MOST_BLOCKS = 3
_SHORTEST_BLOCK = 32


def block_lengths(
    max_prompt_tokens: int, max_completion_tokens: int
) -> tuple[int, ...]:
  """Returns the columns of each block: P, then lengths that sum to T."""
  blocks, rest = [], max_completion_tokens
  while rest > _SHORTEST_BLOCK and len(blocks) < _MOST_BLOCKS - 1:
    blocks.insert(0, rest // 2)
    rest -= rest // 2
  return max_prompt_tokens, rest, *blocks


def plan_chunk(
    lengths: Sequence[int], longest: int, *, chunk_steps: int | None
) -> tuple[int, int]:
  """Returns how many steps a chunk takes and how many blocks it reads.

  Args:
    lengths: columns of each block, the prompts' first.
    longest: tokens that the longest row has sampled, at least 1.
    chunk_steps: steps to take; None: as many as the fewest blocks allow.
  """
  ends = list(itertools.accumulate(lengths[1:]))
  # A step writes the token sampled before it, so the last one needs no column.
  last_column = longest - 1 + (chunk_steps or 1)
  num_own = min(bisect.bisect_left(ends, last_column), len(ends) - 1)
  steps = chunk_steps or max(1, ends[num_own] - longest + 1)
  return steps, num_own + 2
