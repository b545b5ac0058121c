# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Completion masks, and batches of draws and of encoded texts."""

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
    sampled_mask: [..., T] bool, True on policy tokens.
    tokenizer: source of the stop tokens and stop strings to leave out; None
      counts all tokens.
  """
  if tokenizer is not None:
    sampled_mask = tokenizer_lib.content_mask(tokenizer, tokens, sampled_mask)
  return sampled_mask.astype(np.float32)


def of_draw(
    draw: types.Draw,
    tokenizer: tokenizer_lib.Tokenizer | None = None,
    masks_cut_off: bool = False,
) -> types.Batch:
  """Returns the batch of a draw on the host.

  Args:
    tokenizer: see `completion_mask`.
    masks_cut_off: whether the loss counts no token of completions that were cut
      off. Source: overlong filtering of Yu et al. 2025 (DAPO,
      arXiv:2503.14476), §3.4.
  """
  mask_BxKxT = completion_mask(
      draw.completion_tokens, draw.sampled_mask, tokenizer
  )
  if masks_cut_off:
    mask_BxKxT *= draw.stopped[..., None]
  arrays = vars(draw) | {"completion_mask": mask_BxKxT}
  return types.Batch(
      **{
          name: np.ascontiguousarray(arrays[name], column.dtype)
          for name, column in types.columns_of(types.Batch).items()
          if arrays[name] is not None
      }
  )


class BatchRow(NamedTuple):
  """A prompt and its K completions.

  masks: True on the completion tokens that the loss counts; None counts all.
  """

  prompt: Sequence[int]
  completions: Sequence[Sequence[int]]
  masks: Sequence[Sequence[bool]] | None = None


def pad_sequences(
    rows: Sequence[BatchRow | tuple[Sequence[int], Sequence[Sequence[int]]]],
    shape: tuple[int, ...],
    *,
    num_completions: int,
    max_prompt_tokens: int,
    max_completion_tokens: int,
) -> types.Batch:
  """Pads encoded texts into a NumPy batch, with prompts on the right.

  Args:
    rows: encoded texts, at most prod(shape); the rest is padding.
    shape: leading axes of the leaves, [*shape, …], filled in order.
    num_completions: K.
    max_prompt_tokens: P.
    max_completion_tokens: T.

  Returns:
    The batch, with 0 in columns that supervised losses do not read.
  """
  sizes = {
      "B": math.prod(shape),
      "K": num_completions,
      "P": max_prompt_tokens,
      "T": max_completion_tokens,
  }
  flat = jax.tree.map(
      lambda x: np.zeros(x.shape, x.dtype), types.abstract_batch(sizes)
  )
  for b, row in enumerate(rows):
    prompt, texts, masks = BatchRow(*row)
    flat.prompt_tokens[b, max_prompt_tokens - len(prompt) :] = prompt
    flat.prompt_mask[b, max_prompt_tokens - len(prompt) :] = 1
    for k, ids in enumerate(texts):
      flat.completion_tokens[b, k, : len(ids)] = ids
      flat.completion_mask[b, k, : len(ids)] = masks[k] if masks else 1
  return jax.tree.map(lambda x: x.reshape(*shape, *x.shape[1:]), flat)
