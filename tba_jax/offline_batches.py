# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Host batches of texts that are there already: what data becomes of steps."""

from collections.abc import Sequence
import math

import jax
import numpy as np

from tba_jax import types

# Ids of a prompt, and of each of its K completions.
Row = tuple[Sequence[int], Sequence[Sequence[int]]]


def pad(
    rows: Sequence[Row],
    shape: tuple[int, ...],
    *,
    num_completions: int,
    max_prompt_tokens: int,
    max_completion_tokens: int,
) -> types.Batch:
  """Returns rows as a batch, prompts padded on the left.

  Args:
    rows: at most as many as `shape` has room for, none longer than allowed.
    shape: of the leading axes, which the rows fill in order.
    num_completions: K.
    max_prompt_tokens: P.
    max_completion_tokens: T.

  Returns:
    A batch of NumPy arrays whose leaves are [*shape, …]; what no row fills is
    0, as are the fields that a supervised loss does not read.
  """
  size = math.prod(shape)
  prompts = np.zeros((size, max_prompt_tokens), np.int32)
  prompt_mask = np.zeros(prompts.shape, np.float32)
  completions = np.zeros(
      (size, num_completions, max_completion_tokens), np.int32
  )
  completion_mask = np.zeros(completions.shape, np.float32)
  for b, (prompt, texts) in enumerate(rows):
    prompts[b, max_prompt_tokens - len(prompt) :] = prompt
    prompt_mask[b, max_prompt_tokens - len(prompt) :] = 1
    for k, ids in enumerate(texts):
      completions[b, k, : len(ids)] = ids
      completion_mask[b, k, : len(ids)] = 1
  unread = np.zeros_like(completion_mask)
  flat = types.Batch(
      prompt_tokens=prompts,
      prompt_mask=prompt_mask,
      completion_tokens=completions,
      completion_mask=completion_mask,
      behavior_logprobs=unread,
      ref_logprobs=unread,
      rewards=unread[..., 0],
      staleness_steps=unread[..., 0],
  )
  return jax.tree.map(lambda x: x.reshape(*shape, *x.shape[1:]), flat)
