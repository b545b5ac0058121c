# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""What a draw of the replay buffer returns."""

import dataclasses
from typing import Any, TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
  from tba_jax.replay import completions


@dataclasses.dataclass(frozen=True)
class Draw:
  """B groups of K completions, copied out of the buffer.

  rows: [B, K] int64, ids of the completions, which no later one ever has.
  recent: [B] bool, drawn from the recent window.
  fresh: [B, K] bool, the first use of this completion by any step.
  prompt_ids: [B] int64.
  prompt_tokens: [B, P] int32, left-padded with 0.
  prompt_mask: [B, P] float32, 1 on prompt tokens.
  completion_tokens: [B, K, T] int32, 0 past the length.
  completion_lengths: [B, K] int32, with the stop token.
  stopped: [B, K] bool.
  behavior_logprobs: [B, K, T] float32, nats, 0 past the length.
  ref_logprobs: [B, K, T] float32, nats, 0 past the length and where none are
    cached.
  ref_versions: [B, K] int32, of the reference policy, -1 where none are cached.
  rewards: [B, K] float32.
  versions: [B, K] int32, step of the params that sampled.
  step: of the draw.
  """

  rows: np.ndarray
  recent: np.ndarray
  fresh: np.ndarray
  prompt_ids: np.ndarray
  prompt_tokens: np.ndarray
  prompt_mask: np.ndarray
  completion_tokens: np.ndarray
  completion_lengths: np.ndarray
  stopped: np.ndarray
  behavior_logprobs: np.ndarray
  ref_logprobs: np.ndarray
  ref_versions: np.ndarray
  rewards: np.ndarray
  versions: np.ndarray
  step: int

  def stats(self) -> dict[str, Any]:
    """Returns means over this batch's completions.

    fresh_share: used for the first time. recent_share: of the recent window.
    unique_share: rows that differ. unique_completions: texts of a group that
    differ. staleness_steps: step minus version. completion_tokens: with the
    stop token. stop_rate: ended by a stop token.
    """
    texts = [
        {
            tokens[:length].tobytes()
            for tokens, length in zip(*group, strict=True)
        }
        for group in zip(
            self.completion_tokens, self.completion_lengths, strict=True
        )
    ]
    return {
        "fresh_share": float(self.fresh.mean()),
        "recent_share": float(self.recent.mean()),
        "unique_share": len(np.unique(self.rows)) / self.rows.size,
        "staleness_steps": float(
            np.maximum(self.step - self.versions, 0).mean()
        ),
        "unique_completions": sum(map(len, texts)) / len(texts),
        "completion_tokens": float(self.completion_lengths.mean()),
        "stop_rate": float(self.stopped.mean()),
    }


def gather(
    store: "completions.CompletionStore",
    rows_BxK: np.ndarray,
    recent_B: np.ndarray,
    prompt_ids_B: np.ndarray,
    *,
    num_columns: int,
    step: int,
) -> Draw:
  """Returns the draw of some rows, copied out of their store.

  Args:
    store: of the rows.
    rows_BxK: [B, K] int64.
    recent_B: [B] bool, drawn from the recent window.
    prompt_ids_B: [B] int64.
    num_columns: P.
    step: of the draw.
  """
  table = store.table
  integers = table.integers(rows_BxK)
  # Of a row that was drawn twice, only the first place is its first use.
  first_BxK = np.zeros(rows_BxK.shape, np.bool_)
  first_BxK.flat[np.unique(rows_BxK, return_index=True)[1]] = True
  prompt_tokens_BxP = np.zeros((len(rows_BxK), num_columns), np.int32)
  prompt_mask_BxP = np.zeros((len(rows_BxK), num_columns), np.float32)
  for b, key in enumerate(prompt_ids_B.tolist()):
    tokens = store.prompts[key].tokens
    prompt_tokens_BxP[b, num_columns - len(tokens) :] = tokens
    prompt_mask_BxP[b, num_columns - len(tokens) :] = 1
  ref_versions_BxK = integers["ref_versions"]
  ref_logprobs_BxKxT = table.ref_logprobs[rows_BxK]
  ref_logprobs_BxKxT[ref_versions_BxK < 0] = 0
  return Draw(
      rows=integers["ids"],
      recent=recent_B,
      fresh=(integers["use_counts"] == 0) & first_BxK,
      prompt_ids=prompt_ids_B,
      prompt_tokens=prompt_tokens_BxP,
      prompt_mask=prompt_mask_BxP,
      completion_tokens=table.tokens[rows_BxK],
      completion_lengths=integers["lengths"],
      stopped=integers["stopped"],
      behavior_logprobs=table.behavior_logprobs[rows_BxK],
      ref_logprobs=ref_logprobs_BxKxT,
      ref_versions=ref_versions_BxK,
      rewards=table.rewards[rows_BxK],
      versions=integers["versions"],
      step=step,
  )
