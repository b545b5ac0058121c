# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Training batches from draws of the replay buffer or from given texts."""

from collections.abc import Callable, Collection, Mapping, Sequence
import math
from typing import Any

import jax
import numpy as np

from tba_jax import types
from tba_jax.replay import buffer as buffer_lib
from tba_jax.training import reference as reference_lib


class Placer:
  """Puts batches onto the mesh and computes missing reference log-probs.

  All processes of a trainer take part: process 0 calls `put`, the others
  `put_along`.
  """

  def __init__(
      self,
      reference: reference_lib.Reference,
      *,
      part_prompts: int,
      place: Callable[[types.Batch], types.Batch] = lambda batch: batch,
      gather: Callable[[jax.Array], jax.Array] = lambda array: array,
      tell: Callable[..., None] = lambda **fields: None,
  ):
    """Initializes the placer; the defaults are for one process and device.

    Args:
      reference: policy that the KL is measured against.
      part_prompts: prompts whose reference log-probs are computed at a time.
      place: puts a host batch of B prompts onto the mesh; in processes other
        than 0, a batch of `jax.ShapeDtypeStruct`.
      gather: copies an array of the mesh whole to this process.
      tell: sends the arguments of `put_along` to the other processes.
    """
    self._reference = reference
    self._part_prompts = part_prompts
    self._place = place
    self._gather = gather
    self._tell = tell
    self._cut = jax.jit(_cut, static_argnums=2)
    self._merge = jax.jit(_merge)

  def follow(self, step: int, ref_params: types.PyTree) -> int:
    """Sets the reference from a train state; returns its version."""
    self._reference.follow(step, ref_params)
    return self._reference.version

  def put(
      self, batch: types.Batch, step: int, num_missing: int
  ) -> tuple[types.Batch, list[tuple[slice, jax.Array]]]:
    """Returns the batch on the mesh, and the log-probs computed, by rows.

    Args:
      batch: [B, ...] on the host.
      step: that the batch is for; call `follow` with it first.
      num_missing: prompts at the head of the batch without reference log-probs.
    """
    arrays = {n: x for n, x in vars(batch).items() if n != "prepared"}
    shapes = {n: [list(x.shape), x.dtype.name] for n, x in arrays.items()}
    self._tell(shapes=shapes, step=step, num_missing=num_missing)
    return self._put(batch, num_missing)

  def put_along(
      self,
      shapes: Mapping[str, Any],
      *,
      step: int,
      num_missing: int,
      ref_params: types.PyTree,
  ) -> types.Batch:
    """Joins the `put` of process 0 from another process, without the batch.

    Args:
      shapes: shape and dtype of each field of the batch.
      step, num_missing: as `put`.
      ref_params: as `follow`.
    """
    self.follow(step, ref_params)
    leaves = {n: jax.ShapeDtypeStruct(*shape) for n, shape in shapes.items()}
    return self._put(types.Batch(**leaves), num_missing)[0]

  def _put(
      self, batch: types.Batch, num_missing: int
  ) -> tuple[types.Batch, list[tuple[slice, jax.Array]]]:
    num_prompts = batch.rewards.shape[0]
    batch = self._place(batch)
    part = min(self._part_prompts, num_prompts)
    computed, ref_logprobs = [], batch.ref_logprobs
    for start in range(0, num_missing, part):
      # The last part overlaps the one before, so that all have one shape.
      start = min(start, num_prompts - part)
      values_bxKxT = self._reference.logprobs(*self._cut(batch, start, part))
      ref_logprobs = self._merge(ref_logprobs, values_bxKxT, start)
      rows = slice(start, start + part)
      computed.append((rows, self._gather(values_bxKxT)))
    batch = types.Batch(**{**vars(batch), "ref_logprobs": ref_logprobs})
    return batch, computed


class BatchMaker:
  """Makes batches; computes reference log-probs once per trajectory.

  They stay on the devices until `flush`, so making a batch never waits for a
  device.
  """

  def __init__(
      self,
      buffer: buffer_lib.ReplayBuffer,
      placer: Placer,
      uncounted_ids: Collection[int] = (),
  ):
    """Initializes the maker.

    Args:
      buffer: source of the draws; caches the reference log-probs.
      placer: puts batches onto the mesh.
      uncounted_ids: as `completion_mask`.
    """
    self._buffer = buffer
    self._placer = placer
    self._uncounted_ids = uncounted_ids
    self._unsaved: list[tuple[np.ndarray, jax.Array, int]] = []

  def make(
      self, draw: buffer_lib.Draw, step: int, ref_params: types.PyTree
  ) -> types.Batch:
    """Returns the batch of a draw, with all reference log-probs.

    Args:
      draw: of `ReplayBuffer.sample`.
      step: that trains on the batch.
      ref_params: of the train state before that step.
    """
    version = self._placer.follow(step, ref_params)
    mask_BxKxT = completion_mask(
        draw.completion_tokens, draw.completion_lengths, self._uncounted_ids
    )
    cached_B = (draw.ref_versions == version).all(axis=1)
    # Prompts without cached log-probs come first, as `put` expects.
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
    batch, computed = self._placer.put(batch, step, int((~cached_B).sum()))
    for rows, values_bxKxT in computed:
      self._unsaved.append((draw.rows[order_B[rows]], values_bxKxT, version))
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
    tokens: np.ndarray, lengths: np.ndarray, uncounted_ids: Collection[int] = ()
) -> np.ndarray:
  """Returns [..., T] float32, 1 on the tokens that the loss counts.

  Args:
    tokens: [..., T] int.
    lengths: [...] int, stop token included.
    uncounted_ids: tokens that do not count in last position.
  """
  last = np.take_along_axis(tokens, np.maximum(lengths, 1)[..., None] - 1, -1)
  counted = lengths - np.isin(last[..., 0], list(uncounted_ids))
  return (np.arange(tokens.shape[-1]) < counted[..., None]).astype(np.float32)


def _cut(batch: types.Batch, start: int, size: int) -> tuple[jax.Array, ...]:
  """Returns the reference's inputs for prompts `start` to `start + size`."""
  return tuple(
      jax.lax.dynamic_slice_in_dim(array, start, size)
      for array in (
          batch.prompt_tokens,
          batch.prompt_mask,
          batch.completion_tokens,
          batch.completion_mask,
      )
  )


def _merge(
    all_BxKxT: jax.Array, part_bxKxT: jax.Array, start: int
) -> jax.Array:
  return jax.lax.dynamic_update_slice(all_BxKxT, part_bxKxT, (start, 0, 0))


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
