# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Rewards by a frozen reward model, and rewards of groups in the trainer."""

from collections.abc import Callable, Iterator, Sequence
import dataclasses
import itertools
import math
from typing import Any

import jax
import ml_collections
import numpy as np

from tba_jax import types
from tba_jax.models import tokenizer as tokenizer_lib
from tba_jax.rewards import judges
from tba_jax.tasks import base

# A text is padded to the full length, its half or its quarter, the shortest
# that fits.
_NUM_LENGTHS = 3


@dataclasses.dataclass(frozen=True)
class Text:
  """A completion to score.

  prompt: prompt, as the task gives it.
  completion: text, without its stop token.
  stopped: whether it ended with one; the reward model then sees its own.
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
      params: params of the model.
      tokenizer: tokenizer of the model; may differ from the policy's.
      max_prompt_tokens: prompts keep this many tokens from their end.
      max_completion_tokens: completions keep this many from their start.
      batch_size: texts scored at a time.
    """
    self.params = params
    self._tokenizer = tokenizer
    self._max_tokens = max_prompt_tokens, max_completion_tokens
    self._batch_size = batch_size
    self._rewards = jax.jit(rewards)
    full = max_prompt_tokens + max_completion_tokens
    self._lengths = sorted({-(-full // 2**i) for i in range(_NUM_LENGTHS)})

  def score(self, texts: Sequence[Text]) -> np.ndarray:
    """Returns raw scores, [N] float32: no normalization, no offset.

    A text's own length decides the shape in which it is scored, whatever else
    is in the batch.
    """
    rows = [self.encode(text) for text in texts]
    scores_N = np.zeros(len(rows), np.float32)
    for i, length in enumerate(self._lengths):
      above = self._lengths[i - 1] if i else 0
      fit = [n for n, row in enumerate(rows) if above < len(row) <= length]
      for start in range(0, len(fit), self._batch_size):
        some = fit[start : start + self._batch_size]
        scores_N[some] = self._score_batch([rows[n] for n in some], length)
    return scores_N

  def _score_batch(self, rows: list[list[int]], length: int) -> np.ndarray:
    shape = self._batch_size, length
    tokens_BxL = np.full(shape, self._tokenizer.pad_id, np.int32)
    mask_BxL = np.zeros(shape, np.float32)
    mask_BxL[:, 0] = 1  # Rows without a text need a token.
    for b, row in enumerate(rows):
      tokens_BxL[b, : len(row)] = row
      mask_BxL[b, : len(row)] = 1
    scores_B = self._rewards(self.params, tokens_BxL, mask_BxL)
    return np.asarray(scores_B)[: len(rows)]

  def encode(self, text: Text) -> list[int]:
    """Returns the ids of a text; ValueError if no template takes its prompt."""
    max_prompt, max_completion = self._max_tokens
    prompt = self._tokenizer.encode_prompt(text.prompt)[-max_prompt:]
    completion = self._tokenizer.encode(text.completion, prompt)
    if text.stopped:
      completion.append(self._tokenizer.stop_id(text.prompt))
    # Two empty texts have no last token.
    return prompt + completion[:max_completion] or [self._tokenizer.eos_id]


class GroupScorer:
  """Rewards groups in the trainer as they leave the queue.

  With `reward.role="trainer"`, searchers and the journal keep completions
  unscored; after a restart the same frozen judge scores them again.
  """

  def __init__(
      self,
      judge: judges.Judge | None,
      tokenizer: tokenizer_lib.Tokenizer,
      config_loss: ml_collections.ConfigDict,
  ):
    """Stores the judge; None if searchers have judged the completions."""
    self._judge = judge
    self._tokenizer = tokenizer
    self._config_loss = config_loss

  def score(self, groups: Sequence[types.Group]) -> list[types.Group]:
    """Returns the groups with the rewards to learn from."""
    if self._judge is None:
      return list(groups)
    judged = iter(
        self._judge.judge([r for group in groups for r in self._ask(group)])
    )
    return [
        dataclasses.replace(group, rewards=self._rewards(group, judged))
        for group in groups
    ]

  def totals(self) -> dict[str, Any] | None:
    """Returns the judge's counts, None if searchers have judged."""
    return self._judge and self._judge.totals()

  def close(self) -> None:
    if self._judge is not None:
      self._judge.close()

  def _ask(self, group: types.Group) -> list[judges.Request]:
    return [
        judges.Request(
            base.TRAIN,
            group.prompt_id,
            self._tokenizer.decode_completion(
                tokens, int(length), bool(stopped)
            ),
            bool(stopped),
        )
        for tokens, length, stopped in zip(
            group.completion_tokens, group.completion_lengths, group.stopped
        )
    ]

  def _rewards(
      self, group: types.Group, judged: Iterator[base.Judgement]
  ) -> np.ndarray:
    judged = itertools.islice(judged, group.num_completions)
    return judges.final_rewards(self._config_loss, [*judged], group.stopped)


class Unscored(judges.Judge):
  """Gives no completion a reward, since the trainer judges."""

  def _judge(self, requests: Sequence[judges.Request]) -> list[base.Judgement]:
    return [base.Judgement(math.nan, None)] * len(requests)
