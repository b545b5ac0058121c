# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""From a draw of the replay buffer to the batch that a step learns from."""

from collections.abc import Callable

import jax
import numpy as np

from tba_jax import reference as reference_lib
from tba_jax import types
from tba_jax.replay import buffer as buffer_lib
from tba_jax.replay import draw as draw_lib

STOP_RULES = ("keep", "replace", "add")


class BatchMaker:
  """Makes batches; reference log-probs are computed once a trajectory.

  They stay on their devices until `flush`, which runs when the step's metrics
  are read anyway: making a batch never waits for a device.
  """

  def __init__(
      self,
      buffer: buffer_lib.ReplayBuffer,
      reference: reference_lib.Reference,
      *,
      include_stop_token: bool,
      missing_stop: str,
      missing_stop_reward: float,
      part_prompts: int,
      place: Callable[[types.Batch], types.Batch] = lambda batch: batch,
  ):
    """Takes the parts.

    Args:
      buffer: the draws come from; it caches the reference log-probs.
      reference: policy that the KL is measured against.
      include_stop_token: whether the loss counts stop tokens.
      missing_stop, missing_stop_reward: as `with_stop_rule`.
      part_prompts: reference log-probs are computed for so many prompts at a
        time, at most the batch's; one shape, compiled once.
      place: puts a host batch onto the mesh.
    """
    self._buffer = buffer
    self._reference = reference
    self._include_stop_token = include_stop_token
    self._stop_rule = missing_stop, missing_stop_reward
    self._part_prompts = part_prompts
    self._place = place
    self._unsaved: list[tuple[np.ndarray, jax.Array, int]] = []
    self._merge = jax.jit(_merge)

  def make(
      self, draw: draw_lib.Draw, step: int, ref_params: types.PyTree
  ) -> types.Batch:
    """Returns the batch of a draw, with the reference log-probs of every row.

    Args:
      draw: as `ReplayBuffer.sample` gave it.
      step: the step that will learn from it.
      ref_params: of the train state before that step.
    """
    self._reference.follow(step, ref_params)
    mask_BxKxT = completion_mask(
        draw.completion_lengths,
        draw.stopped,
        draw.completion_tokens.shape[-1],
        include_stop_token=self._include_stop_token,
    )
    version = self._reference.version
    cached_B = (draw.ref_versions == version).all(axis=1)
    # Prompts without cached log-probs come first; their order means nothing.
    order_B = np.argsort(cached_B, kind="stable")
    take = lambda x: np.ascontiguousarray(x[order_B])
    batch = types.Batch(
        prompt_tokens=take(draw.prompt_tokens),
        prompt_mask=take(draw.prompt_mask).astype(np.float32),
        completion_tokens=take(draw.completion_tokens),
        completion_mask=take(mask_BxKxT),
        behavior_logprobs=take(draw.behavior_logprobs),
        ref_logprobs=take(draw.ref_logprobs),
        rewards=take(
            with_stop_rule(draw.rewards, draw.stopped, *self._stop_rule)
        ),
        # A later version is of a history that a restart has undone.
        staleness_steps=take(np.abs(step - draw.versions).astype(np.float32)),
    )
    batch = self._place(batch)
    num_missing = int((~cached_B).sum())
    if not num_missing:
      return batch
    num_prompts = len(cached_B)
    part = min(self._part_prompts, num_prompts)
    computed = []
    for start in range(0, num_missing, part):
      # The last part reaches back, so that all have one shape.
      start = min(start, num_prompts - part)
      rows = slice(start, start + part)
      values_bxKxT = self._reference.logprobs(
          batch.prompt_tokens[rows],
          batch.prompt_mask[rows],
          batch.completion_tokens[rows],
          batch.completion_mask[rows],
      )
      self._unsaved.append((draw.rows[order_B[rows]], values_bxKxT, version))
      computed.append((start, values_bxKxT))
    ref_logprobs = batch.ref_logprobs
    for start, values_bxKxT in computed:
      ref_logprobs = self._merge(ref_logprobs, values_bxKxT, start)
    return types.Batch(**{**vars(batch), "ref_logprobs": ref_logprobs})

  def flush(self) -> None:
    """Saves the computed reference log-probs in the buffer.

    Waits until the devices have computed them.
    """
    unsaved, self._unsaved = self._unsaved, []
    # The reference may have moved since; what it gave before keeps its version.
    for rows_bxK, values_bxKxT, version in unsaved:
      self._buffer.set_ref_logprobs(rows_bxK, np.asarray(values_bxKxT), version)


def with_stop_rule(
    rewards: np.ndarray, stopped: np.ndarray, rule: str, reward: float
) -> np.ndarray:
  """Returns the rewards by the rule for completions without stop token.

  Args:
    rewards: [...] float32.
    stopped: [...] bool.
    rule: "keep" changes nothing; "replace" puts `reward` in place of theirs, as
      Noukhovitch et al. 2024 (arXiv:2410.18252); "add" adds it.
    reward: task units.

  Raises:
    ValueError: the rule is not known.
  """
  if rule not in STOP_RULES:
    raise ValueError(f"loss.missing_stop={rule!r}: allowed {STOP_RULES}")
  if rule == "keep":
    return rewards
  ruled = np.full_like(rewards, reward)
  return np.where(stopped, rewards, ruled + (rewards if rule == "add" else 0))


def completion_mask(
    lengths: np.ndarray,
    stopped: np.ndarray,
    num_tokens: int,
    *,
    include_stop_token: bool,
) -> np.ndarray:
  """Returns 1 on the tokens that the loss counts, [..., T] float32.

  Args:
    lengths: [...] int, tokens with the stop token.
    stopped: [...] bool, whether the last one is a stop token.
    num_tokens: T.
    include_stop_token: whether a stop token counts.
  """
  counted = lengths if include_stop_token else lengths - stopped
  return (np.arange(num_tokens) < counted[..., None]).astype(np.float32)


def _merge(
    all_BxKxT: jax.Array, part_bxKxT: jax.Array, start: int
) -> jax.Array:
  return jax.lax.dynamic_update_slice(all_BxKxT, part_bxKxT, (start, 0, 0))
