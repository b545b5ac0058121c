# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Training batches from draws of the replay buffer or from given texts."""

from collections.abc import Sequence
import dataclasses
import math

import jax
import ml_collections
import numpy as np

from tba_jax import types
from tba_jax.models import tokenizer as tokenizer_lib
from tba_jax.replay import buffer as buffer_lib
from tba_jax.training import device_work
from tba_jax.training import packing


class BatchMaker:
  """Makes batches; computes reference log-probs once per completion.

  They stay on the devices until `flush`, so making a batch never waits for a
  device.
  """

  def __init__(
      self,
      config: ml_collections.ConfigDict,
      tokenizer: tokenizer_lib.Tokenizer,
      buffer: buffer_lib.ReplayBuffer,
      work: device_work.DeviceWork,
  ):
    """Initializes the maker.

    Args:
      config: reads `loss.include_stop_token`, and what `packing.pack` reads.
      tokenizer: knows stop tokens and stop strings.
      buffer: source of the draws; caches the reference log-probs.
      work: has the reference, and places batches.
    """
    self._config = config
    self._buffer = buffer
    self._work = work
    counts = config.loss.include_stop_token
    self._tokenizer = None if counts else tokenizer
    self._unsaved: list[tuple[np.ndarray, jax.Array, int]] = []

  def make(self, draw: buffer_lib.Draw) -> types.Batch:
    """Returns the batch of a draw, with all reference log-probs.

    Call it between the step before the draw's and the draw's own.
    """
    version = self._work.reference.version(draw.step)
    mask_BxKxT = completion_mask(
        draw.completion_tokens, draw.sampled_mask, self._tokenizer
    )
    cached_B = (draw.ref_versions == version).all(axis=1)
    # Prompts without cached log-probs come first, as `place` expects.
    order_B = np.argsort(cached_B, kind="stable")
    take = lambda x: np.ascontiguousarray(x[order_B])
    batch = types.Batch(
        prompt_tokens=take(draw.prompt_tokens),
        prompt_mask=take(draw.prompt_mask).astype(np.float32),
        completion_tokens=take(draw.completion_tokens),
        completion_mask=take(mask_BxKxT),
        behavior_logprobs=take(draw.behavior_logprobs),
        ref_logprobs=take(draw.ref_logprobs),
        rewards=take(draw.rewards),
        staleness_steps=take(draw.staleness_steps.astype(np.float32)),
    )
    rows = packing.pack(
        self._config, batch.prompt_tokens, batch.completion_tokens
    )
    batch = dataclasses.replace(batch, rows=rows)
    batch, computed = self._work.place(batch, int((~cached_B).sum()))
    for part, values_bxKxT in computed:
      self._unsaved.append((draw.rows[order_B[part]], values_bxKxT, version))
    return batch

  def flush(self) -> None:
    """Caches the computed reference log-probs in the buffer.

    Blocks until the devices have computed them.
    """
    unsaved, self._unsaved = self._unsaved, []
    # The reference may have moved since, so each keeps its own version.
    for rows_bxK, values_bxKxT, version in unsaved:
      self._buffer.set_ref_logprobs(rows_bxK, np.asarray(values_bxKxT), version)


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


# Token ids of a prompt, and of each of its K completions.
Row = tuple[Sequence[int], Sequence[Sequence[int]]]


def pad_sequences(
    rows: Sequence[Row],
    shape: tuple[int, ...],
    *,
    num_completions: int,
    max_prompt_tokens: int,
    max_completion_tokens: int,
) -> types.Batch:
  """Returns a NumPy batch of given texts, with left-padded prompts.

  Args:
    rows: at most prod(shape); missing ones are all padding.
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
