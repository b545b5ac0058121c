# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""What an evaluation measures beside the task's own reward.

Each function adds fields to the records of prompts, for `eval_summary.py`.
"""

from collections.abc import Sequence
from typing import Any, TYPE_CHECKING

import numpy as np

from tba_jax import types
from tba_jax.rewards import comparers
from tba_jax.tasks import base

if TYPE_CHECKING:
  from tba_jax import reference as reference_lib
  from tba_jax.rewards import judges

Record = dict[str, Any]


def add_reference(
    reference: "reference_lib.Reference",
    prompts: Sequence[np.ndarray],
    sampled: Sequence[types.Completions],
    records: Sequence[Record],
) -> None:
  """Adds `kl`, log π - log π_ref of each completion, and `ref_nats`.

  Args:
    reference: tempered as the policy.
    prompts: token ids, [P] each.
    sampled: completions of each prompt.
    records: of the prompts.
  """
  ref_BxKxT, mask_BxKxT = _logprobs(reference, prompts, sampled)
  own_BxKxT = np.stack([found.plain_logprobs for found in sampled])
  kl_BxK = np.where(mask_BxKxT, own_BxKxT - ref_BxKxT, 0.0).sum(-1)
  for record, kl_K, ref_KxT in zip(records, kl_BxK, ref_BxKxT):
    record |= {"kl": kl_K, "ref_nats": -ref_KxT.sum(-1)}


def add_perplexity(
    reference: "reference_lib.Reference",
    prompts: Sequence[np.ndarray],
    sampled: Sequence[types.Completions],
    records: Sequence[Record],
) -> None:
  """Adds `diluted_perplexity` of each completion, as Asynchronous RLHF has it.

      exp(-log π_ref(y|x) / (|x| + |y| - 1))

  The prompt's tokens count in the denominator and not in the sum, which puts
  all values near 1. The papers call it perplexity, or KL.

  Source: the evaluation code of Noukhovitch et al. 2024 (arXiv:2410.18252).

  Args:
    reference: at temperature 1.
    prompts, sampled, records: as `add_reference`.
  """
  ref_BxKxT, mask_BxKxT = _logprobs(reference, prompts, sampled)
  for record, prompt, ref_KxT, mask_KxT in zip(
      records, prompts, ref_BxKxT, mask_BxKxT
  ):
    tokens_K = np.maximum(len(prompt) + mask_KxT.sum(-1) - 1, 1)
    record["diluted_perplexity"] = np.exp(-ref_KxT.sum(-1) / tokens_K)


def add_verdicts(
    comparer: comparers.Comparer | None,
    task: base.Task,
    texts: Sequence[str],
    requests: "Sequence[Sequence[judges.Request]]",
    records: Sequence[Record],
    *,
    name: str,
) -> None:
  """Adds verdicts on completions against the task's reference completion.

  Args:
    comparer: says which is better; None adds nothing.
    task: of the references.
    texts: prompts.
    requests: completions of each prompt.
    records: of the prompts.
    name: the field, a list of `comparers.Verdict` in the completions' order.
  """
  if comparer is None:
    return
  contests = [
      comparers.Contest(
          text, one, base.reference_text(task, one.split, one.index)
      )
      for text, some in zip(texts, requests)
      for one in some
  ]
  verdicts = iter(comparer.compare(contests))
  for record, some in zip(records, requests):
    record[name] = [next(verdicts) for _ in some]


def _logprobs(
    reference: "reference_lib.Reference",
    prompts: Sequence[np.ndarray],
    sampled: Sequence[types.Completions],
) -> tuple[np.ndarray, np.ndarray]:
  """Returns log-probs [B, K, T] under the reference, and what is real."""
  width = max(len(prompt) for prompt in prompts)
  prompts_BxP = np.zeros((len(prompts), width), np.int32)
  prompt_mask_BxP = np.zeros((len(prompts), width), np.float32)
  for row, prompt in enumerate(prompts):
    prompts_BxP[row, width - len(prompt) :] = prompt
    prompt_mask_BxP[row, width - len(prompt) :] = 1
  tokens_BxKxT = np.stack([found.tokens for found in sampled])
  lengths_BxK = np.stack([found.lengths for found in sampled])
  mask_BxKxT = np.arange(tokens_BxKxT.shape[-1]) < lengths_BxK[..., None]
  logprobs_BxKxT = reference.logprobs(
      prompts_BxP, prompt_mask_BxP, tokens_BxKxT, mask_BxKxT
  )
  return np.asarray(logprobs_BxKxT), mask_BxKxT
