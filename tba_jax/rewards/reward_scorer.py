# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Rewards by a frozen reward model."""

from collections.abc import Callable, Sequence
import dataclasses

import jax
import numpy as np

from tba_jax import types
from tba_jax.models import tokenizer as tokenizer_lib
from tba_jax.tasks import base

# A text is padded to the full length, half of it or a quarter, the shortest
# that fits.
_NUM_LENGTHS = 3


@dataclasses.dataclass(frozen=True)
class Text:
  """A completion to score.

  prompt: text or messages, as in the task.
  completion: text, without its stop token.
  stopped: whether it ended with a stop token; the reward model then sees its
    own stop token.
  """

  prompt: base.Prompt
  completion: str
  stopped: bool = True


class RewardScorer:
  """Scores texts by the scalar head at the last token."""

  def __init__(
      self,
      rewards: Callable[..., jax.Array],
      params: types.PyTree,
      tokenizer: tokenizer_lib.Tokenizer,
      *,
      max_prompt_tokens: int,
      max_completion_tokens: int,
      batch_size: int,
  ):
    """Stores the model; it is compiled when first used.

    Args:
      rewards: (params, tokens [B, L], mask [B, L]) -> [B] float32.
      tokenizer: may differ from the policy's.
      max_prompt_tokens: longest prompt; longer ones lose their beginning.
      max_completion_tokens: longest completion; longer ones lose their end.
    """
    self.params = params
    self._tokenizer = tokenizer
    self._max_tokens = max_prompt_tokens, max_completion_tokens
    self._batch_size = batch_size
    self.rewards = jax.jit(rewards)
    full = max_prompt_tokens + max_completion_tokens
    self._lengths = sorted({-(-full // 2**i) for i in range(_NUM_LENGTHS)})

  def score(self, texts: Sequence[Text]) -> np.ndarray:
    """Returns raw scores, [N] float32: no normalization, no offset.

    Each text is padded by its own length, whatever else is in the batch.
    """
    rows = [self.encode(text) for text in texts]
    scores_N = np.zeros(len(rows), np.float32)
    for i, length in enumerate(self._lengths):
      above = self._lengths[i - 1] if i else 0
      fit = [n for n, row in enumerate(rows) if above < len(row) <= length]
      for start in range(0, len(fit), self._batch_size):
        batch = fit[start : start + self._batch_size]
        scores_N[batch] = self._score_batch([rows[n] for n in batch], length)
    return scores_N

  def _score_batch(self, rows: list[list[int]], length: int) -> np.ndarray:
    shape = self._batch_size, length
    tokens_BxL = np.full(shape, self._tokenizer.pad_id, np.int32)
    mask_BxL = np.zeros(shape, np.float32)
    mask_BxL[:, 0] = 1  # Even rows without a text need a token.
    for b, row in enumerate(rows):
      tokens_BxL[b, : len(row)] = row
      mask_BxL[b, : len(row)] = 1
    scores_B = self.rewards(self.params, tokens_BxL, mask_BxL)
    return np.asarray(scores_B)[: len(rows)]

  def encode(self, text: Text) -> list[int]:
    """Returns the ids of a text; ValueError if no template fits its prompt."""
    max_prompt, max_completion = self._max_tokens
    prompt = self._tokenizer.encode_prompt(text.prompt)[-max_prompt:]
    completion = self._tokenizer.encode(text.completion, prompt)
    if text.stopped:
      completion.append(self._tokenizer.stop_id(text.prompt))
    # Two empty texts would have no last token.
    return prompt + completion[:max_completion] or [self._tokenizer.eos_id]
