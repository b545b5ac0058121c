# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Batches and evaluations straight from params, for the runs of a sweep.

The sampler, the reference policy and the reward are those of the roles; store,
journal and replay buffer are left out.
"""

from collections.abc import Sequence

import jax
import ml_collections
import numpy as np

from tba_jax import batches
from tba_jax import reference as reference_lib
from tba_jax import sharding
from tba_jax import tokenizer as tokenizer_lib
from tba_jax import types
from tba_jax.sampling import decode
from tba_jax.tasks import base as tasks_base

# Visits of held-out prompts stand above those of training, so that the two
# never share random numbers.
_EVALUATION_VISIT = 2**31


class Samples:
  """Samples completions and gives them rewards and reference log-probs."""

  def __init__(
      self,
      config: ml_collections.ConfigDict,
      mesh: jax.sharding.Mesh,
      *,
      task: tasks_base.Task,
      tokenizer: tokenizer_lib.Tokenizer,
      sampler: decode.Sampler,
      reference: reference_lib.Reference,
  ):
    """Takes the parts, which are those of the config."""
    self._config = config
    self._mesh = mesh
    self._task = task
    self._tokenizer = tokenizer
    self._sampler = sampler
    self._reference = reference

  def sample(
      self,
      params: types.PyTree,
      prompts: Sequence[tuple[int, int]],
      num_completions: int,
      *,
      version: int,
      seed: int,
      split: str = tasks_base.TRAIN,
  ) -> types.Batch:
    """Returns completions of prompts; blocks until they are sampled.

    Args:
      params: of the policy that samples.
      prompts: (prompt id, visit) of each, B in all.
      num_completions: K.
      version: of `params`.
      seed: of the random numbers.
      split: of the task.

    Returns:
      A host batch. Its `staleness_steps` are 0 and its `ref_logprobs` are
      missing; `finish` puts them in.
    """
    tokenizer, task = self._tokenizer, self._task
    asked = [
        decode.Request(
            prompt_tokens=np.asarray(
                tokenizer.encode_prompt(task.prompt(split, index)), np.int32
            ),
            prompt_id=index,
            visit=visit,
            num_completions=num_completions,
            seed=seed,
        )
        for index, visit in prompts
    ]
    found = self._sampler.sample(params, asked, version=version)
    rewards_BxK = [
        [
            task.reward(split, index, text)
            for text in _texts(tokenizer, completions)
        ]
        for (index, _), completions in zip(prompts, found)
    ]
    stack = lambda name: np.stack([getattr(c, name) for c in found])
    tokens_BxKxT = stack("tokens")
    prompt_tokens_BxP, prompt_mask_BxP = self._pad(asked)
    return types.Batch(
        prompt_tokens=prompt_tokens_BxP,
        prompt_mask=prompt_mask_BxP,
        completion_tokens=tokens_BxKxT,
        completion_mask=batches.completion_mask(
            stack("lengths"),
            stack("stopped"),
            tokens_BxKxT.shape[2],
            include_stop_token=self._config.loss.include_stop_token,
        ),
        behavior_logprobs=stack("logprobs"),
        ref_logprobs=np.zeros(tokens_BxKxT.shape, np.float32),
        rewards=np.asarray(rewards_BxK, np.float32),
        staleness_steps=np.zeros(tokens_BxKxT.shape[:2], np.float32),
    )

  def finish(self, batch: types.Batch, staleness_steps: int) -> types.Batch:
    """Returns a host batch on the mesh, with what `sample` leaves out."""
    staleness_BxK = np.full_like(batch.staleness_steps, staleness_steps)
    placed = sharding.shard_batch(
        types.Batch(**{**vars(batch), "staleness_steps": staleness_BxK}),
        self._mesh,
        self._config.sharding,
    )
    ref_logprobs = self._reference.logprobs(
        placed.prompt_tokens,
        placed.prompt_mask,
        placed.completion_tokens,
        placed.completion_mask,
    )
    return types.Batch(**{**vars(placed), "ref_logprobs": ref_logprobs})

  def evaluate(
      self, params: types.PyTree, *, version: int, seed: int
  ) -> dict[str, float]:
    """Returns what the policy does on held-out prompts; blocks.

    Args:
      params: of the policy.
      version: of `params`.
      seed: of the random numbers.

    Returns:
      reward: mean over completions, task units.
      kl: mean over completions of Σ_t (log π - log π_ref), nats.
      ref_perplexity: exp of the mean of -log π_ref over all tokens.
      length: mean, tokens with the stop token.
      distinct: share of distinct completions among those of a prompt.
    """
    c = self._config.evaluate
    sums, num_completions = np.zeros(5), 0
    for start in range(0, c.final_prompts, c.batch_prompts):
      # The last batch reaches back: all have one shape.
      start = max(min(start, c.final_prompts - c.batch_prompts), 0)
      indices = range(start, min(start + c.batch_prompts, c.final_prompts))
      batch = self.finish(
          self.sample(
              params,
              [(index, _EVALUATION_VISIT) for index in indices],
              c.num_completions,
              version=version,
              seed=seed,
              split=tasks_base.HELD_OUT,
          ),
          0,
      )
      mask_BxKxT = batch.completion_mask
      kl_BxKxT = mask_BxKxT * (batch.behavior_logprobs - batch.ref_logprobs)
      distinct = [
          len({tokens.tobytes() for tokens in group})
          for group in np.asarray(batch.completion_tokens)
      ]
      sums += [
          float(batch.rewards.sum()),
          float(kl_BxKxT.sum()),
          float(batch.ref_logprobs.sum()),
          float(mask_BxKxT.sum()),
          sum(distinct),
      ]
      num_completions += len(indices) * c.num_completions
    reward, kl, ref_logprob, num_tokens, num_distinct = sums
    return {
        "reward": reward / num_completions,
        "kl": kl / num_completions,
        "ref_perplexity": float(np.exp(-ref_logprob / num_tokens)),
        "length": num_tokens / num_completions,
        "distinct": num_distinct / num_completions,
    }

  def _pad(
      self, asked: Sequence[decode.Request]
  ) -> tuple[np.ndarray, np.ndarray]:
    """Returns the prompts' tokens and mask, left-padded."""
    shape = (len(asked), self._config.sampling.max_prompt_tokens)
    tokens_BxP = np.full(shape, self._tokenizer.pad_id, np.int32)
    mask_BxP = np.zeros(shape, np.float32)
    for b, request in enumerate(asked):
      length = len(request.prompt_tokens)
      tokens_BxP[b, -length:] = request.prompt_tokens
      mask_BxP[b, -length:] = 1
    return tokens_BxP, mask_BxP


def _texts(
    tokenizer: tokenizer_lib.Tokenizer, completions: types.Completions
) -> list[str]:
  """Returns the K texts, each without its final stop token."""
  return [
      tokenizer.decode_completion(tokens, int(length), bool(stopped))
      for tokens, length, stopped in zip(
          completions.tokens, completions.lengths, completions.stopped
      )
  ]
