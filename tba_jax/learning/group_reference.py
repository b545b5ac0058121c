# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Reference log-probs computed by searchers (`reference.role="searcher"`).

Each searcher holds the reference params and runs the reference forward pass, so
its throughput scales with the searchers, and the trainer needs neither.

Source: TBA's searchers, Bartoldson et al. 2025 (arXiv:2503.18929).
"""

from collections.abc import Callable, Sequence
import dataclasses
import math

import jax
import ml_collections
import numpy as np

from tba_jax import collect
from tba_jax import types
from tba_jax.learning import batches
from tba_jax.learning import packing
from tba_jax.learning import published
from tba_jax.mesh import sharding
from tba_jax.models.kernels import kernels
from tba_jax.models.net import sequence
from tba_jax.policy import frozen_models
from tba_jax.policy import policy as policy_lib
from tba_jax.policy import reference_policy
from tba_jax.sampling import samplers

# Factor on the number of passes if groups may be skipped.
_SHORT_PASSES = 4


class GroupReference:
  """Log-probs of sampled groups under a fixed reference."""

  def __init__(
      self,
      config: ml_collections.ConfigDict,
      policy: policy_lib.Policy,
      params: types.PyTree,
      mesh: jax.sharding.Mesh | None = None,
  ):
    """Initializes the reference.

    Args:
      config: reads `sampling`, `search` and `loss.include_stop_token`.
      params: reference params, on the searcher's devices.
      mesh: searcher's mesh; None uses the first device.

    Raises:
      ValueError: the mesh does not support the kernel of `model.attention`.
    """
    sampling, mesh = config.sampling, mesh or sharding.first_device_mesh()
    kernels.choose(
        policy.model.config, sequence.Split(mesh, *sharding.TOKEN_AXES)
    )
    counts = config.loss.include_stop_token
    self._tokenizer = None if counts else policy.tokenizer
    self._reference = reference_policy.Reference(
        policy.model,
        params,
        temperature=sampling.temperature,
        mesh=mesh,
    )
    self._num_prompts = prompts_at_a_time(config)
    self._num_kept = samplers.num_kept(config)
    self._shape = (
        config.search.samples_per_prompt,
        sampling.max_prompt_tokens,
        sampling.max_completion_tokens,
    )
    self._packing = packing.Packing(
        (self._num_prompts, *self._shape),
        self._num_prompts,
        shards=sharding.num_batch_shards(mesh),
        sequence=mesh.shape["sequence"],
    )

  def warm_up(self) -> None:
    """Compiles the pass for each packed size."""
    B, (S, P, T) = self._num_prompts, self._shape
    tokens = lambda *shape: np.zeros(shape, np.int32)
    masks = lambda *shape: np.zeros(shape, np.float32)
    inputs = tokens(B, P), masks(B, P), tokens(B, S, T), masks(B, S, T)
    for size in self._packing.sizes():
      rows = packing.abstract_rows(size, B, S, T)
      rows = jax.tree.map(lambda x: np.full(x.shape, -1, x.dtype), rows)
      self._reference.logprobs(
          *inputs, rows=rows, kept_BxKxTxC=self._kept([])
      ).block_until_ready()

  def start(
      self,
      prompts: Sequence[np.ndarray],
      tokens: Sequence[np.ndarray],
      lengths: Sequence[np.ndarray],
      sampled_masks: Sequence[np.ndarray],
      kept_ids: Sequence[np.ndarray | None],
  ) -> Callable[[], list[np.ndarray]]:
    """Dispatches the reference pass over groups, without waiting for it.

    Args:
      prompts: [P] int32 for each group, without padding.
      tokens: [S, T] int32 for each group, right-padded.
      lengths: [S] int32 for each group, stop token included.
      sampled_masks: [S, T] bool for each group, True on policy tokens.
      kept_ids: [S, T, C] int32 for each group, or None, see `types.Group`.

    Returns:
      A function that waits and returns log-probs [S, T] float32 for each group,
      in nats, 0 on tokens that the loss does not count.
    """
    passes = []
    for start in range(0, len(prompts), self._num_prompts):
      chosen = slice(start, start + self._num_prompts)
      passes.append(
          self._of_batch(
              *(prompts[chosen], tokens[chosen]),
              *(lengths[chosen], sampled_masks[chosen], kept_ids[chosen]),
          )
      )

    def wait() -> list[np.ndarray]:
      groups = [group for out in passes for group in np.asarray(out)]
      return groups[: len(prompts)]

    return wait

  def _of_batch(
      self,
      prompts: Sequence[np.ndarray],
      tokens: Sequence[np.ndarray],
      lengths: Sequence[np.ndarray],
      sampled_masks: Sequence[np.ndarray],
      kept_ids: Sequence[np.ndarray | None],
  ) -> jax.Array:
    """Returns log-probs [B, S, T] of a batch padded to B groups."""
    B, (S, P, T) = self._num_prompts, self._shape
    rows = [
        (prompt, [row[:n] for row, n in zip(rows_SxT, lengths_S)])
        for prompt, rows_SxT, lengths_S in zip(prompts, tokens, lengths)
    ]
    batch = batches.pad_sequences(
        rows,
        (B,),
        num_completions=S,
        max_prompt_tokens=P,
        max_completion_tokens=T,
    )
    sampled_BxSxT = np.zeros((B, S, T), np.bool_)
    sampled_BxSxT[: len(rows)] = sampled_masks
    mask_BxSxT = batches.completion_mask(
        batch.completion_tokens, sampled_BxSxT, self._tokenizer
    )
    kept_BxSxTxC = self._kept(kept_ids)
    return self._reference.logprobs(
        batch.prompt_tokens,
        batch.prompt_mask,
        batch.completion_tokens,
        mask_BxSxT,
        rows=packing.pack(
            self._packing,
            batch.prompt_mask,
            batch.completion_tokens,
            mask_BxSxT,
            kept_BxSxTxC,
        ),
        kept_BxKxTxC=kept_BxSxTxC,
    )

  def _kept(self, kept_ids: Sequence[np.ndarray | None]) -> np.ndarray | None:
    """Returns [B, S, T, C] of groups; None if they have no kept tokens."""
    if not self._num_kept:
      return None
    S, _, T = self._shape
    out = np.full((self._num_prompts, S, T, self._num_kept), -1, np.int32)
    for b, group in enumerate(kept_ids):
      if group is not None:  # None of a group without tokens.
        out[b] = group
    return out


def prompts_at_a_time(config: ml_collections.ConfigDict) -> int:
  """Returns the number of prompts per pass.

  A pass has about as many completions as are decoded at a time, at most, and
  the passes of a round have similar sizes. If groups may be skipped, passes are
  shorter, so that skipped groups save whole passes.
  """
  search = config.search
  most = max(1, config.sampling.num_slots // search.samples_per_prompt)
  num_passes = math.ceil(search.prompts_per_round / most)
  if not collect.draws_equal_groups(config):
    num_passes *= _SHORT_PASSES
  shards = search.mesh.data * search.mesh.fsdp
  return math.ceil(search.prompts_per_round / num_passes / shards) * shards


def make_group_reference(
    config: ml_collections.ConfigDict,
    policy: policy_lib.Policy,
    make_params: Callable[[], types.PyTree],
    mesh: jax.sharding.Mesh | None,
) -> GroupReference:
  """Returns a searcher's reference.

  Args:
    make_params: function that puts the initial params on the searcher's
      devices.
    mesh: searcher's mesh; None uses the first device.
  """
  if not config.reference.init:
    return GroupReference(config, policy, make_params(), mesh)
  model, params = frozen_models.load_reference(config, policy.tokenizer, mesh)
  params = published.computed(config, params)
  policy = dataclasses.replace(policy, model=model)
  return GroupReference(config, policy, params, mesh)
