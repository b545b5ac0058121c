# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Masks and batches of given texts."""

from collections.abc import Sequence
import math
from typing import NamedTuple

import jax
import numpy as np

from tba_jax import types
from tba_jax.models import tokenizer as tokenizer_lib


def completion_mask(
    tokens: np.ndarray,
    sampled_mask: np.ndarray,
    tokenizer: tokenizer_lib.Tokenizer | None = None,
) -> np.ndarray:
  """Returns [..., T] float32, 1 on the tokens that the loss counts.

  Args:
    tokens: [..., T] int.
    sampled_mask: [..., T] bool, True on the tokens that the policy sampled.
    tokenizer: tokenizer whose stop tokens and stop strings do not count; None
      counts all.
  """
  if tokenizer is not None:
    sampled_mask = tokenizer_lib.content_mask(tokenizer, tokens, sampled_mask)
  return sampled_mask.astype(np.float32)


class Row(NamedTuple):
  """A prompt and its K completions.

  prompt: token ids.
  completions: token ids of each.
  masks: whether the loss counts each token of each completion; None counts all.
  """

  prompt: Sequence[int]
  completions: Sequence[Sequence[int]]
  masks: Sequence[Sequence[bool]] | None = None


def pad_sequences(
    rows: Sequence[Row | tuple[Sequence[int], Sequence[Sequence[int]]]],
    shape: tuple[int, ...],
    *,
    num_completions: int,
    max_prompt_tokens: int,
    max_completion_tokens: int,
) -> types.Batch:
  """Returns a NumPy batch of given texts, with left-padded prompts.

  Args:
    rows: texts, at most prod(shape); missing ones are all padding.
    shape: leading axes of the leaves, [*shape, …], filled in order.
    num_completions: K.
    max_prompt_tokens: P.
    max_completion_tokens: T.

  Returns:
    The batch; fields that a supervised loss does not read are 0.
  """
  size = math.prod(shape)
  prompts = np.zeros((size, max_prompt_tokens), np.int32)
  prompt_mask = np.zeros(prompts.shape, np.float32)
  completions = np.zeros(
      (size, num_completions, max_completion_tokens), np.int32
  )
  completion_mask = np.zeros(completions.shape, np.float32)
  for b, row in enumerate(rows):
    prompt, texts, masks = Row(*row)
    prompts[b, max_prompt_tokens - len(prompt) :] = prompt
    prompt_mask[b, max_prompt_tokens - len(prompt) :] = 1
    for k, ids in enumerate(texts):
      completions[b, k, : len(ids)] = ids
      completion_mask[b, k, : len(ids)] = masks[k] if masks else 1
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
